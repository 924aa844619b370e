"""The hooks of a continual-learning method.

A method never steps: it shapes the model, prepares batches, adds a penalty and remembers. Only
`raycl.training.step` calls backward and step, which is what lets every method compose with everything else.
What it does not know: engines, workers, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone, Output
from raycl.config import Section, Tree, as_tree
from raycl.methods.context import TaskRows
from raycl.retrieval.encoder import SentenceEncoder
from raycl.types import Activation, AdapterState, Batch, Mixture, Phase, RouterState, Task


class MethodConfig(Section):
    """Base of every method's settings; `name` picks the method."""

    name: str

    unused_for_single_task: ClassVar[tuple[str, ...]] = ()
    """Settings without any part in the score of a task that is trained alone."""

    label_head: ClassVar[tuple[str, ...]] = ()
    """Settings that act on label heads alone, which only encoder-only backbones have."""

    def idle_beside(self, has_label_head: bool, reason: str) -> Iterator[tuple[str, str]]:
        """Settings that act on nothing on the run's backbone, as `Section.idle` says them from the method on.

        Args:
            has_label_head: the backbone is encoder-only. reason: which backbone it is, and what it lacks.
        """
        if not has_label_head:
            yield from ((name, reason) for name in self.label_head)

    def cache_key(self, index: int, tasks: Sequence[str]) -> Tree:
        """The settings that can change anything about stage `index`: what is learned, remembered or measured in it.

        Runs whose acting settings agree up to some stage are the same run up to there, bit for bit, and sweeps train
        it once. So leave out only what provably has no part; by default nothing is left out.

        Args:
            tasks: names of the stages.
        """
        return as_tree(self)

    @property
    def needs_task(self) -> bool:
        """Whether a text is answered only if evaluation tells its task; then a task never learned cannot be asked."""
        return False

    @property
    def fits_ahead(self) -> bool:
        """Whether texts of later tasks are read before the first one is learned (`Method.fits_ahead`)."""
        return False


@dataclass
class Learned:
    """What a stage leaves behind for use outside the run: adapters, or a whole model.

    Attributes:
        adapters: name -> what it holds; they go to the bank.
        model: tensors of a Hugging Face model folder by name, for methods that change all weights.
        labels: rows of the model's label head (`head.weight`, `head.bias` among its tensors).
        extras: adapter -> kind -> tensors that are kept beside it in the bank (pseudo samples).
    """

    adapters: dict[str, AdapterState] = field(default_factory=dict)
    model: dict[str, Tensor] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    extras: dict[str, dict[str, dict[str, Tensor]]] = field(default_factory=dict)


