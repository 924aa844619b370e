"""GORP: a LoRA for each task and full weights beside it, both trained off the gradients of earlier tasks.

Linears of `target_modules` have IncLoRA's adapters. Weights of `full_modules` are trained in full, each in a subspace
of few dimensions (GaLore). With G `[N, n]` the gradient of such a weight, or of its transpose, so that N >= n:

    R = G P^T,  P [r, n] the leading right singular vectors of G, renewed every `projection_steps` steps
    R <- R - M M^T R,  W <- W - rate * Adam(R) P

The gradient `[r, D]` of each A loses its part in an M `[r, K]` of its own in the same way, without a projection. When a
task ends, M gains the leading left singular vectors of Adam's first moment m of what was trained, outside of M, until
M holds the share `energy` of |m|^2. B has no M (Wang et al. 2025, "Continual Gradient Low-Rank Projection Fine-Tuning
for LLMs", ACL 2025, arXiv:2507.02503). The definition here is that of the authors' code, which is in the history of
Hoilap/AS-LoRA: src/Proj_torch and src/uie_trainer_lora.py at 8ce2e71, the settings in scripts at 6eec1c2 and in
scripts_llama at 28a4fec. Rank 8, alpha 32, a projection of rank 8 and an energy of 0.9 are theirs. For T5 they train
queries and values of self-attention by LoRA at a rate of 1e-3, and those of cross-attention in full at 1e-5, with a new
projection every 10 steps (`target_modules=['SelfAttention\\.(q|v)'] full_modules=['EncDecAttention\\.(q|v)']
full_scale=0.01`); for LLaMA-2 the gates of feed-forward blocks in full at 1e-6, times 0.25, beside 2e-4, every 20 steps
(`full_modules=['mlp\\.gate_proj'] full_scale=0.00125 projection_steps=20`). Their dropout of 0.1 is an option here and
off, as for IncLoRA.

The method does not step: R takes the first r columns of the weight's gradient, whose other columns are zero, so that
the moments of an elementwise optimizer there are those of R; after the step the change in these columns is replaced by
its product with P and `full_scale` (a `Constraint`). So the optimizer keeps a state of the weight's size, where
GaLore's is small. `projection_steps` is counted from 0 in each task, and moments stay when P is renewed, as in GaLore.

M keeps gradients off earlier ones, before Adam's moments. Adam divides each entry by its own size, so that its update
has some part in M again, as in the authors' code; with `train.optimizer=sgd` it has none. A has only r rows: once M
spans them, A stays as it was drawn, and only B is trained.

Deviations from the code: it looks for M in the folder of the task that begins, where none is, and saves adapters
without the full weights, so that a first run of its scripts has neither in the next task; here both are kept. Its
`lamda_3`, a penalty on the change of full weights, compares names of modules with those of parameters, so that it is
always zero; here there is none. Its first task takes one direction less than it takes to reach the energy; here each
takes as many. Where a weight has more columns than rows, its M lies in the r dimensions of a P that changes; here in
those of the columns, as for the transpose. m averages gradients before they are clipped, with a decay of 0.9 whatever
`train.betas` is, and A, B and R are clipped, not G. By default `ffn.in` is trained in full, a role of every kind of
backbone. The label head of encoder-only backbones is IncLoRA's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from raycl.adapters.state import combine
from raycl.backbone import Backbone
from raycl.backbone.roles import linear_names
from raycl.errors import BackboneError
from raycl.methods.base import Learned, MethodConfig, State, under
from raycl.methods.context import TaskContext
from raycl.methods.lora.inclora import IncLora, IncLoraSettings
from raycl.methods.lora_settings import as_tuple
from raycl.types import Phase

DECAY = 0.9
"""Decay of the first moment, Adam's default."""

NOISE = 1e-6
"""Singular values below this share of a moment's norm are rounding errors."""

KINDS = ("projections", "moments", "bases")
"""The tensors of `GradientSpaces`, by the names of its attributes."""


class GorpConfig(IncLoraSettings):
    """GORP: a LoRA for each task and full weights, trained off the gradients of earlier tasks."""

    name: Literal["gorp"] = "gorp"
    full_modules: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        ("ffn.in",),
        min_length=1,
        description="linears whose weights are trained in full, written as target_modules; none has an adapter too",
    )
    full_scale: float = Field(
        0.01,
        gt=0,
        description="factor of the updates of full weights: their learning rate as a share of train.learning_rate, "
        "times GaLore's scale",
    )
    projection_rank: int = Field(8, ge=1, description="dimensions of the subspace in which a full weight is trained")
    projection_steps: int = Field(10, ge=1, description="optimizer steps after which the subspace is chosen anew")
    energy: float = Field(
        0.9, gt=0, le=1, description="share of a task's gradient (its first moment, squared) that later tasks keep off"
    )

    unused_for_single_task: ClassVar[tuple[str, ...]] = (*IncLoraSettings.unused_for_single_task, "energy")
    takes: ClassVar[tuple[str, ...]] = ("use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights=gaussian")
    """Experts have slices of one tensor, which is no weight of a linear."""

    def values_kept(self, tasks: int) -> int:
        """Count moments and bases; projections are small."""
        return 2

    @property
    def reads_weights(self) -> bool:
        return True


