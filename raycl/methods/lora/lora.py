"""One LoRA trained on the tasks in turn (SeqLoRA in SAPT, "LoRA" in MIGU): the lower reference for adapters.

Rank 8, alpha 32, query and value projections are the settings of the code of O-LoRA and MIGU, and of SAPT's on the
long-sequence benchmark; their dropout of 0.1 (MIGU, O-LoRA) is an option here and off, so that N workers equal one. The
label head of encoder-only backbones is trained with it.
"""

from __future__ import annotations

import torch

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone
from raycl.backbone.roles import linear_names
from raycl.methods.lora_settings import LoraConfig, as_peft_draws
from raycl.methods.single_adapter import SingleAdapter


class Lora(SingleAdapter):
    """The frozen backbone with one LoRA that every task overwrites."""

    Config = LoraConfig
    adapter = "lora"
    compiles = True

    def __init__(self, config: LoraConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.stack = AdapterStack(backbone.model, linear_names(backbone.model, config.target_modules))
        torch.manual_seed(seed)
        self.stack.begin_training({self.adapter: config.r}, config.scaling, as_peft_draws, config.lora_dropout)
