"""Costs of a growing bank for SLM and SAPT after 5, 20 and 100 tasks: time per step and answer, memory, checkpoints.

Many small tasks stand for many tasks: each has its own keys (of its own part of the texts), slots and label rows; the
slots of earlier tasks are drawn, since what they hold does not change what they cost. SAPT applies every task's adapter
above the pruning threshold of its attention: their number depends on how sharp it is, so keys can be scaled.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median
from typing import Any

import psutil
import torch

from benchmarks.figures import Figure, Report, measured
from raycl import config as configs
from raycl.adapters import AdapterStack
from raycl.data.loader import Collate
from raycl.generation.batch_answers import predict
from raycl.methods.base import activate_batch, trained_names
from raycl.methods.context import TaskContext
from raycl.methods.pseudo_samples.samples import PseudoSamples
from raycl.methods.sapt.sapt import Sapt
from raycl.methods.slm.slm import Slm
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.phase.step import train_step
from raycl.training.records.checkpoint import Checkpoint, write_checkpoint
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.distributed import DistributedContext
from raycl.types import AdapterState, Batch, Phase

LIMITS = {"slm": (1.1, 1.5), "sapt": (2.0, 2.0)}
"""Time per step and per answer over those of the fewest tasks. SLM evaluates its top K however many tasks there are;
SAPT every active adapter, which with drawn keys is all: twenty times the tasks for at most twice the time."""
CHECKPOINT_LIMIT = 1.2
SETTINGS = ("tasks", "batch_size", "rounds", "threads", "method", "router", "sharpness")
WARM = 2
"""Rounds before those that count."""

PSEUDO_INPUTS = 20
"""2 % of a thousand rows."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults end within five minutes on two cores."""
    parser.add_argument("--tasks", type=int, nargs="+", default=[5, 20, 100], help="tasks learned before")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12, help="steps and batches that are timed")
    parser.add_argument("--method", choices=["slm", "sapt"], default="slm")
    parser.add_argument("--sharpness", type=float, default=1.0, help="sapt: keys are drawn so many times as large")
    parser.add_argument("--router", choices=["keys", "discriminant"], default="discriminant")
    parser.add_argument("--threads", type=int, default=1)


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    return measured("growth", options, SETTINGS, lambda: _figures(options), threads=options.threads)


def _figures(options: argparse.Namespace) -> Iterator[Figure]:
    is_slm = options.method == "slm"
    step_limit, answer_limit = LIMITS[options.method]

    def make(tasks: int) -> Grown:
        size = (tasks, options.batch_size, options.rounds)
        return GrownSlm(*size, options.router) if is_slm else GrownSapt(*size, options.sharpness)

    few = min(options.tasks)
    for tasks in options.tasks:
        grown = make(tasks)
        memory = psutil.Process().memory_info().rss / 2**20
        pair = [grown] if tasks == few else [grown, make(few)]  # step by step in turn: a machine's speed drifts
        (step, *others), (answer, *answers) = steps_s(pair), answers_s(pair)
        yield Figure(f"{tasks} tasks: time per step", step * 1e3, "ms")
        yield Figure(
            f"{tasks} tasks: time per answer", answer * 1e3 / options.batch_size, "ms", detail="encoder left out"
        )
        for other in others:
            yield Figure(f"{tasks} tasks: time per step over {few} tasks'", step / other, "x", step_limit)
        for other in answers:
            yield Figure(f"{tasks} tasks: time per answer over {few} tasks'", answer / other, "x", answer_limit)
        size, *sizes = map(checkpoint_bytes, pair)
        yield Figure(f"{tasks} tasks: size of a checkpoint", size / 2**20, "MiB", detail="with objects that are new")
        for other in sizes:
            yield Figure(f"{tasks} tasks: size of a checkpoint over {few} tasks'", size / other, "x", CHECKPOINT_LIMIT)
        yield Figure(f"{tasks} tasks: adapters active in a batch", grown.recorded(), "")
        yield Figure(f"{tasks} tasks: slots, on the device", grown.stack.pool.bytes / 2**20, "MiB")
        yield Figure(f"{tasks} tasks: resident memory", memory, "MiB")


class Grown:
    """A method on MiniLM that has learned `tasks` tasks and is about to learn another."""

    method: Slm | Sapt

    def __init__(self, tasks: int, batch_size: int, rounds: int, settings: dict[str, Any]) -> None:
        tree: dict[str, Any] = {
            "stream": {"name": "builtin", "tasks": ["topic"], "max_source_tokens": 64},
            "method": settings,
            "train": {"batch_size": batch_size},
        }
        self.rounds = rounds
        self.world = DistributedContext.alone(torch.device("cpu"))
        self.context, self.open_engine = build(configs.validate(RunConfig, tree), self.world)
        codec = self.context.backbone.codec
        self.table = self.context.stream.table(self.context.phases[0].tasks[0], "train", codec)
        self.draw = torch.Generator().manual_seed(0)
        self.learn(tasks)
        self.before = self.method.state_dict()[1].groups
        phase = self.context.phases[0]
        self.task_context = TaskContext(phase, batch_size, self.context.stream, codec)
        if isinstance(self.method, Slm):
            queries = self.method.encoder.embed(self.table.texts(range(len(self.table))))
            self.task_context.phases = (phase,)
            self.task_context.queries = {phase.index: {"train": queries, "dev": queries[:2]}}
        self.method.begin_task(phase, self.task_context)
        collate = Collate([self.table], codec.pad_id, self.context.backbone.label_ids(), texts=True)
        size = batch_size
        rows = [torch.arange(start, start + size).numpy() for start in range(0, len(self.table) - size, size)]
        self.batches: list[Batch] = [collate(chosen, size) for chosen in rows]

    def learn(self, tasks: int) -> None:
        """Learn drawn tasks."""
        raise NotImplementedError

    @property
    def stack(self) -> AdapterStack:
        """The method's stack."""
        assert self.method.stack is not None
        return self.method.stack

    def slot(self, rank: int, scale: float) -> AdapterState:
        """Return an adapter of an earlier task."""

        def small(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=self.draw) * 0.01

        layers = self.stack.layers.items()
        pairs = {path: (small(rank, layer.inputs), small(layer.outputs, rank)) for path, layer in layers}
        return AdapterState(pairs, scale, None, ("yes", "no"), small(2, 384), small(2))

    def recorded(self) -> float:
        """Return the mean number of adapters in a batch's mixture, between tasks."""
        return mean(len(self.method.route(batch).names) for batch in self.batches)

    def batch(self, number: int) -> Batch:
        """Return the batch of a round."""
        return self.batches[number % len(self.batches)]

    def answer(self, number: int) -> None:
        """Answer a batch whose queries are known, choosing among all tasks."""
        batch = self.batch(number)
        with activate_batch(self.method, batch):
            predict(self.context.backbone, batch, 1)


