"""Two methods compared over the seeds that both ran with: the difference, its 95 % interval, p-values, seeds needed.

Runs are paired: each difference is between two runs of one seed, on one task, and on one test row where the scores of
rows are known. The standard error is that of a paired bootstrap which draws seeds, and within each task test rows, with
replacement, both at once (Owen, "The pigeonhole bootstrap", 2007). Differences of means need no random draws: the
variance over endlessly many resamples has a closed form, here with the factor n / (n - 1) that a bootstrap of n seeds
lacks (Hesterberg, "What teachers should know about the bootstrap", 2015, section 3.2). Three seeds say little about
their own variance, so quantiles are Student's, with the degrees of freedom of Welch and Satterthwaite.

Where several comparisons stand in one table, `holm` corrects their p-values (Holm, "A simple sequentially rejective
multiple test procedure", 1979).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

LEVEL, POWER = 0.05, 0.8
"""Level of tests and intervals, and the power that a number of seeds is to have."""
MOST_SEEDS = 100
"""More seeds than these are not proposed."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RowScores:
    """The scores of a task's test rows in one run.

    Attributes:
        scores: `[rows]`, 0 to 100. texts: hash of the rows' texts and references, equal for equal rows.
    """

    scores: Array
    texts: str

    @staticmethod
    def of(scores: Sequence[float], texts: Sequence[str]) -> RowScores:
        """Return the scores of rows with these texts."""
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        return RowScores(np.asarray(scores, dtype=np.float64), digest)


@dataclass(frozen=True)
class TaskScore:
    """The score of one run on one task.

    Attributes:
        value: the score. rows: scores of the test rows, whose mean it is; None: they are not known.
    """

    value: float
    rows: RowScores | None = None


RunScores = Mapping[str, TaskScore]
"""Task -> score of one run."""


@dataclass(frozen=True)
class VariancePart:
    """A part of the variance of the mean difference: its value, its degrees of freedom, and the seeds it shrinks with.

    Attributes:
        shrinks: it is divided by the number of seeds.
    """

    variance: float
    freedom: float
    shrinks: bool


