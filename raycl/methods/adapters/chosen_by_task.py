"""Base class of methods whose adapters are chosen by the task id of a text, in evaluation and in serving."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

from raycl.adapters.head import MixedHead
from raycl.methods.base import MethodConfig
from raycl.methods.per_task_adapter import PerTaskAdapter
from raycl.types import Batch, Mixture


class ByTaskConfig(MethodConfig):
    """Settings of a method that needs the task id."""

    needs_task: ClassVar[bool] = True
    needs_texts: ClassVar[bool] = True


class ChosenByTask(PerTaskAdapter, ABC):
    """An adapter for each phase, for texts of its tasks."""

    def _begin(self, task: str, labels: list[str]) -> None:
        if self.task_id_given and isinstance(self.backbone.head, MixedHead):
            self.backbone.head.clear()
        super()._begin(task, labels)

    def _number(self) -> int:
        return 0 if self.task_id_given else len(self._learned)

    def route(self, batch: Batch) -> Mixture:
        return Mixture.same({self._task: 1.0}, len(batch))
