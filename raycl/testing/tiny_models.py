"""Tiny models of every kind: a few thousand weights from a fixed seed, and a tokenizer of whole words.

They are saved as Hugging Face folders, so that the real loading code runs; and engines that stop as in a crash.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from raycl.methods.capabilities import Constraint
from raycl.methods.modifier import Modifiers
from raycl.training.engines.engine import Engine, OpenEngine, Transform

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
SPECIAL = {
    "bert": BERT,
    "masked": {**BERT, "mask_token": "[MASK]"},
    "t5": {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
    "llama": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "mixtral": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "gpt2": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
}
"""Kind -> the special tokens that such models have (the decoders have no padding token)."""

SHAPES = {
    "bert": "[CLS] $A [SEP]",
    "masked": "[CLS] $A [SEP]",
    "t5": "$A </s>",
    "llama": "<s> $A",
    "mixtral": "<s> $A",
    "gpt2": "$A",
}
"""Kind -> the form of a tokenized text."""


def word_tokenizer(kind: str, words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words; the special tokens of that kind of model come first."""
    special, shape = SPECIAL[kind], SHAPES[kind]
    ids = {word: number for number, word in enumerate([*special.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    used = [(word, ids[word]) for word in special.values() if word in shape]
    tokenizer.post_processor = processors.TemplateProcessing(single=shape, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def tiny_model(kind: str, vocabulary: int, seed: int = 0, positions: int = 64) -> Any:
    """Return a randomly initialised model of two layers, the same for the same seed.

    Args:
        positions: number of position embeddings; the LLaMA and the Mixtral have twice as many.
    """
    torch.manual_seed(seed)
    if kind == "bert":
        return BertModel(BertConfig(vocab_size=vocabulary, max_position_embeddings=positions, **SIZES))
    if kind == "masked":
        return BertForMaskedLM(BertConfig(vocab_size=vocabulary, max_position_embeddings=positions, **SIZES))
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        return T5ForConditionalGeneration(
            T5Config(vocab_size=vocabulary, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **sizes)
        )
    if kind == "llama":
        special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=vocabulary, max_position_embeddings=2 * positions, **special, **SIZES)
        )
    if kind == "mixtral":
        experts = {"num_local_experts": 4, "num_key_value_heads": 1}
        return MixtralForCausalLM(
            MixtralConfig(vocab_size=vocabulary, max_position_embeddings=2 * positions, **experts, **SIZES)
        )
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": positions}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, bos_token_id=1, eos_token_id=2, **sizes))


def save_model(kind: str, folder: Path, words: Sequence[str], positions: int = 64) -> Path:
    """Return a Hugging Face folder with config, tokenizer and safetensors weights."""
    tokenizer = word_tokenizer(kind, words)
    tokenizer.save_pretrained(folder)
    tiny_model(kind, len(tokenizer), positions=positions).save_pretrained(folder)
    return folder


class Stop(Exception):
    """Raised in place of a crash."""


class StoppingEngine:
    """An engine whose `step` number `after + 1`, counted over all phases, never happens."""

    def __init__(self, engine: Engine, left: list[int]) -> None:
        self.engine = engine
        self.left = left

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(
        self, modifiers: Modifiers, transform: Transform | None = None, constraint: Constraint | None = None
    ) -> float:
        """Count a step, or raise."""
        if self.left[0] == 0:
            raise Stop("before a step")
        self.left[0] -= 1
        return self.engine.step(modifiers, transform, constraint)


def stopping(open_engine: OpenEngine, after: int) -> OpenEngine:
    """Return a factory of engines that together do `after` steps and then raise `Stop`."""
    left = [after]
    return lambda *phase: cast(Engine, StoppingEngine(open_engine(*phase), left))
