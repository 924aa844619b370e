"""What MIGU costs or saves: step time of plain training, masked dense gradients, and row-sparse ones, in one run.

The contenders have a model, optimizer and gradients each, and take the same batches in turn, every modified step
between two plain ones, so that a machine that slows down slows all; medians over the rounds are compared. On a CPU
processor time is taken, since others may be running beside it.
What it does not know: whether MIGU helps.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from raycl.backbone import Backbone, BackboneConfig, load_backbone, load_codec
from raycl.backbone.codec import HFCodec
from raycl.backbone.seq2seq import Seq2SeqBackbone
from raycl.bench.figures import Figure, Report, machine
from raycl.config import validate
from raycl.methods.migu import FIRST, MEASURED, Migu, MiguConfig
from raycl.methods.modifier import Modifiers
from raycl.methods.registry import method_class
from raycl.train.engine import TorchEngine
from raycl.train.settings import TrainConfig
from raycl.train.step import train_step
from raycl.train.world import World
from raycl.types import IGNORE, Batch, Stage, Task

BUSY = 0.5
SETTINGS = ("batch_size", "tokens", "threshold", "rounds", "threads")
CPU_LIMITS = {"finetune": 1.00, "lora": 1.03}
GPU_LIMITS = {("finetune", 64): 0.95, ("finetune", 8): 1.02, ("lora", 64): 1.03}
"""Row-sparse step time over plain training's; on a GPU by batch size."""
GPU_TOKENS, GPU_TARGETS = 512, 8
WORDS = (1000, 20_000)
"""Ids of ordinary words in the vocabularies of both."""
T5_LARGE = {
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 2816,
    "num_layers": 24,
    "num_heads": 16,
    "vocab_size": 32_128,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
"""Sizes of T5 v1.1 large; the weights are random, since they do not change how long a step takes."""
CONTENDERS: dict[str, MiguConfig | None] = {
    "plain": None,
    "masked dense": MiguConfig(row_sparse=False),
    "row-sparse": MiguConfig(),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Sizes; the defaults end within five minutes on two cores."""
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="longest row; rows are between half of it and that")
    parser.add_argument("--threshold", type=float, default=0.7, help="T, the share of rows that is masked")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    before, threads = os.getloadavg()[0], torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        figures = [figure for method in CPU_LIMITS for figure in _on_cpu(method, options)]
    finally:
        torch.set_num_threads(threads)
    notes = [f"the load was {before:.1f} when this began"] if before > BUSY else []
    if torch.cuda.is_available():
        figures += [figure for (method, size) in GPU_LIMITS for figure in _on_gpu(method, size, options)]
    else:
        notes.append("no GPU here: T5-large in bfloat16 not measured")
    settings = {key: value for key, value in vars(options).items() if key in SETTINGS}
    return Report("migu", settings, figures, machine(before), notes)


def _on_cpu(method: str, options: argparse.Namespace) -> Iterator[Figure]:
    config = BackboneConfig(name="minilm", dtype="float32")
    codec = load_codec(config, options.tokens, 1)
    cpu = torch.device("cpu")
    made = partial(load_backbone, config, codec, cpu, 0)
    bench = Bench({name: made() for name in CONTENDERS}, method, options.threshold, cpu)
    where = f"MiniLM, batch {options.batch_size}, {method}"
    batches = [encoder_batch(options.batch_size, options.tokens, number) for number in range(4)]
    yield from figures(where, bench, batches, options.rounds, CPU_LIMITS[method])


def _on_gpu(method: str, size: int, options: argparse.Namespace) -> Iterator[Figure]:
    device = torch.device("cuda")
    bench = Bench({name: t5_large(device) for name in CONTENDERS}, method, options.threshold, device)
    batches = [seq2seq_batch(size, GPU_TOKENS, GPU_TARGETS, number).to(device) for number in range(2)]
    where = f"T5-large in bfloat16, batch {size} x {GPU_TOKENS}, {method}"
    yield from figures(where, bench, batches, options.rounds, GPU_LIMITS[method, size])
    del bench
    torch.cuda.empty_cache()


def figures(where: str, bench: Bench, batches: list[Batch], rounds: int, limit: float) -> Iterator[Figure]:
    """One figure for each contender over plain training."""
    timed = bench.times(batches, rounds)
    for name in list(CONTENDERS)[1:]:
        found = timed[name]
        target = limit if name == "row-sparse" else None
        detail = f"{found.own_ms:.1f} ms against {found.plain_ms:.1f} ms a step"
        yield Figure(f"{where}: {name} over plain", found.ratio, "x", target, "<=", detail)
    extra = timed["measured step"]
    detail = f"the first {FIRST} steps of a task and one in {MEASURED} after them, for the report; not in the above"
    yield Figure(f"{where}: a measured step over plain", extra.ratio, "x", None, "<=", detail)


@dataclass(frozen=True)
class Timed:
    """A contender beside plain training. Attributes: `ratio` of the times, and both times; medians over rounds."""

    ratio: float
    own_ms: float
    plain_ms: float


class Bench:
    """Twins of one model, each trained in its own way on the same batches."""

    def __init__(self, backbones: dict[str, Backbone], method: str, threshold: float, device: torch.device) -> None:
        self.world, self.device = World.alone(device), device
        self.twins = {
            name: Twin(backbones[name], method, _with(CONTENDERS[name], threshold), self.world) for name in backbones
        }

    def times(self, batches: list[Batch], rounds: int) -> dict[str, Timed]:
        """Contender -> its step time beside the plain one's."""
        found: dict[str, list[tuple[float, float]]] = {}
        for number in range(-FIRST - 1, rounds):
            batch = batches[number % len(batches)]
            before = self._seconds("plain", batch, 1)
            for name, twin, seed in (
                ("masked dense", "masked dense", 1),
                ("row-sparse", "row-sparse", 1),
                ("measured step", "row-sparse", MEASURED),
            ):
                spent = self._seconds(twin, batch, seed)
                after = self._seconds("plain", batch, 1)
                if number >= 0:  # the rounds before warm up, and take the steps that a new task begins with
                    found.setdefault(name, []).append((spent, (before + after) / 2))
                before = after
        return {
            name: Timed(
                median(own / plain for own, plain in pairs),
                median(own for own, _ in pairs) * 1e3,
                median(plain for _, plain in pairs) * 1e3,
            )
            for name, pairs in found.items()
        }

    def _seconds(self, name: str, batch: Batch, seed: int) -> float:
        began = self._clock()
        self.twins[name].step(batch, seed)
        return self._clock() - began

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


class Twin:
    """One model in training."""

    def __init__(self, backbone: Backbone, method: str, migu: MiguConfig | None, world: World) -> None:
        self.world = world
        kind = method_class(method)
        self.method = kind(kind.Config(name=method), backbone, 0)
        stage = Stage(0, "bench", (Task("bench", ("no", "yes"), "exact_match"),))
        self.method.begin_task(stage, resumed=False)
        self.modifiers = Modifiers({"migu": Migu(migu, self.method)} if migu else {})
        self.modifiers.begin_task(stage, only=True, resumed=False)
        self.engine = TorchEngine(backbone, TrainConfig(learning_rate=1e-5), 1000, world)
        backbone.train()

    def step(self, batch: Batch, seed: int) -> float:
        """One optimizer step; the gradient's norm."""
        return train_step(self.engine, self.method, [batch], self.world, seed, self.modifiers).grad_norm


def _with(config: MiguConfig | None, threshold: float) -> MiguConfig | None:
    return config and validate(MiguConfig, {**config.model_dump(), "threshold": threshold})


def t5_large(device: torch.device) -> Backbone:
    """A T5 of that size with random weights; its tokenizer is never used."""
    torch.manual_seed(0)
    with device:
        model: Any = T5ForConditionalGeneration(T5Config(**T5_LARGE)).to(torch.bfloat16)
    tokenizer = load_codec(BackboneConfig(name="minilm"), 64, 1).tokenizer
    tokenizer.eos_token = tokenizer.sep_token  # an encoder's has none, and without one nothing can generate
    return Seq2SeqBackbone(model, HFCodec(tokenizer, "encoder-decoder", GPU_TOKENS, GPU_TARGETS))


def encoder_batch(size: int, tokens: int, seed: int, words: tuple[int, int] = WORDS) -> Batch:
    """Random words of random lengths with a random label of two."""
    ids_BL, mask_BL, draw = _texts(size, tokens, seed, words)
    labels_B = torch.randint(0, 2, (size,), generator=draw)
    return Batch(ids_BL, mask_BL, ids_BL[:, :0], labels_B, torch.ones(size), torch.arange(size))


def seq2seq_batch(size: int, tokens: int, targets: int, seed: int) -> Batch:
    """Random words with random answers."""
    ids_BL, mask_BL, draw = _texts(size, tokens, seed, WORDS)
    answers_BT = torch.randint(*WORDS, (size, targets), generator=draw)
    labels_B = torch.full((size,), IGNORE)
    return Batch(ids_BL, mask_BL, answers_BT, labels_B, torch.ones(size), torch.arange(size))


def _texts(size: int, tokens: int, seed: int, words: tuple[int, int]) -> tuple[Tensor, Tensor, torch.Generator]:
    draw = torch.Generator().manual_seed(seed)
    ids_BL = torch.randint(*words, (size, tokens), generator=draw)
    lengths_B1 = torch.randint(tokens // 2, tokens + 1, (size, 1), generator=draw)
    lengths_B1[0] = tokens
    mask_BL = (torch.arange(tokens) < lengths_B1).long()
    return ids_BL * mask_BL, mask_BL, draw
