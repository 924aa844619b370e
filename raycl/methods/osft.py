"""OSFT: weights are trained in full, and each task's updates keep off the largest singular directions of every weight.

Before a task each weight is decomposed, W = U S V^T, and of its k largest singular directions

    dW <- (I - U_k U_k^T) dW (I - V_k V_k^T)    after every step of the optimizer

so that U_k S_k V_k^T stays as it is, and any change of the rest is reached: the factors that the paper trains, U, S and
V of the smaller directions with U kept off U_k and V off V_k, form the same set of weights (Nayak et al. 2025,
"Sculpting Subspaces: Constrained Full Fine-Tuning in LLMs for Continual Learning", arXiv:2504.07097, section 3; OSF in
PEFT, OSFT in Red Hat's training_hub). k is the share `least + I (most - least)` of the singular values, where I is the
importance of the weight's layer: the mean cosine of what the layer reads and writes at the task's tokens, divided by
its mean over layers. 0.1 and 0.8 are the paper's. `least` and `most` of 0.5 are PEFT's default, which has no layers'
importance.

Deviations: the weights themselves are trained, not their factors, so that the optimizer's moments are those of weights,
and updates are projected after the optimizer's step, not gradients before it: with Adam, whose steps are no multiples
of gradients, only this keeps them off the directions exactly. A layer is a block of the model, whose decomposition is
made anew for each task of the weights as they are then, as in the paper. Weights that `target_modules` leaves out
(embeddings, norms, biases, the output layer) are frozen, as in PEFT; label heads are trained. The authors' public code
(notebooks/finetune_svd.py of Red-Hat-AI-Innovation-Team/orthogonal-subspace-learning at a5f91f6) keeps one number of
directions, a share of the larger dimension that its caller gives, in attention and feed-forward weights of T5; the
importance stands in it as a comment, with the shares 1/2 and 1, and is that of each weight's own inputs and outputs,
where a block's is taken here.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from raycl.backbone import Backbone
from raycl.backbone.roles import linear_names
from raycl.methods.base import Learned, Method, MethodConfig, State, in_head, phase_labels, under
from raycl.methods.context import TaskContext
from raycl.methods.lora_settings import TargetModules
from raycl.methods.token_sums import TokenSums
from raycl.methods.trained_adapters import whole_model
from raycl.types import Phase

BLOCK = re.compile(r"(.*?\.\d+)\.")
"""The block of a layer's path: `encoder.block.0` of `encoder.block.0.layer.1.DenseReluDense.wi`."""


class OsftConfig(MethodConfig):
    """OSFT: full updates off the largest singular directions of each weight."""

    name: Literal["osft"] = "osft"
    least: float = Field(0.1, ge=0, le=1, description="share of a weight's directions kept in a layer of importance 0")
    most: float = Field(0.8, ge=0, le=1, description="share of a weight's directions kept in a layer of importance 1")
    target_modules: TargetModules = ("all-linear",)

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least is {self.least:g} and most {self.most:g}: expected least up to most")
        return self

    def values_kept(self, tasks: int) -> int:
        """Count both bases."""
        return 2

    def extra_passes(self, epochs: int, steps: int) -> float:
        """Return the pass over every row that measures the importance of layers; none where all keep one share."""
        return 0.0 if self.least == self.most else 0.5 / epochs

    @property
    def reads_weights(self) -> bool:
        return True


