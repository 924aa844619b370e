"""The runs of a comparison in a CSV file, one line a run (`raycl report --runs-csv`): their numbers and verdicts."""

import csv
from collections.abc import Sequence
from pathlib import Path

from raycl import config as configs
from raycl.errors import RunError
from raycl.metrics.paired_comparison import Difference, TaskScore, difference
from raycl.metrics.run_results import METRICS, SHOTS, UNTRAINED, Published
from raycl.operations.report.run_comparison import COSTS, OPTIONAL, Line, Spread
from raycl.operations.report.verdicts import Verdict, corrected

HEADS = ("run", "seed", "method", "stream", "backbone", "ap")
SCORE = "score_"
"""Columns that begin with it are scores of tasks."""


def published_in(comparison: Path) -> Published | None:
    """Return the papers' numbers in a comparison file; None: it has none, or does not exist."""
    printed = configs.read_tree(str(comparison)).get("published") if comparison.is_file() else None
    return None if printed is None else configs.validate(Published, printed)


class RecordedRuns:
    """Runs by the row of their comparison and by seed.

    Args:
        file: names of runs end with `-s` and the seed; columns that begin with `SCORE` are scores of tasks.
        published: numbers that papers printed for some rows.

    Attributes:
        runs: row -> seed -> column -> cell, in the order of the file.

    Raises:
        RunError: the file is no such table.
    """

    def __init__(self, file: Path, published: Published | None = None) -> None:
        self.file = file
        self.published = published
        self.runs: dict[str, dict[str, dict[str, str]]] = {}
        if not file.is_file():
            raise RunError(f"there is no file '{file}': expected one of `raycl report RUNS --runs-csv`")
        try:
            with file.open(encoding="utf-8-sig", newline="") as lines:
                table = csv.DictReader(lines)
                missing, runs = sorted(set(HEADS) - set(table.fieldnames or ())), list(table)
        except (UnicodeError, csv.Error) as error:
            raise RunError(f"'{file}' is no CSV file in UTF-8 ({error}): write it anew, or convert it") from error
        if missing:
            raise RunError(f"'{file}' lacks {', '.join(missing)}: expected a file of `raycl report RUNS --runs-csv`")
        for run in runs:
            self._add(run)
        if not self.runs:
            raise RunError(f"'{file}' has no runs: expected a file of `raycl report RUNS --runs-csv`")

    def _add(self, run: dict[str, str]) -> None:
        if None in run or None in run.values():
            raise RunError(f"'{self.file}': the line of run '{run['run']}' has not as many cells as the head: mend it")
        for column, cell in run.items():
            if column in (*METRICS, *OPTIONAL, *COSTS) or column.startswith(SCORE):
                try:
                    float("nan" if cell == "" else cell)
                except (TypeError, ValueError) as error:
                    raise RunError(
                        f"'{self.file}': {column} of run '{run['run']}' is '{cell}', expected a number"
                    ) from error
        by_seed = self.runs.setdefault(run["run"].removesuffix(f"-s{run['seed']}"), {})
        if run["seed"] in by_seed:
            raise RunError(f"'{self.file}' has two lines of run '{run['run']}', seed {run['seed']}: expected one")
        by_seed[run["seed"]] = run

    def numbers(self, row: str, column: str, seeds: Sequence[str] | None = None) -> list[float]:
        """Return a column for the seeds of a row, or for those named, without empty cells.

        Raises:
            RunError: no run has the name.
        """
        if row not in self.runs:
            raise RunError(f"{self.file.name} has no run of '{row}': expected one of {', '.join(self.runs)}")
        runs = self.runs[row]
        return [float(runs[seed][column]) for seed in (runs if seeds is None else seeds) if runs[seed][column]]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in the order of the columns."""
        first = next(iter(next(iter(self.runs.values())).values()))
        return [column.removeprefix(SCORE) for column in first if column.startswith(SCORE)]

    def lines(self) -> list[Line]:
        """Return a line of a comparison for each row: means and deviations over its seeds.

        Rows that learn the tasks one after another come first, and of each kind those with the highest AP.
        """
        lines = []
        for row, runs in self.runs.items():
            first = next(iter(runs.values()))
            known = {name: self.numbers(row, name) if name in first else [] for name in (*METRICS, *OPTIONAL, *COSTS)}
            spreads = {
                name: Spread.over(numbers) if len(numbers) == len(runs) else None for name, numbers in known.items()
            }
            printed = self.published.of(row) if self.published else None
            lines.append(Line(row, "", first["stream"], first["backbone"], len(runs), spreads, printed or {}))
        alone = self._alone
        return sorted(lines, key=lambda line: (line.method in alone, -(line.numbers["ap"] or Spread(-1.0, None)).mean))

    def competing(self) -> list[str]:
        """Return the rows that learn the tasks one after another, the highest AP first."""
        return [line.method for line in self.lines() if line.method not in self._alone]

    @property
    def _alone(self) -> set[str]:
        """The rows of another schedule, which is written behind the method (`lora, separate`), or of no training."""
        return {
            row
            for row, runs in self.runs.items()
            for run in runs.values()
            if ", " in run["method"] or run["method"] == UNTRAINED or run["method"].startswith(SHOTS)
        }

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Return the verdicts on AP of the first row of each pair against the second, corrected over all of them."""
        return corrected([Verdict(first, second, "ap", self._difference(first, second)) for first, second in pairs])

    def _difference(self, first: str, second: str) -> Difference | None:
        one, other = self._scores(first), self._scores(second)
        pairs = [(scores, other[seed]) for seed, scores in one.items() if seed in other]
        return difference([(scores, others) for scores, others in pairs if scores.keys() == others.keys()])

    def _scores(self, row: str) -> dict[str, dict[str, TaskScore]]:
        self.numbers(row, "ap")
        return {
            seed: {column: TaskScore(float(run[column])) for column in run if column.startswith(SCORE) and run[column]}
            for seed, run in self.runs[row].items()
        }
