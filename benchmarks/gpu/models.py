"""Models of the sizes that people use, with random weights made on the device, and tokenizers made of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from benchmarks.gpu.setup import Setup
from benchmarks.model_copies import shared_copy
from raycl.backbone import Backbone
from raycl.backbone.load import wrap_model
from raycl.testing.tiny_models import word_tokenizer
from raycl.types import IGNORE, Batch

POSITIONS = 8192
FIRST_WORD = 3
"""Ids below are special tokens, in every tokenizer made here."""


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a LLaMA; `kv_heads` below `heads` is grouped-query attention."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int = 32_000


LLAMAS = {
    "tiny": LlamaSizes(2, 64, 128, 2, 1, 96),
    "1B": LlamaSizes(22, 2048, 5632, 32, 4),
    "7B": LlamaSizes(32, 4096, 11008, 32, 32),
    "13B": LlamaSizes(40, 5120, 13824, 40, 40),
}
"""TinyLlama's 1.1 billion parameters, LLaMA's 7 and 13. Widths are multiples of 64, as 4-bit weights on a CPU need."""

T5S: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 96},
    "large": {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24, "num_heads": 16, "vocab_size": 32_128},
}
"""T5 v1.1 large has 750 million parameters with tied embeddings."""


def sizes_of(setup: Setup, name: str) -> LlamaSizes:
    """Return the sizes of a LLaMA, tiny where everything is tiny."""
    return LLAMAS["tiny" if setup.tiny else name]


def decoder(setup: Setup, name: str, targets: int = 64) -> Backbone:
    """Return a LLaMA in evaluation mode whose answers do not end by themselves: the end token always has logit 0.

    Args:
        targets: tokens of an answer at most.
    """
    sizes = sizes_of(setup, name)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = _new_model(setup, LlamaForCausalLM, config)
    with torch.no_grad():
        model.lm_head.weight[2].zero_()
    words = word_tokenizer("llama", [f"w{number}" for number in range(sizes.vocabulary - FIRST_WORD)])
    return wrap_model(model, words, POSITIONS // 2, targets)


def encoder_decoder(setup: Setup, name: str = "large", targets: int = 64) -> Backbone:
    """Return a T5 v1.1 in evaluation mode."""
    sizes = T5S["tiny" if setup.tiny else name]
    config = T5Config(**sizes, feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0)
    model = _new_model(setup, T5ForConditionalGeneration, config)
    words = word_tokenizer("t5", [f"w{number}" for number in range(sizes["vocab_size"] - FIRST_WORD)])
    return wrap_model(model, words, POSITIONS // 2, targets)


def _new_model(setup: Setup, kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(setup.dtype)
    try:
        with setup.device:
            return kind(config).eval()
    finally:
        torch.set_default_dtype(before)


def twin(backbone: Backbone) -> Any:
    """Return a backbone of its own over the same weights."""
    return type(backbone)(shared_copy(backbone.model), backbone.codec)


def token_ids(setup: Setup, rows: int, tokens: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Return `[rows, tokens]` of ordinary words, on the device."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, vocabulary, (rows, tokens), generator=draw).to(setup.device)


def batch_to_learn(setup: Setup, rows: int, tokens: int, targets: int, vocabulary: int, seed: int = 0) -> Batch:
    """Return prompts with answers, so long in all; every row has a text `row <n>`, and is of no task."""
    ids = token_ids(setup, rows, tokens, vocabulary, seed).cpu()
    return Batch(
        source_ids=ids[:, : tokens - targets],
        source_mask=torch.ones(rows, tokens - targets, dtype=torch.long),
        target_ids=ids[:, tokens - targets :],
        label_ids=torch.full((rows,), IGNORE),
        weight=torch.ones(rows),
        rows=torch.arange(rows),
        texts=tuple(f"row {row}" for row in range(rows)),
        tasks=("",) * rows,
    )
