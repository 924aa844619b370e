"""Base class of methods with adapters of their own for every task: created, trained, frozen, published, restored."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import cosine_similarity

from raycl.adapters import AdapterStack
from raycl.adapters.experts import expert_names
from raycl.adapters.head import MixedHead
from raycl.adapters.head import Rule as HeadRule
from raycl.adapters.soft_prompts import PLAIN, Form, MixedPrompts, PromptForm, PromptUse, used_alike
from raycl.adapters.soft_prompts import How as PromptMixing
from raycl.backbone import Backbone
from raycl.backbone.base import seed_all
from raycl.backbone.roles import linear_names, query_of
from raycl.bank.tensor_groups import TensorGroups
from raycl.errors import RunError
from raycl.methods.base import (
    TEXTS,
    Learned,
    Method,
    MethodConfig,
    RoutedConfig,
    State,
    packed,
    phase_labels,
    under,
    unpacked,
)
from raycl.methods.context import LEAST_TRIAL, TaskContext
from raycl.methods.lora_settings import InputDropout, TargetModules
from raycl.methods.trained_adapters import end_training, is_trainable
from raycl.routing.statistics import KINDS_OF_OUTLINES, BareTexts
from raycl.types import Activation, AdapterState, Batch, Mixture, Phase, RouterState

PREVIOUS = "previous"
"""Kind of tensors of adapters that a task which is learned again begins with."""

PromptFormSetting = Annotated[
    Form,
    Field(
        description="value=prompt: what is trained. plain: the prompt P; mlp: also a residual MLP, P' = MLP(P) + P; "
        "gate: also a factor that starts at zero, P' = gate P (SLM, appendix A.5, eq. 10 and 11); the bank keeps P'"
    ),
]


StartThreshold = Annotated[
    float,
    Field(
        ge=-1,
        le=1,
        description="start_from=nearest: smallest cosine of two tasks' mean texts, by the router's statistics, at "
        "which one may begin with the other's values; 1: never",
    ),
]


class StartSettings(RoutedConfig):
    """Settings of the values that a task's adapters begin with."""

    start_from: Literal["new", "nearest"] = Field(
        "new",
        description="values that a task's adapters begin with. new: drawn ones; nearest: those of the known task whose "
        "texts are most similar, label rows of equal name included, so that what is known is not learned again. Those "
        "of the known task stay as they are",
    )
    start_threshold: StartThreshold = 0.85
    start_trial_steps: int = Field(
        10,
        ge=0,
        description="start_from=nearest: optimizer steps, half an epoch at most, for which such a task is first "
        "trained twice on the same rows, from drawn values and from the known task's. It begins with the known task's "
        "if their loss on the rows of as many following steps is lower by more than its standard error. 0, or an epoch "
        "of fewer than four steps: it begins with the known task's, without a trial",
    )

    unused_in_first_phase: ClassVar[tuple[str, ...]] = ("start_from", "start_threshold", "start_trial_steps")

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield the settings of starts where every task begins anew."""
        yield from super().unused_settings()
        if self.start_from == "new":
            yield from ((name, "start_from=new") for name in ("start_threshold", "start_trial_steps"))

    def extra_passes(self, epochs: int, steps: int) -> float:
        """Add two trials, each scored on the rows of as many steps, as if every task had them."""
        tried = min(self.start_trial_steps, steps // epochs // 2) if self.start_from == "nearest" else 0
        return super().extra_passes(epochs, steps) + (3 * tried / steps if tried >= LEAST_TRIAL else 0.0)

    @model_validator(mode="after")
    def _sizes_are_alike(self) -> Self:
        sizes = [path for path in self.by_task if path != "keys.slots_by_task" and self.settings_by_task()[path]]
        if self.start_from == "nearest" and sizes:
            raise ValueError(
                f"start_from=nearest copies values between adapters, which {sizes[0]} makes differ in size: expected "
                "one size, or start_from=new"
            )
        return self


@dataclass(frozen=True)
class AdapterForm:
    """The form of a method's adapters.

    Attributes:
        targets: roles or regular expressions of linear paths; empty for none.
        scale: scale of every update (see `AdapterState`), unless a task has its own.
        head_rule: rule of mixing label heads (`raycl.adapters.head`).
        activation: between A and B of each adapter.
        prompts: adapters are soft prompts, mixed in this way; None: they are not.
        parameters: ends of paths of parameters that experts share (`raycl.adapters.experts`).
    """

    targets: Sequence[str]
    scale: float
    head_rule: HeadRule
    activation: Activation = ""
    prompts: PromptMixing | None = None
    parameters: Sequence[str] = ()


def is_lower(losses_M: Tensor, others_M: Tensor) -> bool:
    """Return whether paired losses are lower in the mean, by more than the standard error of the differences."""
    are_finite, others_are = (math.isfinite(float(losses.sum())) for losses in (losses_M, others_M))
    if not (are_finite and others_are):
        return are_finite
    differences_M = others_M - losses_M
    return float(differences_M.mean()) > float(differences_M.std()) / math.sqrt(len(differences_M))


def _mean(losses_M: Tensor) -> float | None:
    """Return the mean of losses that JSON can hold; None: it is not finite."""
    mean = float(losses_M.mean())
    return mean if math.isfinite(mean) else None


class PerTaskAdapter(Method, ABC):
    """One adapter or several for every task; those of earlier tasks never change.

    Subclasses create a task's adapters (`_create`), route, and name the router that chooses adapters later (`_router`).

    Attributes:
        owners: adapter -> names of its tasks.
        starts: task -> the task whose adapters its own began with; others began anew.
        nearest: task -> the known task with the most similar texts when it was learned, and the cosine.
        start_losses: task -> mean loss after a trial from drawn values, and after one from those of the nearest task;
            None: it has diverged.

    Class attributes:
        starts_anew: where the task id is given, each task starts as the first one: with its seed, without other labels.
    """

    own_adapters: ClassVar[bool] = True
    starts_anew: ClassVar[bool] = False
    revisable: ClassVar[bool] = True

    def __init__(self, config: MethodConfig, backbone: Backbone, seed: int, form: AdapterForm) -> None:
        """Attach the stack, and where there are any, prompts and label heads.

        Raises:
            BackboneError: `form.targets` matches no linear, or `form.parameters` no experts.
        """
        super().__init__(config, backbone, seed)
        self.allocation = self.allocate
        paths = linear_names(backbone.model, tuple(form.targets)) if form.targets else []
        paths += expert_names(backbone.model, form.parameters)
        self.stack: AdapterStack = AdapterStack(backbone.model, paths, activation=form.activation, query_of=query_of)
        self.scale: float = form.scale
        self.owners: dict[str, list[str]] = {}
        self._learned: dict[str, AdapterState] = {}
        self._previous: dict[str, AdapterState] = {}
        self.starts: dict[str, str] = {}
        self.nearest: dict[str, tuple[str, float]] = {}
        self.start_losses: dict[str, tuple[float | None, float | None]] = {}
        self._task = ""
        self._form = form
        if form.prompts is not None:
            width = int(backbone.model.get_input_embeddings().weight.shape[1])
            backbone.prefix = MixedPrompts(self.stack, width, self._prompt_use)
        if backbone.head is not None:
            backbone.head = MixedHead(self.stack, int(backbone.model.config.hidden_size), form.head_rule)

    # ---- for subclasses --------------------------------------------------------------------------------------

    @abstractmethod
    def _create(self, task: str) -> None:
        """Create the task's trainable adapters (`AdapterStack.begin_training`, prompts, keys)."""

    def _prompt_use(self, adapter: str) -> PromptUse:
        """Return how the soft prompt of an adapter is mixed with others."""
        return used_alike(self._form.prompts or "sum", adapter)

    def _number(self) -> int:
        """Return the number of tasks so far, by which seeds differ."""
        return 0 if self.starts_anew and self.task_id_given else self.tasks_elsewhere + len(self._learned)

    def _head_labels(self, labels: list[str]) -> list[str]:
        """Return the labels whose head rows are trained with the task."""
        return labels

    def _shared_head(self, labels: Sequence[str]) -> AdapterState | None:
        """Return an adapter whose label head is used and stays as it is; None: a new one is trained."""
        return None

    def _is_trained(self, name: str, parameter: Tensor) -> bool:
        """Return whether a parameter of the backbone is trained with the task."""
        return is_trainable(name, parameter)

    def _router(self) -> RouterState:
        """Return how adapters are chosen for a text."""
        return RouterState("task")

    def _find_start(self, task: str, mean_C: Tensor, means: Mapping[str, Tensor], threshold: float) -> None:
        """Choose the known task whose texts are most similar, if they are enough so, for `_start`.

        Args:
            mean_C: mean of the task's texts. means: known task -> mean of its texts.
        """
        if self.task_id_given or self._previous or not means:
            return
        cosines = {name: float(cosine_similarity(mean_C, mean, dim=0)) for name, mean in means.items()}
        name = max(cosines, key=cosines.__getitem__)
        self.nearest[task] = name, cosines[name]
        if cosines[name] >= threshold:
            self.starts[task] = name

    def _start(self, context: TaskContext, steps: int) -> None:
        """Let the task's adapters begin with those of the chosen task, if a trial of so many steps says so. Collective.

        Call it last in `begin_task`: trials train as the phase does.
        """
        task = context.phase.name
        if context.resumed or task not in self.starts:
            return
        known = {own: self._learned[name] for own, name in self._pairs(task, self.starts[task]).items()}
        drawn_losses = context.trial_losses(steps) if steps else None
        drawn = {name: p.detach().clone() for name, p in self.backbone.named_parameters() if p.requires_grad}
        self._begin_as(known)
        near_losses = None if drawn_losses is None else context.trial_losses(steps)
        if drawn_losses is None or near_losses is None:
            return
        self.start_losses[task] = _mean(drawn_losses), _mean(near_losses)
        if not is_lower(near_losses, drawn_losses):
            del self.starts[task]
            own = dict(self.backbone.named_parameters())
            with torch.no_grad():
                for name, value in drawn.items():
                    own[name].copy_(value)

    def _joined(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Learned:
        """Take over the adapters of a task that was learned without the others, after what routes to them.

        Subclasses whose tasks are independent extend it, and set `join_task` to it.
        """
        self.backbone.learn_labels(values["labels"])
        self.bare.join(BareTexts.of(under(f"{TEXTS}/", tensors)))
        scales = {name: values.get("scales", {}).get(name, self.scale) for name, _ in values["learned"]}
        states = unpacked(dict(values["learned"]), tensors, scales, self.stack.activation)
        self._load(states, later=True)
        self.owners |= {name: list(tasks) for name, tasks in values["owners"]}
        return Learned(dict(states), owners=dict(self.owners), router=self._router())

    def _pairs(self, task: str, known: str) -> dict[str, str]:
        """Return adapter of a new task -> adapter of a known one with whose values it begins."""
        return {task: known}

    # ---- hooks -----------------------------------------------------------------------------------------------

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Train the task's adapters and label rows, and freeze everything else."""
        if not context.resumed:
            self._begin(phase.name, self._head_labels(phase_labels(phase)))
        self._train_own()

    def allocate(self, phase: Phase) -> None:
        """Create the parameters of `begin_task` without the phase's data, to estimate their size."""
        self._begin(phase.name, self._head_labels(phase_labels(phase)))
        self._train_own()

    def _train_own(self) -> None:
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(self._is_trained(name, parameter))

    def _begin(self, task: str, labels: list[str]) -> None:
        if self.starts_anew and self.task_id_given and isinstance(self.backbone.head, MixedHead):
            self.backbone.head.clear()
        seed_all(self.seed + self._number(), self.backbone.device)
        self._create(task)
        self._task = task
        if isinstance(self.backbone.head, MixedHead):
            self.backbone.head.begin_training(labels, self._shared_head(labels))
        self._begin_as(self._previous)
        self._previous = {}

    def _begin_as(self, states: Mapping[str, AdapterState]) -> None:
        """Copy the values of adapters into those in training."""
        self._check_sizes(states)
        for part in (self.stack, self.backbone.head, self.backbone.prefix):
            if isinstance(part, (AdapterStack, MixedHead, MixedPrompts)):
                part.fill(states)

    def _check_sizes(self, states: Mapping[str, AdapterState]) -> None:
        """Check that adapters have the sizes of those whose values they take.

        Raises:
            RunError: those of a task that is learned again have other sizes.
        """
        prompts = getattr(self.backbone.prefix, "trainable", None)
        for name, rank in self.stack.trainable.items():
            if (state := states.get(name)) is None:
                continue
            sizes = (state.rank, 0 if state.prompt is None else len(state.prompt))
            wanted = (rank if self.stack.layers else 0, 0 if prompts is None else prompts.shape[1])
            if sizes != wanted:
                raise RunError(
                    f"adapter '{name}' has rank {sizes[0]} and a prompt of {sizes[1]} positions, and the settings give "
                    f"it rank {wanted[0]} and {wanted[1]} positions: keep its sizes, or use bank.revise_from=new"
                )

    def _begin_prompts(self, adapters: int, length: int, form: PromptForm = PLAIN) -> None:
        """Initialize prompts of the task's adapters by embeddings of drawn tokens (SLM, eq. 12; SAPT, appendix C)."""
        words = self.backbone.model.get_input_embeddings().weight.detach()
        rows = torch.randint(len(words), (adapters, length)).to(words.device)
        assert isinstance(self.backbone.prefix, MixedPrompts), "the adapters are no prompts"
        self.backbone.prefix.begin_training(words[rows].float(), form)

    def route(self, batch: Batch) -> Mixture:
        """Return the task's adapter alone."""
        return Mixture.same({self._task: 1.0}, len(batch))

    def end_task(self, context: TaskContext) -> Learned:
        """Freeze the task's adapters, and publish them with their label rows."""
        return self._published(context, self._freeze(context))

    def _published(self, context: TaskContext, states: Mapping[str, AdapterState]) -> Learned:
        """Return adapters of the phase, and earlier ones that it has changed."""
        trained = (*(context.earlier_tasks if self.is_wrapped else ()), *context.phase.tasks)
        for name in states:
            self.owners.setdefault(name, [task.name for task in trained])
        return Learned(dict(states), owners=dict(self.owners), router=self._router())

    def _freeze(self, context: TaskContext) -> dict[str, AdapterState]:
        states = end_training(self.backbone, self.stack, context.parameters)
        self._task = ""
        self._load(states)
        return states

    def _load(self, states: Mapping[str, AdapterState], later: bool = False) -> None:
        self._learned |= states
        for name, state in states.items():
            self.stack.load(name, state, later=later)

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what adapters began with, where any began with another's values or was compared."""
        nearest: dict[str, dict[str, Any]] = {
            task: {"task": name, "cosine": round(cosine, 4)} for task, (name, cosine) in self.nearest.items()
        }
        for task, (drawn, near) in self.start_losses.items():
            losses = {"drawn_loss": drawn, "near_loss": near}
            nearest[task] |= {kind: loss if loss is None else round(loss, 4) for kind, loss in losses.items()}
        held: dict[str, dict[str, Any]] = {"starts": dict(self.starts), "nearest": nearest}
        return {kind: begun for kind, begun in held.items() if begun}

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        head = self.backbone.head
        rows = list(head.trainable_labels) if isinstance(head, MixedHead) else []
        learned = [[name, list(state.labels)] for name, state in self._learned.items()]  # pairs: their order counts
        values |= {"task": self._task, "trainable_labels": rows, "learned": learned}
        values["owners"] = list(self.owners.items())
        values["previous"] = [[name, list(state.labels)] for name, state in self._previous.items()]
        scales = {name: state.scale for name, state in (self._learned | self._previous).items()}
        values |= {"starts": self.starts, "nearest": {task: list(pair) for task, pair in self.nearest.items()}}
        values["start_losses"] = {task: list(pair) for task, pair in self.start_losses.items()}
        values["scales"] = {name: scale for name, scale in scales.items() if scale != self.scale}
        return values, tensors | packed(self._learned) | packed(self._previous, PREVIOUS)

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(values, tensors)
        for name in self._learned:
            self.stack.drop(name)
        self._learned, self.owners = {}, {name: list(tasks) for name, tasks in values["owners"]}
        self.starts = dict(values.get("starts", {}))
        self.nearest = {task: (name, cosine) for task, (name, cosine) in values.get("nearest", {}).items()}
        tried = values.get("start_losses", {})
        self.start_losses = {task: (drawn, near) for task, (drawn, near) in tried.items()}
        pairs = (*values["learned"], *values.get("previous", ()))
        scales = {name: values.get("scales", {}).get(name, self.scale) for name, _ in pairs}
        learned = unpacked(dict(values["learned"]), tensors, scales, self.stack.activation)
        self._load(learned, later=True)  # a checkpoint may hold thousands, of which few are used
        previous = dict(values.get("previous", ()))
        self._previous = unpacked(previous, tensors, scales, self.stack.activation, PREVIOUS)
        if values["task"]:
            self._begin(values["task"], values["trainable_labels"])

    # ---- a task is learned again, or forgotten ---------------------------------------------------------------

    @classmethod
    def without_task(
        cls, values: Mapping[str, Any], tensors: Mapping[str, Tensor], task: str, adapters: Collection[str], keep: bool
    ) -> State:
        """See `raycl.methods.capabilities.TaskRemoval`."""
        own = tuple(f"{kind}/{name}/" for kind in ("slot", PREVIOUS) for name in adapters)
        texts = {f"{TEXTS}/{kind}/{task}" for kind in KINDS_OF_OUTLINES}
        left = TensorGroups.of(tensors).select(lambda name: not name.startswith(own) and name not in texts)
        learned = [pair for pair in values["learned"] if pair[0] not in adapters]
        previous = [pair for pair in values["learned"] if pair[0] in adapters] if keep else []
        for name, _ in previous:
            left |= TensorGroups({f"{PREVIOUS}/{name}/": under(f"slot/{name}/", tensors)})
        known = {label for _, labels in learned for label in labels}
        labels = [label for label in values["labels"] if label in known]
        owners = [pair for pair in values["owners"] if pair[0] not in adapters]
        values = {**values, "learned": learned, "owners": owners, "previous": previous, "labels": labels}
        begun = {kind: values.get(kind, {}) for kind in ("starts", "nearest", "start_losses")}
        values |= {kind: {name: of for name, of in held.items() if name != task} for kind, held in begun.items()}
        return cls._without(values, left, task, adapters)

    @classmethod
    def _without(cls, values: dict[str, Any], left: TensorGroups, task: str, adapters: Collection[str]) -> State:
        """Remove from a state without the task's adapters what the method keeps of it beside them."""
        return values, left


class ByTaskConfig(MethodConfig):
    """Settings of a method that needs the task id."""

    needs_task: ClassVar[bool] = True
    needs_texts: ClassVar[bool] = True


class BottleneckSettings(ByTaskConfig):
    """Settings of a task's bottleneck adapters."""

    bottleneck_size: int = Field(48, ge=1, description="units of each bottleneck")
    dropout: InputDropout = 0.0
    target_modules: TargetModules = ("ffn.out",)
