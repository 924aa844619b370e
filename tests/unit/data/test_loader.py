"""Batches: the same rows for any number of workers, equally many micro-batches, padding that carries nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from data_samples import MiniLMCodec, WriteTask, news, open_agnews
from hypothesis import given
from hypothesis import strategies as st

from raycl.data.loader import BATCH_TOKENS, Collate, GlobalOrder, Loader, check_batch, eval_batches, parts_by_length
from raycl.data.tokens import TokenTable
from raycl.errors import ConfigError
from raycl.types import IGNORE, Batch


@pytest.fixture
def tables(write_task: WriteTask, codec: MiniLMCodec) -> tuple[TokenTable, TokenTable]:
    """37 and 8 rows."""
    stream = open_agnews(write_task("agnews", news(37), news(8, 50)), dev_fraction=0)
    task = stream.tasks[0]
    return stream.table(task, "train", codec), stream.table(task, "test", codec)


def real_rows(batches: Sequence[Batch]) -> list[int]:
    return [int(row) for batch in batches for row in batch.rows if row >= 0]


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), st.integers(0, 5))
def test_an_order_covers_every_row_once_an_epoch(count: int, size: int, epochs: int, seed: int) -> None:
    order = GlobalOrder(count, size, epochs, seed)
    assert order.steps == order.steps_per_epoch * epochs
    for epoch in range(epochs):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        rows = np.concatenate([order.rows(step) for step in steps])
        assert sorted(rows) == list(range(count))


def test_steps_of_similar_length_have_the_same_rows_in_an_order_of_their_own() -> None:
    lengths = np.random.Generator(np.random.PCG64(0)).integers(1, 500, 1003)
    mixed, grouped = GlobalOrder(1003, 8, 2, seed=4), GlobalOrder(1003, 8, 2, 4, lengths=lengths)
    steps = range(grouped.steps_per_epoch, grouped.steps)
    rows = [grouped.rows(step) for step in steps]
    assert sorted(np.concatenate(rows)) == list(range(1003)) and len(rows[-1]) == 3
    spread = [[float(np.ptp(lengths[order.rows(step)])) for step in steps[:-1]] for order in (mixed, grouped)]
    assert np.mean(spread[1]) < 0.1 * np.mean(spread[0])
    longest = [int(lengths[row].max()) for row in rows[:-1]]
    assert longest != sorted(longest) and abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.3, "drawn at random"
    again = GlobalOrder(1003, 8, 2, 4, lengths=lengths)
    assert [again.rows(step).tolist() for step in reversed(steps)] == [row.tolist() for row in rows[::-1]]
    assert GlobalOrder(5, 8, 1, 0, lengths=lengths[:5]).rows(0).tolist() == GlobalOrder(5, 8, 1, 0).rows(0).tolist()


def test_an_order_is_a_pure_function_of_the_step() -> None:
    order = GlobalOrder(100, 8, 3, seed=4)
    forward = [order.rows(step).tolist() for step in range(order.steps)]
    backward = [GlobalOrder(100, 8, 3, seed=4).rows(step).tolist() for step in reversed(range(order.steps))]
    assert forward == backward[::-1]
    assert forward[0] != GlobalOrder(100, 8, 3, seed=5).rows(0).tolist()
    assert forward[0] != forward[order.steps_per_epoch]
    assert GlobalOrder(100, 8, 3, 4, max_steps=5).steps == 5
    with pytest.raises(AssertionError, match="outside"):
        GlobalOrder(100, 8, 3, 4, max_steps=5).rows(5)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_workers_share_exactly_the_rows_of_the_step(tables: tuple[TokenTable, TokenTable], world: int) -> None:
    order = GlobalOrder(45, 12, 2, seed=1)
    loaders = [Loader(Collate(tables, 0), order, 2, rank, world) for rank in range(world)]
    for step in range(order.steps):
        shares = [loader.micro_batches(step) for loader in loaders]
        assert {len(share) for share in shares} == {12 // (2 * world)}
        assert {len(batch) for share in shares for batch in share} == {2}
        rows = [row for share in shares for row in real_rows(share)]
        assert sorted(rows) == sorted(order.rows(step))
        weight = sum(float(batch.weight.sum()) for share in shares for batch in share)
        assert weight == len(rows)


def test_a_batch_holds_what_the_table_holds(tables: tuple[TokenTable, TokenTable], codec: MiniLMCodec) -> None:
    label_ids = {"Science or Technology": 5, "World": 2, "Sports": 9, "Business": 0}
    order = GlobalOrder(45, 8, 1, seed=0)
    loader = Loader(Collate(tables, 0, label_ids), order, 4)
    for batch in loader.micro_batches(order.steps - 1) + loader.micro_batches(0):
        for index, row in enumerate(batch.rows.tolist()):
            if row < 0:
                continue
            table, local = (tables[0], row) if row < 37 else (tables[1], row - 37)
            columns = table.columns([local])
            length = int(batch.source_mask[index].sum())
            assert batch.source_ids[index, :length].tolist() == columns.source_ids[0].tolist()
            assert not batch.source_ids[index, length:].any() and not batch.source_mask[index, length:].any()
            target = batch.target_ids[index]
            assert target[target != IGNORE].tolist() == columns.target_ids[0].tolist()
            assert int(batch.label_ids[index]) == label_ids[table.references([local])[0][0]]
        assert int(batch.source_mask.sum(dim=1).max()) == batch.source_ids.shape[1]
        assert all(tensor.dtype == torch.int64 for tensor in batch.tensors() if tensor is not batch.weight)


def test_fill_up_rows_have_no_loss(tables: tuple[TokenTable, TokenTable]) -> None:
    order = GlobalOrder(45, 32, 1, seed=0)  # the last step has 13 rows
    last = [Loader(Collate(tables, 7), order, 4, rank, 2).micro_batches(1) for rank in (0, 1)]
    assert [len(real_rows(share)) for share in last] == [7, 6]
    empty = last[0][-1]
    assert real_rows([empty]) == [] and not empty.weight.any()
    assert (empty.target_ids == IGNORE).all() and empty.target_ids.shape == (4, 1)
    assert (empty.label_ids == IGNORE).all() and (empty.rows == -1).all()
    assert (empty.source_ids == 7).all() and (empty.source_mask == 1).all()


def test_neighbours_are_of_similar_length(tables: tuple[TokenTable, TokenTable]) -> None:
    order = GlobalOrder(45, 24, 1, seed=0)
    lengths = [b.source_mask.sum(dim=1) for b in Loader(Collate(tables, 0), order, 4).micro_batches(0)]
    assert torch.equal(torch.cat(lengths), torch.cat(lengths).sort().values)


def test_encoders_have_no_targets(write_task: WriteTask) -> None:
    stream = open_agnews(write_task("agnews", news(10), news(4)), dev_fraction=0)
    table = stream.table(stream.tasks[0], "train", MiniLMCodec(needs_labels=True))
    batch = Loader(Collate([table], 0), GlobalOrder(10, 16, 1, 0), 16).micro_batches(0)[0]
    assert batch.target_ids.shape == (16, 0)
    with pytest.raises(AssertionError, match="no row for"):
        Loader(Collate([table], 0, {"World": 0}), GlobalOrder(10, 16, 1, 0), 16).micro_batches(0)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 4, 64])
def test_evaluation_sees_every_row_once(tables: tuple[TokenTable, TokenTable], world: int, size: int) -> None:
    shares: list[list[Batch]] = [
        list(eval_batches(Collate([tables[0]], 0), size, rank, world)) for rank in range(world)
    ]
    assert len({len(share) for share in shares}) == 1
    assert [len(batch) for batch in shares[0]] == [len(batch) for batch in shares[-1]]
    assert sorted(row for share in shares for row in real_rows(share)) == list(range(37))


def test_batch_sizes_that_do_not_fit_get_their_neighbours() -> None:
    assert check_batch(32, 8, 2) == 2
    with pytest.raises(ConfigError, match=r"batch_size 30 is not a multiple of .* 8 x 2 workers = 16: .* 16 or 32"):
        check_batch(30, 8, 2)
    with pytest.raises(ConfigError, match=r"set batch_size to 24$"):
        check_batch(8, 8, 3)


def test_order_and_tables_must_agree(tables: tuple[TokenTable, TokenTable]) -> None:
    with pytest.raises(AssertionError, match="cover exactly"):
        Loader(Collate(tables, 0), GlobalOrder(44, 12, 1, 0), 2)


@pytest.mark.parametrize(
    "lengths", [[], [5], [9] * 40, [300, 2, 150, 2, 160], list(range(1, 60)), [17] * 20 + [18] * 12]
)
def test_rows_of_similar_lengths_are_computed_together(lengths: list[int]) -> None:
    parts = parts_by_length(lengths)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))

    def cost(parts: Sequence[Sequence[int]]) -> int:
        return sum(len(part) * max(lengths[row] for row in part) + BATCH_TOKENS for part in parts)

    assert cost(parts) <= cost([range(len(lengths))] if lengths else [])
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for first in range(1, len(order)):  # no other division in two or three has fewer
        for second in range(first, len(order)):
            others = [part for part in (order[:first], order[first:second], order[second:]) if part]
            assert cost(parts) <= cost(others)
    assert len(set(lengths)) > 1 or len(parts) <= 1, "nothing is gained by dividing equal lengths"
