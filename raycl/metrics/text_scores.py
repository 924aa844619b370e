"""A cell of the accuracy matrix where texts themselves are learned: the share of tokens that are guessed right."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from raycl.types import Batch, Score

Share = list[tuple[int, float, float, float]]
"""Row, tokens guessed right, tokens, cross-entropy in nats."""


def score_texts(
    batches: Iterable[Batch],
    read: Callable[[Batch], Tensor],
    count: int,
    gather: Callable[[Share], Sequence[Share]] = lambda share: [share],
) -> Score:
    """Return percent of tokens guessed right, over all tokens of the split; `perplexity` and `tokens` are extra
    numbers.

    Args:
        batches: this worker's share. gather: all workers' shares from this worker's.
        read: a batch to `[B, 3]`: tokens guessed right, tokens, their cross-entropy in nats.
        count: number of rows of the split.
    """
    mine: Share = []
    for batch in batches:
        counts = zip(batch.rows.tolist(), read(batch).tolist(), strict=True)
        mine += [(row, right, tokens, loss) for row, (right, tokens, loss) in counts if row >= 0]
    rows = sorted(row for share in gather(mine) for row in share)
    assert [row[0] for row in rows] == list(range(count)), f"{len(rows)} texts were read of {count}"
    right, tokens, loss = torch.tensor([row[1:] for row in rows], dtype=torch.float64).sum(0).tolist()
    perplexity = math.exp(min(loss / max(tokens, 1.0), 700.0))  # JSON has no infinity
    return Score(100.0 * right / max(tokens, 1.0), count, {"perplexity": perplexity, "tokens": tokens})
