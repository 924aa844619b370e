"""IncLoRA: every task trains a LoRA of its own beside the frozen ones of earlier tasks, and all of them speak.

O-LoRA's plain sum without its penalty ("IncLoRA" in MIGU, section 4.1, and in the tables of both papers): rank 8,
alpha 32, query and value projections, as in the code of both. Their dropout of 0.1 is an option here and off, so that
N workers equal one. The authors' models write their answers as text; an encoder-only backbone needs a label head, of
which the papers say nothing. It is treated like the weights: each task trains an increment, and logits are the sum of
all increments.
With rows for every label seen so far (`head=shared`, the default) that is exactly the one growing head that keeps
training, as method `lora` has it, and yet nothing that an earlier snapshot holds ever changes. `head=own` trains rows
of the task's own labels only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.adapters.head import MixedHead
from raycl.backbone import Backbone
from raycl.backbone.roles import linear_names
from raycl.methods.base import Learned, Method, MethodConfig, in_head, packed, phase_labels, unpacked
from raycl.methods.lora.lora import LoraSettings, as_peft_draws
from raycl.methods.trained_adapters import end_training
from raycl.types import AdapterState, Batch, Mixture, Phase, RouterState


class IncLoraSettings(LoraSettings):
    """LoRA settings of every task's own adapter."""

    head: Literal["shared", "own"] = Field(
        "shared",
        description="rows of the label head that a task trains (encoder-only backbones): of all labels seen so far, or "
        "of its own labels",
    )

    label_head: ClassVar[tuple[str, ...]] = ("head",)


class IncLoraConfig(IncLoraSettings):
    """IncLoRA: a LoRA for each task, and the sum of all answers."""

    name: Literal["inclora"] = "inclora"


class IncLora(Method):
    """A growing sum of LoRAs, of which only the newest is trained.

    As the learner of `separate` (`task_id_given`) each adapter is trained and speaks alone.
    """

    Config: ClassVar[type[MethodConfig]] = IncLoraConfig
    own_adapters: ClassVar[bool] = True

    def __init__(self, config: IncLoraSettings, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.stack: AdapterStack = AdapterStack(backbone.model, linear_names(backbone.model, config.targets))
        self._learned: dict[str, AdapterState] = {}
        self._task = ""
        if backbone.head is not None:
            backbone.head = MixedHead(self.stack, int(backbone.model.config.hidden_size), "logit")

    def begin_task(self, phase: Phase, resumed: bool) -> None:
        """A new adapter is live; backbone and all earlier adapters are frozen."""
        if not resumed:
            self._begin(phase.name, self._rows_for(phase_labels(phase)))
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(".lora_" in name or in_head(name, parameter))

    def _rows_for(self, labels: list[str]) -> list[str]:
        """Labels whose head rows are trained."""
        head = self.backbone.head
        if head is None or self.task_id_given or self.config.head == "own":
            return labels
        return list(dict.fromkeys([*head.labels, *labels]))

    def _begin(self, task: str, rows: list[str]) -> None:
        config, number = self.config, 0 if self.task_id_given else len(self._learned)
        torch.manual_seed(self.seed + number)
        self.stack.begin_training({task: config.rank}, config.alpha / config.rank, as_peft_draws, config.dropout)
        self._task = task
        if isinstance(self.backbone.head, MixedHead):
            if self.task_id_given:
                self.backbone.head.clear()
            self.backbone.head.begin_training(rows)

    def route(self, batch: Batch) -> Mixture:
        """Every adapter so far, fully, for every example; only the newest where each task is told."""
        names = [*self._learned, *([self._task] if self._task else [])]
        return Mixture.same(dict.fromkeys(names[-1:] if self.task_id_given else names, 1.0), len(batch))

    def end_task(self, phase: Phase, tensors: Mapping[str, Tensor]) -> Learned:
        """The adapter becomes resident and never changes again; it goes to the bank with its part of the head."""
        states = end_training(self.backbone, self.stack, tensors)
        self._task = ""
        self._keep(states)
        return Learned(dict(states))

    def _keep(self, states: Mapping[str, AdapterState]) -> None:
        self._learned |= states
        for name, state in states.items():
            self.stack.load(name, state)

    def learned_names(self) -> list[str]:
        """The live adapter and head rows; none between tasks."""
        return super().learned_names() if self._task else []

    def router_state(self) -> RouterState:
        """All adapters with weight 1, and logits added up; each its own task where that is told."""
        return RouterState("task" if self.task_id_given else "sum", {"head_rule": "logit"})

    def frozen_state(self) -> dict[str, Tensor]:
        """Adapters of earlier tasks."""
        return packed(self._learned)

    def state_dict(self) -> dict[str, Any]:
        """Labels, which adapters there are, and which one is being learned."""
        head = self.backbone.head
        rows = list(head.trainable_labels) if isinstance(head, MixedHead) else []
        learned = {name: list(state.labels) for name, state in self._learned.items()}
        return {**super().state_dict(), "task": self._task, "live_labels": rows, "learned": learned}

    def load_state_dict(self, state: Mapping[str, Any], frozen_state: Mapping[str, Tensor]) -> None:
        """Adapters of earlier tasks as they were; the live one in shape."""
        super().load_state_dict(state, frozen_state)
        scale = self.config.alpha / self.config.rank
        self._keep(unpacked(state["learned"], frozen_state, scale))
        if state["task"]:
            self._begin(state["task"], state["live_labels"])
