"""Row selection is a pure function of seed, task and rows."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raycl.data.selection import carve_dev, per_class, pick_reference, sample


@given(st.integers(0, 10), st.integers(0, 500), st.floats(0, 0.99), st.integers(0, 50))
def test_dev_and_train_part_the_rows(seed: int, count: int, fraction: float, limit: int) -> None:
    train, dev = carve_dev(seed, "task", count, fraction, limit)
    assert sorted([*train, *dev]) == list(range(count))
    assert len(dev) == min(int(fraction * count), limit)
    assert list(train) == sorted(train) and list(dev) == sorted(dev)


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
