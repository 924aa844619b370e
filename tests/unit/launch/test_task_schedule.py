"""What a free worker group does next, where the tasks of a run are learned at the same time.

How long groups take by it is tested with the benchmark that simulates them.
"""

from __future__ import annotations

from raycl.launch.parallel_tasks import TaskSchedule
from raycl.training.definition.job import TaskPart
from raycl.types import Phase


def schedule(tasks: int, learned: tuple[int, ...] = (), first: int = 0) -> TaskSchedule:
    return TaskSchedule.of([Phase(index, str(index), ()) for index in range(tasks)], learned, (), first)


def test_no_row_of_a_task_that_failed_is_scored() -> None:
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


def test_nothing_is_left_where_all_is_learned_and_scored() -> None:
    phases = [Phase(index, str(index), ()) for index in range(2)]
    left = TaskSchedule.of(phases, (0, 1), (0, 1), 0)
    assert left.is_over and not left.waiting
