"""SD-LoRA: every task adds a direction of weight change, and retrains how far the model goes in each of them.

    y = W h + sum_{i<t} a_i D_i h + a_t s B_t A_t h,    D_i = B_i A_i / |B_i A_i|

Task t trains A_t, B_t and all magnitudes a_1 .. a_t, with the label head; directions of earlier tasks are frozen (Wu et
al. 2025, "SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class Incremental Learning", ICLR, section 4). The task's
own update is not normalized while it is trained: B_t = 0 has no direction. At its end the norm goes into a_t, so that
no output changes. No text is routed: the a_i are the same for all texts.
A magnitude is shared by all linears, as in the authors' code. Here the norm is one as well: the root mean square over
linears of |B A|_F, which is |B A|_F where there is one linear. Paper and code divide each linear by its own norm. With
one magnitude that would change what the trained task answers, so relative sizes of linears are kept.

Rank reduction (RR) is `rank_reduction`: smaller ranks from some tasks on. Knowledge distillation (KD) is `drop_below`:
at the end of a task D_t ~ sum_k c_k D_k is solved by least squares. Where the norm of what is left is at most this,
D_t is dropped and a_k grows by a_t c_k (the paper adds c_k, which keeps the function for a_t = 1 alone; its eq. 7
compares the squared norm, its algorithm 1 the norm).

The authors' code differs: it divides by |B|_F |A|_F of each linear (`norm=factors`: by the root mean square of these);
magnitudes are not kept, but start at 0.8 in every task, which changes the outputs; only labels of the new task compete
(`train.label_loss=task`); it trains with SGD.
On encoder-only backbones, each task trains an increment of all label rows, and logits are the sum of all increments
(see `inclora`), which no magnitude scales: else a new task would lower the magnitudes of earlier ones because that
lowers the scores of their labels. s = `lora_alpha` / `r` is 1, as in the paper, where the two are equal.
Where the task id is given (schedule `separate`), a task is trained alone and its magnitude goes into B.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from raycl.backbone import Backbone
from raycl.bank.tensor_groups import TensorGroups
from raycl.methods.base import MethodConfig, State, under
from raycl.methods.context import TaskContext
from raycl.methods.lora.inclora import IncLora, IncLoraSettings
from raycl.methods.lora_settings import LoraAlpha, Rank
from raycl.methods.per_task_adapter import AdapterForm, PerTaskAdapter
from raycl.methods.trained_adapters import end_training
from raycl.types import AdapterState, Batch, Mixture, RouterState


class SdLoraConfig(IncLoraSettings):
    """SD-LoRA: frozen directions of earlier tasks, whose magnitudes every task trains."""

    name: Literal["sdlora"] = "sdlora"
    r: Rank = 10
    lora_alpha: LoraAlpha = 10.0
    magnitude: float = Field(1.0, gt=0, description="a_t when task t begins (0.8 in the authors' code)")
    norm: Literal["product", "factors"] = Field(
        "product",
        description="what a direction is divided by. product: |B A|; factors: |B| |A|, as in the authors' code",
    )
    rank_reduction: dict[int, PositiveInt] = Field(
        default_factory=dict,
        description="number of a task, from 1 -> its rank and that of later ones (paper: 4: 8, 8: 6)",
    )
    drop_below: float | None = Field(
        None,
        ge=0,
        description="a new direction is dropped if its distance to the span of earlier ones, relative to its own norm, "
        "is at most this (paper: 9e-4); null: none is",
    )

    takes: ClassVar[tuple[str, ...]] = ("use_rslora", "alpha_pattern", "init_lora_weights=gaussian")

    unused_for_single_task: ClassVar[tuple[str, ...]] = (
        *IncLoraSettings.unused_for_single_task,
        "rank_reduction",
        "drop_below",
    )


class SdLora(IncLora):
    """A weighted sum of directions, of which the newest and all weights are trained."""

    Config: ClassVar[type[MethodConfig]] = SdLoraConfig
    revisable: ClassVar[bool] = False  # magnitudes of later tasks were trained beside the task's own

    def __init__(self, config: SdLoraConfig, backbone: Backbone, seed: int) -> None:
        PerTaskAdapter.__init__(self, config, backbone, seed, AdapterForm(config.target_modules, config.scaling, "sum"))
        self.stack.detach_loaded = config.stop_grad_old_blocks
        self.magnitudes: TaskMagnitudes = TaskMagnitudes(self.stack.device)
        self.router_module = self.magnitudes
        backbone.add_module("magnitudes", self.magnitudes)

    def _create(self, task: str) -> None:
        super()._create(task)
        self.magnitudes.begin(task, self.config.magnitude, alone=self.task_id_given)

    def _rank(self) -> int:
        number, steps = self._number() + 1, self.config.rank_reduction
        reached = [first for first in steps if first <= number]
        return int(steps[max(reached)] if reached and not self.task_id_given else self.config.r)

    def _is_trained(self, name: str, parameter: Tensor) -> bool:
        return name.startswith("magnitudes.") or super()._is_trained(name, parameter)

    def route(self, batch: Batch) -> Mixture:
        """Return every direction by its magnitude; label rows whose direction was dropped stay active."""
        weights_BT = self.magnitudes(len(batch))
        known = {*self.magnitudes.names}
        others = () if self.task_id_given else tuple(name for name in self._learned if name not in known)
        ones_BN = torch.ones(len(batch), len(others), device=weights_BT.device)
        return Mixture((*self.magnitudes.names, *others), torch.cat([weights_BT, ones_BN], dim=1))

    def _freeze(self, context: TaskContext) -> dict[str, AdapterState]:
        states = end_training(self.backbone, self.stack, context.parameters)
        task, self._task = self._task, ""
        values = context.parameters["magnitudes.values"].double().cpu()
        if self.task_id_given:
            states = {task: scaled(states[task], float(values[-1]))}
            self.magnitudes.end({})
        else:
            states = {task: self._direction(task, states[task], values)}
        self._load(states)
        return states

    def _direction(self, task: str, state: AdapterState, values_T: Tensor) -> AdapterState:
        """Return the normalized direction; magnitudes get its norm, or all of it where it is dropped."""
        earlier = self.magnitudes.names[:-1]
        magnitudes = dict(zip(self.magnitudes.names, values_T.tolist(), strict=True))
        size = state.scale * norm_of(state, self.config.norm)
        if size > 0:
            magnitudes[task] *= size
            state = replace(scaled(state, state.scale / size), scale=1.0)
        if self.config.drop_below is not None and earlier and size > 0:
            shares_K, left = least_squares(state, [self._learned[name] for name in earlier])
            if left <= self.config.drop_below:
                own = magnitudes.pop(task)
                magnitudes |= {
                    name: magnitudes[name] + own * share for name, share in zip(earlier, shares_K, strict=True)
                }
                state = replace(state, linears={})
        self.magnitudes.end(magnitudes)
        return state

    def _router(self) -> RouterState:
        """Return magnitudes as weights; the task's own adapter where the task id is given."""
        if self.task_id_given:
            return RouterState("task", {"head_rule": "sum"})
        weights = {name: self.magnitudes.frozen.get(name, 1.0) for name in self._learned}
        tensors = {f"weight/{name}": torch.tensor(weight) for name, weight in weights.items()}
        return RouterState("weighted_sum", {"head_rule": "sum"}, tensors)

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the magnitudes of all tasks so far."""
        if self.task_id_given:
            return {}
        return {"magnitudes": {name: round(value, 4) for name, value in self.magnitudes.frozen.items()}}

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        magnitudes = {
            f"magnitude/{name}": torch.tensor(magnitude) for name, magnitude in self.magnitudes.frozen.items()
        }
        return values, tensors | magnitudes

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.magnitudes.freeze({name: float(value) for name, value in under("magnitude/", tensors).items()})
        super().load_state_dict(values, tensors)

    @classmethod
    def _without(cls, values: dict[str, Any], left: TensorGroups, task: str, adapters: Collection[str]) -> State:
        return values, left.select(lambda name: name != f"magnitude/{task}")


class TaskMagnitudes(nn.Module):
    """a_1 .. a_t.

    Attributes:
        values: `[t]` in training; None between tasks.
        names: adapters that they belong to, in order.
        frozen: adapter -> its magnitude before the task in training, or between tasks.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_parameter("values", None)
        self.values: nn.Parameter | None
        self.device = device
        self.names: tuple[str, ...] = ()
        self.frozen: dict[str, float] = {}

    def freeze(self, values: Mapping[str, float]) -> None:
        """Set the magnitudes between tasks."""
        self.frozen, self.names = dict(values), tuple(values)

    def begin(self, task: str, value: float, alone: bool = False) -> None:
        """Train all magnitudes, with one more for a new task.

        Args:
            alone: train the new one alone.
        """
        earlier = {} if alone else self.frozen
        self.names = (*earlier, task)
        self.values = nn.Parameter(torch.tensor([*earlier.values(), value], device=self.device))

    def end(self, values: Mapping[str, float]) -> None:
        """Set the magnitudes."""
        self.values = None
        self.freeze({name: float(torch.tensor(value)) for name, value in values.items()})  # as a checkpoint keeps them

    def forward(self, examples: int) -> Tensor:
        """Return `[examples, t]`, the same in each row."""
        values = torch.tensor(list(self.frozen.values())) if self.values is None else self.values.float()
        return torch.ones(examples, 1, device=values.device) * values

    def zero(self, examples: int) -> Tensor:
        """Return `[examples, 1]` zeros in whose graph the magnitudes take part."""
        result: Tensor = self(examples).sum(1, keepdim=True) * 0.0
        return result


