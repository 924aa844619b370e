"""Accuracy matrices of settings: each cell is a mean over the runs of one setting, which differ in their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycl.config import Tree
from raycl.data.sources.table_cells import spreadsheet
from raycl.metrics.run_results import (
    METRICS,
    backbone_of,
    method_of,
    metric_of,
    stream_of,
    tasks_of,
    title_of,
    values_of,
)
from raycl.operations.report.run_comparison import Spread, grouped


@dataclass(frozen=True)
class SeedMatrix:
    """The accuracy matrix of a setting.

    Attributes:
        results: result trees of its runs. settings: `key=value` where it differs from others of the same title.
        cells: a row for each phase, a column for each task; None where not every run has a score.
        numbers: `METRICS` by name.
    """

    results: list[Tree]
    settings: str
    cells: list[list[Spread | None]]
    numbers: dict[str, Spread | None]

    @staticmethod
    def over(results: list[Tree], settings: str = "") -> SeedMatrix:
        """Return the matrix of runs with the same phases and tasks."""
        rows = zip(*map(values_of, results), strict=True)
        cells = [[Spread.over(scores) for scores in zip(*row, strict=True)] for row in rows]
        numbers = {name: Spread.over([metric_of(result, name) for result in results]) for name in METRICS}
        return SeedMatrix(results, settings, cells, numbers)

    @property
    def title(self) -> str:
        """A line that identifies it: the method, where others share it the settings that differ, and the seeds."""
        first, *rest = self.results
        method = f"{method_of(first)} ({self.settings})" if self.settings else method_of(first)
        if not rest:
            return method + title_of(first).removeprefix(method_of(first))
        seeds = ", ".join(str(result["config"].get("seed")) for result in self.results)
        return f"{method} on {stream_of(first)}, {backbone_of(first)}, seeds {seeds}"

    @property
    def tasks(self) -> list[str]:
        """Names of the columns."""
        return tasks_of(self.results[0])

    @property
    def phases(self) -> list[str]:
        """Names of the rows."""
        return [str(phase) for phase in self.results[0]["phases"]]


def seed_matrices(results: Sequence[Tree]) -> list[SeedMatrix]:
    """Return a matrix for each setting, in the order of a comparison's lines.

    Runs of one setting whose tasks came in another order, or which have more of them, have matrices of their own.
    """
    matrices = []
    for settings, group in grouped(results):
        alike: dict[tuple[str, ...], list[Tree]] = {}
        for result in group:
            alike.setdefault((*map(str, result["phases"]), "", *tasks_of(result)), []).append(result)
        matrices += [SeedMatrix.over(members, settings) for members in alike.values()]
    return matrices


def matrices_to_csv(matrices: Sequence[SeedMatrix]) -> str:
    """Return CSV with a line for each cell that has a score: mean and standard deviation in full precision."""
    rows: list[list[Any]] = [["method", "settings", "stream", "backbone", "runs", "after", "task", "mean", "std"]]
    for matrix in matrices:
        first = matrix.results[0]
        head = [method_of(first), matrix.settings, stream_of(first), backbone_of(first), len(matrix.results)]
        for phase, row in zip(matrix.phases, matrix.cells, strict=True):
            for task, cell in zip(matrix.tasks, row, strict=True):
                if cell is not None:
                    rows.append([*head, phase, task, cell.mean, cell.std])
    return spreadsheet(rows)
