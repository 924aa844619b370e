"""Intervals of scores over samples of rows."""

from __future__ import annotations

import importlib.util
import tracemalloc

import numpy as np
import pytest

from raycl.metrics.answers import Answers
from raycl.metrics.per_example import METRICS, interval, score


def test_rows_that_are_right_or_wrong_have_wilsons_interval() -> None:
    """Numbers of Wilson's formula for 15 of 20; all right is no certainty."""
    assert interval([100.0] * 15 + [0.0] * 5) == pytest.approx((53.13, 88.81), abs=0.01)
    low, high = interval([100.0] * 20)
    assert 80 < low < 90 and high == 100


def test_other_scores_have_the_interval_of_a_bootstrap() -> None:
    rows = np.random.default_rng(0).uniform(0, 100, 200)
    low, high = interval(rows.tolist())
    error = float(rows.std(ddof=1)) / 200**0.5
    assert (low, high) == pytest.approx((rows.mean() - 1.96 * error, rows.mean() + 1.96 * error), abs=0.5)
    assert interval(rows.tolist()) == (low, high), "the seed is fixed"
    assert interval([40.0] * 3) == (40.0, 40.0)
    tracemalloc.start()
    interval(np.tile(rows, 5).tolist())
    assert tracemalloc.get_traced_memory()[1] < 2**26, "not all resamples are in memory together"
    tracemalloc.stop()


@pytest.mark.parametrize("metric", sorted(name for name, metric in METRICS.items() if metric.mean_of_rows))
def test_such_metrics_are_means_over_rows(metric: str) -> None:
    if importlib.util.find_spec(METRICS[metric].library or "re") is None:
        return
    given, accepted = ["red", "the blue", "", "cat"], [["red"], ["blue", "a"], ["cat"], ["dog"]]
    labels = ["red", "blue", "cat", "dog"]
    rows = [
        score(metric, Answers([item], [many], labels), ["cat"]).value
        for item, many in zip(given, accepted, strict=True)
    ]
    result = score(metric, Answers(given, accepted, labels), with_interval=True)
    assert result.value == pytest.approx(sum(rows) / 4)
    assert result.extra["low"] < result.value < result.extra["high"]
    assert "low" not in score("macro_f1", Answers(given, accepted, labels), with_interval=True).extra
