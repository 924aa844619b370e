"""The contract of a continual-learning method: ten hooks.

A method never steps: it shapes the model, prepares batches, routes, adds a penalty and keeps what it learned. Only
`raycl.training.phase.step` calls backward and step, so every method composes with every engine and gradient modifier. A
method does not depend on engines, workers or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone, Output
from raycl.bank.tensor_groups import TensorGroups
from raycl.bank.tensors import StoredAdapter, StoredTensors
from raycl.config import Section, Tree, as_tree
from raycl.errors import ConfigError
from raycl.methods.capabilities import (
    Constraint,
    LocalAdaptation,
    Objective,
    RouterModule,
    SampleGenerator,
    TaskJoin,
    TaskRemoval,
)
from raycl.methods.context import TaskContext
from raycl.routing.sentence_encoder import EncoderConfig, SentenceEncoder
from raycl.routing.statistics import BareTexts
from raycl.types import Activation, AdapterState, Batch, Mixture, Phase, RouterState, RouterText, Task

TEXTS = "texts"
"""Kind of tensors of statistics of texts (`Method.bare`)."""

State = tuple[dict[str, Any], TensorGroups]
"""JSON-able values, and tensors on the CPU."""


RouterTextSetting = Annotated[
    RouterText,
    Field(
        description="text that the router is fitted on, and reads where a text comes with its task's prompt "
        "(eval.instruction=given, requests that name task or instruction). input: the text alone; prompt: the text in "
        "that prompt, instruction included. A text that comes alone (eval.instruction=chosen, requests without "
        "instruction) is read alone; a router that is fitted on prompts then reads it once more, in the prompt of the "
        "task that it has found"
    ),
]


class MethodConfig(Section):
    """Base of every method's settings; `name` picks the method."""

    name: str

    unused_for_single_task: ClassVar[tuple[str, ...]] = ()
    """Settings without effect on a task that is trained alone."""

    label_head: ClassVar[tuple[str, ...]] = ()
    """Settings that act on label heads alone, which only encoder-only backbones have."""

    by_task: ClassVar[tuple[str, ...]] = ()
    """Settings that map names of tasks to values, by dotted path."""

    unused_in_first_phase: ClassVar[tuple[str, ...]] = ()
    """Settings without effect before there are earlier tasks."""

    kept_share: ClassVar[str] = ""
    """Setting, by dotted path, that says which share of a task's rows is kept for later tasks; "": there is none."""

    task_id_in_training: ClassVar[bool] = True
    """True if training must know which task a text belongs to, or where a task ends (MIGU's table 1, not TIFT)."""

    own_statistics: ClassVar[bool] = False
    """True if the router's own state holds the statistics of texts that `knows_texts` promises."""

    fine_tunes: ClassVar[bool] = True
    """True if it learns tasks with answers (MIGU's table 1, CIT)."""

    pre_trains: ClassVar[bool] = True
    """True if it learns texts themselves (MIGU's table 1, CPT)."""

    def unused_with(self, has_label_head: bool, reason: str) -> Iterator[tuple[str, str]]:
        """Yield settings without effect on the run's backbone, as in `Section.unused_settings`: dotted path and reason.

        Args:
            has_label_head: the backbone is encoder-only. reason: which backbone it is, and what it lacks.
        """
        if not has_label_head:
            yield from ((name, reason) for name in self.label_head)

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        """Return the settings that can change anything about phase `index`: what is learned, kept or measured in it.

        Runs whose keys agree up to some phase are the same run up to there, bit for bit, and sweeps train that part
        once. Leave out only what provably has no effect; by default nothing is left out.

        Args:
            tasks: names of the phases. learns_texts: texts themselves are learned, not their answers.
        """
        settings = as_tree(self)
        for name in self.unused_in_first_phase if index == 0 else ():
            del settings[name]
        for path in () if self.fits_ahead else self.by_task:
            holder, key = at(settings, path)
            holder[key] = {task: value for task, value in holder[key].items() if task == tasks[index]}
        return settings

    @property
    def least_epochs(self) -> int:
        """The epochs of a task below which the method is another one without further settings."""
        return 1

    def settings_by_task(self) -> dict[str, dict[str, Any]]:
        """Return the dotted path -> name of a task -> its value."""
        return {path: attrgetter(path)(self) for path in self.by_task}

    def values_kept(self, tasks: int) -> int:
        """Return the float32 values that a device holds for each trained parameter at most, in addition to training's.

        Args:
            tasks: tasks of the run.
        """
        return 0

    def extra_passes(self, epochs: int, steps: int) -> float:
        """Return the cost of passes over a task's rows besides those of its steps, as a share of these, for plans.

        A pass without gradients costs half of one with them. Evaluation is in no plan.

        Args:
            epochs: epochs of a task. steps: its optimizer steps; 1 where they are not known.
        """
        return 0.0

    @property
    def fixed_roles(self) -> tuple[str, ...]:
        """The roles by which it chooses linears whatever its settings."""
        return ()

    def prompt_positions(self, tasks: int) -> int:
        """Return the positions that soft prompts take in addition to each text at most.

        Args:
            tasks: tasks of the run.
        """
        return 0

    @property
    def sample_share(self) -> tuple[str, float] | None:
        """`kept_share` and its value."""
        return (self.kept_share, attrgetter(self.kept_share)(self)) if self.kept_share else None

    @property
    def innermost(self) -> MethodConfig:
        """The settings of the method that learns: these, or those of the learner that it is around."""
        return self

    @property
    def learning_rates(self) -> dict[str, float]:
        """Parameters with a learning rate of their own: a name in the backbone, or what it begins with -> the rate."""
        return {}

    @property
    def sentence_encoder(self) -> EncoderConfig | None:
        """The sentence encoder (`encoder`) whose embeddings route texts; None: no embeddings route them."""
        return None

    @property
    def routed_text(self) -> RouterText | None:
        """The text that the router is fitted on and reads; None: there is no router that reads texts."""
        return None

    @property
    def needs_texts(self) -> bool:
        """Return whether batches carry their input texts and tasks (`Batch.texts`)."""
        return False

    @property
    def generates_samples(self) -> bool:
        """Return whether pseudo-samples are generated, for which each worker runs as many passes as its texts need."""
        return False

    @property
    def sample_generator(self) -> SampleGenerator | None:
        """The settings of the generator that learns to write tasks' inputs; None: there is none."""
        return None

    @property
    def publishes_samples(self) -> bool:
        """Return whether pseudo-samples go to the bank with the adapters."""
        return False

    @property
    def needs_task(self) -> bool:
        """Return whether evaluation must give the task id of a text; then unseen tasks cannot be evaluated."""
        return False

    @property
    def chooses_task(self) -> bool:
        """Return whether the published router chooses a task's adapters, and its prompt, by a text alone."""
        return False

    @property
    def knows_texts(self) -> bool:
        """Return whether statistics of the tasks' texts are published with the router, which chooses by the text: texts
        of no task are found by them."""
        return self.routed_text is not None and not self.needs_task

    @property
    def needs_dropout(self) -> bool:
        """Return whether passes of the backbone must differ by dropout."""
        return False

    @property
    def reads_weights(self) -> bool:
        """Return whether the backbone's weights are read beside its passes, as engines that shard them do not allow."""
        return False

    @property
    def independent_tasks(self) -> bool:
        """Return whether no task depends on the tasks before it, so that two snapshots can be merged, and several
        tasks be learned at the same time (`Method.join_task`)."""
        return False

    @property
    def rereads_rows(self) -> bool:
        """Return whether rows of earlier tasks are read again, so that their data must be there."""
        return False

    @property
    def keeps_data(self) -> bool:
        """Return whether rows, samples or features of earlier tasks are kept for training (SLM's table 1, DR)."""
        return self.rereads_rows

    @property
    def selects_router(self) -> bool:
        """Return whether the kind of router is selected by dev texts of all tasks."""
        return False

    @property
    def fits_ahead(self) -> bool:
        """Return whether texts of all phases are read before the first one is trained."""
        return False


