"""A sweep's outcome as files of its folder: table, CSV, JSON, the best config, pictures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from raycl.config import Tree
from raycl.operations.report.sweeps.sweep_plots import parallel_coordinates, pareto_front, sensitivity
from raycl.operations.report.sweeps.sweep_tables import group_table, sweep_csv, sweep_table
from raycl.operations.sweep.definition.sweep_folder import SweepFolder
from raycl.operations.sweep.outcome import SweepOutcome
from raycl.storage import Storage

PICTURES: dict[str, Callable[[Tree, str | Path], Path]] = {
    "parallel.png": parallel_coordinates,
    "sensitivity.png": sensitivity,
    "pareto.png": pareto_front,
}


def write_outcome(outcome: SweepOutcome, directory: str) -> tuple[str, list[str]]:
    """Write all files; the tables, and addresses of what was written."""
    storage = SweepFolder.of(outcome.sweep, directory).storage
    summary = outcome.tree()
    text = sweep_table(summary)
    if outcome.sweep.over:
        text += f"\n\n{group_table(summary)}"
    files = {"summary.txt": f"{text}\n".encode(), "summary.csv": sweep_csv(summary).encode()}
    best = outcome.best_yaml()
    if best is not None:
        files["best.yaml"] = best.encode()
    storage.write_json("summary.json", summary)
    for name, data in files.items():
        storage.write(name, data)
    drawn = _draw(summary, storage) if best is not None else []
    return text, [f"{storage.uri}/{name}" for name in (*files, *drawn)]


def _draw(summary: Tree, storage: Storage) -> list[str]:
    names = [name for name in PICTURES if name != "pareto.png" or len(summary["metric"]) > 1]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            storage.write(name, PICTURES[name](summary, f"{folder}/{name}").read_bytes())
    return names
