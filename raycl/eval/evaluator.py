"""One cell of the accuracy matrix, its examples spread over the workers.

What it does not know: backbones, data files, process groups; it is given functions for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from raycl.eval.metrics import score
from raycl.types import Batch, Score, Task

Predictions = list[tuple[int, str]]


def predict_share(batches: Iterable[Batch], predict: Callable[[Batch], list[str]]) -> Predictions:
    """This worker's answers as (row, text); fill-ups are computed, so that workers stay in step, and dropped."""
    answers: Predictions = []
    for batch in batches:
        texts = predict(batch)
        answers += [(row, text) for row, text in zip(batch.rows.tolist(), texts, strict=True) if row >= 0]
    return answers


def merge(shares: Sequence[Predictions], count: int) -> list[str]:
    """All workers' answers in row order."""
    answers = dict(pair for share in shares for pair in share)
    assert sorted(answers) == list(range(count)), f"{len(answers)} answers for {count} rows"
    return [answers[row] for row in range(count)]


def evaluate(
    task: Task,
    share: Predictions,
    references: Sequence[Sequence[str]],
    other_labels: Collection[str],
    gather: Callable[[Predictions], Sequence[Predictions]] = lambda share: [share],
    *,
    sources: Sequence[str] = (),
    off_task_is_wrong: bool = True,
    with_interval: bool = False,
) -> tuple[list[str], Score]:
    """Answers in row order and their score by the task's own metric.

    Args:
        share: this worker's answers. gather: all workers' answers from this worker's.
        other_labels: label words of other tasks, which count as off-task answers.
        sources: the input texts, for metrics that compare with them.
        off_task_is_wrong, with_interval: see `score`.
    """
    answers = merge(gather(share), len(references))
    rules: dict[str, Any] = {"sources": sources, "off_task_is_wrong": off_task_is_wrong}
    rules["with_interval"] = with_interval
    return answers, score(task.metric, answers, references, task.labels, other_labels, **rules)
