"""Tasks at the same time (`launch.parallel_tasks`): two on this machine beside one after another, many on a cluster.

Runs of this machine are commands of their own, with caches of their own; what counts is the time of the run, processes
that it starts included, without the start of the command. A cluster is simulated: as many worker groups as there are
tasks, in the order of raycl's own schedule, with times that were measured here, each part alone on one thread. Rows of
more tasks than were measured follow from a line through the measured rows, and so do the tasks that the run joins.
Starting groups is not in these times.

On a machine that others use, `--part cluster --clock processor` counts the seconds that a processor worked, without
waiting for the disk. Two groups are simulated as well, beside the measured run of one task after another.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks.figures import Figure, Report, measured
from raycl import config as configs
from raycl.data.benchmarks import builtin
from raycl.errors import RunError
from raycl.launch import driver
from raycl.launch.local import in_process_worker, work_here
from raycl.launch.parallel_tasks import TaskSchedule, learn_at_once, parts_of
from raycl.launch.prepared_run import Prepared, prepare
from raycl.launch.worker import Worker, work
from raycl.training.definition.job import Resources, TaskPart
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.distributed import DistributedContext
from raycl.training.workers.stopping import HostStop
from raycl.types import Phase

AT_ONCE_LIMIT, CLUSTER_LIMIT = 0.8, 1.2
"""Two tasks at a time take at most 0.8 of the time of one after another, and a cluster with a group for each task 1.2
of the longest task and one row of the matrix."""

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
"""Ways to measure the parts of a run."""

SETTINGS = ("tasks", "rows", "test_rows", "epochs", "method", "groups", "part", "clock")
SEED = 5

PROGRAM = """
import json, sys, time
from raycl import config as configs
from raycl.launch import driver
from raycl.launch.prepared_run import prepare
from raycl.training.setup.run_config import RunConfig

if __name__ == "__main__":
    prepared = prepare(configs.validate(RunConfig, json.loads(sys.argv[1])))
    began = time.perf_counter()
    results = driver.train(prepared)
    print(json.dumps([time.perf_counter() - began, results["matrix"]]))
"""
"""Trains the run of a config; its last line has the seconds and the matrix."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults take about five minutes on two idle cores."""
    parser.add_argument("--tasks", type=int, default=8, help="tasks of each run")
    parser.add_argument("--rows", type=int, default=64, help="train rows per task")
    parser.add_argument("--test-rows", type=int, default=32, help="test rows per task")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--method", choices=["epi", "slm"], default="epi")
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 16, 64], help="worker groups that are simulated")
    parser.add_argument("--part", choices=["machine", "cluster", "both"], default="both")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="what is measured of each part")


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    return measured("parallel", options, SETTINGS, lambda: _figures(options))


def _figures(options: argparse.Namespace) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="raycl-bench-") as name:
        folder = Path(name)
        tree = make_tree(options, folder)
        if options.part != "cluster":
            yield from on_this_machine(tree, folder)
        if options.part != "machine":
            yield from on_a_cluster(Times.of(tree, folder, CLOCKS[options.clock]), options.groups)


