"""Suites of general ability: a delta is that of TRACE's table. That lm-eval has their tasks is tested with it."""

from __future__ import annotations

import os
from statistics import fmean

import pytest

from raycl.scoring.general_ability import CODE_ALLOWED, SUITES, _code_allowed, headline

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


@pytest.mark.parametrize(
    ("task", "numbers", "score"),
    [
        ("arc_easy", {"acc,none": 0.5, "acc_norm,none": 0.75, "acc_norm_stderr,none": 0.1}, ("acc_norm", 75.0)),
        ("coqa", {"em,none": 0.25, "f1,none": 0.5}, ("em", 25.0)),
        ("squadv2", {"exact,none": 40.0, "f1,none": 63.5}, ("f1", 63.5)),
        ("squadv2", {"f1,none": 0.5}, ("f1", 0.5)),
        ("scrolls_qasper", {"f1,none": 0.5}, ("f1", 0.5)),
        ("scrolls_quality", {"acc,none": 0.5, "em,none": 50.0}, ("acc", 50.0)),
        ("of a file of ours", {"exact_match,none": 12.5}, ("exact_match", 12.5)),
        ("wmt", {"bleu,none": 0.5}, ("bleu", 0.5)),
    ],
)
def test_scores_are_points_of_a_hundred(task: str, numbers: dict[str, float], score: tuple[str, float]) -> None:
    assert headline(task, numbers) == score
