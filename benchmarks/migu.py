"""Costs and savings of MIGU: step time of plain training, masked dense gradients, and row-sparse ones, in one run.

The contenders have a model, optimizer and gradients each, and take the same batches in turn, every modified step
between two plain ones, so that a machine that slows down slows all; medians over the rounds are compared. Processor
time is taken, since others may be running beside it; `benchmark gpu` measures larger models on a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import Figure, Report, measured
from benchmarks.phases import bare_context
from raycl.backbone import Backbone, BackboneConfig, load_backbone, load_codec
from raycl.config import validate
from raycl.methods.capabilities import Constraint
from raycl.methods.migu.migu import FIRST, MEASURED, Migu, MiguConfig
from raycl.methods.modifier import Modifiers
from raycl.methods.registry import method_class
from raycl.training.engines.engine import NONE, TorchEngine, Transform
from raycl.training.optimizers.settings import TrainConfig
from raycl.training.phase.step import train_step
from raycl.training.workers.distributed import DistributedContext
from raycl.types import IGNORE, Batch, Phase, Task

SETTINGS = ("batch_size", "tokens", "threshold", "rounds", "threads")
LIMITS = {"finetune": 1.00, "lora": 1.03}
"""Row-sparse step time over plain training's."""
WORDS = (1000, 20_000)
"""Ids of ordinary words in the vocabularies of the backbones."""
CONTENDERS: dict[str, MiguConfig | None] = {
    "plain": None,
    "masked dense": MiguConfig(row_sparse=False),
    "row-sparse": MiguConfig(),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults end within five minutes on two cores."""
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="longest row; rows are between half of it and that")
    parser.add_argument("--threshold", type=float, default=0.7, help="T, the share of rows that is masked")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    figures = (figure for method in LIMITS for figure in _on_cpu(method, options))
    return measured("migu", options, SETTINGS, lambda: figures, threads=options.threads)


def _on_cpu(method: str, options: argparse.Namespace) -> Iterator[Figure]:
    config = BackboneConfig(name="minilm", dtype="float32")
    codec = load_codec(config, options.tokens, 1)
    cpu = torch.device("cpu")
    load = partial(load_backbone, config, codec, cpu, 0)
    bench = Bench({name: load() for name in CONTENDERS}, method, options.threshold, cpu)
    where = f"MiniLM, batch {options.batch_size}, {method}"
    batches = [encoder_batch(options.batch_size, options.tokens, number) for number in range(4)]
    yield from figures(where, bench, batches, options.rounds, LIMITS[method])


def figures(where: str, bench: Bench, batches: list[Batch], rounds: int, limit: float) -> Iterator[Figure]:
    """Return a figure for each contender over plain training."""
    timed = bench.times(batches, rounds)
    for name in list(CONTENDERS)[1:]:
        result = timed[name]
        target = limit if name == "row-sparse" else None
        detail = f"{result.own_ms:.1f} ms against {result.plain_ms:.1f} ms a step"
        yield Figure(f"{where}: {name} over plain", result.ratio, "x", target, "<=", detail)
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
        self.world = DistributedContext.alone(device)
        self.twins = {
            name: Twin(backbones[name], method, _with(CONTENDERS[name], threshold), self.world) for name in backbones
        }

    def times(self, batches: list[Batch], rounds: int) -> dict[str, Timed]:
        """Contender -> its step time beside the plain one's."""
        collected: dict[str, list[tuple[float, float]]] = {}
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
                    collected.setdefault(name, []).append((spent, (before + after) / 2))
                before = after
        return {
            name: Timed(
                median(own / plain for own, plain in pairs),
                median(own for own, _ in pairs) * 1e3,
                median(plain for _, plain in pairs) * 1e3,
            )
            for name, pairs in collected.items()
        }

    def _seconds(self, name: str, batch: Batch, seed: int) -> float:
        began = time.process_time()
        self.twins[name].step(batch, seed)
        return time.process_time() - began


class Twin:
    """One model in training."""

    def __init__(self, backbone: Backbone, method: str, migu: MiguConfig | None, world: DistributedContext) -> None:
        self.world = world
        kind = method_class(method)
        self.method = kind(kind.Config(name=method), backbone, 0)
        phase = Phase(0, "bench", (Task("bench", ("no", "yes"), "exact_match"),))
        self.method.begin_task(phase, bare_context(phase))
        self.modifiers = Modifiers({"migu": Migu(migu, self.method)} if migu else {})
        self.modifiers.begin_task(phase, only=True, resumed=False)
        self.engine = TorchEngine(backbone, TrainConfig(learning_rate=1e-5), 1000, world)
        backbone.train()

    def step(self, batch: Batch, seed: int) -> float:
        """Take an optimizer step, and return the gradient's norm."""
        return train_step(self.engine, self.method, [batch], self.world, seed, self.modifiers).grad_norm

    def gradients(self, batch: Batch, seed: int) -> dict[str, Tensor]:
        """Return the modified gradients of a step that is not taken, by parameter."""
        kept = GradientsOnly(self.engine)
        train_step(kept, self.method, [batch], self.world, seed, self.modifiers)
        return kept.found


class GradientsOnly:
    """An engine whose steps update nothing and keep the gradients that they would update with.

    Attributes:
        found: parameter -> gradient, as the modifiers left it.
    """

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.found: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(
        self, modifiers: Modifiers = NONE, transform: Transform | None = None, constraint: Constraint | None = None
    ) -> float:
        """Clear the gradients after they were kept."""
        for name, parameter in self._engine.trained.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            self.found[name] = modifiers(name, gradient)
        self._engine.optimizer.zero_grad()
        return 0.0


def _with(config: MiguConfig | None, threshold: float) -> MiguConfig | None:
    return config and validate(MiguConfig, {**config.model_dump(), "threshold": threshold})


def encoder_batch(size: int, tokens: int, seed: int, words: tuple[int, int] = WORDS) -> Batch:
    """Return random words of random lengths with a random label of two."""
    ids_BL, mask_BL, draw = _texts(size, tokens, seed, words)
    labels_B = torch.randint(0, 2, (size,), generator=draw)
    return Batch(ids_BL, mask_BL, ids_BL[:, :0], labels_B, torch.ones(size), torch.arange(size))


def text_batch(size: int, tokens: int, targets: int, seed: int, words: tuple[int, int] = WORDS) -> Batch:
    """Return random words of random lengths with random answers."""
    ids_BL, mask_BL, draw = _texts(size, tokens, seed, words)
    answers_BT = torch.randint(*words, (size, targets), generator=draw)
    labels_B = torch.full((size,), IGNORE)
    return Batch(ids_BL, mask_BL, answers_BT, labels_B, torch.ones(size), torch.arange(size))


def _texts(size: int, tokens: int, seed: int, words: tuple[int, int]) -> tuple[Tensor, Tensor, torch.Generator]:
    draw = torch.Generator().manual_seed(seed)
    ids_BL = torch.randint(*words, (size, tokens), generator=draw)
    lengths_B1 = torch.randint(tokens // 2, tokens + 1, (size, 1), generator=draw)
    lengths_B1[0] = tokens
    mask_BL = (torch.arange(tokens) < lengths_B1).long()
    return ids_BL * mask_BL, mask_BL, draw
