"""Base class of methods that change gradients by those of the loss on stored rows of earlier tasks."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from raycl.backbone import Backbone
from raycl.methods.context import TaskContext
from raycl.methods.replay.buffer import RowBuffer
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.types import Phase


class StoredRowsConfig(WrapperConfig):
    """Settings of the learner."""

    rereads_rows: ClassVar[bool] = True


class StoredRowsWrapper(Wrapper):
    """Any learner that trains one model for all labels, whose gradients are compared with those on stored rows.

    Attributes:
        buffer: rows of all earlier tasks.
    """

    computes_gradients: ClassVar[bool] = True
    needs_shared = "adapters"

    def __init__(self, config: StoredRowsConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.buffer = self.new_buffer()
        self._context: TaskContext | None = None

    @abstractmethod
    def new_buffer(self) -> RowBuffer:
        """Return an empty one, of the size that the settings say."""

    @abstractmethod
    def projected(self, gradients: dict[str, Tensor], context: TaskContext) -> dict[str, Tensor]:
        """Return gradients that the optimizer is given, where rows are stored."""

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Check that rows of all earlier tasks are in the buffer."""
        self.buffer.fill(context)
        self._context = context
        self.learner.begin_task(phase, context)

    def transform_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the learner, projected."""
        gradients = self.learner.transform_gradients(gradients)
        if not len(self.buffer):
            return gradients
        assert self._context is not None, "a step without a task"
        return self.projected(gradients, self._context)
