"""The settings of a LoRA and how its weights are drawn, for every method that has one."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from raycl.config import Section


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


TargetModules = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_tuple),
    Field(
        min_length=1,
        description="linears with an adapter: all-linear (all but the head), or roles or regular expressions of paths",
    ),
]
Rank = Annotated[int, Field(ge=1, description="the rank of the update")]
LoraAlpha = Annotated[float, Field(gt=0, description="the update is scaled by lora_alpha / r")]
InputDropout = Annotated[
    float, Field(ge=0, lt=1, description="share of the adapter's inputs that is dropped in training")
]


class LoraSettings(Section):
    """The settings of every LoRA, by the names that PEFT's `LoraConfig` has for them."""

    r: Rank = 8
    lora_alpha: LoraAlpha = 32.0
    lora_dropout: InputDropout = 0.0
    target_modules: TargetModules = ("attention.query", "attention.value")

    @property
    def scaling(self) -> float:
        """The scale of the update."""
        return self.lora_alpha / self.r


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
