"""The runs of a comparison in a CSV file, one line a run (`raycl report --runs-csv`): their numbers and verdicts."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from raycl.errors import RunError
from raycl.metrics.paired_comparison import Difference, TaskScore, difference
from raycl.operations.report.verdicts import Verdict, corrected


class RecordedRuns:
    """Runs by the row of their comparison and by seed.

    Args:
        file: names of runs end with `-s` and the seed; columns that begin with `score_` are scores of tasks.

    Attributes:
        runs: row -> seed -> column -> cell, in the order of the file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: dict[str, dict[str, dict[str, str]]] = {}
        with file.open(encoding="utf-8", newline="") as lines:
            for run in csv.DictReader(lines):
                self.runs.setdefault(run["run"].rpartition("-s")[0], {})[run["seed"]] = run

    def numbers(self, row: str, column: str, seeds: Sequence[str] | None = None) -> list[float]:
        """Return a column for the seeds of a row, or for those named, without empty cells.

        Raises:
            RunError: no run has the name.
        """
        if row not in self.runs:
            raise RunError(f"{self.file.name} has no run of '{row}': expected one of {', '.join(self.runs)}")
        runs = self.runs[row]
        return [float(runs[seed][column]) for seed in (runs if seeds is None else seeds) if runs[seed][column]]

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Return the verdicts on AP of the first row of each pair against the second, corrected over all of them."""
        return corrected([Verdict(first, second, "ap", self._difference(first, second)) for first, second in pairs])

    def _difference(self, first: str, second: str) -> Difference | None:
        one, other = self._scores(first), self._scores(second)
        return difference([(scores, other[seed]) for seed, scores in one.items() if seed in other])

    def _scores(self, row: str) -> dict[str, dict[str, TaskScore]]:
        self.numbers(row, "ap")
        return {
            seed: {
                column: TaskScore(float(run[column])) for column in run if column.startswith("score_") and run[column]
            }
            for seed, run in self.runs[row].items()
        }
