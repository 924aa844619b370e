"""HAT in the layers of a transformer: all weights are trained, and each task masks heads, inner units and outputs.

Masks, their schedule, the sparsity and what holds weights in use are those of `hard_attention` (Serra et al. 2018,
section 2). Masked are the heads that an attention layer's output projection reads, the inner units that a feed-forward
block's last linear reads, and the outputs of both. Weights of queries, keys and values are held by their head, those of
the linears that compute inner units by those, and a projection's by the smaller of both its sides. Whatever has no
units (embeddings, norms, the output words) is trained with the first task and stays as it is afterwards, since every
task reads it. Label heads of encoder-only backbones belong to their tasks, as in HAT. The task id is given at test.
HAT's networks have no such layers. For transformers ContinualLM has `transformer_hat`, with masks of heads, inner units
and outputs of feed-forward blocks (approaches/compute_loss.py). It cannot run as released: `transformer_mask()` is
called and defined nowhere, and no gradient is held (utils/roberta.py).
What a phase exports is the model behind its task's masks, whose projections have rows and columns scaled by them.
Nothing goes to the bank: the masks of the tasks are in layers, which adapters do not reach.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from raycl.adapters.head import MixedHead
from raycl.backbone import Backbone
from raycl.backbone.gates import Gate, GatePoint, attach
from raycl.methods.base import Learned, MethodConfig, in_head
from raycl.methods.context import TaskContext
from raycl.methods.masks.hard_attention import EMBEDDING, MODULE, freedom
from raycl.methods.masks.hat_adapter import BehindMasks, HatSettings
from raycl.methods.masks.units import Sides, Units, parameters_of, units_of
from raycl.methods.per_task_adapter import AdapterForm
from raycl.methods.trained_adapters import end_training
from raycl.types import AdapterState


class HatConfig(HatSettings):
    """HAT: all weights are trained, behind masks of each task over heads, inner units and outputs of layers."""

    name: Literal["hat"] = "hat"

    fixed_roles: ClassVar[tuple[str, ...]] = ("attention", "ffn")


class Hat(BehindMasks):
    """Full fine-tuning behind the masks of each task. Its adapters hold label rows alone."""

    Config: ClassVar[type[MethodConfig]] = HatConfig
    own_adapters: ClassVar[bool] = False
    trains_backbone = True

    def __init__(self, config: HatConfig, backbone: Backbone, seed: int) -> None:
        """Find the units and gate them.

        Raises:
            ConfigError: the backbone's layers have no units of this kind.
        """
        super().__init__(config, backbone, seed, AdapterForm((), 1.0, "probability"))
        units = units_of(backbone.model, attention_outputs=True)
        self.units: dict[GatePoint, Units] = {unit.gate_point: unit for unit in units}
        self.sides: dict[str, Sides] = parameters_of(backbone.model, units)
        self.mask_units({point: unit.count for point, unit in self.units.items()})
        attach(backbone.model, {point: self._gate(point) for point in self.units})
        self._tables: dict[tuple[str, ...], Tensor] = {}

    def _gate(self, point: GatePoint) -> Gate:
        """Return the gate of the active mixture of tasks; none for the bare backbone."""

        def gate(rows: int) -> Tensor | None:
            plan, units = self.stack.plan, self.units[point]
            if plan is None:
                return None
            if self._task and plan.used == {self._task}:
                return units.spread(self.masks(point))
            weights_BN = plan.for_rows(plan.mixture.weights, rows)
            table_NU = self._table(plan.mixture.names)[:, self.masks.places[point]]
            return units.spread(weights_BN.to(table_NU) @ table_NU)

        return gate

    def _table(self, names: tuple[str, ...]) -> Tensor:
        """Return `[N, U]` masks of learned tasks on the device; zeros for the task in training, active alone."""
        if names not in self._tables:
            zeros = torch.zeros(len(self.masks.embedding))
            rows = [self.masks.masks.get(name, zeros) for name in names]
            self._tables = {names: torch.stack(rows).to(self.backbone.device)}
        return self._tables[names]

    def _create(self, task: str) -> None:
        self.stack.begin_training({task: 0}, 1.0)
        self.masks.begin(alone=False)

    def _is_trained(self, name: str, parameter: Tensor) -> bool:
        return in_head(name, parameter) or not name.startswith("head.")

    def transform_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights in use are held, and e is compensated."""
        return {name: self._held(name, gradient) for name, gradient in gradients.items()}

    def _held(self, name: str, gradient: Tensor) -> Tensor:
        if name == EMBEDDING:
            return self.masks.compensated(gradient)
        if name.startswith("head.") or not self.masks.masks:
            return gradient
        sides = self.sides.get(name.removeprefix("model."))
        if sides is None:
            return torch.zeros_like(gradient)
        rows = None if sides.rows is None else sides.of_rows(self.masks.in_use(sides.rows.gate_point), len(gradient))
        if gradient.dim() == 1:
            assert rows is not None, "a bias belongs to the units of its rows"
            return gradient * (1 - rows).to(gradient)
        columns = None if sides.columns is None else sides.columns.spread(self.masks.in_use(sides.columns.gate_point))
        return gradient * freedom(rows, columns).to(gradient)

    def end_task(self, context: TaskContext) -> Learned:
        """Return the model behind the task's masks, with the task's label rows."""
        head = self.backbone.head
        labels = list(head.trainable_labels) if isinstance(head, MixedHead) else []
        task = self._task
        learned = super().end_task(context)
        return replace(learned, adapters={}, model=self._masked(task, context.parameters), labels=labels)

    def _freeze(self, context: TaskContext) -> dict[str, AdapterState]:
        """Return masks and label rows; the backbone's own values, which all workers have."""
        self.masks.end(self._task, self.masks.embedding)
        rows = {name: p.detach().cpu() for name, p in self.backbone.named_parameters() if name.startswith("head.")}
        states = end_training(self.backbone, self.stack, rows)
        self._task, self._tables = "", {}
        self._load(states)
        return states

    def _masked(self, task: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a model's tensors by their Hugging Face names, with the task's masks in its projections."""
        factors: dict[str, list[Tensor]] = {}
        for (path, side), units in self.units.items():
            mask = units.spread(self.masks.learned(task, (path, side)))
            if side == "input":
                factors.setdefault(f"model.{path}.weight", []).append(mask)
            else:
                factors.setdefault(f"model.{path}.weight", []).append(mask[:, None])
                factors.setdefault(f"model.{path}.bias", []).append(mask)
        masked = {}
        for name, tensor in parameters.items():
            for factor in factors.get(name, ()):
                tensor = _times(tensor, factor)
            if not name.startswith(f"{MODULE}."):
                masked[self.backbone.exported_name(name)] = tensor
        return masked

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._tables = {}
        super().load_state_dict(values, tensors)


def _times(tensor: Tensor, factor: Tensor) -> Tensor:
    """Return a parameter, perhaps shared out over workers, times a factor that all of them have."""
    from torch.distributed.tensor import DTensor, Replicate

    factor = factor.to(tensor.device, tensor.dtype)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        factor = DTensor.from_local(factor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return tensor.detach() * factor
