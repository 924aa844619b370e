"""Drift: the active snapshot's answers beside rows that its tasks were learned from, read by the same router."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from raycl.data.stream import Stream
from raycl.data.tokens import Split
from raycl.serve.engine.engine_requests import AdapterSelection
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot
from raycl.serve.errors import BusyError, DeadlineExceededError
from raycl.serve.gate.earlier_rows import stream_of
from raycl.serve.http.schema import DriftAnswer, UnsureAnswer
from raycl.serve.service.history import MOST_TASKS, OTHER_LABEL, History, TaskCounts
from raycl.serve.service.service import ServedAnswer, Service
from raycl.types import Task

log: logging.Logger = logging.getLogger(__name__)

READ = 32
"""Held-out rows of a task that the router reads."""

LABELLED = 2_000
"""Training rows of a task whose labels are counted; of more, those at equal distances."""

HELD_OUT: tuple[Split, Split] = ("dev", "test")
"""Splits whose rows are read, the first that a task has."""

TOGETHER = 8
"""Texts that are routed at once, so that requests do not wait long."""


class TrainingCounts:
    """Counts of the rows that the active snapshot's tasks were learned from, made when they are first wanted.

    They are routed by the served snapshot, as the texts of requests are.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._sha256 = ""
        self._counting: asyncio.Task[dict[str, TaskCounts]] | None = None

    def state(self) -> dict[str, Any]:
        """Return `state` (counting, ready or missing), `reason` where it is missing, and `data` by task."""
        snapshot = self._service.snapshot_manager.active.snapshot
        if self._counting is None or snapshot.sha256 != self._sha256:
            self._sha256, self._counting = snapshot.sha256, asyncio.ensure_future(self._counts())
        if not self._counting.done():
            return {"state": "counting", "reason": "", "data": {}}
        if (error := self._counting.exception()) is not None:
            if isinstance(error, BusyError | DeadlineExceededError):
                self._counting = None  # the next request counts again
            return {"state": "missing", "reason": str(error), "data": {}}
        data = {name: vars(counts) for name, counts in self._counting.result().items()}
        return {"state": "ready", "reason": "", "data": data}

    async def _counts(self) -> dict[str, TaskCounts]:
        counts = {}
        async with self._service.use_snapshot(None) as loaded:
            stream = await asyncio.to_thread(stream_of, loaded.snapshot, self._service.config)
            learned = {task.name for task in loaded.snapshot.tasks}
            for task in [task for task in stream.tasks if task.name in learned][:MOST_TASKS]:
                texts, labels = await asyncio.to_thread(_rows, stream, task, bool(loaded.labels[task.name]))
                counts[task.name] = counted = TaskCounts()
                for begin in range(0, len(texts), TOGETHER):
                    await self._route(loaded, texts[begin : begin + TOGETHER], stream.is_chat(task), counted)
                counted.labels.update(labels)
        return counts

    async def _route(self, loaded: LoadedSnapshot, texts: Sequence[str], is_chat: bool, counts: TaskCounts) -> None:
        service = self._service
        settings = {"route_only": True, "is_chat": is_chat}
        async with service.submit(loaded, AdapterSelection(), texts, **settings) as queues:
            for queue in queues:
                answer = await service.complete(queue, service.deadline, route_only=True)
                assert answer.metadata is not None, "an answer begins with how it is made"
                counts.add(answer.metadata.ood_score, answer.metadata.unknown)


def _rows(stream: Stream, task: Task, has_labels: bool) -> tuple[list[str], list[str]]:
    """Return held-out texts of a task, and labels of its training rows."""
    texts: list[str] = []
    for split in HELD_OUT:
        if (source := stream.source(task, split)) is not None and len(rows := stream.rows(task, split)):
            texts = source.open().values("text", rows[:READ])
            break
    trained = stream.source(task, "train")
    if trained is None or not has_labels:
        return texts, []
    rows = stream.rows(task, "train")
    some = rows[:: max(1, len(rows) // LABELLED)]
    return texts, [names[0] for names in trained.open().values("references", some)]


def record(
    history: History,
    loaded: LoadedSnapshot,
    answer: ServedAnswer,
    tasks: dict[str, float],
    text: str,
    is_active: bool,
) -> None:
    """Count a finished answer.

    Args:
        tasks: task -> weight of its adapters. is_active: it is the active snapshot's; counts by task are of that alone.
    """
    labels = loaded.labels.get(max(tasks, key=lambda task: tasks[task], default=""), ())
    label: str | None = None
    if answer.scores:
        label = max(answer.scores, key=lambda name: answer.scores[name])
    elif labels:
        written = answer.text.strip()
        label = written if written in labels else OTHER_LABEL
    history.add_answer(answer, tasks)
    if answer.metadata is not None and is_active:
        history.served.add(text, answer.metadata, tasks, label)


def add_drift(app: FastAPI, service: Service, history: History) -> None:
    training = TrainingCounts(service)

    @app.get("/v1/drift", response_model=None, responses={200: {"model": DriftAnswer}})
    async def drift() -> Response:
        """Return counts of this replica's answers by task, beside those of the rows that tasks were learned from."""
        active = service.snapshot_manager.active.snapshot.number
        tree = {
            "object": "drift",
            "replica": history.replica,
            "snapshot": active,
            "served": history.served.tree(active),
            "training": training.state(),
            "keeps_unsure": history.served.keep_unsure,
        }
        return JSONResponse(tree, headers={"Cache-Control": "no-store"})

    @app.get("/admin/unsure", response_model=None, responses={200: {"model": UnsureAnswer}})
    async def unsure() -> Response:
        """Return the kept texts that are farthest from all tasks; none where `keep_unsure` is 0."""
        tree = {"object": "list", "replica": history.replica, "data": history.served.unsure()}
        return JSONResponse(tree, headers={"Cache-Control": "no-store"})
