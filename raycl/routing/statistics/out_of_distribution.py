"""Out-of-distribution score: the share of known texts of the tasks that are nearer to a task than a text is.

A Mahalanobis distance has no meaning by itself; its size depends on the encoder, and on the covariance that every new
task changes. A share of known texts is easy to interpret. So a few texts of each task are kept that its statistics do
not contain (those lie too near), as queries and not as distances: distances are computed again when tasks are added or
removed, and a removed task leaves no data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

KEPT = 64
"""The number of texts kept of each task, 98 KB at 384 dimensions; the share of one task alone is then known in steps of
1.6 %."""

ROWS = 1024
"""The number of kept texts whose distances are computed together, to bound memory at many tasks."""


def sample_rows(count: int) -> Tensor:
    """Return at most `KEPT` of so many rows, drawn the same every time: nothing but the task itself decides."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:KEPT]


class OodCalibrator:
    """The distances of known texts under the statistics of the current tasks."""

    def __init__(self, distances: Callable[[Tensor], Tensor], samples: Sequence[Tensor], rows: int = ROWS) -> None:
        """Measure the known texts.

        Args:
            distances: returns the distances `[B]` of queries `[B, c]` to the nearest task, on the queries' device.
            samples: `[n, c]` queries of each task, not all empty; their order does not matter.
            rows: number of queries that are measured together.
        """
        parts = torch.split(torch.cat(list(samples)), rows)
        self._measure = distances
        self._known = torch.cat([distances(part) for part in parts]).sort().values

    def scores(self, queries_BC: Tensor) -> Tensor:
        """Return `[B]` from 0 to 1: the share of known texts that are nearer to their nearest task than the query is to
        its.

        Texts of all known tasks together spread evenly over 0 to 1; one minus the share is the p-value of a text being
        known. (Texts of one task may lie lower or higher: tasks differ in how far their texts spread.) The mean share
        of a new task's texts is the area under the ROC curve (AUROC) of telling them from known ones.
        """
        distances_B = self._measure(queries_BC)
        self._known = self._known.to(distances_B.device)
        return torch.searchsorted(self._known, distances_B) / len(self._known)
