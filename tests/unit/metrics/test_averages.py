"""Means of the last row: all tasks, the first two and the last two."""

from __future__ import annotations

import pytest

from raycl.metrics.answers import Answers
from raycl.metrics.matrix import AccuracyMatrix, averages
from raycl.metrics.per_example import score
from raycl.types import Score


def matrix(*last: Score | None) -> AccuracyMatrix:
    return AccuracyMatrix(tuple(f"t{number}" for number in range(len(last))), ("joint",), [list(last)])


@pytest.mark.parametrize("metric", ["macro_f1", "micro_f1"])
def test_accuracy_stands_beside_f1(metric: str) -> None:
    """DAS reports both; here three of four answers are right and one class is never answered."""
    result = score(metric, Answers(["a", "a", "a", "a"], [["a"], ["a"], ["a"], ["b"]], labels=["a", "b"]))
    assert result.extra["accuracy"] == 75
    assert result.value == pytest.approx(100 * (6 / 7) / 2 if metric == "macro_f1" else 75)


def test_off_task_answers_are_no_right_ones() -> None:
    assert score("macro_f1", Answers(["x", "a"], [["a"], ["a"]], ["a"]), other_labels=["x"]).extra["accuracy"] == 50


def test_means_of_the_first_and_last_two_tasks() -> None:
    scores = [Score(value, 1, {"accuracy": value + 10}) for value in (10.0, 20.0, 60.0, 80.0)]
    assert averages(matrix(*scores)) == {
        "score": {"all": 42.5, "first_two": 15, "last_two": 70},
        "accuracy": {"all": 52.5, "first_two": 25, "last_two": 80},
    }


def test_a_mean_needs_every_part() -> None:
    some = averages(matrix(Score(10, 1, {"accuracy": 50}), Score(20, 1), None))
    assert some["score"] == {"all": None, "first_two": 15, "last_two": None}
    assert some["accuracy"] == {"all": None, "first_two": None, "last_two": None}
    assert averages(matrix(Score(10, 1))) == {"score": {"all": 10, "first_two": None, "last_two": None}}