@dataclass(frozen=True)
class Difference:
    """The mean difference of two methods, first minus second, in points.

    Attributes:
        mean: over seeds and tasks. seeds: seeds in common. over: what was paired, in words.
        parts: of the variance of the mean; empty where one seed and one task say nothing about it.
    """

    mean: float
    seeds: int
    over: str
    parts: tuple[VariancePart, ...]

    @cached_property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(sum(part.variance for part in self.parts))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval; None where it is not known."""
        if not self.parts:
            return None
        from scipy import stats

        reach = self.error * float(stats.t.ppf(1 - LEVEL / 2, _freedom(self.parts)))
        return self.mean - reach, self.mean + reach

    @property
    def p(self) -> float | None:
        """The two-sided p-value of no difference; None where it is not known."""
        if not self.parts:
            return None
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        from scipy import stats

        return 2 * float(stats.t.sf(abs(self.mean) / self.error, _freedom(self.parts)))

    @property
    def variance_of_a_seed(self) -> float | None:
        """The variance of the difference from seed to seed; None of one seed."""
        return self.parts[0].variance * self.seeds if self.seeds > 1 else None

    def seeds_needed(self, level: float = LEVEL, variance_of_a_seed: float | None = None) -> int | None:
        """Return how many seeds would tell this difference with `POWER`; None: not known, or more than `MOST_SEEDS`.

        Args:
            level: of the two-sided test, smaller than `LEVEL` among several comparisons.
            variance_of_a_seed: stands in for that of a difference of one seed.
        """
        if self.mean == 0 or (self.seeds < 2 and variance_of_a_seed is None):
            return None
        return next(
            (n for n in range(2, MOST_SEEDS + 1) if self._power(n, level, variance_of_a_seed or 0.0) >= POWER), None
        )

    def _power(self, seeds: int, level: float, variance_of_a_seed: float) -> float:
        from scipy import stats

        if self.seeds > 1:
            scale, more = self.seeds / seeds, (seeds - 1) / (self.seeds - 1)
            parts = [
                VariancePart(part.variance * scale, part.freedom * more, True) if part.shrinks else part
                for part in self.parts
            ]
        else:
            parts = [VariancePart(variance_of_a_seed / seeds, seeds - 1, True)]
        error = math.sqrt(sum(part.variance for part in parts))
        if error == 0:
            return 1.0
        freedom = _freedom(parts)
        limit = float(stats.t.ppf(1 - level / 2, freedom))
        return float(stats.nct.sf(limit, freedom, abs(self.mean) / error))


def difference(pairs: Sequence[tuple[RunScores, RunScores]]) -> Difference | None:
    """Return the mean difference of two methods over pairs of runs, one for each seed; None without pairs.

    Two seeds or more: seeds and test rows are drawn, where both runs of a seed know the scores of the same rows; else
    seeds alone, and the tasks' own departures from a seed's mean count as well. One seed: tasks are drawn, for the rows
    of one pair of runs do not show what another seed would give.

    Args:
        pairs: runs of the same tasks.
    """
    if not pairs:
        return None
    tasks = list(pairs[0][0])
    cells = np.array([[first[task].value - second[task].value for task in tasks] for first, second in pairs])
    seeds, count = cells.shape
    mean = float(cells.mean())
    if seeds == 1:
        parts = (_part(cells[0], shrinks=False),) if count > 1 else ()
        return Difference(mean, 1, "tasks", parts)
    own = _part(cells.mean(1), shrinks=True)
    rows = _rows(pairs, tasks)
    if rows is not None:
        within = [
            _part(group, shrinks=len(groups) > 1, share=1 / (count * len(groups)))
            for groups in rows
            for group in groups
            if len(group) > 1
        ]
        return Difference(mean, seeds, "seeds and test rows", (own, *within))
    if count == 1:
        return Difference(mean, seeds, "seeds", (own,))
    rest = cells - cells.mean(0) - cells.mean(1, keepdims=True) + mean
    freedom = (seeds - 1) * (count - 1)
    mixed = VariancePart(float((rest**2).sum()) / freedom / cells.size, freedom, True)
    return Difference(mean, seeds, "seeds and tasks", (own, mixed))


def holm(values: Sequence[float | None]) -> list[tuple[float, float] | None]:
    """Return Holm's corrected p-value of each, and the level that it had to reach; None stays None and is not counted.

    Args:
        values: p-values of all comparisons of a table.
    """
    known = sorted((p, index) for index, p in enumerate(values) if p is not None)
    corrected: list[tuple[float, float] | None] = [None] * len(values)
    largest, level = 0.0, LEVEL
    for rank, (p, index) in enumerate(known):
        left = len(known) - rank
        if largest < LEVEL:
            level = LEVEL / left  # after the first that fails, the others would have to reach its level
        largest = max(largest, min(1.0, left * p))
        corrected[index] = (largest, level)
    return corrected


def _part(values: Array, shrinks: bool, share: float = 1.0) -> VariancePart:
    return VariancePart(share**2 * float(values.var(ddof=1)) / len(values), len(values) - 1, shrinks)


def _rows(pairs: Sequence[tuple[RunScores, RunScores]], tasks: Sequence[str]) -> list[list[Array]] | None:
    """Return the differences on the test rows of each task; None: they are not known, or the runs of a pair differ.

    They are one group, the mean over seeds, where all seeds have the same rows, else a group for each seed.
    """
    differences = []
    for task in tasks:
        known = [(first[task].rows, second[task].rows) for first, second in pairs]
        same = [
            (one.texts, one.scores - other.scores)
            for one, other in known
            if one is not None and other is not None and one.texts == other.texts
        ]
        if len(same) < len(pairs):
            return None
        groups = [scores for _, scores in same]
        alike = len({texts for texts, _ in same}) == 1
        differences.append([np.mean(groups, axis=0)] if alike else groups)
    return differences


def _freedom(parts: Sequence[VariancePart]) -> float:
    """Return the degrees of freedom of the sum of these parts (Welch and Satterthwaite)."""
    total = sum(part.variance for part in parts)
    spread = sum(part.variance**2 / part.freedom for part in parts)
    return total**2 / spread if spread else max(part.freedom for part in parts)
