"""Capabilities that a method may declare in addition to its hooks, for engines, the evaluator and passes for
parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from raycl.backbone import BackboneConfig, Output
from raycl.bank.tensor_groups import TensorGroups
from raycl.types import Batch

if TYPE_CHECKING:
    from raycl.methods.base import Learned


class RouterModule(Protocol):
    """A module that routes and is trained with the adapters."""

    def parameters(self) -> Iterator[Parameter]:
        """Yield its parameters, as torch's modules do."""
        ...

    def zero(self, examples: int) -> Tensor:
        """Return `[examples, 1]` zeros in whose graph every trained parameter of the module takes part."""
        ...


class Constraint(Protocol):
    """A constraint on updates of some trained parameters, which engines apply after each update of the optimizer."""

    @property
    def names(self) -> Collection[str]:
        """Parameters that it is for, by name in the backbone; none: nothing is to be kept."""
        ...

    def __call__(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        """Return the value that the parameter gets, of the whole values before and after the optimizer's update, in
        float32.

        The same on all workers.
        """
        ...


class Objective(Protocol):
    """A loss that takes the place of the cross-entropy of a batch's answers or labels."""

    def count(self, batch: Batch) -> int:
        """Return the number that divides the loss of a step, summed over its micro-batches and workers."""
        ...

    def __call__(self, batch: Batch, output: Output) -> Tensor:
        """Return the loss of a micro-batch as a scalar float32, summed over what `count` counts.

        Args:
            batch: a batch as `Method.prepare_batch` returns it. output: its forward pass.
        """
        ...


class SampleGenerator(Protocol):
    """The settings of a generator of pseudo-samples, as far as a run's checks need them.

    Attributes:
        writes: input, or instruction_and_input. max_tokens: limit of a written text.
        backbone: its own; None: that of the run.
    """

    @property
    def writes(self) -> str: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def backbone(self) -> BackboneConfig | None: ...


class TaskRemoval(Protocol):
    """Takes a task out of a method's state between tasks."""

    def __call__(
        self, values: Mapping[str, Any], tensors: Mapping[str, Tensor], task: str, adapters: Collection[str], keep: bool
    ) -> tuple[dict[str, Any], TensorGroups]:
        """Return the state (`Method.state_dict`) without the task: its adapters, router entries and own labels.

        Args:
            adapters: names of the task's adapters.
            keep: a task whose adapters have these names, learned next, begins with their weights.
        """
        ...


class TaskJoin(Protocol):
    """Takes over a task that a method of the same settings has learned without knowing the other tasks."""

    def __call__(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Learned:
        """Return what `Method.end_task` returns of the task; it is the newest one from now on.

        Args:
            values, tensors: state of the other method at the end of its only task (`Method.state_dict`).
        """
        ...


@dataclass(frozen=True)
class LocalAdaptation:
    """Weights are trained on a text's neighbours before it is answered, and are then as they were before.

    Attributes:
        steps: number of gradient steps. rate: length of a step. momentum: momentum of steps; each text begins without
            any.
        weight: weight of the squared distance to the trained weights.
        parameters: returns names of the backbone's parameters that are adapted.
        neighbours: returns the stored examples that a batch of one text is adapted to; None: there are none.
    """

    steps: int
    rate: float
    momentum: float
    weight: float
    parameters: Callable[[], Sequence[str]]
    neighbours: Callable[[Batch], Batch | None]
