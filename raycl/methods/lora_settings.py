"""The settings of a LoRA and how its weights are drawn, for every method that has one, and the default learner's."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from raycl.methods.base import MethodConfig


class LoraSettings(MethodConfig):
    """The settings of every LoRA; `alpha / rank` is the scale of the update."""

    rank: int = Field(8, ge=1, description="r, the rank of the update")
    alpha: float = Field(32.0, gt=0, description="the update is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of the adapter's inputs that is dropped in training")
    targets: tuple[str, ...] = Field(
        ("attention.query", "attention.value"), min_length=1, description="roles or regular expressions of linear paths"
    )


class LoraConfig(LoraSettings):
    """One LoRA that is trained on all tasks in turn (SeqLoRA)."""

    name: Literal["lora"] = "lora"

    task_id_in_training: ClassVar[bool] = False


def as_peft_draws(low: Tensor, outputs: int) -> None:
    """Draw A Kaiming-uniform. PEFT first draws values for A and B that it throws away: so do we, to start as it
    does."""
    rank, inputs = low.shape
    nn.Linear(inputs, rank, bias=False)
    nn.Linear(rank, outputs, bias=False)
    kaiming(low, outputs)


def kaiming(low: Tensor, outputs: int) -> None:
    """Fill A as torch draws linears."""
    nn.init.kaiming_uniform_(low, a=math.sqrt(5))
