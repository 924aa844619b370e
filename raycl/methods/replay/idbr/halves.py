"""Texts cut in two: beside each example one of its two halves in their own order, or swapped (IDBR, section 3.2).

    [CLS] x1 [SEP] x2 [SEP]    or    [CLS] x2 [SEP] x1 [SEP]

The cut is drawn, and the order is swapped with probability 1/2, both by the seed and the example's position alone. What
surrounds a text (special tokens) stays as the tokenizer put it; what ends it stands between the halves too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from raycl.data.loader import batch_of
from raycl.methods.replay.stored_rows import FIRST
from raycl.types import IGNORE, Batch

HALVES = -(1 << 40)
"""Position in a batch of halves in their own order; one below it: swapped; two below: a text too short to be cut."""


def is_halves(batch: Batch) -> Tensor:
    """Return `[B]` bool."""
    return batch.rows <= HALVES


def is_real(batch: Batch) -> Tensor:
    """Return `[B]` bool: rows of the current task and stored ones, neither halves nor fill-ups."""
    return ((batch.rows >= 0) | (batch.rows <= FIRST)) & (batch.rows > HALVES)


def orders(batch: Batch) -> Tensor:
    """Return `[H]` of all halves in a batch: 0 their own order, 1 swapped, IGNORE too short."""
    order_H = HALVES - batch.rows[is_halves(batch)]
    return order_H.masked_fill(order_H > 1, IGNORE)


def halves_of(batch: Batch, seed: int, special_ids: Collection[int], limit: int, pad_id: int) -> Batch:
    """Return the halves of each real example, in the order of the batch, with its label.

    Args:
        limit: most tokens of an example; a text loses its last ones where the mark between the halves needs room.
    """
    places = is_real(batch).nonzero().squeeze(1).tolist()
    sources, rows = list[list[int]](), list[int]()
    for row in places:
        ids = batch.source_ids[row][batch.source_mask[row] > 0].tolist()
        halves, order = _cut(ids, seed, int(batch.rows[row]), special_ids, limit)
        sources.append(halves)
        rows.append(HALVES - order)
    return replace(
        batch_of(sources, pad_id),
        target_ids=batch.target_ids[places],
        label_ids=batch.label_ids[places],
        weight=batch.weight[places],
        rows=torch.tensor(rows, dtype=torch.int64),
        texts=tuple(batch.texts[row] for row in places) if batch.texts else (),
        tasks=tuple(batch.tasks[row] for row in places) if batch.tasks else (),
    )


def _cut(ids: Sequence[int], seed: int, row: int, special_ids: Collection[int], limit: int) -> tuple[list[int], int]:
    """Return a text's halves with what surrounds it, and 0: in their own order, 1: swapped, 2: too short to be cut."""
    words = [index for index, token in enumerate(ids) if token not in special_ids]
    if len(words) < 2:
        return list(ids), 2
    start, end = list(ids[: words[0]]), list(ids[words[-1] + 1 :])
    body = list(ids[words[0] : words[-1] + 1])[: max(2, limit - len(start) - 2 * len(end))]
    draw = np.random.Generator(np.random.PCG64([seed, row + (1 << 33)]))
    cut, swapped = int(draw.integers(1, len(body))), int(draw.integers(2))
    first, second = (body[cut:], body[:cut]) if swapped else (body[:cut], body[cut:])
    return [*start, *first, *end, *second, *end], swapped