@dataclass
class GradientSpaces:
    """The subspaces of full weights and of earlier gradients. A `Constraint`.

    Attributes:
        rank: dimensions of a projection. scale: factor of updates of full weights.
        projections: full weight -> P `[r, n]`, orthonormal rows.
        moments: full weight or A -> m `[N, r]`, or `[r, D]` of A, of the present task.
        bases: full weight or A -> M `[N, K]`, or `[r, K]` of A, orthonormal columns.
    """

    rank: int
    scale: float
    projections: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    bases: dict[str, Tensor] = field(default_factory=dict)

    def kept(self, name: str, low_NC: Tensor) -> Tensor:
        """Return a gradient without its part in the basis, and add it to the moment."""
        low = low_NC if name not in self.bases else without(self.bases[name], low_NC)
        before = self.moments.get(name)
        new = (1 - DECAY) * low
        self.moments[name] = new if before is None else DECAY * before + new
        return low

    def in_columns(self, name: str, gradient_OD: Tensor, renews: bool) -> Tensor:
        """Return the projected gradient of a full weight in the first columns of a matrix of the weight's shape, or in
        its first rows where the weight has fewer rows than columns.

        Args:
            renews: the projection is chosen anew by this gradient.
        """
        shape = gradient_OD.shape
        gradient_Nn = turned(gradient_OD, shape)
        if renews:
            self.projections[name] = leading_rows(gradient_Nn, self.rank)
        low_Nr = self.kept(name, gradient_Nn @ self.projections[name].T)
        placed_Nn = torch.zeros_like(gradient_Nn)
        placed_Nn[:, : low_Nr.shape[1]] = low_Nr
        return turned(placed_Nn, shape).contiguous()

    @property
    def names(self) -> tuple[str, ...]:
        """The full weights."""
        return tuple(self.projections)

    def __call__(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        """Return the weight after an update whose first columns are coordinates in the projection's rows."""
        projection_rn = self.projections[name]
        update_Nr = turned(after - before, before.shape)[:, : len(projection_rn)]
        return before + self.scale * turned(update_Nr @ projection_rn, before.shape)

    def end_task(self, energy: float) -> None:
        """Let the bases grow by the task's moments, and forget what was of the task."""
        for name, moment in self.moments.items():
            basis = self.bases.get(name, moment.new_zeros(len(moment), 0))
            self.bases[name] = grown(basis, moment, energy)
        self.projections, self.moments = {}, {}

    def to(self, devices: Mapping[str, torch.device]) -> None:
        """Move all tensors to the devices of their parameters."""
        for kind in KINDS:
            held = getattr(self, kind)
            held.update({name: value.to(devices[name]) for name, value in held.items() if name in devices})


class Gorp(IncLora):
    """IncLoRA with weights trained in full, all of them off the gradients of earlier tasks."""

    Config: ClassVar[type[MethodConfig]] = GorpConfig
    own_adapters: ClassVar[bool] = False  # the full weights are those of all tasks
    revisable: ClassVar[bool] = False
    holds_weights: ClassVar[bool] = True  # decay would be taken for a part of the update
    trains_backbone = True

    def __init__(self, config: GorpConfig, backbone: Backbone, seed: int) -> None:
        """Find the weights that are trained in full, and attach adapters.

        Raises:
            BackboneError: `full_modules` or `target_modules` names no linear, or both name the same one.
        """
        full = linear_names(backbone.model, config.full_modules)
        if both := sorted({*full} & {*config.adapted(backbone.model)}):
            raise BackboneError(
                f"'{both[0]}' is in method.full_modules and in method.target_modules: expected linears that are "
                "trained in full, and others with an adapter"
            )
        super().__init__(config, backbone, seed)
        own = dict(backbone.named_parameters())
        self._full = [name for path in full if (name := f"model.{path}.weight") in own]  # a tied weight has one name
        self._spaces = GradientSpaces(config.projection_rank, config.full_scale)
        self._context: TaskContext | None = None
        self.constraint = self._spaces

    def _is_trained(self, name: str, parameter: Tensor) -> bool:
        return name in self._full or super()._is_trained(name, parameter)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Train a new adapter and the full weights."""
        super().begin_task(phase, context)
        self._context = context
        self._spaces.to({name: parameter.device for name, parameter in self.backbone.named_parameters()})

    def transform_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of A and of full weights off earlier ones, the latter projected."""
        assert self._context is not None, "a step without a task"
        renews = self._context.step.index % self.config.projection_steps == 0
        spaces, changed = self._spaces, dict(gradients)
        for name, gradient in gradients.items():
            if name in self._full:
                changed[name] = spaces.in_columns(name, gradient, renews)
            elif name.endswith(".lora_A"):
                changed[name] = spaces.kept(name, gradient)
        return changed

    def end_task(self, context: TaskContext) -> Learned:
        """Let the bases grow; the adapter is frozen, and the whole model with all adapters merged is returned."""
        self._spaces.end_task(self.config.energy)
        self._context = None
        own, trained = dict(self.backbone.named_parameters()), context.parameters
        context.parameters = {name: own[name].detach().float().cpu() for name in trained if name not in self._full}
        learned = self._published(context, self._freeze(context))
        return replace(learned, adapters={}, **self._merged({name: trained[name] for name in self._full}))

    def _merged(self, full: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the whole model under its Hugging Face names and the labels of its head, as fields of `Learned`."""
        all_adapters = combine(dict.fromkeys(self._learned, 1.0), self._learned, "logit")
        own = {name: parameter.detach() for name, parameter in self.backbone.named_parameters() if parameter.numel()}
        model = {**own, **full}
        for path, (low_RD, high_OR) in all_adapters.linears.items():
            layer = self.stack.layers[path]
            for name in [name for name in own if name.startswith(f"model.{path}.base.")]:
                model[name.replace(".base.", ".")] = model.pop(name)
            update = high_OR @ low_RD if isinstance(layer.base, nn.Linear) else (high_OR @ low_RD).T
            weight = model[f"model.{path}.weight"]
            model[f"model.{path}.weight"] = weight.float() + update.to(weight.device)
        model = {self.backbone.exported_name(name): value for name, value in model.items()}
        if all_adapters.head_weight is not None and all_adapters.head_bias is not None:
            model |= {"head.weight": all_adapters.head_weight, "head.bias": all_adapters.head_bias}
        return {"model": model, "labels": list(all_adapters.labels)}

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the mean share of dimensions that later tasks keep off, of A and of full weights."""
        shares: dict[str, list[float]] = {"lora": [], "full": []}
        for name, basis in self._spaces.bases.items():
            shares["full" if name in self._full else "lora"].append(basis.shape[1] / basis.shape[0])
        held = {kind: round(sum(values) / len(values), 4) for kind, values in shares.items() if values}
        return {**super().summary(observed), **({"held_dimensions": held} if held else {})}

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        held = {
            f"gorp/{kind}/{name}": value.cpu() for kind in KINDS for name, value in getattr(self._spaces, kind).items()
        }
        return values, tensors | held

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(values, tensors)
        for kind in KINDS:
            stored = under(f"gorp/{kind}/", tensors)  # products may depend on how memory from a file is aligned
            setattr(self._spaces, kind, {name: value.clone() for name, value in stored.items()})


def turned(matrix: Tensor, shape: torch.Size) -> Tensor:
    """Return a matrix of a weight of this shape, or its transpose where the weight has more columns than rows, so that
    there are at least as many rows; applied twice, the matrix itself."""
    return matrix if shape[0] >= shape[1] else matrix.T


def without(basis_NK: Tensor, values_NC: Tensor) -> Tensor:
    """Return columns without their part in the span of an orthonormal basis."""
    return values_NC - basis_NK @ (basis_NK.T @ values_NC)


def leading_rows(gradient_Nn: Tensor, rank: int) -> Tensor:
    """Return the leading right singular vectors `[r, n]`, n at most.

    The sign of a vector is arbitrary: its largest entry is positive, so that all workers agree. Values that are not
    finite count as zero: the step that follows says that training has diverged.
    """
    finite_Nn = torch.nan_to_num(gradient_Nn.float(), nan=0.0, posinf=0.0, neginf=0.0)
    rows_rn = torch.linalg.svd(finite_Nn, full_matrices=False)[2][:rank]
    largest_r1 = rows_rn.gather(1, rows_rn.abs().argmax(1, keepdim=True))
    rows: Tensor = (rows_rn * largest_r1.sign()).contiguous()  # products depend on strides, which no file keeps
    return rows


def grown(basis_NK: Tensor, moment_NC: Tensor, energy: float) -> Tensor:
    """Return an orthonormal basis with the fewest leading directions of a moment with which it holds this share of the
    moment's squared norm."""
    moment = moment_NC.double()
    rest = without(basis_NK.double(), moment)
    directions_NC, values_C, _ = torch.linalg.svd(rest, full_matrices=False)
    lacking_C = rest.square().sum() - values_C.square().cumsum(0) + values_C.square()  # before each direction
    wanted_C = (lacking_C > (1 - energy) * moment.square().sum()) & (values_C > NOISE * moment.norm())
    both = torch.cat([basis_NK.double(), directions_NC[:, : int(wanted_C.sum())]], dim=1)
    basis: Tensor = torch.linalg.qr(both)[0].to(basis_NK)  # without the rounding errors of many tasks
    return basis.contiguous()
