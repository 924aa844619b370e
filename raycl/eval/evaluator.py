"""One cell of the accuracy matrix, its examples spread over the workers.

What it does not know: backbones, data files, process groups; it is given functions for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

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


def score_task(
    task: Task, predictions: Sequence[str], references: Sequence[Sequence[str]], other_labels: Collection[str]
) -> Score:
    """The task's own metric; `other_labels` are label words of other tasks, which count as off-task answers."""
    return score(task.metric, predictions, references, task.labels, other_labels)
