"""Tests of what trials are judged by, after each task."""

from __future__ import annotations

from typing import Any

import pytest

from raycl.errors import ConfigError
from raycl.operations.sweep.definition.expressions import measured, read_metric

TASKS = ["a", "b", "c"]
ROWS = [{"a": 90.0}, {"a": 60.0, "b": 80.0}, {"a": 30.0, "b": 70.0, "c": 50.0}]


def records(rows: list[dict[str, float]]) -> list[dict[str, Any]]:
    return [{"row": {task: {"value": value, "count": 10} for task, value in row.items()}} for row in rows]


def values(metric: str, done: int, **more: Any) -> float | None:
    return measured([read_metric(metric)], TASKS, TASKS, records(ROWS[:done]), **more)[0]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("ap", [90.0, 70.0, 50.0]),
        ("f_ra", [0.0, 30.0, 35.0]),
        ("ap - f_ra", [90.0, 40.0, 15.0]),
        ("ap - 0.5 * f_ra", [90.0, 55.0, 32.5]),
        ("task('b')", [None, 80.0, 70.0]),
        ("min(task('a'), task('c'))", [None, None, 30.0]),
        ("fwt", [None, None, None]),
    ],
)
def test_metrics_after_each_task(metric: str, expected: list[float | None]) -> None:
    assert [values(metric, done) for done in (1, 2, 3)] == pytest.approx(expected)


def test_forward_transfer_needs_the_singles() -> None:
    assert values("fwt", 2, singles={"a": 80.0, "b": 80.0, "c": 80.0}) == pytest.approx(5.0)


def test_scores_of_tasks_to_come_do_not_count() -> None:
    rows = records([{"a": 90.0, "b": 10.0, "c": 20.0}])
    assert measured([read_metric("ap")], TASKS, TASKS, rows) == [90.0]


def test_joint_training_has_one_row() -> None:
    rows = records([{"a": 60.0, "b": 70.0, "c": 80.0}])
    assert measured([read_metric("ap"), read_metric("f_ra")], TASKS, ["joint"], rows) == [70.0, 0.0]


@pytest.mark.parametrize("text", ["app", "ap.x", "ap - lambda_1", "task(ap) - b"])
def test_unknown_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="expected ap, f_ra"):
        read_metric(text)
