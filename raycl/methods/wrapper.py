"""Base class of methods around another method, their learner: each hook calls the learner's unless overridden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator
from torch import Tensor

from raycl.backbone import Backbone, Output
from raycl.config import Tree, named
from raycl.errors import ConfigError
from raycl.methods.base import Learned, Method, MethodConfig, State
from raycl.methods.capabilities import SampleGenerator
from raycl.methods.context import TaskContext
from raycl.methods.lora_settings import LoraConfig
from raycl.methods.registry import LearnerChoice, method_class
from raycl.types import Batch, Mixture, Phase, Task


class WrapperConfig(MethodConfig):
    """Settings of the learner."""

    learner: LearnerChoice = Field(LoraConfig(), description="the method that learns, with its settings")

    unused_in_first_phase: ClassVar[tuple[str, ...]] = ()
    """Settings without effect before there are earlier tasks."""

    @field_validator("learner", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return named(value, "lora")

    def unused_with(self, has_label_head: bool, reason: str) -> Iterator[tuple[str, str]]:
        """See the learner; paths are below `learner`."""
        for path, why in self.learner.unused_with(has_label_head, reason):
            yield f"learner.{path}", why

    def settings_by_task(self) -> dict[str, dict[str, Any]]:
        """See the learner; paths are below `learner`."""
        return {f"learner.{path}": given for path, given in self.learner.settings_by_task().items()}

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        """Return the learner's, and in the first phase without `unused_in_first_phase`."""
        settings = super().cache_key(index, tasks, learns_texts)
        settings["learner"] = self.learner.cache_key(index, tasks, learns_texts)
        for name in self.unused_in_first_phase if index == 0 else ():
            del settings[name]
        return settings

    def extra_passes(self, epochs: int) -> float:
        """Forward to the learner."""
        return self.learner.extra_passes(epochs)

    @property
    def fixed_roles(self) -> tuple[str, ...]:
        """See the learner."""
        return self.learner.fixed_roles

    def prompt_positions(self, tasks: int) -> int:
        """Forward to the learner."""
        return self.learner.prompt_positions(tasks)

    @property
    def innermost(self) -> MethodConfig:
        """The innermost method of the learner."""
        return self.learner.innermost

    @property
    def learning_rates(self) -> dict[str, float]:
        """See the learner."""
        return self.learner.learning_rates

    @property
    def needs_texts(self) -> bool:
        """See the learner."""
        return self.learner.needs_texts

    @property
    def generates_samples(self) -> bool:
        """See the learner."""
        return self.learner.generates_samples

    @property
    def sample_generator(self) -> SampleGenerator | None:
        """See the learner."""
        return self.learner.sample_generator

    @property
    def publishes_samples(self) -> bool:
        """See the learner."""
        return self.learner.publishes_samples

    @property
    def needs_task(self) -> bool:
        """See the learner."""
        return self.learner.needs_task

    @property
    def chooses_task(self) -> bool:
        """See the learner."""
        return self.learner.chooses_task

    @property
    def needs_dropout(self) -> bool:
        """See the learner."""
        return self.learner.needs_dropout

    @property
    def keeps_data(self) -> bool:
        """Also what the learner keeps."""
        return self.rereads_rows or self.learner.keeps_data

    @property
    def fits_ahead(self) -> bool:
        """See the learner."""
        return self.learner.fits_ahead


class Wrapper(Method):
    """A method around a learner.

    Attributes:
        learner: the method that trains.
    """

    def __init__(self, config: WrapperConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.learner = method_class(config.learner.name)(config.learner, backbone, seed)
        self.learner.is_wrapped = True
        self.trains_backbone = self.learner.trains_backbone
        self.stack = self.learner.stack
        self.encoder = self.learner.encoder
        self.router_module = self.learner.router_module
        self.constraint = self.learner.constraint
        overridden = type(self).transform_gradients is not Wrapper.transform_gradients
        self.transforms_gradients = overridden or self.learner.transforms_gradients
        self.mixes_gradients = (overridden and not self.scales_gradients) or self.learner.mixes_gradients
        self.adds_penalty = type(self).penalty is not Wrapper.penalty or self.learner.adds_penalty

    def _require_shared_adapters(self) -> None:
        """Check that adapters are shared, for methods that train on rows of earlier tasks.

        Raises:
            ConfigError: the learner routes each text to its own task's adapters in training, so that rows of earlier
                tasks would train nothing of the new task's.
        """
        if self.learner.needs_texts:  # to route each text (SAPT has its own ablation +Replay)
            raise ConfigError(
                f"method.learner is {self.learner.config.name}, which trains each task's adapters on its own texts "
                "alone: expected a learner that trains on every text of its batches, for example lora or finetune"
            )

    def _require_shared_parameters(self) -> None:
        """Check that parameters are shared, for methods that hold the parameters of earlier tasks.

        Raises:
            ConfigError: each task trains parameters of its own, and those of earlier ones are frozen.
        """
        if self.learner.own_adapters:
            raise ConfigError(
                f"method.learner is {self.learner.config.name}, which freezes the adapters of earlier tasks, so that "
                f"method '{self.config.name}' has nothing to hold: expected a learner that trains the same parameters "
                "in every task, for example lora or finetune"
            )

    def check(self, tasks: Sequence[Task]) -> None:
        """Forward to the learner."""
        self.learner.check(tasks)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Forward to the learner."""
        self.learner.begin_task(phase, context)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Forward to the learner."""
        return self.learner.prepare_batch(batch)

    def route(self, batch: Batch) -> Mixture | None:
        """Forward to the learner."""
        return self.learner.route(batch)

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Forward to the learner."""
        return self.learner.penalty(batch, output)

    def transform_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Forward to the learner."""
        return self.learner.transform_gradients(gradients)

    def end_task(self, context: TaskContext) -> Learned | None:
        """Forward to the learner."""
        return self.learner.end_task(context)

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Forward to the learner."""
        return self.learner.summary(observed)

    def state_dict(self) -> State:
        """Forward to the learner."""
        return self.learner.state_dict()

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Forward to the learner."""
        self.learner.load_state_dict(values, tensors)
