"""Time and memory of a decoder's training step: logits of every token or of those with labels, rows padded or packed.

LoRA on query and value projections of one LLaMA-shaped model, whose weights the contenders share. They take the same
batches in turn, so that a machine that slows down slows all, and ratios within a round are compared. Prompts are of
unlike lengths, as texts are. Processor time is taken, since others may be running beside it. Memory is the most that
the process held during a step, above what it held before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.figures import Figure, Report, measured
from benchmarks.model_copies import shared_copy
from benchmarks.phases import bare_context
from raycl.backbone import Backbone, BackboneConfig, BackboneOptions, Output, load_backbone, load_codec
from raycl.backbone.base import checkpoint_activations, summed_cross_entropy
from raycl.backbone.causal import join
from raycl.backbone.load import wrap_model
from raycl.methods.single_adapter import Lora, LoraConfig
from raycl.testing.tiny_models import word_tokenizer
from raycl.training.engines.compilation import compile_layers
from raycl.training.engines.engine import TorchEngine
from raycl.training.optimizers.settings import TrainConfig
from raycl.training.phase.step import train_step
from raycl.training.workers.distributed import DistributedContext
from raycl.training.workers.memory import forget_peak, peak_memory_mb, resident_memory_mb, return_freed_memory
from raycl.types import IGNORE, Batch, Phase, Task

SIZES = {
    "small": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
}
"""Shapes of random models, both with the vocabulary of LLaMA 2; the larger one is TinyLlama's."""
KEY_HEADS = {"small": 4, "1.1B": 4}
VOCABULARY = 32_000

