"""A service without HTTP, called as its endpoints call it, and the same answers computed one text at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tiny import Done, SnapshotModel, opened

from raycl.bank import Bank
from raycl.data.loader import Collate, batch_of, eval_batches
from raycl.data.prepare import fit_sources
from raycl.data.prompts import Prompt
from raycl.generation.batch_answers import predict
from raycl.generation.requests import Event, Failed, LabelScores, Sampling, Started, TextDelta
from raycl.serve.engine.engine_requests import AdapterSelection, EngineRequest
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot
from raycl.serve.engine.serving_engine import ServingEngine
from raycl.serve.service.opening import close_service, open_service
from raycl.serve.service.service import Service
from raycl.serve.settings import ServeConfig
from raycl.types import Mixture

WAIT_S = 120.0
"""No answer takes that long, however busy the machine."""

LIMIT = 12
"""Tokens of an answer, three times what tasks were trained with."""


class Reply:
    """Events of one ask, as they come."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def take(self, event: Event) -> None:
        """Take an event from the engine's thread."""
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, over: Any = None) -> Reply:
        """Wait until it is over, or until an event for which `over` is true."""
        ready = over or _is_last
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(ready, self.events)), WAIT_S), "no answer"
        return self

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(event.text for event in self.wait().events if isinstance(event, TextDelta))

    @property
    def last(self) -> Event:
        """The event that ended the request."""
        return self.wait().events[-1]

    @property
    def finish(self) -> str | None:
        """The reason why the text ended."""
        assert isinstance(self.last, TextDelta), self.last
        return self.last.finish

    @property
    def label(self) -> str:
        """The best one."""
        assert isinstance(self.last, LabelScores), self.last
        return next(iter(self.last.scores))

    @property
    def metadata(self) -> Any:
        """The metadata of the answer."""
        return next(event.metadata for event in self.wait(_is_started).events if isinstance(event, Started))

    @property
    def error(self) -> str:
        """The sentence of the error."""
        assert isinstance(self.last, Failed), self.last
        return str(self.last.error)


def _is_last(event: Event) -> bool:
    return isinstance(event, Failed | LabelScores) or (isinstance(event, TextDelta) and event.finish is not None)


def _is_started(event: Event) -> bool:
    return isinstance(event, Started)


def is_piece(event: Event) -> bool:
    """Return whether it is text."""
    return isinstance(event, TextDelta)


class ServiceClient:
    """A client that asks a service in this process."""

    def __init__(self, service: Service) -> None:
        self.service, self.snapshot_manager = service, service.snapshot_manager
        assert isinstance(service.engine, ServingEngine)
        self.engine: ServingEngine = service.engine

    def ask(
        self,
        text: str,
        snapshot: int | None = None,
        weights: Mapping[str, float] | None = None,
        task: str | None = None,
        sampling: Sampling | None = Sampling(LIMIT),  # noqa: B008 -- frozen
        **settings: Any,
    ) -> Reply:
        """One ask; `settings` are those of `EngineRequest`."""
        reply, loaded = Reply(), self.loaded(snapshot)
        reply.request = EngineRequest(
            text, reply.take, sampling, loaded=loaded, selection=AdapterSelection(weights, task), **settings
        )  # type: ignore[attr-defined]
        self.engine.submit(reply.request)  # type: ignore[attr-defined]
        return reply

    def loaded(self, number: int | None = None) -> LoadedSnapshot:
        """Return a snapshot that answers."""
        return self.snapshot_manager.active if number is None else self.snapshot_manager.open(number)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model's thread stands still, so that everything asked inside comes at once."""
        stands, go = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            assert go.wait(WAIT_S)

        self.engine.call(stand)
        assert stands.wait(WAIT_S)
        try:
            yield
        finally:
            go.set()

    def settle(self) -> None:
        """Wait until nothing is left to do."""
        self.engine.call(lambda: None).result(WAIT_S)
        self.until(lambda: not self.engine.pending)

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something that must happen."""
        end = time.monotonic() + WAIT_S
        while not happened():
            assert time.monotonic() < end, "it never happened"
            time.sleep(0.005)


def bank_of(done: Done, folder: Path) -> Bank:
    """Return a copy of a run's bank: serving writes its decisions into it."""
    return Bank(done.copy(folder).sub("bank"))


@contextmanager
def serving(bank: Bank, **settings: Any) -> Iterator[ServiceClient]:
    """Run the service of a bank, which follows nothing unless it is set to."""
    tree = {"bank": bank.storage.uri, "device": "cpu", "follow": {"enabled": False}, **settings}
    service = open_service(ServeConfig(**tree))
    try:
        yield ServiceClient(service)
    finally:
        close_service(service)


@dataclass(frozen=True)
class Asked:
    """A test example, and what the snapshot answers to it by itself."""

    task: str
    text: str
    answer: str


FEW = 4
"""The first rows of a task: both of its labels, and texts of all lengths that there are."""


def examples(done: Done, bank: Bank, number: int | None = None, rows: int | None = None) -> list[Asked]:
    """Return the first test examples of every task, or every one, answered by `SnapshotModel.predict`."""
    snapshot = bank.open(number or max(bank.snapshots()))
    model, collected = opened(bank, snapshot), []
    codec = model.backbone.codec
    for task in done.context.stream.tasks[: len(snapshot.tasks)]:
        table = done.context.stream.table(task, "test", codec)
        for batch in islice(eval_batches(Collate([table], codec.pad_id), 1), rows):
            texts = table.texts(batch.rows.tolist())
            collected.append(Asked(task.name, texts[0], model.predict(batch, texts, [task.name], LIMIT)[0]))
    return collected


def alone(model: SnapshotModel, text: str, weights: Mapping[str, float], task: str, limit: int = LIMIT) -> str:
    """Return the backbone's own answer to one text under one mixture."""
    prompt = model.loaded.prompts.get(task, Prompt())
    codec = model.backbone.codec
    ids, *_ = fit_sources([text], prompt, codec, codec.max_source_tokens)
    with model.model.activate(model.loaded.named(Mixture.same(weights, 1))):
        return predict(model.backbone, batch_of(ids, codec.pad_id), limit)[0]


def chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Neighbours together."""
    return [items[first : first + size] for first in range(0, len(items), size)]
