"""Evaluation in one continuous batch beside Hugging Face's `generate` on padded batches: same model, same rows.

`generate` is measured twice: as `eval.decoding=generate` runs it, with attention and products for inference and last
states in one piece (`raycl.backbone.load`), and "by itself", without them, on the model as it trains.

A LoRA is trained on the tasks together for a few steps, until its answers end as answers do. Then all ways answer all
test rows, in turn and round after round: with the adapter as it is, so that all rows have one mixture and share the
reading of their task's definition; and with a weight of its own for each row, as SAPT and SLM give, where nothing can
be shared.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.figures import Figure, Report, measured
from raycl import config as configs
from raycl.backbone import Backbone
from raycl.methods.single_adapter import Lora
from raycl.routing.routers import SingleRouter
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.evaluation import StreamEvaluation
from raycl.training.phase.routing import PublishedRouter
from raycl.training.setup.run_config import RunConfig
from raycl.training.stream_loop import StreamLoop
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Mixture

log = logging.getLogger(__name__)

WAYS = ("auto", "generate", "generate by itself")
TARGET = 0.5
SETTINGS = (
    "backbone",
    "tasks",
    "rows",
    "steps",
    "rounds",
    "batch_size",
    "source_tokens",
    "target_tokens",
    "dtype",
    "threads",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults end within five minutes on two cores with 20 million parameters."""
    tasks = ["task363", "task875", "task1572", "task591"]
    parser.add_argument("--backbone", required=True, help="folder or name of a model that generates")
    parser.add_argument("--data", type=Path, required=True, help="folder with SuperNI tasks in CL_Benchmark's layout")
    parser.add_argument("--tasks", nargs="+", default=tasks, help="two of labels, two of free text")
    parser.add_argument("--rows", type=int, default=40, help="test rows of each task at most")
    parser.add_argument("--steps", type=int, default=40, help="of training, eight rows each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="as eval.batch_size")
    parser.add_argument("--source-tokens", type=int, default=128)
    parser.add_argument("--target-tokens", type=int, default=24)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads")


def measure(options: argparse.Namespace) -> Report:
    """Train, answer, report."""
    with tempfile.TemporaryDirectory() as folder:
        figures = partial(_figures, options, Storage.at(folder))
        return measured("evaluation", options, SETTINGS, figures, threads=options.threads)


def _figures(options: argparse.Namespace, storage: Storage) -> Iterator[Figure]:
    context = _trained(options, storage)
    owners = {Lora.adapter: tuple(task.name for task in context.stream.tasks)}
    kinds = {"one mixture": SingleRouter, "a mixture for each row": _VariedRouter}
    for name, kind in kinds.items():
        router = PublishedRouter(context.method, kind(owners), owners)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        cpu: dict[str, list[float]] = {way: [] for way in WAYS}
        answers: dict[str, list[dict[str, Any]]] = {}
        for number in range(options.rounds):
            for way in WAYS:
                began, used = time.perf_counter(), time.process_time()
                answers[way] = _evaluated(context, storage, router, way)
                seconds[way].append(time.perf_counter() - began)
                cpu[way].append(time.process_time() - used)
            log.info(
                "%s, round %d: %.1f s, generate %.1f s, by itself %.1f s",
                name,
                number + 1,
                *(seconds[way][-1] for way in WAYS),
            )
        rows = len(answers["auto"])
        yield Figure(f"{name}: rows answered per second", rows / median(seconds["auto"]), "rows/s")
        for way in WAYS[1:]:
            yield Figure(f"{name}: {way}, on padded batches", rows / median(seconds[way]), "rows/s")
            by_cpu, by_clock = (_ratio(took["auto"], took[way]) for took in (cpu, seconds))
            differ = sum(mine != other for mine, other in zip(answers["auto"], answers[way], strict=True))
            detail = f"{rows} rows, {differ} with another answer; by CPU time {by_cpu:.2f}"
            target = TARGET if way == WAYS[-1] else None
            yield Figure(f"{name}: time over that of {way}", by_clock, "x", target, detail=detail)


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over rounds."""
    return median(item / other for item, other in zip(mine, theirs, strict=True))


def _trained(options: argparse.Namespace, storage: Storage) -> TrainingContext:
    """Return a model whose answers end."""
    tree = _learned_by_lora(options)
    tree["stream"] |= {"schedule": "joint", "train_rows": 2 * options.steps}
    tree["eval"] = {"subsample": 1, "batch_size": options.batch_size}
    context, open_engine = build(configs.validate(RunConfig, tree), DistributedContext.alone(torch.device("cpu")))
    began = time.perf_counter()
    StreamLoop(context, open_engine, storage, DistributedContext.alone(torch.device("cpu"))).run()
    log.info("trained in %.0f s", time.perf_counter() - began)
    return context


def _learned_by_lora(options: argparse.Namespace) -> dict[str, Any]:
    """Return sections of a run that learns the tasks with LoRA until its answers end, with the flags' sizes."""
    return {
        "stream": {
            "name": "superni",
            "root": str(options.data),
            "tasks": options.tasks,
            "prompt": "superni",
            "test_rows": options.rows,
            "max_source_tokens": options.source_tokens,
            "max_target_tokens": options.target_tokens,
        },
        "backbone": {"name": options.backbone, "dtype": options.dtype},
        "method": "lora",
        "train": {"max_steps": options.steps, "epochs": 1000, "batch_size": 8, "learning_rate": 3e-3},
    }


class _VariedRouter(SingleRouter):
    """A weight of its own for each row, near the one that was trained."""

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """Route by the length of a text."""
        mixture = super().route(texts, tasks)
        nudge_B1 = torch.tensor([[1 + 0.01 * (len(text) % 7)] for text in texts])
        return replace(mixture, weights=mixture.weights * nudge_B1)


def _evaluated(context: TrainingContext, storage: Storage, router: PublishedRouter, way: str) -> list[dict[str, Any]]:
    """Return the answers to all test rows of all tasks."""
    update = {"decoding": way.partition(" ")[0], "subsample": None}
    context.evaluation = context.evaluation.model_copy(update=update)
    phase, world = context.phases[-1], DistributedContext.alone(torch.device("cpu"))
    with _as_it_trains(context.backbone) if way == WAYS[-1] else nullcontext():
        StreamEvaluation(context, world, storage, router).row(phase)
    folder = f"predictions/{phase.index:03d}-{phase.name}"
    return [json.loads(row) for task in phase.tasks for row in storage.read(f"{folder}/{task.name}.jsonl").splitlines()]


@contextmanager
def _as_it_trains(backbone: Backbone) -> Iterator[None]:
    """Compute inside as in training, without what makes inference faster."""
    head, attention = backbone.model.get_output_embeddings(), backbone.inference_attention
    hooks, by_onednn = dict(head._forward_pre_hooks), backbone.inference_by_onednn
    head._forward_pre_hooks.clear()
    backbone.inference_attention, backbone.inference_by_onednn = None, False
    try:
        yield
    finally:
        head._forward_pre_hooks.update(hooks)
        backbone.inference_attention, backbone.inference_by_onednn = attention, by_onednn
