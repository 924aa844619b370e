"""Base class of methods around another method, their learner: each hook calls the learner's unless overridden."""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from torch import Tensor

from raycl.backbone import Backbone, Output
from raycl.config import Tree, named
from raycl.errors import ConfigError
from raycl.methods.base import Learned, Method, MethodConfig, State
from raycl.methods.context import TaskContext
from raycl.methods.registry import DEFAULT_METHOD, LearnerChoice, method_class, method_config
from raycl.types import Batch, Mixture, Phase, Task


def _of_learner(name: str) -> Any:
    """Return a property that gives what the learner's settings have under this name."""
    return property(attrgetter(f"learner.{name}"))


class WrapperConfig(MethodConfig):
    """Settings of the learner."""

    learner: LearnerChoice = Field(
        method_config({"name": DEFAULT_METHOD}), description="the method that learns, with its settings"
    )

    fixed_roles: ClassVar[Any] = _of_learner("fixed_roles")
    innermost: ClassVar[Any] = _of_learner("innermost")
    learning_rates: ClassVar[Any] = _of_learner("learning_rates")
    routed_text: ClassVar[Any] = _of_learner("routed_text")
    needs_texts: ClassVar[Any] = _of_learner("needs_texts")
    publishes_samples: ClassVar[Any] = _of_learner("publishes_samples")
    needs_task: ClassVar[Any] = _of_learner("needs_task")
    chooses_task: ClassVar[Any] = _of_learner("chooses_task")
    knows_texts: ClassVar[Any] = _of_learner("knows_texts")
    own_statistics: ClassVar[Any] = _of_learner("own_statistics")
    needs_dropout: ClassVar[Any] = _of_learner("needs_dropout")
    fits_ahead: ClassVar[Any] = _of_learner("fits_ahead")
    generates_samples: ClassVar[Any] = _of_learner("generates_samples")
    sample_generator: ClassVar[Any] = _of_learner("sample_generator")
    extra_passes: ClassVar[Any] = _of_learner("extra_passes")
    prompt_positions: ClassVar[Any] = _of_learner("prompt_positions")

    @field_validator("learner", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return named(value, DEFAULT_METHOD)

    def unused_with(self, has_label_head: bool, reason: str) -> Iterator[tuple[str, str]]:
        """See the learner; paths are below `learner`."""
        for path, why in self.learner.unused_with(has_label_head, reason):
            yield f"learner.{path}", why

    def settings_by_task(self) -> dict[str, dict[str, Any]]:
        """See the learner; paths are below `learner`."""
        return {f"learner.{path}": given for path, given in self.learner.settings_by_task().items()}

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        settings = super().cache_key(index, tasks, learns_texts)
        settings["learner"] = self.learner.cache_key(index, tasks, learns_texts)
        return settings

    @property
    def keeps_data(self) -> bool:
        """Add what the learner keeps."""
        return self.rereads_rows or self.learner.keeps_data


class Wrapper(Method):
    """A method around a learner.

    Attributes:
        learner: the method that trains.

    Class attributes:
        needs_shared: what the learner must not have for each task by itself. adapters: its training on rows of earlier
            tasks would train nothing of the new task's; parameters: those of earlier tasks are to be held.
    """

    needs_shared: ClassVar[Literal["", "adapters", "parameters"]] = ""

    def __init__(self, config: WrapperConfig, backbone: Backbone, seed: int) -> None:
        """Make the learner.

        Raises:
            ConfigError: it lacks what `needs_shared` says.
        """
        super().__init__(config, backbone, seed)
        self.learner = method_class(config.learner.name)(config.learner, backbone, seed)
        self.learner.is_wrapped = True
        self.trains_backbone = self.learner.trains_backbone
        self.stack = self.learner.stack
        self.encoder = self.learner.encoder
        self.router_module = self.learner.router_module
        self.constraint = self.learner.constraint
        self.objective = self.learner.objective
        overridden = type(self).transform_gradients is not Wrapper.transform_gradients
        self.transforms_gradients: bool = overridden or self.learner.transforms_gradients
        self.mixes_gradients: bool = (overridden and not self.scales_gradients) or self.learner.mixes_gradients
        self.adds_penalty: bool = type(self).penalty is not Wrapper.penalty or self.learner.adds_penalty
        self._check_learner()

    def _check_learner(self) -> None:
        name = self.learner.config.name
        if self.needs_shared == "adapters" and self.learner.config.needs_texts:  # to route each text (SAPT has +Replay)
            raise ConfigError(
                f"method.learner is {name}, which trains each task's adapters on its own texts alone: expected a "
                "learner that trains on every text of its batches, for example lora or finetune"
            )
        if self.needs_shared == "parameters" and self.learner.own_adapters:
            raise ConfigError(
                f"method.learner is {name}, which freezes the adapters of earlier tasks, so that method "
                f"'{self.config.name}' has nothing to hold: expected a learner that trains the same parameters in "
                "every task, for example lora or finetune"
            )
        reads_gradients = type(self).transform_gradients is not Wrapper.transform_gradients
        if self.learner.mixes_gradients and (reads_gradients or self.needs_shared == "parameters"):
            raise ConfigError(
                f"method.learner is {name}, which projects gradients itself, and method '{self.config.name}' takes "
                "them for those of parameters: expected a learner that does not, for example lora or finetune"
            )

    def check(self, tasks: Sequence[Task]) -> None:
        self.learner.check(tasks)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        self.learner.begin_task(phase, context)

    def prepare_batch(self, batch: Batch) -> Batch:
        return self.learner.prepare_batch(batch)

    def route(self, batch: Batch) -> Mixture | None:
        return self.learner.route(batch)

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        return self.learner.penalty(batch, output)

    def transform_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.learner.transform_gradients(gradients)

    def end_task(self, context: TaskContext) -> Learned | None:
        return self.learner.end_task(context)

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        return self.learner.summary(observed)

    def state_dict(self) -> State:
        return self.learner.state_dict()

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.learner.load_state_dict(values, tensors)
