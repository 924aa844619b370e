"""One trial each of the plain loop and of raycl: the same work, measured the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.streams.worksheet import Sheet
from raycl.errors import RunError
from raycl.launch import driver
from raycl.launch.prepared_run import prepare
from raycl.storage import Storage
from raycl.training.records.journal import read_state
from raycl.training.records.progress import read_trace
from raycl.training.setup.run_config import RunConfig


@dataclass(frozen=True)
class Trial:
    """Costs and results of one run of the work.

    Attributes:
        losses, step_s: loss and seconds of every optimizer step.
        eval_s: seconds of all evaluations together.
        answers: answers to every test row, after every task.
        tokens: read in all steps.
        peak_memory_mb: peak memory of the largest worker.
        start_s: seconds from the call of Ray Train until rank 0 has claimed the run; 0 for the plain loop.
        wall_s: seconds of the entire run, including processes.
    """

    losses: list[float]
    step_s: list[float]
    eval_s: float
    answers: list[str]
    tokens: int
    peak_memory_mb: float
    start_s: float
    wall_s: float

    @property
    def rest_s(self) -> float:
        """Neither start, step nor evaluation: tokenising, checkpoints, leaving."""
        return self.wall_s - self.start_s - sum(self.step_s) - self.eval_s


@dataclass(frozen=True)
class Typical:
    """Several trials of one kind as one: each step's time is its median over the trials."""

    trials: list[Trial]

    @property
    def step_s(self) -> list[float]:
        """The seconds per step."""
        return [median(times) for times in zip(*(trial.step_s for trial in self.trials), strict=True)]

    def of(self, name: str) -> float:
        """Return the median of `eval_s`, `wall_s`, `rest_s`, `start_s` or `peak_memory_mb`."""
        return median(float(getattr(trial, name)) for trial in self.trials)

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second in training."""
        return self.trials[0].tokens / sum(self.step_s)


def run_plain(sheet: Sheet, folder: Path) -> Trial:
    """Return the plain loop in a process of its own, with the threads and the priority of a worker.

    Raises:
        RunError: it failed; the message ends in its last words.
    """
    work, report = folder / "worksheet.json", folder / "report.json"
    work.write_text(json.dumps({**sheet, "niceness": worker_niceness()}))
    threads = str(sheet["threads"])
    command = [sys.executable, "-m", "benchmarks.streams.plain", str(work), str(report)]
    began = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": threads}, capture_output=True, text=True, check=False
    )
    wall = time.perf_counter() - began
    if done.returncode:
        raise RunError(f"the plain loop failed: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    tree = json.loads(report.read_text())
    steps = tree["steps"]
    return Trial(
        losses=[step["loss"] for step in steps],
        step_s=[step["seconds"] for step in steps],
        eval_s=sum(tree["eval_s"]),
        answers=[text for row in tree["answers"] for texts in row.values() for text in texts],
        tokens=sum(step["tokens"] for step in steps),
        peak_memory_mb=tree["peak_memory_mb"],
        start_s=0.0,
        wall_s=wall,
    )


def worker_niceness() -> int:
    """Return what Ray gives its workers (2.60, observed): at another priority a busy machine would slow one side
    only."""
    return int(os.environ.get("RAY_worker_niceness", "15"))  # noqa: SIM112  Ray spells it so


def run_raycl(config: RunConfig) -> Trial:
    """Return a run through Ray Train, from an empty folder and an empty cache to its results."""
    began = time.time()
    prepared = prepare(config)
    called = time.time()
    results = driver.train(prepared)
    wall = time.time() - began
    steps = read_trace(prepared.storage)
    times = results["phase_times"]
    return Trial(
        losses=[step["loss"] for step in steps],
        step_s=[step["seconds"] for step in steps],
        eval_s=sum(phase["eval_s"] for phase in times),
        answers=_answers(prepared.storage, results),
        tokens=sum(phase["tokens"] for phase in times),
        peak_memory_mb=results["peak_memory_mb"],
        start_s=read_state(prepared.storage).attempts[0]["started"] - called,
        wall_s=wall,
    )


def _answers(storage: Storage, results: dict[str, Any]) -> list[str]:
    """Return the kept answers after every phase, of the tasks in stream order."""
    tasks = results["stream"]["tasks"]
    answers = []
    for index, phase in enumerate(results["phases"]):
        for task in tasks[: index + 1]:
            rows = storage.read(f"predictions/{index:03d}-{phase}/{task}.jsonl").splitlines()
            answers += [json.loads(row)["answer"] for row in rows]
    return answers