@dataclass
class TopDirections:
    """The largest singular directions of weights, which updates keep off. A `Constraint`.

    An update is written in the other directions of its shorter side, of which there are few where most are kept: with
    0.8 of 576 directions kept, an update of a 1536 x 576 weight takes less than a quarter of the multiplications.

    Attributes:
        kept: parameter -> the largest directions of its longer side `[longer, k]`; of a square weight U_k.
        free: parameter -> the other directions of its shorter side `[shorter, shorter - k]`; of a square weight those
            of V. Both float32 and orthonormal.
    """

    kept: dict[str, Tensor] = field(default_factory=dict)
    free: dict[str, Tensor] = field(default_factory=dict)

    def decompose(self, name: str, weight_OD: Tensor, share: float) -> None:
        """Keep the largest share of a weight's singular directions, rounded down."""
        left_OK, values_K, right_KD = torch.linalg.svd(weight_OD.detach().float(), full_matrices=False)
        count = min(len(values_K), int(share * len(values_K)))
        longer, shorter = (left_OK, right_KD.T) if _is_high(weight_OD) else (right_KD.T, left_OK)
        self.kept[name], self.free[name] = longer[:, :count].contiguous(), shorter[:, count:].contiguous()

    def to(self, devices: Mapping[str, torch.device]) -> None:
        """Move the bases to their parameters' devices."""
        for bases in (self.kept, self.free):
            bases.update({name: basis.to(devices[name]) for name, basis in bases.items()})

    def clear(self) -> None:
        """Keep off nothing."""
        self.kept, self.free = {}, {}

    @property
    def names(self) -> tuple[str, ...]:
        """The weights that were decomposed."""
        return tuple(self.kept)

    def __call__(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        """Return the weight after an update without its part in the largest directions of either side."""
        kept, free = self.kept[name], self.free[name]
        update, is_high = after - before, _is_high(before)
        coordinates = (update if is_high else update.T) @ free  # of the update in the free directions
        update = (coordinates - kept @ (kept.T @ coordinates)) @ free.T
        return before + (update if is_high else update.T)


def _is_high(weight_OD: Tensor) -> bool:
    """Return whether a weight has at least as many rows as columns."""
    return weight_OD.shape[0] >= weight_OD.shape[1]


class Osft(Method):
    """All linears are trained off their largest singular directions."""

    Config: ClassVar[type[MethodConfig]] = OsftConfig
    trains_backbone = True
    compiles = True

    def __init__(self, config: OsftConfig, backbone: Backbone, seed: int) -> None:
        """Find the weights that are trained.

        Raises:
            BackboneError: `target_modules` names no linear.
        """
        super().__init__(config, backbone, seed)
        self._weights = [f"model.{path}.weight" for path in linear_names(backbone.model, config.target_modules)]
        self._top = TopDirections()
        self._shares: dict[str, float] = {}
        self.constraint = self._top
        self.allocation = self._train

    def _train(self, phase: Phase) -> None:
        """Train the weights and the label head, and nothing else."""
        self.backbone.learn_labels(phase_labels(phase))
        weights = frozenset(self._weights)
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(name in weights or in_head(name, parameter))

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Train the weights and the label head, and decompose the weights as they are now."""
        self._train(phase)
        own = dict(self.backbone.named_parameters())
        trained = [name for name in self._weights if name in own]  # a tied weight has one name
        if not context.resumed:
            self._top.clear()
            self._shares = self._kept_shares(context)
            for name in trained:
                share = self._shares.get(block_of(name), self.config.most)
                self._top.decompose(name, own[name], share)
        self._top.to({name: own[name].device for name in trained})

    def _kept_shares(self, context: TaskContext) -> dict[str, float]:
        """Return the share of directions that is kept of each block's weights. Collective."""
        if self.config.least == self.config.most:
            return {}
        names = dict.fromkeys(block for name in self._weights if (block := block_of(name)))
        blocks = {block: self.backbone.model.get_submodule(block.removeprefix("model.")) for block in names}
        if not blocks:
            return {}
        with observed_blocks(self.backbone, blocks) as seen:
            context.forward_pass(seen.begin_batch)
        sums = context.sum(torch.stack(list(seen.totals.values())))
        cosines = (sums[:, 0] / sums[:, 1].clamp_min(1)).tolist()
        return shares(dict(zip(blocks, cosines, strict=True)), self.config.least, self.config.most)

    def end_task(self, context: TaskContext) -> Learned:
        """Return the whole model under its Hugging Face names, and the label head."""
        self._top.clear()
        own = {name: p.detach() for name, p in self.backbone.named_parameters() if p.numel()}
        return whole_model(self.backbone, {**own, **context.parameters})

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the share of directions that each block's weights kept in the phase that has just ended."""
        return {"kept": {block: round(share, 4) for block, share in self._shares.items()}} if self._shares else {}

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        sides = {"kept": self._top.kept, "free": self._top.free}
        held = {f"osft/{side}/{name}": basis.cpu() for side, bases in sides.items() for name, basis in bases.items()}
        return {**values, "osft": {"shares": self._shares}}, tensors | held

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(values, tensors)
        self._shares = dict(values["osft"]["shares"])
        self._top.kept, self._top.free = (dict(under(f"osft/{side}/", tensors)) for side in ("kept", "free"))


def block_of(name: str) -> str:
    """Return the path of the block that a parameter belongs to; "" for one outside of all blocks."""
    found = BLOCK.match(name)
    return "" if found is None else found[1]


def shares(cosines: Mapping[str, float], least: float, most: float) -> dict[str, float]:
    """Return the share of directions that is kept of each layer.

    Args:
        cosines: layer -> mean cosine of what it reads and writes.
    """
    mean = sum(cosines.values()) / len(cosines) or 1.0
    return {layer: min(1.0, max(0.0, least + cosine / mean * (most - least))) for layer, cosine in cosines.items()}


@contextmanager
def observed_blocks(backbone: Backbone, blocks: Mapping[str, nn.Module]) -> Iterator[TokenSums]:
    """Add up the cosines `[2]` of what these blocks read and write at real tokens, and the number of tokens, while the
    context is open."""
    zeros = torch.zeros(2, dtype=torch.float64, device=backbone.device)
    sums = TokenSums(backbone, {block: zeros.clone() for block in blocks})

    def observe(block: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], y: Any) -> None:
        states = given[0] if given else named["hidden_states"], y[0] if isinstance(y, tuple) else y
        read_ND, written_ND = (sums.real(block.removeprefix("model."), part) for part in states)
        cosines_N = nn.functional.cosine_similarity(read_ND, written_ND, dim=-1)
        count = torch.ones_like(cosines_N, dtype=torch.float64).sum()
        sums.totals[block] += torch.stack([cosines_N.sum().double(), count])

    with ExitStack() as hooks:
        for block, module in blocks.items():
            hooks.enter_context(module.register_forward_hook(partial(observe, block), with_kwargs=True))
        yield sums
