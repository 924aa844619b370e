"""One LoRA trained on the tasks in turn (SeqLoRA in SAPT, "LoRA" in MIGU): the adapter lower reference.

Rank 8, alpha 32, query and value projections are the settings of O-LoRA, MIGU (paper section 4, code) and
SAPT's long benchmark; their dropout of 0.1 (MIGU, O-LoRA) is an option here and off, so that N workers equal
one. The label head of encoder-only backbones is trained with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone
from raycl.backbone.roles import linear_names
from raycl.methods.base import Learned, Method, MethodConfig, stage_labels
from raycl.types import Stage

ADAPTER = "default"
"""PEFT's name of the one adapter; it stands in parameter names and is left out on disk."""


class LoraConfig(MethodConfig):
    """LoRA settings; `alpha / rank` is the scale of the update."""

    name: Literal["lora"] = "lora"
    rank: int = Field(8, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] = Field(
        ("attention.query", "attention.value"), min_length=1, description="roles or regular expressions of linear paths"
    )


class Lora(Method):
    """The frozen backbone with one LoRA that every task overwrites."""

    Config = LoraConfig

    def __init__(self, config: LoraConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.names = linear_names(backbone.model, config.targets)
        self.peft = PeftLoraConfig(
            r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=self.names
        )
        torch.manual_seed(seed)
        inject_adapter_in_model(self.peft, backbone.model, adapter_name=ADAPTER)

    def begin_task(self, stage: Stage, resumed: bool) -> None:
        """LoRA and label head are live, the backbone is frozen."""
        self.backbone.learn_labels(stage_labels(stage))
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(".lora_" in name or name.startswith("head."))

    def end_task(self, stage: Stage, tensors: Mapping[str, Tensor]) -> Learned:
        """The adapter under PEFT's names on disk, the label head beside it."""
        exported = {_peft_name(name): tensor for name, tensor in tensors.items()}
        head = self.backbone.head
        return Learned("adapter", exported, self._adapter_config(), [] if head is None else list(head.labels))

    def _adapter_config(self) -> dict[str, Any]:
        """What `adapter_config.json` needs for PEFT to rebuild the adapter."""
        return {
            "peft_type": "LORA",
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "lora_dropout": self.config.dropout,
            "target_modules": self.names,
            "bias": "none",
            "inference_mode": True,
            "base_model_name_or_path": getattr(self.backbone.model.config, "_name_or_path", ""),
        }


def _peft_name(name: str) -> str:
    """`model.x.lora_A.default.weight` -> `base_model.model.x.lora_A.weight`; head rows keep their name."""
    if name.startswith("head."):
        return name
    return f"base_model.{name}".replace(f".{ADAPTER}.", ".")
