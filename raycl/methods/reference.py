"""Upper references: one model per task, and all tasks at once.

Both wrap another method (`learner`), so that "trained alone" and "trained jointly" mean *by the same method*
(FWT's single-task scores must come from there: SAPT's scorer hard-codes them instead).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from raycl.backbone import Backbone, Output
from raycl.config import named
from raycl.methods.base import Learned, Method, MethodConfig
from raycl.methods.context import TaskRows
from raycl.methods.lora.lora import LoraConfig
from raycl.methods.registry import LearnerChoice, method_class
from raycl.retrieval.encoder import SentenceEncoder
from raycl.types import Batch, Mixture, Phase, RouterState, Task


class ReferenceConfig(MethodConfig):
    """Which method learns."""

    learner: LearnerChoice = Field(LoraConfig(), description="the method that learns, with its settings")

    @field_validator("learner", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return named(value, "lora")

    @property
    def needs_task(self) -> bool:
        """As the learner does."""
        return self.learner.needs_task

    @property
    def fits_ahead(self) -> bool:
        """As the learner does."""
        return self.learner.fits_ahead

    def idle_beside(self, has_label_head: bool, reason: str) -> Iterator[tuple[str, str]]:
        """What the learner says."""
        for path, why in self.learner.idle_beside(has_label_head, reason):
            yield f"learner.{path}", why


class SeparateConfig(ReferenceConfig):
    """One model per task: the upper reference (PerTaskFT of MIGU, "separate fine-tune" of SLM)."""

    name: Literal["separate"] = "separate"

    def idle(self) -> Iterator[tuple[str, str]]:
        """What has no part in a task that is learned alone."""
        yield from ((f"learner.{name}", "name=separate") for name in type(self.learner).unused_for_single_task)

    @property
    def needs_task(self) -> bool:
        """Each task has a model of its own."""
        return True


class JointConfig(ReferenceConfig):
    """All tasks at once: the upper reference (multi-task learning, MTL)."""

    name: Literal["joint"] = "joint"


class Reference(Method):
    """Passes every hook on to the learner."""

    def __init__(self, config: ReferenceConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.learner = method_class(config.learner.name)(config.learner, backbone, seed)
        self.stack = self.learner.stack
        self.fits_ahead = self.learner.fits_ahead

    @property
    def encoder(self) -> SentenceEncoder | None:
        """As the learner says."""
        return self.learner.encoder

    @property
    def reads_batches(self) -> bool:
        """As the learner says."""
        return self.learner.reads_batches

    def check(self, tasks: Sequence[Task]) -> None:
        """As the learner does."""
        self.learner.check(tasks)

    def show(self, rows: TaskRows) -> None:
        """As the learner does."""
        self.learner.show(rows)

    def begin_task(self, phase: Phase, resumed: bool) -> None:
        """As the learner does."""
        self.learner.begin_task(phase, resumed)

    def study(self, phase: Phase, queries_BC: Tensor, dev_BC: Tensor) -> None:
        """As the learner does."""
        self.learner.study(phase, queries_BC, dev_BC)

    def put_together(self, gather: Callable[[Any], Sequence[Any]]) -> None:
        """As the learner does."""
        self.learner.put_together(gather)

    def summary(self) -> dict[str, Any]:
        """As the learner says."""
        return self.learner.summary()

    def begin_step(self, step: int, seed: int, micro_batches: int) -> None:
        """As the learner does."""
        self.learner.begin_step(step, seed, micro_batches)

    def prepare_batch(self, batch: Batch) -> Batch:
        """As the learner does."""
        return self.learner.prepare_batch(batch)

    def route(self, batch: Batch) -> Mixture | None:
        """As the learner does."""
        return self.learner.route(batch)

    def activate(self, batch: Batch) -> AbstractContextManager[None]:
        """As the learner does."""
        return self.learner.activate(batch)

    def activate_trainable(self, examples: int) -> AbstractContextManager[None]:
        """As the learner does."""
        return self.learner.activate_trainable(examples)

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """As the learner does."""
        return self.learner.penalty(batch, output)

    def end_task(self, phase: Phase, tensors: Mapping[str, Tensor]) -> Learned | None:
        """As the learner does."""
        return self.learner.end_task(phase, tensors)

    def router_state(self) -> RouterState:
        """As the learner says."""
        return self.learner.router_state()

    def frozen_state(self) -> dict[str, Tensor]:
        """As the learner says."""
        return self.learner.frozen_state()

    def learned_names(self) -> list[str]:
        """As the learner says."""
        return self.learner.learned_names()

    def state_dict(self) -> dict[str, Any]:
        """As the learner says."""
        return self.learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], frozen_state: Mapping[str, Tensor]) -> None:
        """As the learner does."""
        self.learner.load_state_dict(state, frozen_state)


class Joint(Reference):
    """All tasks in one stage."""

    Config = JointConfig
    joint: ClassVar[bool] = True


class Separate(Reference):
    """A fresh start for every task: parameters and label head go back to their first values.

    A learner with adapters of its own for every task starts afresh anyway; it is told the task instead.
    """

    Config = SeparateConfig
    one_model_per_task: ClassVar[bool] = True
    own_adapters: ClassVar[bool] = True

    def __init__(self, config: SeparateConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.learner.task_id_given = self.learner.own_adapters
        self._first = {
            name: parameter.detach().clone()
            for name, parameter in backbone.named_parameters()
            if parameter.requires_grad and not name.startswith("head.") and not self.learner.own_adapters
        }

    def router_state(self) -> RouterState:
        """Each task is told, and has its own; a learner that chooses among several keeps its own way."""
        learners = self.learner.router_state()
        return learners if self.learner.own_adapters else RouterState("task")

    def begin_task(self, phase: Phase, resumed: bool) -> None:
        """Forget the former task's model, then as the learner does."""
        if not resumed and not self.learner.own_adapters:
            if self.backbone.head is not None:
                self.backbone.head.clear()
            parameters = dict(self.backbone.named_parameters())
            with torch.no_grad():
                for name, first in self._first.items():
                    parameters[name].copy_(first)
        self.learner.begin_task(phase, resumed)

    def end_task(self, phase: Phase, tensors: Mapping[str, Tensor]) -> Learned | None:
        """The learner's, each adapter under its task's name."""
        learned = self.learner.end_task(phase, tensors)
        if learned is not None and not self.learner.own_adapters:
            several = len(learned.adapters) > 1
            learned.extras = {}
            learned.adapters = {
                f"{phase.name}.{name}" if several else str(phase.name): state
                for name, state in learned.adapters.items()
            }
        return learned
