"""Stored training rows of earlier tasks as batches, and batches with some of them below the rows of the current task.

Rows are numbered through all tasks in the order of learning. In a batch, stored row n has the position `-2 - n`, so
that what a method keeps of it (outputs, features) is found again after the forward pass. Where texts themselves are
learned, the words that are hidden of a stored text follow from the seed and the text alone: they are the same whenever
it is read.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from raycl.backbone import Backbone
from raycl.backbone.base import evaluating
from raycl.data.loader import Collate
from raycl.data.sources.cache import Indices
from raycl.data.text_objectives import Ids, TextObjective
from raycl.methods.context import TaskContext
from raycl.types import IGNORE, Batch, Task

FIRST = -2
"""Position in a batch of stored row 0; -1 is that of fill-ups."""


class StoredRows:
    """Rows of several tasks."""

    def __init__(
        self, entries: Sequence[tuple[Task, Indices]], context: TaskContext, backbone: Backbone, seed: int
    ) -> None:
        """Open stored rows.

        Args:
            entries: tasks in the order of learning, and rows of their training tables.
            seed: seed of the words that are hidden.
        """
        codec = backbone.codec
        tables = [context.stream.table(task, "train", codec).part(rows) for task, rows in entries]
        labels = backbone.label_ids() if codec.needs_labels else None
        objective = _same_each_time(context.stream.text_objective(codec, seed))
        self.counts: list[int] = [len(rows) for _, rows in entries]
        self._collate = Collate(tables, codec.pad_id, labels, text_objective=objective) if tables else None

    def __len__(self) -> int:
        return sum(self.counts)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return the rows of these numbers, in their order."""
        assert self._collate is not None, "no row is stored"
        batch = self._collate(np.array(numbers, dtype=np.int64), len(numbers))
        return replace(batch, rows=FIRST - batch.rows)

    def batches(self, size: int, backbone: Backbone) -> Iterator[Batch]:
        """Yield all rows in order, so many together, for a backbone that is in evaluation mode meanwhile."""
        with evaluating(backbone):
            for start in range(0, len(self), size):
                yield self.batch(range(start, min(start + size, len(self)))).to(backbone.device)


def numbers_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return `[S]` places of stored rows in a batch, and `[S]` their numbers; on the batch's device."""
    places = (batch.rows <= FIRST).nonzero().squeeze(1)
    return places, FIRST - batch.rows[places]


def dealt(batch: Batch, count: int, seed: int) -> list[int]:
    """Return the number of a stored row for each new row of a batch: a drawn order of all `count` is dealt to them."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[row % count] for row in batch.rows.tolist() if row >= 0]


def joined(upper: Batch, lower: Batch, pad_id: int) -> Batch:
    """Return the examples of two batches below each other."""
    has_texts = bool(upper.texts)
    return replace(
        upper,
        source_ids=_below(upper.source_ids, lower.source_ids, pad_id),
        source_mask=_below(upper.source_mask, lower.source_mask, 0),
        target_ids=_below(upper.target_ids, lower.target_ids, IGNORE),
        label_ids=torch.cat([upper.label_ids, lower.label_ids]),
        weight=torch.cat([upper.weight, lower.weight]),
        rows=torch.cat([upper.rows, lower.rows]),
        texts=(*upper.texts, *lower.texts) if has_texts else (),
        tasks=(*upper.tasks, *lower.tasks) if has_texts else (),
    )


def _below(upper_BL: Tensor, lower_BL: Tensor, fill: int) -> Tensor:
    """Return right-padded rows below each other, padded to the longest."""
    width = max(upper_BL.shape[1], lower_BL.shape[1])
    return torch.cat(
        [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in (upper_BL, lower_BL)]
    )


def _same_each_time(objective: TextObjective | None) -> TextObjective | None:
    """Return an objective whose draw depends on the text instead of its row and epoch."""
    if objective is None:
        return None

    def by_text(ids: Ids, row: int, epoch: int) -> tuple[Ids, Ids]:
        return objective(ids, zlib.crc32(ids.tobytes()), 0)

    return by_text
