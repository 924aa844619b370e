"""Scores of a snapshot on the tasks of a stream, by the metrics that training used.

What it does not know: how the snapshot came to be.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from raycl.backbone import Backbone
from raycl.data.conversation import last_contents
from raycl.data.loader import eval_batches
from raycl.data.stream import Stream
from raycl.errors import BankError, counted
from raycl.eval.evaluator import evaluate, predict_share
from raycl.eval.metrics import NEED_SOURCES
from raycl.eval.settings import EvalConfig
from raycl.types import Batch, Score, Task

log = logging.getLogger("raycl")


class Answering(Protocol):
    """A snapshot that answers, by itself or behind an engine."""

    backbone: Backbone

    def predict(
        self,
        batch: Batch,
        texts: Sequence[str],
        tasks: Sequence[str] | None,
        limit: int,
        is_chat: bool = False,
        alone: bool = False,
    ) -> list[str]:
        """As `raycl.serve.snapshots.snapshot_model.SnapshotModel.predict`."""
        ...


def score_snapshot(model: Answering, stream: Stream, tasks: Sequence[Task], settings: EvalConfig) -> dict[str, Score]:
    """Task -> score, for these tasks of the stream.

    Raises:
        BankError: a task without answers.
    """
    return {task.name: _score(model, stream, task, settings) for task in tasks}


def _score(model: Answering, stream: Stream, task: Task, settings: EvalConfig) -> Score:
    if task.objective != "answer":
        raise BankError(
            f"task '{task.name}' trains on the texts themselves (stream.objective={task.objective}): it has no answers "
            "to evaluate a snapshot on: expected tasks with answers; see the run's own matrix"
        )
    codec, device = model.backbone.codec, model.backbone.device
    table = stream.scored(task, settings.split, codec, settings.subsample)
    limit = settings.max_new_tokens or stream.limits(task, codec).target

    def answers(batch: Batch) -> list[str]:
        texts = table.texts(batch.rows.tolist())
        names, alone = [task.name] * len(batch), settings.instruction == "chosen"
        return model.predict(batch.to(device), texts, names, limit, stream.is_chat(task), alone)

    batches = eval_batches(table, None, 0, 1, settings.batch_size, codec.pad_id)
    others = {label for other in stream.tasks if other is not task for label in other.labels or ()}
    sources = last_contents(table.texts(range(len(table)))) if task.metric in NEED_SOURCES else ()
    references = table.references(range(len(table)))
    is_wrong = settings.off_task == "wrong"
    share = predict_share(batches, answers)
    _, score = evaluate(task, share, references, others, sources=sources, off_task_is_wrong=is_wrong)
    log.info("    %-36s %5.1f  (%s)", task.name, score.value, counted(score.count, "example"))
    return score