def steps_s(all_grown: Sequence[Grown]) -> list[float]:
    """Return the median seconds of an optimizer step of each on its new task, which ends with the last step."""
    rounds = all_grown[0].rounds + WARM
    engines = [grown.open_engine(1, rounds) for grown in all_grown]
    for grown in all_grown:
        grown.context.backbone.train()

    def step(position: int, number: int) -> None:
        grown = all_grown[position]
        train_step(engines[position], grown.method, [grown.batch(number)], grown.world, number)

    turns = _in_turn(step, len(all_grown), rounds)
    for grown, engine in zip(all_grown, engines, strict=True):
        grown.task_context.parameters = engine.parameters(trained_names(grown.context.backbone))
        engine.close()
        grown.method.end_task(grown.task_context)
    return turns


def checkpoint_bytes(grown: Grown) -> int:
    """Return what the checkpoint at the end of the new task writes where that of the task before is stored."""
    values, tensors = grown.method.state_dict()
    checkpoint = Checkpoint(0, 1, 1, values, dict(grown.task_context.parameters), frozen_state=tensors)
    with tempfile.TemporaryDirectory() as folder:
        storage = Storage.at(folder)
        objects = TensorObjects(storage)
        for group, held in grown.before.items():
            objects.put(group, held)
        stored = sum(file.size for file in storage.files().values())
        write_checkpoint(storage, "end", checkpoint, objects)
        return sum(file.size for file in storage.files().values()) - stored


@torch.no_grad()
def answers_s(all_grown: Sequence[Grown]) -> list[float]:
    """Return the median seconds of each to answer a batch, between tasks."""
    for grown in all_grown:
        grown.context.backbone.eval()
    rounds = all_grown[0].rounds + WARM
    return _in_turn(lambda index, number: all_grown[index].answer(number), len(all_grown), rounds)


def _in_turn(act: Callable[[int, int], None], places: int, rounds: int) -> list[float]:
    spent: list[list[float]] = [[] for _ in range(places)]
    for number in range(rounds):
        for index in range(places):
            began = time.perf_counter()
            act(index, number)
            spent[index].append(time.perf_counter() - began)
    return [median(times[WARM:]) for times in spent]


class GrownSlm(Grown):
    """SLM with keys of each task's own part of the texts."""

    method: Slm

    def __init__(self, tasks: int, batch_size: int, rounds: int, router: str) -> None:
        super().__init__(tasks, batch_size, rounds, {"name": "slm", "router": router})

    def learn(self, tasks: int) -> None:
        """Keys and slots."""
        assert isinstance(self.context.method, Slm)
        self.method = self.context.method
        queries = self.method.encoder.embed(self.table.texts(range(len(self.table))))
        for number in range(tasks):
            mine = queries[torch.randperm(len(queries), generator=self.draw)[:32]]
            centre = mine + torch.randn(1, queries.shape[1], generator=self.draw) * queries.std()
            phase = Phase(number, f"old{number}", ())
            self.method.fit(phase, centre, centre[:2])
            names = self.method.router.adapters(phase.name)
            self.method._load({name: self.slot(self.method.config.r, 1.0) for name in names})


class GrownSapt(Grown):
    """SAPT with keys that are drawn, and pseudo-samples of every task."""

    method: Sapt

    def __init__(self, tasks: int, batch_size: int, rounds: int, sharpness: float) -> None:
        self.sharpness = sharpness
        super().__init__(tasks, batch_size, rounds, {"name": "sapt"})

    def learn(self, tasks: int) -> None:
        """Draw keys, adapters and entries of the replay buffer."""
        assert isinstance(self.context.method, Sapt)
        self.method = self.context.method
        config, attention = self.method.config, self.method.attention
        sources = [ids.tolist() for ids in self.table.columns(range(PSEUDO_INPUTS)).source_ids]
        for number in range(tasks):
            name = f"old{number}"
            key = (torch.rand(attention.dimensions, generator=self.draw) * 2 - 1) * self.sharpness
            attention.begin(name, number)
            attention.end({**attention.tensors(), "key": key})
            self.method._load({name: self.slot(config.r, config.scaling)})
            self.method.reflection.samples[name] = PseudoSamples(sources, [], [])
            self.method.reflection.abar[name] = torch.full((number + 1,), 1 / (number + 1))
