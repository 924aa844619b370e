"""What a growing bank costs SLM: time per step, time per answer and memory after 5, 20 and 100 tasks.

Many small tasks stand for many tasks: each has its own keys (of its own part of the texts), slots and label rows; the
slots of earlier tasks are drawn, since what they hold does not change what they cost.
What it does not know: how a stream is trained.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import psutil
import torch

from raycl import config as configs
from raycl.bench.figures import Figure, Report, machine
from raycl.data.loader import Collate
from raycl.methods.slm import Slm
from raycl.run import RunConfig, build
from raycl.train.step import train_step
from raycl.train.world import World
from raycl.types import AdapterState, Batch, Stage

STEP_LIMIT, ANSWER_LIMIT, BUSY = 1.1, 1.5, 0.5
SETTINGS = ("tasks", "batch_size", "rounds", "threads", "router")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Sizes; the defaults end within five minutes on two cores."""
    parser.add_argument("--tasks", type=int, nargs="+", default=[5, 20, 100], help="tasks learned before")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12, help="steps and batches that are timed")
    parser.add_argument("--router", choices=["keys", "discriminant"], default="discriminant")
    parser.add_argument("--threads", type=int, default=1)


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    before, threads = os.getloadavg()[0], torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        figures = list(_figures(options))
    finally:
        torch.set_num_threads(threads)
    notes = [f"the load was {before:.1f} when this began: times say little"] if before > BUSY else []
    settings = {key: value for key, value in vars(options).items() if key in SETTINGS}
    return Report("growth", settings, figures, machine(before), notes)


def _figures(options: argparse.Namespace) -> Iterator[Figure]:
    first: tuple[float, float] | None = None
    for tasks in options.tasks:
        grown = Grown(tasks, options.batch_size, options.rounds, options.router)
        step, answer = grown.step_s(), grown.answer_s()
        first = first or (step, answer)
        yield Figure(f"{tasks} tasks: time per step", step * 1e3, "ms")
        yield Figure(
            f"{tasks} tasks: time per step over {options.tasks[0]} tasks'", step / first[0], "x", STEP_LIMIT, "<="
        )
        yield Figure(
            f"{tasks} tasks: time per answer", answer * 1e3 / options.batch_size, "ms", detail="encoder left out"
        )
        yield Figure(
            f"{tasks} tasks: time per answer over {options.tasks[0]} tasks'", answer / first[1], "x", ANSWER_LIMIT, "<="
        )
        yield Figure(f"{tasks} tasks: slots, on the device", grown.method.stack.pool.bytes / 2**20, "MiB")
        yield Figure(f"{tasks} tasks: resident memory", psutil.Process().memory_info().rss / 2**20, "MiB")


class Grown:
    """SLM on MiniLM that has learned `tasks` tasks and is about to learn another."""

    def __init__(self, tasks: int, batch_size: int, rounds: int, router: str) -> None:
        tree: dict[str, Any] = {
            "stream": {"name": "builtin", "tasks": ["topic"], "max_source_tokens": 64},
            "method": {"name": "slm", "router": router},
            "train": {"batch_size": batch_size},
        }
        self.rounds = rounds
        self.world = World.alone(torch.device("cpu"))
        self.parts, self.open_engine = build(configs.validate(RunConfig, tree), self.world)
        assert isinstance(self.parts.method, Slm)
        self.method = self.parts.method
        table = self.parts.stream.table(self.parts.stages[0].tasks[0], "train", self.parts.backbone.codec)
        texts = table.texts(range(len(table)))
        queries = self.method.encoder.embed(texts)
        draw = torch.Generator().manual_seed(0)
        for number in range(tasks):
            mine = queries[torch.randperm(len(queries), generator=draw)[:32]]
            centre = mine + torch.randn(1, queries.shape[1], generator=draw) * queries.std()
            stage = Stage(number, f"old{number}", ())
            self.method.study(stage, centre, centre[:2])
            self.method._keep({name: self._slot(draw) for name in self.method.router.adapters(stage.name)})
        self.method.study(self.parts.stages[0], queries, queries[:2])
        self.method.begin_task(self.parts.stages[0], resumed=False)
        collate = Collate([table], self.parts.backbone.label_ids(), self.parts.backbone.codec.pad_id, texts=True)
        size = batch_size
        rows = [torch.arange(start, start + size).numpy() for start in range(0, len(table) - size, size)]
        self.batches: list[Batch] = [collate(chosen, size) for chosen in rows]

    def _slot(self, draw: torch.Generator) -> AdapterState:
        def small(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw) * 0.01

        rank, layers = self.method.config.rank, self.method.stack.layers.items()
        pairs = {path: (small(rank, layer.inputs), small(layer.outputs, rank)) for path, layer in layers}
        return AdapterState(pairs, 1.0, None, ("yes", "no"), small(2, 384), small(2))

    def step_s(self) -> float:
        """Median seconds of an optimizer step on the new task."""
        engine = self.open_engine(1, self.rounds + 2)
        self.parts.backbone.train()
        spent = []
        for number in range(self.rounds + 2):
            began = time.perf_counter()
            train_step(engine, self.method, [self.batches[number % len(self.batches)]], self.world, number)
            spent.append(time.perf_counter() - began)
        self.tensors = engine.parameters(self.method.learned_names())
        engine.close()
        return median(spent[2:])

    def answer_s(self) -> float:
        """Median seconds to answer a batch whose queries are known, choosing among all tasks."""
        self.method.end_task(self.parts.stages[0], self.tensors)
        self.parts.backbone.eval()
        spent = []
        for number in range(self.rounds + 2):
            batch = self.batches[number % len(self.batches)]
            began = time.perf_counter()
            with self.method.speaking(batch):
                self.parts.backbone.predict(batch, 1)
            spent.append(time.perf_counter() - began)
        return median(spent[2:])
