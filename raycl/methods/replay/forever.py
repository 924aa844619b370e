"""FOREVER: stored rows are replayed after intervals of a forgetting curve, in a time that the size of updates measures.

    tau = sum over the task's steps of |theta_t - theta_t-1|;  a day is tau after the first `warm_up` steps
    when tau passes 1, 2, 4, 7, 15, 30 days, the stored rows of earlier tasks are replayed once
    in steps of a replay  loss + beta_t |theta - theta*|^2,  beta_t = beta clip(1 + gamma (mu_t / mu_0 - 1), 1/2, 3)

with theta* before the task, mu_0 the mean size of the first `warm_up` updates and mu_t its moving average since, of
rate 0.05: where the model changes faster than at first, it is held more (Feng et al. 2026, "FOREVER: Forgetting
Curve-Inspired Memory Replay for Language Model Continual Learning", ACL 2026, arXiv:2601.03938). 2 % of each task's
rows are stored, 24 steps make a day, and the six intervals are the paper's, as are the rate and the limits of the
intensity. `beta` and `gamma` could not be found, and are ours. Formulas are those that public texts give of the paper,
two of which agree; the authors' code is not public.

Deviations: replayed rows join steps of training, one for each new row, until as many were drawn as are stored, since a
method does not step. Where parameters are kept in 16 bits between steps (DeepSpeed in bfloat16), smaller updates than
these hold are not seen.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, field_validator
from torch import Tensor

from raycl.backbone import Backbone, Output
from raycl.methods.base import Learned, State
from raycl.methods.context import TaskContext
from raycl.methods.held_weights import HeldWeights
from raycl.methods.replay.stored_rows import StoredRows, dealt, joined
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.types import Batch, Phase

RATE = 0.05
"""Rate of the moving average of the size of updates."""

BEFORE, ANCHOR = "forever/before", "forever/anchor"
"""Kinds of tensors in checkpoints: the weights before the last step, and before the task."""

INTENSITIES = (0.5, 3.0)
"""The least and the greatest factor of `beta`."""


class ForeverConfig(WrapperConfig):
    """Any learner, with stored rows that are replayed after intervals of a forgetting curve."""

    name: Literal["forever"] = "forever"
    share: float = Field(0.02, gt=0, le=1, description="share of each task's train rows that is stored; at least one")
    warm_up: int = Field(24, ge=1, description="steps of a task whose updates make a day")
    days: tuple[PositiveFloat, ...] = Field(
        (1.0, 2.0, 4.0, 7.0, 15.0, 30.0), min_length=1, description="days after which stored rows are replayed"
    )
    beta: float = Field(1e-3, ge=0, description="weight of the squared distance to the weights before the task")
    gamma: float = Field(1.0, ge=0, description="how much that weight follows the size of updates")

    kept_share = "share"
    unused_in_first_phase = ("warm_up", "days", "beta", "gamma")
    rereads_rows: ClassVar[bool] = True

    @field_validator("days")
    @classmethod
    def _rise(cls, days: tuple[float, ...]) -> tuple[float, ...]:
        if list(days) != sorted(set(days)):
            raise ValueError(f"days are {', '.join(f'{day:g}' for day in days)}: expected each later than the last")
        return days

    def values_kept(self, tasks: int) -> int:
        """Count the weights before the task and before the last step."""
        return 2


@dataclass
class ModelClock:
    """The time of a task by the size of updates.

    Attributes:
        time: sizes of all updates so far, added up. updates: their number. day: length of a day.
        first: mean size of the updates of the first day. mean: moving average since. passed: number of intervals that
            have passed.
    """

    time: float = 0.0
    updates: int = 0
    day: float = 0.0
    first: float = 0.0
    mean: float = 0.0
    passed: int = 0

    def add(self, size: float, warm_up: int, days: tuple[float, ...]) -> bool:
        """Add an update; returns whether an interval has passed with it."""
        self.time += size
        self.updates += 1
        if self.updates <= warm_up:
            self.day, self.mean = self.time, self.time / self.updates
            self.first = self.mean
        else:
            self.mean += RATE * (size - self.mean)
        before = self.passed
        while self.updates >= warm_up and self.passed < len(days) and self.time >= days[self.passed] * self.day:
            self.passed += 1
        return self.passed > before

    def intensity(self, gamma: float) -> float:
        """Return the factor of `beta`."""
        least, most = INTENSITIES
        ratio = self.mean / self.first if self.first else 1.0
        return min(most, max(least, 1 + gamma * (ratio - 1)))


class Forever(Wrapper):
    """Any learner that trains one model for all labels, with replay on a forgetting curve."""

    Config = ForeverConfig
    needs_shared = "adapters"
    replaces_parameters: ClassVar[bool] = True

    def __init__(self, config: ForeverConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self._context: TaskContext | None = None
        self._rows: StoredRows | None = None
        self._clock = ModelClock()
        self._step = -1
        self._left = 0
        self._before = HeldWeights(backbone, self.learner, torch.float32)
        self._anchor = HeldWeights(backbone, self.learner, torch.float32)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Open the stored rows of earlier tasks, and start the clock."""
        self.learner.begin_task(phase, context)
        self._context = context
        entries = [(task, context.stored_rows(task, self.config.share)) for task in context.earlier_tasks]
        self._rows = StoredRows(entries, context, self.backbone, self.seed) if entries else None
        if not context.resumed:
            self._clock, self._step = ModelClock(), -1
            self._forget()
            if entries:
                self._anchor.hold()

    def _forget(self) -> None:
        """Hold no weights, and end a replay."""
        self._before.clear()
        self._anchor.clear()
        self._left = 0

    def prepare_batch(self, batch: Batch) -> Batch:
        """Add a stored row to each new one while a replay lasts."""
        batch, context = self.learner.prepare_batch(batch), self._context
        if self._rows is None or context is None:
            return batch
        if context.step.index != self._step:
            self._tick(context, len(self._rows))
        numbers = dealt(batch, len(self._rows), context.step.seed) if self._left else []
        if not numbers:
            return batch
        return joined(batch, self._rows.batch(numbers), self.backbone.codec.pad_id)

    def _tick(self, context: TaskContext, stored: int) -> None:
        """Measure the last step's update, once before each step, and begin a replay where an interval has passed."""
        self._step, self._left = context.step.index, max(0, self._left - 1)
        if self._before:
            with torch.no_grad():
                size = float(self._before.squared_distance().sqrt())
            if self._clock.add(size, self.config.warm_up, self.config.days):
                self._left = -(-stored // context.batch_size)
        self._before.hold()

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return the learner's, and in steps of a replay the distance to the weights before the task, once a step."""
        own = self.learner.penalty(batch, output)
        if not self._left or not self.config.beta:
            return own
        weight: float = self.config.beta * self._clock.intensity(self.config.gamma)
        held = weight * self._anchor.squared_distance()
        return held if own is None else own + held

    def end_task(self, context: TaskContext) -> Learned | None:
        """Return the learner's; nothing but the numbers of rows is kept."""
        self._forget()
        return self.learner.end_task(context)

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the learner's, and how many intervals passed in the phase that has just ended."""
        return {**self.learner.summary(observed), "forever": {"replays": self._clock.passed}}

    def state_dict(self) -> State:
        values, tensors = self.learner.state_dict()
        clock = {"clock": asdict(self._clock), "step": self._step, "left": self._left}
        return {**values, "forever": clock}, tensors | self._before.tensors(BEFORE) | self._anchor.tensors(ANCHOR)

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        held = values["forever"]
        self._clock, self._step, self._left = ModelClock(**held["clock"]), held["step"], held["left"]
        self._before.restore(BEFORE, tensors)
        self._anchor.restore(ANCHOR, tensors)
        self.learner.load_state_dict(values, tensors)
