"""Row selection is a pure function of seed, task and rows."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raycl.data.selection import carve_dev, carve_test, draw_groups, per_class, pick_reference, sample


@given(st.integers(0, 10), st.integers(0, 500), st.floats(0, 0.99), st.integers(0, 50))
def test_dev_and_train_part_the_rows(seed: int, count: int, fraction: float, limit: int) -> None:
    train, dev = carve_dev(seed, "task", count, fraction, limit)
    assert sorted([*train, *dev]) == list(range(count))
    assert len(dev) == min(int(fraction * count), limit)
    assert list(train) == sorted(train) and list(dev) == sorted(dev)


@given(st.integers(0, 5), st.lists(st.integers(1, 6), min_size=2, max_size=40), st.floats(0.05, 0.5))
def test_cuts_take_whole_groups(seed: int, sizes: list[int], fraction: float) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    count = len(groups)
    for others, cut, size in (
        (*carve_test(seed, "task", count, fraction, groups), max(1, round(fraction * count))),
        (*carve_dev(seed, "task", count, fraction, 9, groups), min(int(fraction * count), 9)),
    ):
        assert sorted([*others, *cut]) == list(range(count)) and not set(groups[others]) & set(groups[cut])
        assert len(cut) <= max(size, sizes[groups[cut[0]]]) if len(cut) else not size
        assert len(cut) > size - max(sizes)
    drawn = draw_groups(seed, "task", "stored", groups, 3)
    assert all((groups == group).sum() == (groups[drawn] == group).sum() for group in groups[drawn]) and len(drawn)


def test_groups_of_one_row_are_drawn_as_rows_are() -> None:
    rows = np.arange(100)
    assert np.array_equal(draw_groups(1, "a", "train", rows, 7), sample(1, "a", "train", rows, 7))
    for carve in (
        lambda *groups: carve_test(1, "a", 100, 0.15, *groups),
        lambda *groups: carve_dev(1, "a", 100, 0.2, 9, *groups),
    ):
        assert all(np.array_equal(item, other) for item, other in zip(carve(), carve(rows), strict=True))
    assert carve_test(0, "mine", 12, 0.25)[1].tolist() == [1, 5, 6], "as before there were groups"
    assert carve_dev(3, "b", 50, 0.2, 6)[1].tolist() == [13, 24, 39, 42, 43, 49]


def test_choices_depend_on_seed_and_task_alone() -> None:
    rows = np.arange(1000)
    first = sample(1, "a", "train", rows, 50)
    assert np.array_equal(first, sample(1, "a", "train", rows, 50))
    for other in (
        sample(2, "a", "train", rows, 50),
        sample(1, "b", "train", rows, 50),
        sample(1, "a", "test", rows, 50),
    ):
        assert not np.array_equal(first, other)
    assert np.array_equal(sample(1, "a", "train", rows, None), rows)


def test_another_process_chooses_the_same_rows() -> None:
    code = (
        "import numpy as np; from raycl.data.selection import sample;"
        "print(sample(3, 'a', 'x', np.arange(99), 5).tolist())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(sample(3, "a", "x", np.arange(99), 5).tolist())


def test_per_class_takes_equally_many_or_all_there_are() -> None:
    rows = np.arange(10, 110)
    labels = np.array([0] * 60 + [1] * 37 + [2] * 3)
    chosen = per_class(0, "a", rows, labels, 16)
    counts = np.bincount(labels[chosen - 10])
    assert list(counts) == [16, 16, 3] and list(chosen) == sorted(set(chosen))


def test_picked_references_exist_and_vary() -> None:
    counts = np.array([1, 2, 5] * 50)
    picks = pick_reference(0, "a", "train", counts)
    assert (picks < counts).all() and (picks >= 0).all() and len(set(picks[2::3])) == 5
