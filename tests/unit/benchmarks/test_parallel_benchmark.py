"""The benchmark of tasks at the same time: what it simulates, and that it measures every part of a run."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

import pytest
from tiny import Lab

from benchmarks.parallel import CLUSTER_LIMIT, Times, make_tree, on_a_cluster, simulated
from raycl.launch.parallel_tasks import TaskSchedule
from raycl.training.definition.job import TaskPart
from raycl.types import Phase


def schedule(tasks: int) -> TaskSchedule:
    return TaskSchedule.of([Phase(index, str(index), ()) for index in range(tasks)], (), (), 0)


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
    """The first task is slow: no row is scored before it is learned."""
    assert simulated(schedule(3), 3, lambda part: 10.0 if part.kind == "learn" and not part.phase else 1.0) == 11


def test_a_cluster_is_simulated_from_measured_parts(lab: Lab, tmp_path: Path) -> None:
    options = Namespace(tasks=2, rows=8, test_rows=4, epochs=1, method="epi")
    tiny = {"backbone": {"name": str(lab.model_folder("bert"))}}  # it measures the parts of any run
    times = Times.of(make_tree(options, tmp_path) | tiny, tmp_path, time.process_time)
    assert len(times.learn) == len(times.score) == 2
    assert min(*times.learn, *times.score, times.join, times.in_turn) > 0
    steady = Times([100.0, 90.0], [1.0, 2.0], 4.0, [1.0], 200.0)
    figures = {figure.name: figure for figure in on_a_cluster(steady, [4])}
    assert figures["2 tasks on two groups over one task after another"].value == pytest.approx((100 + 2 + 4) / 200)
    limited = figures["4 tasks on 4 groups over the longest task and a row"]
    assert limited.value == pytest.approx((100 + 4 + 2 + 4) / 104) and limited.target == CLUSTER_LIMIT and limited.ok
