"""Suites of general ability: a delta is that of TRACE's table. That lm-eval has their tasks is tested with it."""

from __future__ import annotations

import os
from statistics import fmean

import pytest

from raycl.scoring.general_ability import CODE_ALLOWED, SUITES, _code_allowed

PUBLISHED = {
    "untrained": (46.56, 26.08, 40.23, 23.47, 70.55, 76.22),
    "LoraSeqFT": (42.28, 14.71, 33.61, 21.72, 53.43, 75.19),
    "SeqFT": (46.43, 3.49, 30.11, 33.23, 77.89, 76.5),
}


def test_the_suite_of_trace_has_the_columns_of_its_table() -> None:
    assert len(SUITES["trace"]) == len(PUBLISHED["untrained"])


@pytest.mark.parametrize(("row", "delta"), [("LoraSeqFT", -7.03), ("SeqFT", -2.58)])
def test_the_difference_of_means_is_traces_delta(row: str, delta: float) -> None:
    """Results have the mean after the stream minus the mean before; TRACE has the mean of the differences."""
    after, before = PUBLISHED[row], PUBLISHED["untrained"]
    assert fmean(after) - fmean(before) == pytest.approx(delta, abs=0.006)
    assert fmean(map(float.__sub__, after, before)) == pytest.approx(delta, abs=0.006)


@pytest.mark.parametrize("before", [None, "0"])
def test_a_task_that_may_run_code_leaves_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """A user who has forbidden it for other tasks of the process has forbidden it again."""
    monkeypatch.delenv(CODE_ALLOWED, raising=False)
    if before is not None:
        monkeypatch.setenv(CODE_ALLOWED, before)
    for is_allowed in (True, False):
        with _code_allowed(is_allowed):
            assert os.environ.get(CODE_ALLOWED) == ("1" if is_allowed else before)
        assert os.environ.get(CODE_ALLOWED) == before