def make_tree(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the tasks, and return what all runs share: built-in tasks in turn, each with rows of its own."""
    tasks = []
    for number in range(options.tasks):
        kind = builtin.TASKS[number % len(builtin.TASKS)]
        data = folder / "data" / f"{kind}-{number}"
        data.mkdir(parents=True)
        for split, rows in (("train", options.rows), ("test", options.test_rows)):
            pairs = builtin.rows(kind, split, rows, SEED + number)
            lines = [json.dumps({"text": text, "label": label}) for text, label in pairs]
            (data / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        tasks.append({"name": data.name, "path": str(data)})
    return {
        "stream": {"tasks": tasks, "max_source_tokens": 48},
        "method": options.method,
        "train": {"epochs": options.epochs, "batch_size": 16},
    }


# ---- this machine ----------------------------------------------------------------------------------------------------


def on_this_machine(tree: dict[str, Any], folder: Path) -> Iterator[Figure]:
    """Train the run in turn, two tasks at a time, and in turn with two threads.

    Raises:
        RunError: a run failed, or two tasks at a time gave another matrix.
    """
    ways = {"in turn": (1, 1), "two": (2, 1), "threads": (1, 2)}
    seconds, matrices = {}, {}
    for name, (at_once, threads) in ways.items():
        launch = {"mode": "local", "parallel_tasks": at_once, "cpus_per_worker": threads}
        seconds[name], matrices[name] = trained({**tree, "launch": launch}, folder / name.replace(" ", "-"))
    if matrices["two"] != matrices["in turn"]:
        raise RunError("two tasks at a time gave another matrix than one after another")
    alone = seconds["in turn"]
    what = f"{len(tree['stream']['tasks'])} tasks"
    detail = f"{seconds['two']:.1f} s against {alone:.1f} s, one thread each; the same matrix, bit for bit"
    yield Figure(
        f"{what}, two at a time over one after another", seconds["two"] / alone, "x", AT_ONCE_LIMIT, "<=", detail
    )
    detail = f"{seconds['threads']:.1f} s"
    yield Figure(f"{what} one after another, two threads over one", seconds["threads"] / alone, "x", detail=detail)


def trained(tree: dict[str, Any], folder: Path) -> tuple[float, Any]:
    """Return the seconds and the matrix of a run in a process of its own, whose caches are empty."""
    given = json.dumps({**tree, "output": {"dir": str(folder), "name": "run"}})
    script = folder / "train.py"
    folder.mkdir()
    script.write_text(PROGRAM)  # a file, which the processes that it starts import
    environment = {**os.environ, "RAYCL_CACHE": str(folder / "cache")}
    command = [sys.executable, str(script), given]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RunError(f"the run in '{folder}' ended with {done.returncode}: {done.stderr[-2000:]}")
    seconds, matrix = json.loads(done.stdout.splitlines()[-1])
    return seconds, matrix


# ---- a cluster -------------------------------------------------------------------------------------------------------


@dataclass
class Times:
    """Measured seconds of the parts of a run.

    Attributes:
        learn: of each task. score: of each row, the shortest first. join: of the run that joins all of them.
        join_each: of it, between two tasks. in_turn: of the same run, one task after another.
    """

    learn: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    join: float = 0.0
    join_each: list[float] = field(default_factory=list)
    in_turn: float = 0.0

    @staticmethod
    def of(tree: dict[str, Any], folder: Path, clock: Callable[[], float]) -> Times:
        """Measure them here, one part after the other on one thread."""
        first = {**tree["stream"], "tasks": tree["stream"]["tasks"][:1]}
        warm = {**tree, "stream": first, "train": {**tree["train"], "max_steps": 1}}
        driver.train(_prepared(warm, folder / "warm", 1))  # imports what the first part would wait for
        in_turn, prepared = _prepared(tree, folder, 1), _prepared(tree, folder, 2)
        parts = _TimedParts(prepared, clock)
        learn_at_once(prepared, parts_of(prepared), None, parts)
        join, each = _joined(prepared, clock)
        alone = _seconds(clock, partial(driver.train, in_turn))
        return Times(parts.in_order("learn"), parts.in_order("score"), join, each, alone)

    def of_part(self, part: TaskPart) -> float:
        """Return the seconds of a part of a run with any number of tasks."""
        if part.kind == "learn":
            return self.learn[part.phase % len(self.learn)]
        return self.score[part.phase] if part.phase < len(self.score) else _line(self.score, part.phase)

    def joining(self, tasks: int) -> float:
        """Return the seconds of a run that joins so many tasks."""
        known = len(self.learn)
        more = sum(_line(self.join_each, index) for index in range(known - 1, tasks - 1))
        return self.join + more - sum(self.join_each[tasks - 1 :])


def _prepared(tree: dict[str, Any], folder: Path, at_once: int) -> Prepared:
    launch = {"mode": "local", "cpus_per_worker": 1, "parallel_tasks": at_once}
    output = {"dir": str(folder), "name": f"parts-{at_once}"}
    return prepare(configs.validate(RunConfig, {**tree, "launch": launch, "output": output}))


def _seconds(clock: Callable[[], float], work: Callable[[], object]) -> float:
    began = clock()
    work()
    return clock() - began


def _line(measured: Sequence[float], index: int) -> float:
    """Return what a line through the measured values gives at an index, which does not fall."""
    slope, first = np.polyfit(np.arange(len(measured)), measured, 1) if len(measured) > 1 else (0.0, measured[0])
    return float(first + max(slope, 0.0) * index)


def _joined(prepared: Prepared, clock: Callable[[], float]) -> tuple[float, list[float]]:
    """Return the seconds of the run that joins its tasks, and of them those between two tasks."""
    ends, began = list[float](), clock()
    job = driver.job_of(prepared, driver.RunOptions())
    with in_process_worker():
        work(job, Worker(DistributedContext.alone(torch.device("cpu")), report=lambda _: ends.append(clock())))
    driver.train(prepared)  # what is left to do at the end
    return clock() - began, [after - before for before, after in pairwise(ends)]


class _TimedParts:
    """Does the parts of a run in this process, one at a time, and measures each."""

    def __init__(self, prepared: Prepared, clock: Callable[[], float]) -> None:
        self._prepared, self._clock = prepared, clock
        self._turn = threading.Lock()
        self._seconds: dict[TaskPart, float] = {}

    def __call__(self, part: TaskPart, stop: HostStop) -> None:
        with self._turn:
            job = replace(driver.job_of(self._prepared, driver.RunOptions(stop=stop)), part=part)
            self._seconds[part] = _seconds(self._clock, partial(work_here, job, Resources(1.0)))

    def in_order(self, kind: str) -> list[float]:
        """Return the seconds of the parts of a kind, by phase."""
        parts = sorted((part for part in self._seconds if part.kind == kind), key=lambda part: part.phase)
        return [self._seconds[part] for part in parts]


def on_a_cluster(times: Times, numbers: Sequence[int]) -> Iterator[Figure]:
    """Simulate as many tasks as there are groups, beside the longest task and the last row."""
    yield Figure("a task, measured", fmean(times.learn), "s", detail=f"the longest: {max(times.learn):.2f} s")
    yield Figure("joining a task, measured", fmean(times.join_each), "s", detail="published, with a checkpoint")
    measured_tasks = [Phase(index, str(index), ()) for index in range(len(times.learn))]
    two = simulated(TaskSchedule.of(measured_tasks, (), (), 0), 2, times.of_part) + times.join
    detail = f"{two:.1f} s against {times.in_turn:.1f} s, simulated"
    name = f"{len(measured_tasks)} tasks on two groups over one task after another"
    yield Figure(name, two / times.in_turn, "x", AT_ONCE_LIMIT, "<=", detail)
    for groups in numbers:
        phases = [Phase(index, str(index), ()) for index in range(groups)]
        seconds = simulated(TaskSchedule.of(phases, (), (), 0), groups, times.of_part) + times.joining(groups)
        longest = max(times.of_part(TaskPart("learn", index, "")) for index in range(groups))
        row = times.of_part(TaskPart("score", groups - 1, ""))
        last = f"the last row {row:.1f} s, joining {times.joining(groups):.1f} s"
        detail = f"{seconds:.1f} s; the longest task {longest:.1f} s, {last}; simulated"
        share = seconds / (longest + row)
        yield Figure(
            f"{groups} tasks on {groups} groups over the longest task and a row",
            share,
            "x",
            CLUSTER_LIMIT,
            "<=",
            detail,
        )


def simulated(schedule: TaskSchedule, groups: int, seconds: Callable[[TaskPart], float]) -> float:
    """Return the seconds in which so many groups do the parts of a schedule."""
    now, running, order = 0.0, list[tuple[float, int, TaskPart]](), count()
    while not schedule.is_over:
        while len(running) < groups and (part := schedule.take()) is not None:
            heapq.heappush(running, (now + seconds(part), next(order), part))
        now, _, ended = heapq.heappop(running)
        schedule.end(ended)
    return now
