"""Products of gradients, each one vector over all parameters, and the base class of methods that project them."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from raycl.backbone import Backbone
from raycl.data.sources.cache import Indices
from raycl.methods.context import TaskContext
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.types import Phase, Task

Gradients = Mapping[str, Tensor]
"""Parameter -> whole gradient."""


def product(first: Gradients, other: Gradients) -> float:
    """Return the product of two gradients over the parameters of the first, summed in float64."""
    return sum(
        float(torch.dot(gradient.reshape(-1).double(), other[name].to(gradient.device).reshape(-1).double()))
        for name, gradient in first.items()
    )


def gram(gradients: Sequence[Gradients]) -> Tensor:
    """Return `[K, K]` products of K gradients, float64 on the CPU."""
    products_KK = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for row, gradient in enumerate(gradients):
        for column, other in enumerate(gradients[: row + 1]):
            products_KK[row, column] = products_KK[column, row] = product(gradient, other)
    return products_KK


def plus(gradients: Gradients, weights: Sequence[float], others: Sequence[Gradients]) -> dict[str, Tensor]:
    """Return `g + sum_k weights_k other_k`, in the dtype of g."""
    sums = {}
    for name, gradient in gradients.items():
        total = gradient.float()
        for weight, other in zip(weights, others, strict=True):
            total = total + weight * other[name].to(gradient.device).float()
        sums[name] = total.to(gradient.dtype)
    return sums


class StoredRowsConfig(WrapperConfig):
    """Settings of the learner."""

    rereads_rows: ClassVar[bool] = True


class StoredRowsWrapper(Wrapper):
    """Any learner that trains one model for all labels, whose gradients are compared with those on stored rows.

    Attributes:
        stored: rows of each earlier task.
    """

    computes_gradients: ClassVar[bool] = True
    needs_shared = "adapters"

    def __init__(self, config: StoredRowsConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.stored: list[tuple[Task, Indices]] = []
        self._context: TaskContext | None = None

    @abstractmethod
    def rows_of(self, task: Task, context: TaskContext) -> Indices:
        """Return the rows of a task that the settings store."""

    @abstractmethod
    def projected(self, gradients: dict[str, Tensor], context: TaskContext) -> dict[str, Tensor]:
        """Return gradients that the optimizer is given, where rows are stored."""

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Store rows of all earlier tasks."""
        self.stored = [(task, self.rows_of(task, context)) for task in context.earlier_tasks]
        self._context = context
        self.learner.begin_task(phase, context)

    def transform_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the learner, projected."""
        gradients = self.learner.transform_gradients(gradients)
        if not self.stored:
            return gradients
        assert self._context is not None, "a step without a task"
        return self.projected(gradients, self._context)
