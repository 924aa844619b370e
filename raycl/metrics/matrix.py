"""The accuracy matrix, and the standard numbers of continual learning as pure functions of it.

Two columns both called "BWT" are rarely the same number. The whole matrix is kept with sample counts, and each number
is a function of its values with the formula beside it; published deviations are in `variants`.

Notation: M tasks; `a[i][j]` is the score on task j after phase i, 0 to 100, None where it was not measured. Formulas
count from 1 as the papers do, code from 0. A sequence of tasks has a square matrix; `joint` training has either one
row or only its last row filled. Every function gives None where a number is undefined: with one task, with
missing cells, with missing references.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from raycl.types import Score

Values = Sequence[Sequence[float | None]]
"""Rows of phases, columns of tasks."""


@dataclass
class AccuracyMatrix:
    """Scores of every task after every phase.

    Attributes:
        tasks: column names, in stream order.
        phases: row names; the tasks themselves by default (`joint`: one row).
        cells: `[len(phases)][len(tasks)]`, None where nothing was measured.
    """

    tasks: tuple[str, ...]
    phases: tuple[str, ...] = ()
    cells: list[list[Score | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tasks = tuple(self.tasks)
        self.phases = tuple(self.phases) or self.tasks
        self.cells = self.cells or [[None] * len(self.tasks) for _ in self.phases]
        shape = [len(row) for row in self.cells]
        assert shape == [len(self.tasks)] * len(self.phases), f"rows of {shape} cells, expected {len(self.tasks)} each"

    @classmethod
    def of_records(
        cls, tasks: Sequence[str], phases: Sequence[str], records: Sequence[Mapping[str, Any]]
    ) -> AccuracyMatrix:
        """Return the matrix of a run, finished or not.

        Args:
            records: those of the phases that are done, in a run's journal.
        """
        matrix = cls(tuple(tasks), tuple(phases))
        for i, record in enumerate(records):
            for j, task in enumerate(matrix.tasks):
                if task in record["row"]:
                    matrix.set(i, j, Score(**record["row"][task]))
        return matrix

    def set(self, i: int, j: int, score: Score) -> None:
        """Record the score on task `j` after phase `i`, both counted from 0."""
        assert 0 <= i < len(self.phases) and 0 <= j < len(self.tasks), f"no cell ({i}, {j})"
        self.cells[i][j] = score

    def values(self) -> list[list[float | None]]:
        """Return the numbers alone, `[len(phases)][len(tasks)]`."""
        return [[score.value if score else None for score in row] for row in self.cells]

    def upto(self, phases: int) -> AccuracyMatrix:
        """Return the matrix of a sequence as it was after its first `phases` phases: those rows and their tasks."""
        assert len(self.phases) == len(self.tasks), "only a sequence of tasks has earlier matrices"
        cells = [row[:phases] for row in self.cells[:phases]]
        return AccuracyMatrix(self.tasks[:phases], self.phases[:phases], cells)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a result file."""
        cells = [[asdict(score) if score else None for score in row] for row in self.cells]
        return {"tasks": list(self.tasks), "phases": list(self.phases), "cells": cells}


class Summary(TypedDict):
    """The headline numbers of a run; None where undefined."""

    ap: float | None
    f_ra: float | None
    fwt: float | None
    bwt: float | None
    bwt_m: float | None
    average_accuracy: float | None
    f_t: list[float | None]


def summary(matrix: AccuracyMatrix, singles: Mapping[str, float] | None = None) -> Summary:
    """Return all headline numbers.

    Args:
        matrix: the whole matrix; unfinished runs ask for `matrix.upto(phases)`.
        singles: task -> score of the same method trained on that task alone, None if not measured.
    """
    values = matrix.values()
    references = [(singles or {}).get(task) for task in matrix.tasks]
    return Summary(
        ap=ap(values),
        f_ra=f_ra(values),
        fwt=fwt(values, references),
        bwt=bwt(values),
        bwt_m=bwt_m(values),
        average_accuracy=average_accuracy(matrix),
        f_t=f_t(values),
    )


def ap(values: Values) -> float | None:
    """Return the average performance, `mean_j a[M][j]` (SAPT section 5.1.2): every task counts the same."""
    return mean(values[-1])