def scaled(state: AdapterState, factor: float) -> AdapterState:
    """Return the adapter with B times a factor."""
    pairs = {path: (low, (high.double() * factor).to(high.dtype)) for path, (low, high) in state.linears.items()}
    return replace(state, linears=pairs)


def norm_of(state: AdapterState, kind: str) -> float:
    """Return the root mean square over linears of |B A|_F, or of |B|_F |A|_F (kind `factors`)."""
    if kind == "product":
        return math.sqrt(product(state, state))
    sizes = [float(a.double().square().sum() * b.double().square().sum()) for a, b in state.linears.values()]
    return math.sqrt(sum(sizes) / len(sizes))


def product(first: AdapterState, other: AdapterState) -> float:
    """Return the mean over linears of the sum of the entries of (B A) * (B' A'), from products of the factors."""
    terms = []
    for path, (low, high) in first.linears.items():
        low_2, high_2 = other.linears[path]
        inner = (high.double().T @ high_2.double()) * (low.double() @ low_2.double().T)
        terms.append(float(inner.sum()))
    return max(sum(terms), 0.0) / len(terms) if first is other else sum(terms) / len(terms)


def least_squares(new: AdapterState, earlier: Sequence[AdapterState]) -> tuple[list[float], float]:
    """Return shares c_k of earlier updates whose sum is nearest to the new one, and the distance, relative to its
    norm."""
    gram_KK = torch.tensor(
        [[product(direction, other) for other in earlier] for direction in earlier], dtype=torch.float64
    )
    beside_K = torch.tensor([product(direction, new) for direction in earlier], dtype=torch.float64)
    shares_K = torch.linalg.pinv(gram_KK, hermitian=True) @ beside_K
    size = product(new, new)
    left = size - 2 * float(shares_K @ beside_K) + float(shares_K @ gram_KK @ shares_K)
    return shares_K.tolist(), math.sqrt(max(left, 0.0) / size)
