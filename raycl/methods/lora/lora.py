"""One LoRA trained on the tasks in turn (SeqLoRA in SAPT, "LoRA" in MIGU): the lower reference for adapters.

Rank 8, alpha 32, query and value projections are the settings of the code of O-LoRA and MIGU, and of SAPT's on the
long-sequence benchmark; their dropout of 0.1 (MIGU, O-LoRA) is an option here and off, so that N workers equal one. The
label head of encoder-only backbones is trained with it.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone
from raycl.backbone.roles import linear_names
from raycl.methods.base import MethodConfig
from raycl.methods.single_adapter import SingleAdapter


class LoraSettings(MethodConfig):
    """What every LoRA has; `alpha / rank` is the scale of the update."""

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


class Lora(SingleAdapter):
    """The frozen backbone with one LoRA that every task overwrites."""

    Config = LoraConfig
    adapter = "lora"
    compiles = True

    def __init__(self, config: LoraConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.stack = AdapterStack(backbone.model, linear_names(backbone.model, config.targets))
        torch.manual_seed(seed)
        scale = config.alpha / config.rank
        self.stack.begin_training({self.adapter: config.rank}, scale, as_peft_draws, config.dropout)


def as_peft_draws(low: Tensor, outputs: int) -> None:
    """Kaiming-uniform for A. PEFT first draws values for A and B that it throws away: so do we, to start as it does."""
    rank, inputs = low.shape
    nn.Linear(inputs, rank, bias=False)
    nn.Linear(rank, outputs, bias=False)
    nn.init.kaiming_uniform_(low, a=math.sqrt(5))
