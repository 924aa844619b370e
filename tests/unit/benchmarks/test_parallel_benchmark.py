"""The benchmark of tasks at the same time: what it simulates, and that it measures every part of a run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.parallel import CLUSTER_LIMIT, Times, make_tree, on_a_cluster, simulated
from raycl.launch.task_schedule import TaskSchedule
from raycl.training.definition.job import TaskPart
from raycl.types import Phase


def schedule(tasks: int, learned: tuple[int, ...] = (), first: int = 0) -> TaskSchedule:
    return TaskSchedule.of([Phase(index, str(index), ()) for index in range(tasks)], learned, (), first)


def test_groups_take_tasks_in_order_and_then_the_longest_row_that_is_ready() -> None:
    """Four tasks of 2 s on two groups, rows of 1 to 4 s: one group is free just before the last task is learned."""
    order: list[str] = []

    def seconds(part: TaskPart) -> float:
        order.append(f"{part.kind} {part.phase}")
        return 2.0 if part.kind == "learn" else part.phase + 1.0

    assert simulated(schedule(4), 2, seconds) == 4 + 5
    assert order == ["learn 0", "learn 1", "learn 2", "learn 3", *(f"score {row}" for row in (2, 3, 1, 0))]
    assert simulated(schedule(4), 1, seconds) == 8 + 10


def test_a_row_is_scored_once_all_tasks_before_it_are_learned() -> None:
    """The first task is slow: no row is scored before it is learned. No group scores rows of a task that failed."""
    assert simulated(schedule(3), 3, lambda part: 10.0 if part.kind == "learn" and not part.phase else 1.0) == 11
    left = schedule(3)
    for _ in range(3):
        part = left.take()
        assert part is not None and part.kind == "learn"
        left.end(part, failed=part.phase == 1)
    assert left.take() == TaskPart("score", 0, "0") and not left.is_over
    left.end(TaskPart("score", 0, "0"))
    assert left.is_over and [part.phase for part in left.waiting] == [2, 1]


def test_what_the_run_begins_itself_comes_before_its_rows() -> None:
    left = schedule(3, learned=(1,), first=1)
    assert [left.take(), left.take(), left.take()] == [TaskPart("begin", 0, "0"), TaskPart("learn", 2, "2"), None]
    left.end(TaskPart("begin", 0, "0"))
    assert left.take() == TaskPart("score", 1, "1")


def test_a_cluster_is_simulated_from_measured_parts(tmp_path: Path) -> None:
    options = Namespace(tasks=2, rows=8, test_rows=4, epochs=1, method="epi")
    times = Times.of(make_tree(options, tmp_path), tmp_path)
    assert len(times.learn) == len(times.score) == 2 and min(*times.learn, *times.score, times.join) > 0
    steady = Times([100.0, 90.0], [1.0, 2.0], 2.0)
    figures = {figure.name: figure for figure in on_a_cluster(steady, [4])}
    limited = figures["4 tasks on 4 groups over the longest task and a row"]
    assert limited.value == pytest.approx((100 + 4 + 4) / 104) and limited.target == CLUSTER_LIMIT and limited.ok
