"""HAT in adapters: one set of bottleneck adapters for all tasks, and for each task a mask over its units.

    y + (o * B (a * relu(A x)))          a over the bottleneck's units, o over the outputs

Masks, their schedule, the sparsity and what holds weights in use are those of `hard_attention`: the gradient of row r
of A is scaled by `1 - used_r`, that of B[o, r] by `1 - min(used_o, used_r)`. The task id is given at test. A masked
adapter is an adapter whose B has columns scaled by a and rows by o, so each task's is published, and again after a
later task that has moved it: what is served is what was measured.
HAT: Serra et al. 2018, section 2. In adapters: AdapterHAT of ContinualLM (Ke et al. 2023), behind feed-forward blocks
(reduction 16, so 48 units in RoBERTa-base). Its two halves have two linears with biases each, 768-48-48 and 48-768-768,
a GELU and a mask behind every one, and a ReLU between the halves (networks/adapters/modeling.py,
networks/plugin/plugin.py): 8.0M weights in all, 0.9M here. It also trains the language head's dense layer, norm and
bias, with no mask. Here adapters are those of raycl: in parallel to their linear, without biases, with one mask inside
and one on the outputs, and the language head is frozen. Label heads of encoder-only backbones belong
to their tasks, as in HAT.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone, Output
from raycl.methods.base import MethodConfig, State, under
from raycl.methods.context import TaskContext
from raycl.methods.lora_settings import as_peft_draws
from raycl.methods.masks.hard_attention import EMBEDDING, MODULE, Bounds, HardAttention, Key, annealed, freedom
from raycl.methods.per_task_adapter import AdapterForm, BottleneckSettings, ByTaskConfig, PerTaskAdapter
from raycl.methods.trained_adapters import end_training
from raycl.types import AdapterState, Batch, Phase


class HatSettings(ByTaskConfig):
    """Settings of the masks."""

    max_scale: float = Field(400.0, gt=1, description="s_max, the steepness of masks at an epoch's end and at test")
    sparsity: float = Field(0.75, ge=0, description="weight of the share of free units that a task uses, in the loss")


class BehindMasks(PerTaskAdapter):
    """Shared weights behind the masks of each task.

    Attributes:
        masks: over the units of `mask_units`.
    """

    starts_anew: ClassVar[bool] = True
    holds_weights: ClassVar[bool] = True
    scales_gradients: ClassVar[bool] = True
    revisable: ClassVar[bool] = False  # the shared weights hold every task

    def mask_units(self, sizes: Mapping[Key, int]) -> None:
        """Put masks over so many units of each layer."""
        self.masks: HardAttention = HardAttention(sizes, self.config.max_scale, self.backbone.device, self._scale)
        self.backbone.add_module(MODULE, self.masks)
        self.constraint = Bounds()
        self._context: TaskContext | None = None

    def _scale(self) -> float:
        """s of now: in the present step of a phase, else at test."""
        context = self._context if self.backbone.training else None
        if context is None:
            return float(self.config.max_scale)
        steps = -(-context.count("train") // context.batch_size)
        return annealed(context.step.index, steps, self.config.max_scale)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Continue from the present shared weights, and draw the task's masks."""
        self._context = context
        super().begin_task(phase, context)

    def penalty(self, batch: Batch, output: Output) -> Tensor:
        """Return the sparsity's, which depends on parameters alone, so that every step adds it once."""
        return float(self.config.sparsity) * self.masks.sparsity()

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        return values, tensors | {f"masks/{task}": mask for task, mask in self.masks.masks.items()}

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.masks.masks = dict(under("masks/", tensors))
        super().load_state_dict(values, tensors)


class HatAdapterConfig(HatSettings, BottleneckSettings):
    """HAT in adapters: one bottleneck adapter for all tasks, whose units each task masks."""

    name: Literal["hat-adapter"] = "hat-adapter"


class HatAdapter(BehindMasks):
    """Bottleneck adapters that all tasks share, behind the masks of each."""

    Config: ClassVar[type[MethodConfig]] = HatAdapterConfig

    def __init__(self, config: HatAdapterConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed, AdapterForm(config.target_modules, 1.0, "probability", "relu"))
        sizes: dict[Key, int] = {}
        for path, layer in self.stack.layers.items():
            sizes[path, "units"] = config.bottleneck_size
            sizes[path, "outputs"] = layer.outputs
        self.mask_units(sizes)
        for path, layer in self.stack.layers.items():
            layer.unit_masks = lambda path=path: (self.masks((path, "units")), self.masks((path, "outputs")))
        self._shared: dict[str, Tensor] = {}

    def _create(self, task: str) -> None:
        self.stack.begin_training({task: self.config.bottleneck_size}, 1.0, as_peft_draws, self.config.dropout)
        if self._shared and not self.task_id_given:
            linears = AdapterState.from_tensors(self._shared, 1.0, (), "relu")
            self.stack.fill({task: linears})
        self.masks.begin(alone=self.task_id_given)

    def _is_trained(self, name: str, parameter: Tensor) -> bool:
        return super()._is_trained(name, parameter) or name == EMBEDDING

    def transform_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights in use are held, and e is compensated."""
        changed = dict(gradients)
        for path in self.stack.layers:
            used_r = self.masks.in_use((path, "units"))
            used_O = self.masks.in_use((path, "outputs"))
            for part, free in (("lora_A", freedom(used_r, None)), ("lora_B", freedom(used_O, used_r))):
                name = f"model.{path}.{part}"
                changed[name] = changed[name] * free.to(changed[name])
        changed[EMBEDDING] = self.masks.compensated(changed[EMBEDDING])
        return changed

    def _freeze(self, context: TaskContext) -> dict[str, AdapterState]:
        """Return the task's masked adapter, and those of earlier tasks that it has moved; the shared weights stay."""
        self.masks.end(self._task, context.parameters[EMBEDDING])
        ((task, shared),) = end_training(self.backbone, self.stack, context.parameters).items()
        self._task = ""
        self._shared = {name: value for name, value in shared.tensors().items() if ".lora_" in name}
        earlier = {} if self.task_id_given else dict(self._learned)
        again = {name: self._masked(name, shared, state) for name, state in earlier.items()}
        changed = {name: state for name, state in again.items() if not _same(state, earlier[name])}
        fresh = {task: self._masked(task, shared, shared)}
        if changed:
            for name in earlier:  # all, since sums depend on the order of loading
                self.stack.drop(name)
        self._load((earlier | changed if changed else {}) | fresh)
        return changed | fresh

    def _masked(self, task: str, shared: AdapterState, head: AdapterState) -> AdapterState:
        """Return the shared weights behind a task's masks, with the label rows of `head`.

        B is scaled by the masks; rows of A that no column of it reads are zero.
        """
        linears = {}
        for path, (low_rD, high_Or) in shared.linears.items():
            units_r = self.masks.learned(task, (path, "units"))
            high_Or = high_Or * units_r * self.masks.learned(task, (path, "outputs"))[:, None]
            linears[path] = (low_rD * (units_r > 0)[:, None], high_Or)
        return AdapterState(
            linears, 1.0, None, head.labels, head.head_weight, head.head_bias, activation=shared.activation
        )

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        return values, tensors | {f"shared/{name}": value for name, value in self._shared.items()}

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._shared = dict(under("shared/", tensors))
        super().load_state_dict(values, tensors)


def _same(first: AdapterState, other: AdapterState) -> bool:
    parts = other.tensors()
    return all(torch.equal(value, parts[name]) for name, value in first.tensors().items())