class RoutedConfig(MethodConfig):
    """Settings of a method whose router reads texts."""

    router_text: RouterTextSetting = "prompt"

    @property
    def routed_text(self) -> RouterText:
        return self.router_text


@dataclass
class Learned:
    """The result of a phase for use outside the run: adapters with their router, or a whole model.

    Attributes:
        adapters: name -> what it holds; they go to the bank.
        model: tensors of a Hugging Face model folder by name, for methods that change all weights; workers may share
            each of them out (`raycl.training.workers.distributed.whole`).
        labels: rows of the model's label head (`head.weight`, `head.bias` among its tensors).
        extras: adapter -> kind -> tensors that are kept with it in the bank (pseudo-samples).
        owners: adapter -> names of its tasks, in the order of learning and of earlier phases too, for methods with
            adapters of their own for each task; {}: all adapters know all tasks so far.
        router: chooses adapters for a text, in the phase's evaluation and in serving.
        not_served: one sentence that says why it cannot be served; "" where it can.
    """

    adapters: dict[str, AdapterState] = field(default_factory=dict)
    model: dict[str, Tensor] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    extras: dict[str, dict[str, dict[str, Tensor]]] = field(default_factory=dict)
    owners: dict[str, list[str]] = field(default_factory=dict)
    router: RouterState = field(default_factory=lambda: RouterState("single"))
    not_served: str = ""