def average_accuracy(matrix: AccuracyMatrix) -> float | None:
    """Return the accuracy on the merged test set, AP weighted by sample counts (as MIGU's released code evaluates)."""
    scores = [score for score in matrix.cells[-1] if score is not None]
    samples = sum(score.count for score in scores)
    if len(scores) < len(matrix.tasks) or not samples:
        return None
    return sum(score.value * score.count for score in scores) / samples


def f_ra(values: Values) -> float | None:
    """Return the forgetting rate, `mean_{j<M} (max_{j<=i<M} a[i][j] - a[M][j])` (SAPT section 5.1.2); higher is worse.

    Scores of a task before its own phase are left out, as in SAPT's `score.py`, which holds zeros there.
    """
    return mean(drops(values))


def fwt(values: Values, singles: Sequence[float | None]) -> float | None:
    """Return the forward transfer, `mean_j (a[j][j] - single_j)` (SAPT section 5.1.2), `single_j` = task j trained
    alone."""
    if not is_sequence(values):
        return None
    return mean([_minus(score, single) for score, single in zip(diagonal(values), singles, strict=True)])


def bwt(values: Values) -> float | None:
    """Return the backward transfer, `sum_{j<M} (a[M][j] - a[j][j]) / (M-1)` (SAPT section 5.1.2); negative = loss."""
    return mean(changes(values))


def bwt_m(values: Values) -> float | None:
    """Return the backward transfer divided by M, as SAPT's `score.py` does and its printed tables show."""
    standard = bwt(values)
    return None if standard is None else standard * (len(values) - 1) / len(values)


def f_t(values: Values) -> list[float | None]:
    """Return SLM's forgetting for t = 2..M, `F_t = mean_{j<t} (max_{l<t} a[l][j] - a[t][j])` (SLM section 4.4, eq. 8).

    Row l may lie before task j: if such zero-shot scores were measured, they count.
    """
    if not is_sequence(values):
        return []
    until = [values[:t] for t in range(2, len(values) + 1)]
    return [mean([_minus(_best(rows, 0, j), rows[-1][j]) for j in range(len(rows) - 1)]) for rows in until]


def is_sequence(values: Values) -> bool:
    """Return whether row i is "after task i": as many rows as columns."""
    return bool(values) and len(values) == len(values[0])


def diagonal(values: Values) -> list[float | None]:
    """Return `a[j][j]`, each task right after its own phase, of a sequence."""
    return [row[j] for j, row in enumerate(values)]


def changes(values: Values) -> list[float | None]:
    """Return `a[M][j] - a[j][j]` for every task but the last; empty if there is no earlier task."""
    if not is_sequence(values):
        return []
    return [_minus(last, first) for last, first in zip(values[-1][:-1], diagonal(values)[:-1], strict=True)]


def drops(values: Values) -> list[float | None]:
    """Return `max_{j<=i<M} a[i][j] - a[M][j]` for every task but the last; empty if there is no earlier task."""
    if not is_sequence(values):
        return []
    return [_minus(_best(values, j, j), values[-1][j]) for j in range(len(values) - 1)]


def _best(values: Values, start: int, j: int) -> float | None:
    """Return the best score of task `j` in rows `start` to last but one; None unless it was measured at phase j."""
    if values[j][j] is None:
        return None
    return max(score for row in values[start:-1] if (score := row[j]) is not None)


def mean(numbers: Sequence[float | None]) -> float | None:
    """Return the arithmetic mean; None if there is nothing to average or a part is missing."""
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known and len(known) == len(numbers) else None


def _minus(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left - right


ACCURACY = "accuracy"
"""Name in `Score.extra` of the share of right answers, where another number is the score."""


def averages(matrix: AccuracyMatrix) -> dict[str, dict[str, float | None]]:
    """Return means of the tasks' metrics (`score`) and, where scores have them, of their accuracies (`accuracy`)."""
    last = matrix.cells[-1]
    means = {"score": _averages([cell.value if cell else None for cell in last])}
    if any(cell and ACCURACY in cell.extra for cell in last):
        means[ACCURACY] = _averages([cell.extra.get(ACCURACY) if cell else None for cell in last])
    return means


def _averages(numbers: list[float | None]) -> dict[str, float | None]:
    """Return means over tasks; None where a task has no such number, or there are too few tasks."""
    first, last = (None, None) if len(numbers) < 2 else (mean(numbers[:2]), mean(numbers[-2:]))
    return {"all": mean(numbers), "first_two": first, "last_two": last}
