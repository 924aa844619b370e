"""Packing prompt and answer into one row, and moving padding, for any lengths."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from raycl.backbone.causal import join, pad_left
from raycl.types import IGNORE, Batch

PAD = 0
WORDS = st.lists(st.integers(1, 90), min_size=1, max_size=7)
ROWS = st.lists(st.tuples(WORDS, st.lists(st.integers(1, 90), max_size=4)), min_size=1, max_size=5)
"""Rows of (source, target); a target may be empty, as a fill-up's is."""


def batch_of(rows: list[tuple[list[int], list[int]]]) -> Batch:
    """Return a right-padded batch, as the loader makes it."""
    sources, targets = ([row[side] for row in rows] for side in (0, 1))
    width, depth = max(map(len, sources)), max(1, *map(len, targets))
    return Batch(
        source_ids=torch.tensor([ids + [PAD] * (width - len(ids)) for ids in sources]),
        source_mask=torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sources]),
        target_ids=torch.tensor([ids + [IGNORE] * (depth - len(ids)) for ids in targets]),
        label_ids=torch.full((len(rows),), IGNORE),
        weight=torch.ones(len(rows)),
        rows=torch.arange(len(rows)),
    )


@given(rows=ROWS)
def test_join_packs_source_and_target_without_holes(rows: list[tuple[list[int], list[int]]]) -> None:
    ids, mask, labels = join(batch_of(rows), PAD)
    assert ids.shape == mask.shape == labels.shape
    assert ids.shape[1] == max(len(source) + len(target) for source, target in rows)
    for row, (source, target) in enumerate(rows):
        length = len(source) + len(target)
        assert ids[row].tolist() == source + target + [PAD] * (ids.shape[1] - length)
        assert mask[row].tolist() == [1] * length + [0] * (ids.shape[1] - length)
        expected = [IGNORE] * len(source) + target
        assert labels[row].tolist() == expected + [IGNORE] * (ids.shape[1] - length)


@given(rows=ROWS)
def test_pad_left_keeps_every_row_and_ends_all_at_one_column(rows: list[tuple[list[int], list[int]]]) -> None:
    batch = batch_of(rows)
    ids, mask = pad_left(batch.source_ids, batch.source_mask)
    for row, (source, _) in enumerate(rows):
        blanks = ids.shape[1] - len(source)
        assert ids[row].tolist() == [PAD] * blanks + source
        assert mask[row].tolist() == [0] * blanks + [1] * len(source)