class Method:
    """A method that learns tasks one after another. Subclasses override the hooks that they need.

    Attributes:
        stack: adapters over the backbone, if there are any.
        learner: the method that learns: itself, or the one that it is around.
        encoder: the sentence encoder whose embeddings route texts, or None.
        router_module: the trained module that routes, or None.
        constraint: property that updates of trained parameters must keep, or None.
        objective: loss in place of the cross-entropy; None: the cross-entropy.
        task_id_given: evaluation gives the task id of each text (schedule `separate`).
        is_wrapped: a method around it may train it on rows of earlier tasks in addition to those of a task.
        bare: statistics of the phases' texts without their prompts, where the published router reads prompts.
        local_adaptation: evaluation adapts weights to each text before it is answered; None: it does not.
        allocation: creates the parameters that `begin_task` trains without the phase's data, to estimate their size;
            None: `begin_task` needs none.
        join_task: takes over a task that another worker group has learned by itself; None: tasks are learned one after
            another.
        tasks_elsewhere: number of earlier tasks that other worker groups learn, and of which this one knows nothing.
        transforms_gradients: it has a `transform_gradients` of its own.
        mixes_gradients: its result for one value depends on other values, so it needs complete gradients.
        adds_penalty: it has a `penalty` of its own.

    Class attributes:
        Config: its settings class.
        own_adapters: every phase leaves adapters of its own; otherwise later phases change those of earlier ones.
        without_task: takes a task out of a state; None: the method does not keep tasks apart.
        revisable: a task can be learned again: nothing of it stays in the state where it would be in its own way.
        holds_weights: weights stay where they are because their gradients are set to zero.
        computes_gradients: it calls `TaskContext.gradients` or `row_gradients`, which engines that shard parameters
            cannot give.
        scales_gradients: `transform_gradients` multiplies each value by a factor that depends on no gradient, so that
            what is masked afterwards need not be computed.
        shared_parameters: names of trained parameters that belong to no single task, where adapters do.
        replaces_parameters: it computes with other values of trained parameters, which these engines cannot either.
        trains_backbone: it trains the backbone's own weights, so they cannot be quantized.
        not_served: one sentence that says why what it learns cannot be served; "" where it can.
        compiles: steps compute the same in each layer, whatever the batch, so that torch.compile need not start anew.
    """

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    own_adapters: ClassVar[bool] = False
    without_task: ClassVar[TaskRemoval | None] = None
    revisable: ClassVar[bool] = False
    holds_weights: ClassVar[bool] = False
    computes_gradients: ClassVar[bool] = False
    scales_gradients: ClassVar[bool] = False
    replaces_parameters: ClassVar[bool] = False
    shared_parameters: ClassVar[tuple[str, ...]] = ()
    trains_backbone: bool = False
    not_served: ClassVar[str] = ""
    compiles: ClassVar[bool] = False

    def __init__(self, config: Any, backbone: Backbone, seed: int) -> None:
        self.config = config
        self.backbone = backbone
        self.seed = seed
        self.stack: AdapterStack | None = None
        self.encoder: SentenceEncoder | None = None
        self.router_module: RouterModule | None = None
        self.constraint: Constraint | None = None
        self.objective: Objective | None = None
        self.learner: Method = self
        self.task_id_given = False
        self.is_wrapped = False
        self.local_adaptation: LocalAdaptation | None = None
        self.bare = BareTexts()
        self.allocation: Callable[[Phase], None] | None = None
        self.join_task: TaskJoin | None = None
        self.tasks_elsewhere = 0
        self.transforms_gradients: bool = type(self).transform_gradients is not Method.transform_gradients
        self.mixes_gradients: bool = self.transforms_gradients and not self.scales_gradients
        self.adds_penalty: bool = type(self).penalty is not Method.penalty

    def check(self, tasks: Sequence[Task]) -> None:
        """Check before any work that all tasks of the stream can be learned, and that their inputs exist.

        Raises:
            RayclError: the first thing that is wrong.
        """

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Create parameters before the first batch, and set `requires_grad` of all.

        With `context.resumed` parameters have their values already; only `requires_grad` is set then.
        """

    def prepare_batch(self, batch: Batch) -> Batch:
        """Mix rows into a micro-batch of training."""
        return batch

    def route(self, batch: Batch) -> Mixture | None:
        """Return each example's adapters and weights, for every micro-batch of training, without side effects; None: no
        adapters.

        Evaluation and serving ask the router that `end_task` returns.
        """
        return None

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return a scalar that is added to the mean task loss of a micro-batch after forward; None for nothing.

        Micro-batches count by their share of the step's loss positions (of what `Method.objective` counts, where a
        method has one). So a penalty that does not depend on the batch is added exactly once a step, whatever the
        accumulation and the number of workers.
        """
        return None

    def transform_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Change complete gradients by name, summed over all workers, once a step before the optimizer."""
        return gradients

    def end_task(self, context: TaskContext) -> Learned | None:
        """Freeze and keep what was learned after the last step (`context.parameters`); returns what to publish."""
        return None

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the JSON-able summary in the results of the phase that has just ended.

        Args:
            observed: task -> mean weights of its evaluated texts before pruning (`Mixture.unpruned`).
        """
        return {}

    def state_dict(self) -> State:
        """Return state beside learned parameters (`trained_names`): values that shape the model, and frozen tensors."""
        texts = {f"{TEXTS}/{name}": tensor for name, tensor in self.bare.tensors().items()}
        return {"labels": [] if self.backbone.head is None else list(self.backbone.head.labels)}, TensorGroups.of(texts)

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Give model and method the shape and tensors of `state_dict`; parameters are filled in afterwards."""
        self.bare = BareTexts.of(under(f"{TEXTS}/", tensors))
        if self.backbone.head is not None:
            self.backbone.head.clear()
            self.backbone.learn_labels(values["labels"])


def at(tree: Tree, path: str) -> tuple[Tree, str]:
    """Return the section of a tree that holds a setting, and its key there."""
    *sections, key = path.split(".")
    for section in sections:
        tree = tree[section]
    return tree, key


def activate(method: Method, mixture: Mixture | None) -> AbstractContextManager[None]:
    """Return a routed mixture for all that runs inside: forward, backward with its recomputation, generation."""
    return nullcontext() if method.stack is None else method.stack.activate(mixture)


def activate_batch(method: Method, batch: Batch) -> AbstractContextManager[None]:
    """Return the mixture of a batch, as `Method.route` gives it, for the rows that the backbone makes of it."""
    if method.stack is None:
        return nullcontext()
    return method.stack.activate(method.route(batch), examples=method.backbone.examples_in_rows(batch))


def activate_trainable(method: Method, examples: int) -> AbstractContextManager[None]:
    """Return every trainable adapter with weight 1, for passes in which parameters matter and data does not."""
    stack, module = method.stack, method.router_module
    if stack is None:
        return nullcontext()
    mixture = Mixture.same(dict.fromkeys(stack.trainable, 1.0), examples)
    mixture = replace(mixture, heads=tuple(stack.trainable)[:1] * examples)
    if module is not None and any(p.requires_grad for p in module.parameters()):
        mixture = replace(mixture, weights=mixture.weights.to(method.backbone.device) + module.zero(examples))
    return stack.activate(mixture)


def trained_names(backbone: Backbone) -> list[str]:
    """Return names of the parameters that are trained; between phases, of those that later phases train on."""
    return [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]


def phase_labels(phase: Phase) -> list[str]:
    """Return all labels of a phase's tasks in order, without repeats."""
    return list(dict.fromkeys(label for task in phase.tasks for label in task.labels or ()))


