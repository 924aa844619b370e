"""Base class of methods whose task trains a LoRA, a prefix in every attention layer, or a soft prompt."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from raycl.adapters.head import Rule as HeadRule
from raycl.methods.base import MethodConfig
from raycl.methods.lora_settings import BY_LINEAR, LoraSettings
from raycl.methods.per_task_adapter import AdapterForm, PerTaskAdapter

Module = Annotated[
    Literal["lora", "prefix", "prompt"],
    Field(
        description="the module of a task. lora: weight increments; prefix: keys and values that every attention layer "
        "reads in addition to the text's; prompt: a soft prompt"
    ),
]
PromptLength = Annotated[int, Field(ge=1, description="positions of a prefix or soft prompt")]


class ModuleSettings(LoraSettings, MethodConfig):
    """Settings of a task's module."""

    value: Module = "lora"
    prompt_length: PromptLength = 16

    takes: ClassVar[tuple[str, ...]] = BY_LINEAR

    @property
    def fixed_roles(self) -> tuple[str, ...]:
        """The role of linears with prefixes."""
        return ("attention.out",) if self.value == "prefix" else ()

    def prompt_positions(self, tasks: int) -> int:
        return self.prompt_length if self.value == "prompt" else 0

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings of other modules."""
        others = ("prompt_length",) if self.value == "lora" else LoraSettings.model_fields
        yield from ((name, f"value={self.value}") for name in others)

    def form(self, head_rule: HeadRule) -> AdapterForm:
        if self.value == "lora":
            return AdapterForm(self.target_modules, self.scaling, head_rule, parameters=self.target_parameters)
        if self.value == "prefix":
            return AdapterForm(self.fixed_roles, 1.0, head_rule, "softmax")
        return AdapterForm((), 1.0, head_rule, prompts="sum")


class ModulePerTask(PerTaskAdapter, ABC):
    """A module for each task."""

    @abstractmethod
    def draw_keys(self, low: Tensor, outputs: int) -> None:
        """Fill the keys of a prefix; its values start at zero."""

    def _create(self, task: str) -> None:
        config = self.config
        if config.value == "lora":
            config.begin_training(self.stack, [task])
            return
        self.stack.begin_training({task: config.prompt_length}, self.scale, self.draw_keys)
        if config.value == "prompt":
            self._begin_prompts(1, config.prompt_length)
