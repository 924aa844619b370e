"""Examples of IDBR: the halves of each in their own order or swapped (section 3.2), and those nearest to centroids."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from raycl.data.loader import batch_of
from raycl.data.sources.cache import Indices
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

        [CLS] x1 [SEP] x2 [SEP]    or    [CLS] x2 [SEP] x1 [SEP]

    The cut is drawn, and the order is swapped with probability 1/2, both by the seed and the example's position alone.
    What surrounds a text (special tokens) stays as the tokenizer put it; what ends it stands between the halves too.

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


ROUNDS = 25
"""The most rounds of k-means, from rows drawn by the seed (IDBR's code: scikit-learn's start and 300 rounds, 10
times)."""

AT_ONCE = 4096
"""Rows whose distances are held together."""


def nearest_to_centroids(x_NC: Tensor, count: int, seed: int) -> Indices:
    """Return ascending numbers of at most `count` rows, the nearest one of each cluster; of equals the first.

    They are unlike each other and stand for the others.
    """
    if count >= len(x_NC):
        return np.arange(len(x_NC))
    draw = torch.Generator().manual_seed(seed)
    centroids_KC = x_NC[torch.randperm(len(x_NC), generator=draw)[:count].sort().values].clone()
    cluster_N = torch.full((len(x_NC),), -1)
    for _ in range(ROUNDS):
        before, (cluster_N, _) = cluster_N, _nearest(x_NC, centroids_KC)
        if torch.equal(before, cluster_N):
            break
        size_K = torch.bincount(cluster_N, minlength=count)
        sums_KC = torch.zeros_like(centroids_KC).index_add_(0, cluster_N, x_NC)
        means_KC = sums_KC / size_K.clamp(min=1).unsqueeze(1)
        centroids_KC = torch.where((size_K > 0).unsqueeze(1), means_KC, centroids_KC)
    cluster_N, distance_N = _nearest(x_NC, centroids_KC)
    nearness_N = (distance_N / distance_N.max().clamp(min=torch.finfo(distance_N.dtype).tiny)).round(decimals=4)
    order = torch.argsort(nearness_N, stable=True)  # rounded: both rows of a cluster of two are as near to their mean
    chosen: dict[int, int] = {}
    for row in order.tolist():
        chosen.setdefault(int(cluster_N[row]), row)
    return np.array(sorted(chosen.values()), dtype=np.int64)


def _nearest(x_NC: Tensor, centroids_KC: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[N]` the nearest centroid of each row, and its distance."""
    parts = [torch.cdist(rows, centroids_KC).min(1) for rows in torch.split(x_NC, AT_ONCE)]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