EVERY, LABELLED, PACKED, CHECKPOINTED, COMPILED = (
    "every logit, padded", "labelled logits, padded", "labelled logits, packed", "packed, gradient checkpointing",
    "labelled logits, padded, compiled",
)  # fmt: skip
LIMITS = {
    "small": {LABELLED: (0.6, 0.75), PACKED: (0.5, 0.6)},
    "1.1B": {LABELLED: (1.0, 1.0), PACKED: (0.9, 0.9)},
}
"""Size of the model -> contender -> memory and time over every logit of padded rows."""
SAME_LOSS = 1e-5
"""Largest relative difference of the contenders' losses."""
SETTINGS = ("size", "backbone", "batch_size", "tokens", "answer", "rounds", "threads")
PHASE = Phase(0, "bench", (Task("bench", None, "exact_match"),))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults end within five minutes on two cores."""
    parser.add_argument("--size", choices=SIZES, default="small", help="of a random model")
    parser.add_argument(
        "--backbone", metavar="FOLDER", help="folder of a decoder-only model, in the random one's place"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=192, help="longest prompt; others from an eighth of it")
    parser.add_argument("--answer", type=int, default=12, help="longest answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="a contender with train.compile; its first step is slow")


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    backbone = _loaded(options) if options.backbone else _drawn(options.size)
    sizes = (options.batch_size, options.tokens, options.answer, int(backbone.model.config.vocab_size))
    limits = {} if options.backbone else LIMITS.get(options.size, {})
    batches = [unlike_batch(*sizes, seed) for seed in range(2)]
    result = partial(figures, backbone, batches, options.rounds, limits, options.compile)
    shown = set(SETTINGS) - {"size" if options.backbone else "backbone"}
    report = measured("step", options, shown, result, threads=options.threads)
    return replace(report, settings=report.settings | {"parameters": _count(backbone.model)})


def figures(
    backbone: Backbone,
    batches: Sequence[Batch],
    rounds: int,
    limits: Mapping[str, tuple[float, float]],
    compiles: bool = False,
) -> Iterator[Figure]:
    """Memory and time of each contender over those of the first, and whether all lose the same."""
    names = (EVERY, LABELLED, PACKED, CHECKPOINTED, *([COMPILED] if compiles else []))
    spent, losses = _in_turn(backbone, batches, rounds, names)
    held = "held at most above what it held before, "
    for name in names[1:]:
        pairs = list(zip(spent[name], spent[EVERY], strict=True))
        most, longest = limits.get(name, (None, None))
        memory = median(item.mib / max(other.mib, 1.0) for item, other in pairs)
        mine, theirs = (median(item.mib for item in spent[which]) for which in (name, EVERY))
        detail = f"{held}{mine:,.0f} MiB against {theirs:,.0f} MiB"
        yield Figure(f"{name}: memory over {EVERY}", memory, "x", most, "<=", detail)
        seconds = median(item.seconds / other.seconds for item, other in pairs)
        mine, theirs = (median(item.seconds for item in spent[which]) for which in (name, EVERY))
        detail = f"{mine:.3g} s against {theirs:.3g} s a step"
        yield Figure(f"{name}: step time over {EVERY}", seconds, "x", longest, "<=", detail)
    apart = max(abs(item / losses[EVERY][index] - 1) for own in losses.values() for index, item in enumerate(own))
    yield Figure("largest relative difference of the losses", apart, "", SAME_LOSS)
    real = [int(batch.source_mask.sum() + (batch.target_ids != IGNORE).sum()) for batch in batches]
    padded = [join(batch, 0)[0].numel() for batch in batches]
    yield Figure("real tokens of padded rows", 100 * sum(real) / sum(padded), "%")


@dataclass(frozen=True)
class Spent:
    """One step: `seconds` of processor time, and `mib` above what the process held before."""

    seconds: float
    mib: float


def _in_turn(
    backbone: Backbone, batches: Sequence[Batch], rounds: int, names: Sequence[str]
) -> tuple[dict[str, list[Spent]], dict[str, list[float]]]:
    """Contender -> what each step needed, the first round left out, and the loss of all its steps."""
    learners = {name: Learner(backbone, name) for name in names}
    spent: dict[str, list[Spent]] = {name: [] for name in learners}
    losses: dict[str, list[float]] = {name: [] for name in learners}
    for number in range(-1, rounds):
        for name, learner in learners.items():
            return_freed_memory()  # the next peak would be hidden in it
            forget_peak()
            before, began = resident_memory_mb(), time.process_time()
            losses[name].append(learner.step(batches[number % len(batches)]))
            item = Spent(time.process_time() - began, peak_memory_mb(backbone.device) - before)
            if number >= 0:
                spent[name].append(item)
    return spent, losses


class Learner:
    """LoRA in training, over the weights of a backbone that others use too."""

    def __init__(self, backbone: Backbone, name: str) -> None:
        own = type(backbone)(shared_copy(backbone.model), backbone.codec)
        if name in (PACKED, CHECKPOINTED):
            own.check_packing()
            own.packs = True
        if name == CHECKPOINTED:
            checkpoint_activations(own.model)
        if name == COMPILED:
            compile_layers(own)
        self.method = Lora(LoraConfig(target_modules=("attention.query", "attention.value")), own, 0)
        self.method.begin_task(PHASE, bare_context(PHASE))
        self.world = DistributedContext.alone(torch.device("cpu"))
        engine = EveryLogit if name == EVERY else TorchEngine
        self.engine = engine(own, TrainConfig(learning_rate=1e-3), 1000, self.world)
        own.train()

    def step(self, batch: Batch) -> float:
        """Take an optimizer step, and return the loss before it."""
        return train_step(self.engine, self.method, [batch], self.world, 0).loss


class EveryLogit(TorchEngine):
    """Logits and their loss at every position of padded rows, as a causal language model computes them by itself."""

    def forward(self, batch: Batch) -> Output:
        """Positions without a label have no loss, and are computed nonetheless."""
        ids_BS, mask_BS, labels_BS = join(batch, self.backbone.codec.pad_id)
        logits_BSV = self.backbone.model(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False).logits
        next_BS = nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORE)
        rows_BS = torch.arange(len(batch), device=next_BS.device).unsqueeze(1).expand_as(next_BS)
        loss = summed_cross_entropy(logits_BSV, next_BS)
        return Output(loss, logits_BSV.flatten(0, 1), next_BS.flatten(), rows_BS.flatten())


def unlike_batch(size: int, tokens: int, answer: int, vocabulary: int, seed: int) -> Batch:
    """Random words: one prompt of `tokens`, the others from an eighth of it; answers of any length up to `answer`."""
    draw = torch.Generator().manual_seed(seed)
    lengths_B1 = torch.randint(max(1, tokens // 8), tokens + 1, (size, 1), generator=draw)
    lengths_B1[0] = tokens
    answers_B1 = torch.randint(1, answer + 1, (size, 1), generator=draw)
    mask_BL = (torch.arange(tokens) < lengths_B1).long()
    target_BT = torch.randint(5, vocabulary, (size, answer), generator=draw)
    target_BT[torch.arange(answer) >= answers_B1] = IGNORE
    source_BL = torch.randint(5, vocabulary, (size, tokens), generator=draw) * mask_BL
    labels_B = torch.full((size,), IGNORE)
    return Batch(source_BL, mask_BL, target_BT, labels_B, torch.ones(size), torch.arange(size))


def _drawn(size: str) -> Backbone:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=KEY_HEADS[size], max_position_embeddings=2048, **SIZES[size]
    )
    return wrap_model(LlamaForCausalLM(config), word_tokenizer("llama", []), 1024, 1024)


def _loaded(options: argparse.Namespace) -> Backbone:
    config = BackboneConfig(name=options.backbone, dtype="float32")
    codec = load_codec(config, options.tokens, options.answer)
    return load_backbone(config, codec, torch.device("cpu"), 0, BackboneOptions(trains=True))


def _count(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:,.0f}M"
