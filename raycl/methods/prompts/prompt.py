"""One soft prompt trained on the tasks in turn (SeqPrompt): the lower reference of methods with prompts.

    input [P; x],  P [length, D],  everything else frozen

The prompt begins as the embeddings of tokens that are drawn from the vocabulary, and every task trains it on. The label
head of encoder-only backbones is trained with it (Lester et al. 2021, "The Power of Scale for Parameter-Efficient
Prompt Tuning", section 2, for one task). Prompts need larger learning rates than weights: the papers use 0.3.
Where published rows differ: the code of Progressive Prompts with `--progressive 0` draws the prompt anew for every task
and selects its epoch by the mean dev score of all tasks (`train_one_task` of `T5_codebase/t5_continual.py`). SLM's
table of T5 has a row "Prompt" that equals its row "Finetune" in every order (18.9, 24.9, 41.7), which makes it a
doubtful target.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from raycl.adapters import AdapterStack
from raycl.adapters.soft_prompts import ADDED_UP, MixedPrompts, UseOf
from raycl.backbone import Backbone
from raycl.methods.base import MethodConfig
from raycl.methods.single_adapter import SingleAdapter


class SeqPromptConfig(MethodConfig):
    """One soft prompt that is trained on all tasks in turn (SeqPrompt)."""

    name: Literal["prompt"] = "prompt"
    prompt_length: int = Field(10, ge=1, description="positions of the soft prompt in front of every text")

    task_id_in_training: ClassVar[bool] = False

    def prompt_positions(self, tasks: int) -> int:
        return self.prompt_length


class SeqPrompt(SingleAdapter):
    """The frozen backbone with one soft prompt that every task overwrites."""

    Config = SeqPromptConfig
    adapter = "prompt"

    def __init__(self, config: SeqPromptConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.stack = AdapterStack(backbone.model, [])
        self.stack.begin_training({self.adapter: 0}, 1.0)
        backbone.prefix = drawn_prompts(backbone, self.stack, config.prompt_length, seed)


def drawn_prompts(
    backbone: Backbone, stack: AdapterStack, length: int, seed: int, use_of: UseOf = ADDED_UP
) -> MixedPrompts:
    """Return prompts in training for a stack's adapters in training, as the embeddings of tokens that are drawn."""
    words = backbone.model.get_input_embeddings().weight.detach()
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(words), (len(stack.trainable), length), generator=draw)
    prompts = MixedPrompts(stack, int(words.shape[1]), use_of)
    prompts.begin_training(words[rows.to(words.device)].float())
    return prompts