def check_prompts(method: str, tasks: Sequence[Task]) -> None:
    """Check that each task has prompts, for methods that route by them.

    Raises:
        ConfigError: a task whose next words are learned has none.
    """
    for task in tasks:
        if task.objective == "clm":
            raise ConfigError(
                f"method '{method}' reads prompts, which stream.objective=clm of task '{task.name}' does not have: "
                "expected objective answer or mlm, or another method, such as lora"
            )


def in_head(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is of the label head and holds anything, which it does not without labels."""
    return name.startswith("head.") and parameter.numel() > 0


def packed(states: Mapping[str, AdapterState], kind: str = "slot") -> TensorGroups:
    """Return frozen adapters as tensors of a checkpoint: `<kind>/<adapter>/<part>`."""
    return TensorGroups({f"{kind}/{name}/": state.tensors() for name, state in states.items()})


def unpacked(
    labels: Mapping[str, Sequence[str]],
    tensors: Mapping[str, Tensor],
    scales: Mapping[str, float],
    activation: Activation = "",
    kind: str = "slot",
) -> dict[str, AdapterState]:
    """Invert `packed`; tensors of a checkpoint are created when they are used.

    Args:
        labels: adapter -> labels of its head rows, in the order in which they were learned.
        scales: adapter -> scale of its updates.
    """
    states: dict[str, AdapterState] = {}
    for name, rows in labels.items():
        held = under(f"{kind}/{name}/", tensors)
        if isinstance(held, StoredTensors):
            states[name] = StoredAdapter(held, scales[name], rows, activation)
        else:
            states[name] = AdapterState.from_tensors(held, scales[name], rows, activation)
    return states


def under(start: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors whose names begin with `start`, by the rest of their names."""
    if isinstance(tensors, TensorGroups):
        return tensors.under(start)
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