class Method:
    """One way to learn tasks in sequence. Subclasses override the hooks they need.

    Attributes:
        stack: adapters over the backbone, if it has any.
        task_id_given: evaluation may use each example's task (`Batch.tasks`), as an upper reference does.
        replay_share: of each earlier task's train rows, learned again in every later stage.
        fits_ahead: `study` is called for all stages before the first one, not for each before its own.

    Class attributes:
        Config: its settings class.
        joint: all tasks are one stage.
        own_adapters: every stage leaves adapters of its own; otherwise later stages change those of earlier ones.
        one_model_per_task: each stage starts from the pretrained model, and a task is answered by its own model.
    """

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    joint: ClassVar[bool] = False
    own_adapters: ClassVar[bool] = False
    one_model_per_task: ClassVar[bool] = False

    def __init__(self, config: Any, backbone: Backbone, seed: int) -> None:
        self.config = config
        self.backbone = backbone
        self.seed = seed
        self.stack: AdapterStack | None = None
        self.task_id_given = False
        self.fits_ahead = False
        self.replay_share = 0.0

    @property
    def encoder(self) -> SentenceEncoder | None:
        """What reads texts for this method; None: it routes without them, and batches carry none."""
        return None

    @property
    def reads_batches(self) -> bool:
        """Whether batches carry their texts and tasks (`Batch.texts`)."""
        return self.encoder is not None

    def check(self, tasks: Sequence[Task]) -> None:
        """Before any work, with all tasks of the stream: can they be learned, and is what they need there?

        Raises:
            RayclError: the first thing that is wrong.
        """

    def show(self, rows: TaskRows) -> None:
        """Before `begin_task` of a stage, new or resumed: where its rows are, to be read when they are needed."""

    def study(self, phase: Phase, queries_BC: Tensor, dev_BC: Tensor) -> None:
        """Before `begin_task` of a new stage, with the queries of all its training and dev texts (`encoder`)."""

    def put_together(self, gather: Callable[[Any], Sequence[Any]]) -> None:
        """After an evaluation, join what each worker saw of its own share of the texts, for `summary`. Collective.

        Args:
            gather: every worker's value from this one's.
        """

    def summary(self) -> dict[str, Any]:
        """JSON-able: what people should know about the stage that has just ended; goes into the results."""
        return {}

    def begin_task(self, phase: Phase, resumed: bool) -> None:
        """Before the first batch: which parameters exist, which are live, which are frozen?

        Args:
            resumed: values were restored from a checkpoint of this very stage; set what is live, reset nothing.
        """

    def begin_step(self, step: int, seed: int, micro_batches: int) -> None:
        """Before the first micro-batch of an optimizer step.

        Args:
            step: counted from 0 in this stage. seed: of this step, the same on all workers.
            micro_batches: how many of them this worker will see.
        """

    def prepare_batch(self, batch: Batch) -> Batch:
        """Per micro-batch: is anything mixed into the data?"""
        return batch

    def route(self, batch: Batch) -> Mixture | None:
        """Per micro-batch, in training and in evaluation: which adapters speak for each example, how loudly?"""
        return None

    def activate(self, batch: Batch) -> AbstractContextManager[None]:
        """The batch's mixture, open for all that runs inside: forward, backward with its recomputation, generation."""
        return nullcontext() if self.stack is None else self.stack.activate(self.route(batch))

    def activate_trainable(self, examples: int) -> AbstractContextManager[None]:
        """Every adapter in training speaks fully, for passes that are about parameters and not about data."""
        if self.stack is None:
            return nullcontext()
        return self.stack.activate(Mixture.same(dict.fromkeys(self.stack.trainable, 1.0), examples))

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Per micro-batch, after forward: what is added to the mean task loss? Scalar, or None for nothing.

        Micro-batches count by their share of the step's loss positions, so a penalty that does not depend on
        the batch is added exactly once a step, whatever the accumulation and the number of workers.
        """
        return None

    def end_task(self, phase: Phase, tensors: Mapping[str, Tensor]) -> Learned | None:
        """After the last step: what is remembered, what is exported?

        Args:
            tensors: the learned parameters by name, whole and on the CPU (see `learned_names`).
        """
        return None

    def router_state(self) -> RouterState:
        """How the adapters that it leaves are chosen later."""
        return RouterState("task" if self.own_adapters else "single")

    def frozen_state(self) -> dict[str, Tensor]:
        """Tensors of earlier stages that are no parameters any more (frozen adapters, keys), for checkpoints."""
        return {}

    def learned_names(self) -> list[str]:
        """Names of the backbone's parameters whose values may differ from the pretrained ones."""
        return [name for name, parameter in self.backbone.named_parameters() if parameter.requires_grad]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that shapes the model (label rows, slots); tensors travel by `learned_names`."""
        return {"labels": [] if self.backbone.head is None else list(self.backbone.head.labels)}

    def load_state_dict(self, state: Mapping[str, Any], frozen_state: Mapping[str, Tensor]) -> None:
        """Give the model the shape of `state` and what was `frozen_state`; parameters are filled in afterwards."""
        if self.backbone.head is not None:
            self.backbone.head.clear()
            self.backbone.learn_labels(state["labels"])


def phase_labels(phase: Phase) -> list[str]:
    """All labels of a stage's tasks in order, without repeats."""
    return list(dict.fromkeys(label for task in phase.tasks for label in task.labels or ()))


def in_head(name: str, parameter: Tensor) -> bool:
    """Whether a parameter of the backbone is the label head's and holds anything (it does not without labels)."""
    return name.startswith("head.") and parameter.numel() > 0


def packed(states: Mapping[str, AdapterState]) -> dict[str, Tensor]:
    """Frozen adapters as tensors of a checkpoint: `slot/<adapter>/<part>`."""
    return {f"slot/{name}/{part}": value for name, state in states.items() for part, value in state.tensors().items()}


def unpacked(
    labels: Mapping[str, Sequence[str]], frozen_state: Mapping[str, Tensor], scale: float, activation: Activation = ""
) -> dict[str, AdapterState]:
    """Back from what `packed` gave.

    Args:
        labels: adapter -> labels of its head rows, in the order in which they were learned.
    """
    return {
        name: AdapterState.from_tensors(under(f"slot/{name}/", frozen_state), scale, rows, activation)
        for name, rows in labels.items()
    }


def under(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `start`, by the rest of their names."""
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
