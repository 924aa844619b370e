"""Many short runs under `raycl compare`, whose worker stays between them, beside the same with new workers for each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from benchmarks.figures import Figure
from benchmarks.processor_time import spent_by

STEPS, SHARE = 20, 0.6
"""Optimizer steps of a run, and the largest share of the time with new workers for each that all runs may take."""

BASE = {
    "stream": {
        "name": "builtin",
        "tasks": ["topic"],
        "train_rows": 8 * STEPS,
        "test_rows": 20,
        "max_source_tokens": 48,
    },
    "train": {"max_steps": STEPS, "batch_size": 8},
    "launch": {"cpus_per_worker": 1},
}

WITH_GROUPS = """
import sys
from raycl.launch import console, driver
from raycl.launch.cluster import joined
from raycl.launch.prepared_run import prepare
from raycl.operations.sweep.comparison import load_comparison, plan

console.log_to_stderr()
with joined(None):
    for config in plan(load_comparison(sys.argv[1]), sys.argv[3]).values():
        driver.train(prepare(config))
"""
"""A program for the runs of a comparison on one Ray, each with a worker group of its own; arguments as for compare."""


def measure_runs(count: int, folder: Path, before: Path | None) -> Iterator[Figure]:
    """Yield the share of the reference's time that the runs take, and the memory that their process gains.

    Args:
        count: number of runs; of a single one there is no gain.
        before: another checkout of raycl, whose `raycl compare` is the reference; None: a worker group for each run.
    """
    tree = {"name": "runs", "base": BASE, "runs": {"lora": {"set": ["method=lora"]}}, "seeds": list(range(count))}
    file = folder / "runs.yaml"
    file.write_text(yaml.safe_dump({**tree, "at_once": 1}))
    compare = (sys.executable, "-m", "raycl.cli.main", "compare")
    program = (sys.executable, "-c", WITH_GROUPS) if before is None else compare
    other = spent_by((*program, str(file), "--dir", str(folder / "reference")), before)
    mine = spent_by((*compare, str(file), "--dir", str(folder / "warm")))
    reference = "a worker group for each" if before is None else "the other checkout"
    label = f"{count} runs of {STEPS} steps under raycl compare"
    for kind, own, theirs in (("", mine.wall_s, other.wall_s), (", processor time", mine.cpu_s, other.cpu_s)):
        detail = f"{own:.0f} s against {theirs:.0f} s with {reference}"
        yield Figure(f"{label}{kind}", own / theirs, "x", SHARE, detail=detail)
    results = [folder / "warm" / "runs" / f"lora-s{seed}" / "results.json" for seed in range(count)]
    peaks = [float(json.loads(result.read_text())["peak_memory_mb"]) for result in results]
    if count > 1:
        detail = f"at most {', '.join(f'{peak:.0f}' for peak in peaks)} MB in its runs"
        name = "memory of the worker's process, last run above the second"
        yield Figure(name, peaks[-1] - peaks[1], "MB", detail=detail)
