"""Schedules: what one phase is, from which state it starts, and whether the task id is given at test.

`sequential` trains one task after another, each from the state that the one before left. `joint` trains all tasks in
one phase (multi-task learning, MTL). `separate` trains each task from the pretrained model and gives the task id at
test (PerTaskFT of MIGU, "separate fine-tune" of SLM). The last two are upper references for any method, by the same
method; FWT's single-task scores come from `separate` (SAPT's scorer hard-codes them instead).
"""

import copy

import torch
from torch import Tensor

from raycl.backbone import Backbone
from raycl.bank.tensor_groups import TensorGroups
from raycl.data.stream import Stream
from raycl.methods.base import Learned, Method, State
from raycl.routing.routers import router_class
from raycl.training.optimizers.settings import TrainConfig
from raycl.types import Phase, RouterState, TextCodec

NOT_SERVED = (
    "method '{}' routes texts by what it trains, and under stream.schedule=separate each task has a router of its own, "
    "where a snapshot has one; it is evaluated, and nothing of it is published"
)


class Schedule:
    """One task after another.

    Attributes:
        one_model_per_task: each phase starts from the pretrained model and is evaluated on its own tasks alone.
    """

    one_model_per_task = False

    def phases(self, stream: Stream) -> tuple[Phase, ...]:
        """Return what is trained one after another."""
        return tuple(Phase(index, task.name, (task,)) for index, task in enumerate(stream.tasks))

    def attach(self, method: Method, backbone: Backbone) -> None:
        """Once, when method and backbone are new."""

    def begin(self, method: Method) -> None:
        """Prepare a phase that is not resumed."""

    def published(self, phase: Phase, method: Method, learned: Learned) -> Learned:
        """Return what goes to the bank of what a phase learned."""
        return learned


class Joint(Schedule):
    """All tasks in one phase, their rows shuffled together."""

    def phases(self, stream: Stream) -> tuple[Phase, ...]:
        """Return one."""
        return (Phase(0, "joint", stream.tasks),)


class Separate(Schedule):
    """A new start for every task: parameters, label head and the method's state return to their first values.

    A method with adapters of its own for every task starts anew anyway; it is given the task id instead.
    """

    one_model_per_task = True

    def __init__(self) -> None:
        self._first: dict[str, Tensor] = {}
        self._state: State = {}, TensorGroups()

    def attach(self, method: Method, backbone: Backbone) -> None:
        """Keep first values of all that may be trained: with adapters, not those of the frozen backbone."""
        method.task_id_given = True
        if method.own_adapters:
            return
        self._state = copy.deepcopy(method.state_dict())
        for name, parameter in backbone.named_parameters():
            if name.startswith("model.") and ".lora_" not in name and method.stack is not None:
                is_kept = method.trains_backbone
            else:
                is_kept = parameter.requires_grad and not name.startswith("head.")
            if is_kept:
                self._first[name] = parameter.detach().clone()

    def begin(self, method: Method) -> None:
        """Forget the former task's model."""
        if method.own_adapters:
            return
        method.load_state_dict(*copy.deepcopy(self._state))
        parameters = dict(method.backbone.named_parameters())
        with torch.no_grad():
            for name, first in self._first.items():
                parameters[name].copy_(first)

    def published(self, phase: Phase, method: Method, learned: Learned) -> Learned:
        """Return each adapter under its task's name, chosen by the task id; nothing where a router chose among them."""
        if method.own_adapters:
            return learned
        if learned.adapters and not learned.not_served and router_class(learned.router).chooses:
            return Learned(not_served=NOT_SERVED.format(method.config.name))
        several = len(learned.adapters) > 1
        adapters = {
            f"{phase.name}.{name}" if several else phase.name: adapter for name, adapter in learned.adapters.items()
        }
        kept = {name: value for name, value in learned.router.settings.items() if name == "prompt_place"}
        router = RouterState("task", kept)
        return Learned(adapters, learned.model, learned.labels, router=router, not_served=learned.not_served)


SCHEDULES: dict[str, type[Schedule]] = {"sequential": Schedule, "joint": Joint, "separate": Separate}
"""Name of `stream.schedule` -> class."""


def epochs_of(train: TrainConfig, stream: Stream, phase: Phase, codec: TextCodec) -> int:
    """Return the epochs of a phase, which of small tasks under the model's chat template may be more than usual."""
    is_floored = all(stream.takes_template(task, codec) for task in phase.tasks)
    rows = sum(len(stream.rows(task, "train")) for task in phase.tasks)
    return train.epochs_of(phase.name, rows if is_floored else 0)
