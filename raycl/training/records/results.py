"""`results.json`: the matrix, the metrics, and what is needed to trust and repeat them.

What it does not know: how to draw or print them (`raycl.report`).
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from raycl import __version__
from raycl.eval.averages import averages
from raycl.eval.matrix import AccuracyMatrix, summary
from raycl.eval.variants import compute_variants
from raycl.training.records.journal import RunState
from raycl.training.training_context import RunInfo
from raycl.types import Phase, Score, Task

PACKAGES = ("ray", "torch", "transformers", "peft", "deepspeed", "numpy", "pyarrow")


def build_results(
    info: RunInfo, name: str, notes: Sequence[str], tasks: Sequence[Task], phases: Sequence[Phase], state: RunState
) -> dict[str, Any]:
    """The result tree of a run, finished or not, from its journal.

    Args:
        name: of the stream. notes: what the stream left out.
    """
    matrix = matrix_of([task.name for task in tasks], [phase.name for phase in phases], state)
    times = [record["times"] for record in state.phases]
    seconds = sum(entry["train_s"] for entry in times)
    return {
        "raycl": __version__,
        "fingerprint": info.fingerprint,
        "finished": len(state.phases) == len(phases),
        "config": info.tree,
        "stream": {"name": name, "tasks": list(matrix.tasks), "notes": list(notes)},
        "phases": list(matrix.phases),
        "matrix": matrix.to_json()["cells"],
        "singles": info.singles,
        "unseen": _unseen(state) if len(state.phases) == len(phases) else None,
        "revision": _revision(state) if len(state.phases) == len(phases) else None,
        "metrics": summary(matrix, info.singles),
        "averages": averages(matrix),
        "variants": compute_variants(matrix, info.singles),
        "phase_times": times,
        "phase_summaries": [record.get("summary", {}) for record in state.phases],
        "tokens_per_s": sum(entry["tokens"] for entry in times) / seconds if seconds else None,
        "peak_memory_mb": max((entry["peak_memory_mb"] for entry in times), default=None),
        "versions": _versions(),
        "seeds": {"run": info.seed},
        "attempts": len(state.attempts),
        "workers": state.attempts[-1]["workers"] if state.attempts else None,
        "wall_s": wall_seconds(state),
    }


def wall_seconds(state: RunState) -> float | None:
    """Time of the attempts so far, each from its claim to its last record; None before the first phase is done."""
    if not state.phases:
        return None
    starts = [attempt["started"] for attempt in state.attempts]
    spent = 0.0
    for attempt, until in zip(state.attempts, [*starts[1:], math.inf], strict=True):
        ends = [record["ended"] for record in state.phases if attempt["started"] <= record["ended"] < until]
        spent += attempt.get("ended", max(ends, default=attempt["started"])) - attempt["started"]
    return spent


def matrix_of(tasks: Sequence[str], phases: Sequence[str], state: RunState) -> AccuracyMatrix:
    """The accuracy matrix of a run, finished or not, by the names of its tasks and phases."""
    matrix = AccuracyMatrix(tuple(tasks), tuple(phases))
    for i, record in enumerate(state.phases):
        for j, task in enumerate(tasks):
            if task in record["row"]:
                matrix.set(i, j, Score(**record["row"][task]))
    return matrix


def metrics_so_far(matrix: AccuracyMatrix, done: int, singles: Mapping[str, float] | None) -> dict[str, float]:
    """The headline numbers that are defined, over the tasks of the first `done` phases."""
    sofar = matrix.upto(done) if len(matrix.phases) == len(matrix.tasks) else matrix
    return {name: value for name, value in summary(sofar, singles).items() if isinstance(value, float)}


def curves(matrix: AccuracyMatrix, done: int, singles: Mapping[str, float] | None) -> dict[str, float]:
    """The same for trackers: `metrics/ap` and so on."""
    return {f"metrics/{name}": value for name, value in metrics_so_far(matrix, done, singles).items()}


def _unseen(state: RunState) -> dict[str, Any] | None:
    """Cells of the tasks that were never trained, and their mean; None where the stream has none.

    A run that was extended with tasks has older results in the records of former last phases.
    """
    cells = state.phases[-1].get("unseen")
    if not cells:
        return None
    return {"cells": cells, "mean": statistics.fmean(cell["value"] for cell in cells.values())}


def _revision(state: RunState) -> dict[str, Any] | None:
    """A task that was learned again, and cells of every task before and after; None for other runs."""
    revised = next((attempt["revised"] for attempt in state.attempts if "revised" in attempt), None)
    return revised and {**revised, "after": state.phases[-1]["row"]}


def _versions() -> dict[str, str]:
    versions = {package: _version(package) for package in PACKAGES}
    return {"python": platform.python_version()} | {name: found for name, found in versions.items() if found}


@cache
def _version(package: str) -> str | None:
    """Of an installed package, looked up once: it takes 2 ms."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
