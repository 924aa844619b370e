"""The time that users wait before anything happens: `import raycl`, the help of a command, a run's first step.

And twelve short runs under `raycl compare`, whose worker stays between runs (`benchmarks.many_runs`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

from benchmarks.figures import Figure, Report, machine
from benchmarks.many_runs import measure_runs
from raycl.errors import WrongResultError

CASES: dict[str, tuple[Sequence[str], float | None]] = {
    "python alone": (("-c", "pass"), None),
    "import raycl": (("-c", "import raycl"), 0.1),
    "raycl --help": (("-m", "raycl.cli.main", "--help"), 0.3),
    "raycl train --help": (("-m", "raycl.cli.main", "train", "--help"), 0.3),
    "raycl train --print-config": (("-m", "raycl.cli.main", "train", "--print-config"), None),
}
"""Name -> arguments of Python, and the longest that it may take in seconds."""


RUN = ("train", "stream.tasks=[topic]", "train.max_steps=200", "train.log_every_s=0.001", "output.name=run")
LOCAL_S, LOCAL_OF_RAY = 4.0, 0.35
"""Longest time from the command to the first step in one process, in seconds and as a share of Ray's."""

PATIENCE_S = 300.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes."""
    parser.add_argument("--rounds", type=int, default=7, help="starts of each")
    parser.add_argument("--runs", type=int, default=3, help="runs of each mode until their first step")
    parser.add_argument("--compared", type=int, default=12, help="runs of a comparison; 0: none is measured")
    parser.add_argument("--before", type=Path, help="another checkout of raycl, whose `raycl compare` is the reference")


def measure(options: argparse.Namespace) -> Report:
    """Report the median seconds of each start, in turn."""
    load = os.getloadavg()[0]
    spent: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, (words, _) in CASES.items():
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, *words],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
            spent[name].append(time.perf_counter() - began)
    figures = [Figure(name, median(spent[name]), "s", target) for name, (_, target) in CASES.items()]
    runs: dict[str, list[tuple[float, float]]] = {"local": [], "ray": []}
    for _ in range(options.runs):
        for mode, taken in runs.items():
            taken.append(first_step(mode))
    figures += list(_figures(runs)) if options.runs else []
    if options.compared:
        with tempfile.TemporaryDirectory(prefix="raycl-startup-") as folder:
            figures += measure_runs(options.compared, Path(folder), options.before)
    settings = {name: getattr(options, name) for name in ("rounds", "runs", "compared")}
    return Report("startup", {**settings, "before": str(options.before)}, figures, machine(load))


def _figures(runs: dict[str, list[tuple[float, float]]]) -> Iterator[Figure]:
    """Yield seconds from the command to the first step in both modes, and their ratios."""
    wall, processor = ({mode: median(pair[k] for pair in taken) for mode, taken in runs.items()} for k in (0, 1))
    for mode, target in (("local", LOCAL_S), ("ray", None)):
        name = f"raycl train launch.mode={mode}, to the first step"
        yield Figure(name, wall[mode], "s", target, detail=f"{processor[mode]:.1f} s of processor time")
    yield Figure("local over ray, to the first step", wall["local"] / wall["ray"], "x", LOCAL_OF_RAY)
    yield Figure("local over ray, processor time", processor["local"] / processor["ray"], "x", LOCAL_OF_RAY)


def first_step(mode: str) -> tuple[float, float]:
    """Seconds, and processor time of all processes, from the command to the first optimizer step in its trace."""
    with tempfile.TemporaryDirectory(prefix="raycl-startup-", ignore_cleanup_errors=True) as folder:
        words = [*RUN, f"launch.mode={mode}", f"output.dir={folder}"]
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "raycl.cli.main", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        try:
            while not list(Path(folder).glob("run/trace/*.jsonl")):
                if process.poll() is not None or time.perf_counter() - began > PATIENCE_S:
                    raise WrongResultError(f"raycl {' '.join(words)} has made no step")
                time.sleep(0.02)
            return time.perf_counter() - began, _processor_s(process.pid)
        finally:
            process.terminate()
            process.wait()


def _environment() -> dict[str, str]:
    """Return variables of a process that reads compiled modules, as those of an installed package are."""
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}


def _processor_s(pid: int) -> float:
    """Return the processor time of a process and of all that it has started and that still run."""
    root, spent = psutil.Process(pid), 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            spent += times.user + times.system + times.children_user + times.children_system
    return spent
