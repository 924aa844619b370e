"""Pseudo-samples as ordinary training data: each is added to the batch of a training row (SAPT's ablation +Replay).

In every epoch each sample of every earlier task is trained on exactly once, in the batch of a row drawn for the epoch.
The assignment depends on rows and epoch alone: accumulation and workers change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from raycl.data.loader import batch_of, padded
from raycl.methods.pseudo_samples.samples import PseudoSamples
from raycl.methods.replay.stored_rows import joined
from raycl.types import IGNORE, Batch

SampleIndex = tuple[int, int]
"""Index of the replay buffer entry, and of the sample in it."""


class PseudoReplay:
    """Samples of all earlier tasks, assigned to the rows of the current one."""

    def __init__(self, samples: Sequence[PseudoSamples], labels: Sequence[Sequence[int]], rows: int, seed: int) -> None:
        """Set up the assignment.

        Args:
            labels: row of the label head of every label of each entry, in its order.
            rows: training rows of the current phase.
        """
        self.samples, self.labels, self.rows, self.seed = samples, labels, rows, seed
        self._indices = [(entry, number) for entry, held in enumerate(samples) for number in range(len(held))]
        self._assigned = lru_cache(maxsize=1)(self._assign)

    def _assign(self, epoch: int) -> dict[int, list[SampleIndex]]:
        """Return the row -> samples that are added to its batch in this epoch."""
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        assigned: dict[int, list[SampleIndex]] = {}
        for number, index in enumerate(self._indices):
            assigned.setdefault(order[number % self.rows], []).append(index)
        return assigned

    def joined(self, batch: Batch, epoch: int, pad_id: int) -> Batch:
        """Return the batch, followed by the samples that are assigned to its rows."""
        assigned = self._assigned(epoch)
        mine = [index for row in batch.rows.tolist() for index in assigned.get(row, ())]
        if not mine:
            return batch
        sources = [self.samples[entry].sources[number] for entry, number in mine]
        targets = [self.samples[entry].targets[number] for entry, number in mine]
        rows = [self._label(entry, self.samples[entry].labels[number]) for entry, number in mine]
        blank = ("",) * len(mine)
        lower = replace(
            batch_of(sources, pad_id),
            target_ids=padded(targets, IGNORE),
            label_ids=torch.tensor(rows, dtype=torch.int64),
            rows=torch.full((len(mine),), -1),
            texts=blank,
            tasks=blank,
        )
        return joined(batch, lower, pad_id)

    def _label(self, entry: int, label: int) -> int:
        known = self.labels[entry]
        return known[label] if known and label >= 0 else IGNORE
