"""The hooks of a gradient modifier, and any number of them as one.

A modifier observes layers during the forward passes of a step and then changes whole gradients, after they were summed
over workers and before they are clipped: the optimizer reads them there under every engine. It works with every method
because neither depends on the other. A modifier does not depend on engines, workers (it is given sums over them) or
files.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from raycl.config import Section, Tree, as_tree
from raycl.methods.base import Method, under
from raycl.methods.context import TaskContext
from raycl.types import Batch, Phase

Reduce = Callable[[Tensor], Tensor]
"""Sum of a tensor over all workers, in place."""

T = TypeVar("T")


class ModifierConfig(Section):
    """Base of every modifier's settings; `name` picks the modifier."""

    name: str

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        """Return the settings that can change what phase `index` learns; see `MethodConfig.cache_key`."""
        return as_tree(self)

    def extra_passes(self, epochs: int, steps: int) -> float:
        """Return the cost of passes over a task's rows in addition to the method's; see `MethodConfig.extra_passes`."""
        return 0.0


class GradientModifier:
    """One way to change gradients. Subclasses override the hooks they need.

    Class attributes:
        Config: its settings class.
        computes_gradients: it reads gradients before a task's first step (`observe_gradients`), which engines that
            shard parameters cannot give.

    Attributes:
        examples: number of training examples of a task that it observes before the task's first step.
        parameter_names: parameters whose gradients it may change in the current task, by the backbone's names, in an
            order that is the same on all workers.
        names: those whose gradients it is called with at the end of the current step. Each step looks for every name
            in them; where there are many, keys of a dictionary are fast.
    """

    Config: ClassVar[type[ModifierConfig]] = ModifierConfig
    computes_gradients: ClassVar[bool] = False
    examples: int = 0
    parameter_names: Collection[str] = ()
    names: Collection[str] = ()

    def __init__(self, config: Any, method: Method) -> None:
        """Fit it to the method's backbone, on which the method has attached what it needs.

        Raises:
            RayclError: the backbone lacks what the settings name.
        """
        self.config = config
        self.method = method

    def begin_task(self, phase: Phase, only: bool, resumed: bool) -> None:
        """Observe trainable parameters, after the method's `begin_task` and before the first batch.

        Args:
            only: the run has no other phase. resumed: the task continues; `load_state` came before.
        """

    def observe_rows(self, run_examples: Callable[[], None], reduce: Reduce) -> None:
        """Measure the rows of a new task, after its `begin_task`, if `examples` is set.

        Args:
            run_examples: runs that many examples through the model once.
        """

    def observe_gradients(self, context: TaskContext) -> None:
        """Read `context.gradients` or `row_gradients` of a new task, after its `begin_task`, if `computes_gradients` is
        set.

        Collective.
        """

    def begin_step(self, seed: int, micro_batches: int, reduce: Reduce) -> None:
        """Begin an optimizer step of so many forward passes, on every worker."""

    def observe_forward(self, forward: Callable[[Batch], T], batch: Batch) -> T:
        """Run `forward(batch)` and observe it. Collective."""
        return forward(batch)

    def __call__(self, name: str, gradient: Tensor) -> Tensor:
        """Return the changed gradient (perhaps in place) of a parameter in `names`, whole and summed over workers."""
        return gradient

    def masked(self, name: str) -> Tensor | None:
        """Return where this step's gradient of a parameter was set to zero, as a bool that broadcasts to it; None:
        nowhere.

        The next step may change it.
        """
        return None

    @property
    def holds(self) -> bool:
        """Return whether `held` gives anything for any parameter."""
        return type(self).held is not GradientModifier.held

    def held(self, name: str) -> Tensor | None:
        """Return where a parameter and its optimizer state must not change in this step, in the form of `masked`."""
        return None

    def end_task(self) -> None:
        """Stop observing after the last step."""

    def summary(self) -> dict[str, Any]:
        """Return a JSON-able summary of the phase that has just ended, for the results."""
        return {}

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state for checkpoints: JSON-able values, and tensors on the CPU."""
        return {}, {}

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave, before `begin_task`."""


class Modifiers:
    """All modifiers of a run as one; none at all costs nothing.

    Attributes:
        members: name -> modifier, in the order in which they act.
    """

    def __init__(self, members: Mapping[str, GradientModifier] | None = None) -> None:
        self.members: dict[str, GradientModifier] = dict(members or {})

    @property
    def parameter_names(self) -> list[str]:
        """Parameters whose gradients any of them may change in this task, each once."""
        return list(dict.fromkeys(name for member in self.members.values() for name in member.parameter_names))

    @property
    def names(self) -> list[str]:
        """Parameters whose gradients any of them changes at the end of this step, each once."""
        return list(dict.fromkeys(name for member in self.members.values() for name in member.names))

    def begin_task(self, phase: Phase, only: bool, resumed: bool) -> None:
        for member in self.members.values():
            member.begin_task(phase, only, resumed)

    def observe_rows(self, run_examples: Callable[[int], None], reduce: Reduce) -> None:
        """Call each modifier that has `examples` set with a function that runs them through the model. Collective."""
        for member in self.members.values():
            if member.examples:
                member.observe_rows(partial(run_examples, member.examples), reduce)

    def observe_gradients(self, context: TaskContext) -> None:
        """Forward to each modifier that has `computes_gradients` set. Collective."""
        for member in self.members.values():
            if member.computes_gradients:
                member.observe_gradients(context)

    def begin_step(self, seed: int, micro_batches: int, reduce: Reduce) -> None:
        for member in self.members.values():
            member.begin_step(seed, micro_batches, reduce)

    def observe_forward(self, forward: Callable[[Batch], T], batch: Batch) -> T:
        """Run `forward(batch)`, observed by all modifiers."""
        for member in self.members.values():
            forward = partial(member.observe_forward, forward)
        return forward(batch)

    def __call__(self, name: str, gradient: Tensor) -> Tensor:
        for member in self.members.values():
            if name in member.names:
                gradient = member(name, gradient)
        return gradient

    def masked(self, name: str) -> Tensor | None:
        """Return where any modifier has set the gradient to zero."""
        return _any([member.masked(name) for member in self.members.values()])

    @property
    def holds(self) -> bool:
        """Return whether any of them holds parameters fixed."""
        return any(member.holds for member in self.members.values())

    def held(self, name: str) -> Tensor | None:
        """Return where any modifier holds parameters fixed."""
        return _any([member.held(name) for member in self.members.values()])

    def end_task(self) -> None:
        for member in self.members.values():
            member.end_task()

    def summary(self) -> dict[str, Any]:
        """Return `{"modifiers": {name: its summary}}`; empty without modifiers."""
        return {"modifiers": {name: member.summary() for name, member in self.members.items()}} if self.members else {}

    def state(self) -> dict[str, Any]:
        """Return the JSON-able state of each by its name."""
        return {name: member.state()[0] for name, member in self.members.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return `modifier/<name>/<tensor>` of each."""
        return {
            f"modifier/{name}/{key}": tensor
            for name, member in self.members.items()
            for key, tensor in member.state()[1].items()
        }

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore each modifier from `state` and `tensors`."""
        for name, member in self.members.items():
            member.load_state(state.get(name, {}), under(f"modifier/{name}/", tensors))


def _any(masks: list[Tensor | None]) -> Tensor | None:
    """Return their union; None if there is none."""
    union: Tensor | None = None
    for mask in masks:
        if mask is not None:
            union = mask if union is None else union | mask
    return union
