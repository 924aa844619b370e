"""Scores of a snapshot on the tasks of a stream, as its run's evaluation scores them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raycl.data.stream import Stream
from raycl.errors import BankError
from raycl.metrics.settings import EvalConfig
from raycl.scoring.scored_task import ScoredTask, line_of
from raycl.serve.offline.model import OfflineModel
from raycl.types import Score, Task

log = logging.getLogger("raycl")


def score_snapshot(
    model: OfflineModel, stream: Stream, tasks: Sequence[Task], settings: EvalConfig
) -> dict[str, Score]:
    """Return task -> score, for these tasks of the stream.

    Raises:
        BankError: a task without answers.
    """
    scores = {}
    for task in tasks:
        if task.objective != "answer":
            raise BankError(
                f"task '{task.name}' trains on the texts themselves (stream.objective={task.objective}): it has no "
                "answers to evaluate a snapshot on: expected tasks with answers; see the run's own matrix"
            )
        rows = ScoredTask(stream, task, settings, model.codec)
        scores[task.name] = rows.score(model.answers_to(rows))
        log.info("%s", line_of(task.name, scores[task.name]))
    return scores
