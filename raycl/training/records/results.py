"""`results.json`: the matrix, the metrics, and what is needed to trust and repeat them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from raycl import __version__
from raycl.data.stream import Stream
from raycl.metrics.matrix import AccuracyMatrix, averages, summary
from raycl.metrics.variants import compute_variants
from raycl.training.definition.inputs import version_changes, versions
from raycl.training.definition.training_context import RunInfo
from raycl.training.records.journal import RunState
from raycl.types import Phase, Task


def build_results(info: RunInfo, stream: Stream, phases: Sequence[Phase], state: RunState) -> dict[str, Any]:
    """Return the result tree of a run, finished or not, from its journal."""
    tasks, never = stream.tasks, stream.unseen
    types = {task.name: task.type for task in (*tasks, *never) if task.type}
    untrained = bare_cells(state, "untrained")
    matrix = AccuracyMatrix.of_records([task.name for task in tasks], [phase.name for phase in phases], state.phases)
    times = [record["times"] for record in state.phases]
    seconds = sum(entry["train_s"] for entry in times)
    finished = len(state.phases) == len(phases)
    revised = next((attempt["revised"] for attempt in state.attempts if "revised" in attempt), None)
    return {
        "raycl": __version__,
        "fingerprint": info.fingerprint,
        "finished": finished,
        "config": info.tree,
        "stream": {"name": stream.name, "tasks": list(matrix.tasks), "notes": list(stream.notes)},
        "cut": stream.cuts,
        "phases": list(matrix.phases),
        "matrix": matrix.to_json()["cells"],
        "singles": info.singles,
        "other_row": other_row(info.tree, state),
        "unseen": _unseen(state, types) if finished else None,
        "untrained": _bare(untrained, tasks, never, types),
        "in_context": _bare(bare_cells(state, "in_context"), tasks, (), types),
        "general": _general(state, len(phases)),
        "epochs": {task: curve for record in state.phases for task, curve in record.get("epochs", {}).items()},
        "revision": revised and {**revised, "after": state.phases[-1]["row"]} if finished else None,
        "metrics": summary(matrix, info.singles),
        "averages": averages(matrix),
        "variants": compute_variants(matrix, info.singles, {task: cell["value"] for task, cell in untrained.items()}),
        "phase_times": times,
        "phase_summaries": [record.get("summary", {}) for record in state.phases],
        "tokens_per_s": sum(entry["tokens"] for entry in times) / seconds if seconds else None,
        "train_s": seconds,
        "trained_parameters": max((entry.get("trained_parameters", 0) for entry in times), default=0) or None,
        "prepare_s": _sum([entry.get("prepare_s") for entry in times]),
        "kept_mb_per_task": _kept(times, info.tree["stream"]["schedule"] == "separate"),
        "peak_memory_mb": max((entry["peak_memory_mb"] for entry in times), default=None),
        "versions": versions(info.plugins),
        "version_changes": version_changes(state.attempts),
        "seeds": {"run": info.seed},
        "attempts": len(state.attempts),
        "workers": state.attempts[-1]["workers"] if state.attempts else None,
        "wall_s": wall_seconds(state),
    }


def _sum(values: Sequence[float | None]) -> float | None:
    """Return the sum; None where a phase lacks its number, as those of earlier versions do."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _kept(times: Sequence[Mapping[str, Any]], each_has_its_own: bool) -> float | None:
    """Return MiB kept for each task: what the last phase left, or all phases where each has a state of its own."""
    kept = _sum([entry.get("kept_bytes") for entry in (times if each_has_its_own else times[-1:])])
    return None if kept is None else kept / len(times) / 2**20


def wall_seconds(state: RunState) -> float | None:
    """Return the time of the attempts so far, each from its claim to its last record by a monotonic clock; None before
    the first phase is done."""
    if not state.phases:
        return None
    return float(sum(attempt.get("seconds", 0.0) for attempt in state.attempts))


def metrics_so_far(matrix: AccuracyMatrix, done: int, singles: Mapping[str, float] | None) -> dict[str, float]:
    """Return the headline numbers that are defined, over the tasks of the first `done` phases."""
    sofar = matrix.upto(done) if len(matrix.phases) == len(matrix.tasks) else matrix
    return {name: value for name, value in summary(sofar, singles).items() if isinstance(value, float)}


BARE = ("untrained", "in_context", "general_before")
"""Kinds of cells of the backbone before any training: without examples (`eval.untrained`), and with (`eval.shots`), and
of tasks outside the stream (`eval.general`)."""


def bare_cells(state: RunState, kind: str) -> dict[str, Any]:
    """Return cells of every task by the backbone before any training, as far as they were measured."""
    return {task: cell for record in state.phases for task, cell in record.get(kind, {}).items()}


def other_row(tree: Mapping[str, Any], state: RunState) -> dict[str, Any] | None:
    """Return the last row under the other `eval.instruction` than the matrix's; None where it was not scored.

    Args:
        tree: the run's config.
    """
    cells = state.phases[-1].get("other_row") if state.phases else None
    if not cells:
        return None
    instruction = "chosen" if tree["eval"].get("instruction", "given") == "given" else "given"
    return {
        "instruction": instruction,
        "cells": cells,
        "mean": statistics.fmean(cell["value"] for cell in cells.values()),
    }


def _bare(
    cells: Mapping[str, Any], tasks: Sequence[Task], never: Sequence[Task], types: Mapping[str, str]
) -> dict[str, Any] | None:
    """Return cells before any training: the mean over the trained tasks, and what `_unseen` has of the others."""
    if not cells:
        return None
    own = [cells[task.name]["value"] for task in tasks if task.name in cells]
    others = {task.name: cells[task.name] for task in never if task.name in cells}
    mean = statistics.fmean(own) if len(own) == len(tasks) else None
    unseen = _means(others, types) if others and len(others) == len(never) else None
    return {"cells": dict(cells), "mean": mean, "unseen": unseen}


def _general(state: RunState, phases: int) -> dict[str, Any] | None:
    """Return general ability before any training, after each phase that measured it, and after the last one; None: it
    was not measured.

    `delta` is the mean after the stream minus the mean before, over the same tasks.
    """

    def measured(cells: dict[str, Any] | None) -> dict[str, Any] | None:
        return cells and {"cells": cells, "mean": statistics.fmean(cell["value"] for cell in cells.values())}

    before = measured(bare_cells(state, "general_before"))
    if not before:
        return None
    after_phases = [measured(record.get("general")) for record in state.phases]
    after = after_phases[-1] if len(state.phases) == phases else None
    delta = after and after["mean"] - before["mean"]
    return {"before": before, "phases": after_phases, "after": after, "delta": delta}


def _means(cells: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    by_type: dict[str, list[float]] = {}
    for task, cell in cells.items():
        if task in types:
            by_type.setdefault(types[task], []).append(cell["value"])
    mean = statistics.fmean(cell["value"] for cell in cells.values())
    return {"mean": mean, "types": {name: statistics.fmean(values) for name, values in by_type.items()}}


def _unseen(state: RunState, types: Mapping[str, str]) -> dict[str, Any] | None:
    """Return cells of the tasks that were never trained, their mean and those by type; None where the stream has none.

    A run that was extended with tasks has older results in the records of former last phases.
    """
    cells = state.phases[-1].get("unseen")
    if not cells:
        return None
    return {"cells": cells, **_means(cells, types)}
