"""A router without training: streaming linear discriminant analysis over tasks (Hayes and Kanan 2020; methods.md 1.9).

Each task leaves its count, its mean and its scatter of normalised queries. These are sums: exact in one pass, the same
for any order of tasks, and a task is taken out by leaving its sums out.
What it does not know: adapters, where queries come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raycl.errors import RetrievalError

RIDGE = 0.01
"""Of the mean variance, added to the diagonal; 0.001 to 0.1 route the same within 0.4 points (methods.md 1.9)."""


@dataclass(frozen=True)
class Statistics:
    """Sums over one task's texts: count n, mean `[c]`, scatter `[c, c]` around the mean."""

    count: int
    mean: Tensor
    scatter: Tensor

    @staticmethod
    def of(queries_BC: Tensor) -> Statistics:
        """Of a task's queries.

        Raises:
            RetrievalError: no texts.
        """
        if not len(queries_BC):
            raise RetrievalError("a task without texts has no statistics")
        unit = nn.functional.normalize(queries_BC.double(), dim=1)
        mean = unit.mean(0)
        centred = unit - mean
        scatter = centred.T @ centred
        return Statistics(len(unit), mean.float(), scatter.float())  # summed in double precision, kept in single


class Discriminant:
    """Scores of tasks for queries.

    Attributes:
        tasks: in the order of columns.
    """

    def __init__(self, statistics: Mapping[str, Statistics]) -> None:
        self.tasks = tuple(statistics)
        found = list(statistics.values())
        means = torch.stack([task.mean for task in found]).double()
        shared = torch.zeros_like(found[0].scatter, dtype=torch.float64)
        for task in found:
            shared += task.scatter
        shared /= sum(task.count for task in found)
        width = len(shared)
        ridge = RIDGE * shared.diagonal().mean().clamp_min(1e-9)
        self._precision = torch.linalg.inv(shared + ridge * torch.eye(width, dtype=shared.dtype))
        self._directions = (means @ self._precision).float()
        self._offsets = ((means @ self._precision) * means).sum(1).float() / 2
        self._means = means

    def scores(self, queries_BC: Tensor) -> Tensor:
        """`[B, T]` log-likelihoods but for a constant per text."""
        unit = nn.functional.normalize(queries_BC.float(), dim=1)
        scores: Tensor = unit @ self._directions.T - self._offsets
        return scores

    def distances(self, queries_BC: Tensor) -> Tensor:
        """`[B]` smallest squared Mahalanobis distance to any task's mean: large for texts that no task has seen."""
        unit = nn.functional.normalize(queries_BC.double(), dim=1)
        own_B = ((unit @ self._precision) * unit).sum(1)
        crossed_BT = unit @ self._precision @ self._means.T
        around_T = ((self._means @ self._precision) * self._means).sum(1)
        squared: Tensor = own_B[:, None] - 2 * crossed_BT + around_T
        return squared.min(1).values.float()

    def weights(self, queries_BC: Tensor, top_k: int) -> Tensor:
        """`[B, T]` softmax of the scores over the best `top_k` tasks."""
        scores = self.scores(queries_BC)
        best = scores.topk(min(top_k, scores.shape[1]), dim=1)
        return torch.zeros_like(scores).scatter(1, best.indices, best.values.softmax(1))
