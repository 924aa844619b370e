"""Averages of the last row of the matrix: over all tasks, the first two and the last two.

DAS and MIGU report macro-F1 and accuracy of end tasks side by side, and what happened to the earliest and latest
domains (MIGU, section on continual pre-training).
"""

from __future__ import annotations

from typing import TypedDict

from raycl.metrics.matrix import AccuracyMatrix, mean

ACCURACY = "accuracy"
"""Name in `Score.extra` of the share of right answers, where another number is the score."""


class Averages(TypedDict):
    """Means over tasks; None where a task has no such number, or there are too few tasks."""

    all: float | None
    first_two: float | None
    last_two: float | None


def averages(matrix: AccuracyMatrix) -> dict[str, Averages]:
    """Return the means of the tasks' own metrics (`score`) and of their accuracies (`accuracy`, where scores have
    them)."""
    last = matrix.cells[-1]
    means = {"score": _averages([cell.value if cell else None for cell in last])}
    if any(cell and ACCURACY in cell.extra for cell in last):
        means[ACCURACY] = _averages([cell.extra.get(ACCURACY) if cell else None for cell in last])
    return means


def _averages(numbers: list[float | None]) -> Averages:
    few = len(numbers) < 2
    return Averages(
        all=mean(numbers),
        first_two=None if few else mean(numbers[:2]),
        last_two=None if few else mean(numbers[-2:]),
    )
