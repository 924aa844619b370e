"""Streams of two tiny tasks, run on the device and on the CPU from the same start: losses, gradients, answers, resume.

The real training loop, loading code and checkpoints, in temporary folders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.figures import Figure
from raycl import config as configs
from raycl.data.benchmarks import builtin
from raycl.storage import Storage
from raycl.testing.tiny_models import Stop, save_model, stopping
from raycl.training.assembly import build
from raycl.training.records.progress import read_trace
from raycl.training.setup.run_config import RunConfig
from raycl.training.stream_loop import StreamLoop
from raycl.training.workers.distributed import DistributedContext

KINDS = ("bert", "t5", "llama")
TASKS = ("topic", "sentiment")
ROWS, TEST_ROWS, STEPS = 14, 8, 4
"""Train and test rows of a task; 14 rows in batches of 4 are 4 steps, the last one short."""
POSITIONS = 96
EPSILON = 1e-4
"""Epsilon of Adam: the usual 1e-8 turns gradients of mere rounding, which differ by device, into full steps."""
CPU = torch.device("cpu")

MIGU = {"migu": {"threshold": 0.5, "skip_first_task": False}}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({"name": "lora"}, {}),
    "slm": ({"name": "slm", "target_modules": ["attention"], "keys": {"groups": 4, "steps": 20, "start": "data"}}, {}),
    "sapt": ({"name": "sapt"}, {}),
    "replay": ({"name": "replay"}, {}),
    "migu, finetune": ({"name": "finetune"}, MIGU),
    "migu, lora": ({"name": "lora"}, MIGU),
}
"""Name -> settings of the method, and gradient modifiers."""


@dataclass(frozen=True)
class Tolerances:
    """Largest differences to the CPU, as shares: of losses, of gradient norms, and of all answers those that differ."""

    loss: float
    norm: float
    answers: float


TOLERANCES = {"float32": Tolerances(1e-3, 1e-2, 0.1), "bfloat16": Tolerances(0.05, 0.5, 1.0)}
"""Tolerances by dtype; after steps in bfloat16, tiny models' answers mean little."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: (loss, gradient norm) of every step, and the answers to the test rows after the last
    task."""

    steps: tuple[tuple[float, float], ...]
    answers: tuple[str, ...]


class Battery:
    """Models and runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        texts = [text for task in TASKS for split in ("train", "test") for text, _ in builtin.rows(task, split, 40, 0)]
        labels = [label for task in TASKS for label in builtin.labels(task)]
        self.words = sorted({word for text in [*texts, *labels] for word in text.lower().split()})
        self._runs = 0

    def model(self, kind: str) -> str:
        """Return the folder of the saved model."""
        folder = self.folder / "models" / kind
        return str(folder if folder.is_dir() else save_model(kind, folder, self.words, POSITIONS))

    def config(self, kind: str, family: str, dtype: str) -> RunConfig:
        """Return the config of one run."""
        method, modifiers = FAMILIES[family]
        if method["name"] == "slm":
            method = {**method, "encoder": {"name": self.model("bert"), "max_tokens": POSITIONS // 2}}
        limits = {"max_source_tokens": POSITIONS // 2, "max_target_tokens": 4}
        tree = {
            "stream": {"tasks": list(TASKS), "train_rows": ROWS, "test_rows": TEST_ROWS, "dev_fraction": 0, **limits},
            "backbone": {"name": self.model(kind), "dtype": dtype},
            "method": method,
            "modifiers": modifiers,
            "train": {"epochs": 1, "batch_size": 4, "learning_rate": 0.01, "epsilon": EPSILON, "log_every_s": 1000},
            "checkpoint": {"every_steps": 2},
            "eval": {"batch_size": 4},
        }
        return configs.validate(RunConfig, tree)

    def run(self, config: RunConfig, device: torch.device, after: int | None = None) -> Outcome:
        """Run it on a device; `after` so many steps it is killed and then resumed."""
        self._runs += 1
        storage = Storage.at(self.folder / f"run{self._runs}")
        with cache_in(self.folder / f"cache{self._runs}"):
            if after is not None:
                with suppress(Stop):
                    self._attempt(config, storage, device, after)
            self._attempt(config, storage, device, None)
        steps = tuple((step["loss"], step["grad_norm"]) for step in read_trace(storage))
        folder = f"predictions/{len(TASKS) - 1:03d}-{TASKS[-1]}"
        rows = [json.loads(row) for task in TASKS for row in storage.read(f"{folder}/{task}.jsonl").splitlines()]
        return Outcome(steps, tuple(row["answer"] for row in rows))

    @staticmethod
    def _attempt(config: RunConfig, storage: Storage, device: torch.device, after: int | None) -> None:
        world = DistributedContext.alone(device)
        context, open_engine = build(config, world)
        opened = open_engine if after is None else stopping(open_engine, after)
        StreamLoop(context, opened, storage, world).run()


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Use a cache of its own, so that the user's cache is neither read nor written."""
    before = os.environ.get("RAYCL_CACHE")
    os.environ["RAYCL_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAYCL_CACHE"]
        else:
            os.environ["RAYCL_CACHE"] = before


def compare(battery: Battery, kind: str, family: str, dtype: str, device: torch.device) -> Figure:
    """Return the largest difference to the CPU, as a share of its tolerance; and, in float32, to a run that was
    resumed."""
    config, allowed = battery.config(kind, family, dtype), TOLERANCES[dtype]
    expected, result = battery.run(config, CPU), battery.run(config, device)
    context = _differences(result, expected, allowed)
    if dtype == "float32":
        resumed = battery.run(config, device, after=STEPS + STEPS // 2 + 1)
        context |= {f"{name} after resume": value for name, value in _differences(resumed, result, allowed).items()}
    worst = max(value / limit for value, limit in context.values())
    words = ", ".join(f"{name} {value:.2g} of {limit:g}" for name, (value, limit) in context.items() if value)
    return Figure(f"{dtype}, {kind}, {family}", worst, "x", 1.0, "<=", words or "no difference at all")


def _differences(outcome: Outcome, expected: Outcome, allowed: Tolerances) -> dict[str, tuple[float, float]]:
    """Return name -> difference and its tolerance."""
    assert len(outcome.steps) == len(expected.steps), f"{len(outcome.steps)} steps, expected {len(expected.steps)}"
    pairs = list(zip(outcome.steps, expected.steps, strict=True))
    return {
        "loss": (max(_share(mine[0], its[0]) for mine, its in pairs), allowed.loss),
        "gradient norm": (max(_share(mine[1], its[1]) for mine, its in pairs), allowed.norm),
        "answers": (mean(a != b for a, b in zip(outcome.answers, expected.answers, strict=True)), allowed.answers),
    }


def _share(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1e-6)
