"""Routing apart from the model: an engine's face whose answers are made by replicas elsewhere.

The text is encoded and its mixture worked out here, on CPUs; replicas with the model get the mixture with the text.
What it does not know: how replicas are found (it is given a function that streams their events).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayError

from raycl.backbone.kinds import capabilities_of
from raycl.errors import RayclError
from raycl.generation.requests import Event, Failed, Sampling, Started
from raycl.serve.engine.model_host import LoadedSnapshot
from raycl.serve.engine.requests import CLOSED, FAILURES, Choice, EngineRequest
from raycl.serve.engine.routing import mixtures_of, unfamiliar_of


@dataclass(frozen=True)
class Spec:
    """An ask on its way to a replica: everything but who listens."""

    text: str
    snapshot: int
    choice: Choice
    sampling: Sampling | None
    templated: bool
    route_only: bool


Stream = Callable[[Spec], AsyncGenerator[Event, None]]


class RemoteEngine:
    """Routes, then lets others answer; the face of `raycl.serve.engine.engine.Engine`. What replicas do, they count."""

    def __init__(self, stream: Stream, kind: str, max_batch: int, max_target: int) -> None:
        """Start the routing thread and the loop that listens to replicas."""
        self.kind, self.max_batch, self.max_target = kind, max_batch, max_target
        self.capabilities = capabilities_of(kind)
        self._stream = stream
        self._unfinished: set[int] = set()
        self._lock = threading.Lock()  # of the set: asks begin and end on different threads
        self._inbox: queue.SimpleQueue[EngineRequest | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="raycl-listen", daemon=True),
            threading.Thread(target=self._route_all, name="raycl-route", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, ask: EngineRequest) -> None:
        """As an engine."""
        with self._lock:
            self._unfinished.add(id(ask))
        self._inbox.put(ask)

    @property
    def load(self) -> int:
        """Asks whose last event has not come."""
        return len(self._unfinished)

    def load_snapshot(self, loaded: LoadedSnapshot) -> None:
        """Nothing is put on a device here."""

    def unload_snapshot(self, loaded: LoadedSnapshot) -> None:
        """Nothing was put on a device here."""

    @property
    def alive(self) -> bool:
        """Whether both threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Stop both threads."""
        self._inbox.put(None)
        self._threads[1].join(timeout=60)
        while not self._inbox.empty():
            ask = self._inbox.get()
            if ask is not None:
                self._end(ask, Failed(RayclError(CLOSED)))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads[0].join(timeout=60)

    def _route_all(self) -> None:
        while True:
            asks = [self._inbox.get()]
            while not self._inbox.empty() and len(asks) < self.max_batch:
                asks.append(self._inbox.get())
            wanted = [ask for ask in asks if ask is not None and not ask.cancelled]
            for ask in asks:
                if ask is not None and ask.cancelled:
                    self._over(ask)
            for loaded in {id(ask.loaded): ask.loaded for ask in wanted}.values():
                self._routed(loaded, [ask for ask in wanted if ask.loaded is loaded])
            if None in asks:
                return

    def _routed(self, loaded: LoadedSnapshot, asks: list[EngineRequest]) -> None:
        began = time.perf_counter()
        free = [] if loaded.reads_prompts else asks
        try:
            found = dict(zip(map(id, free), mixtures_of(loaded, free), strict=True))
            strange = unfamiliar_of(loaded, free)
        except (*FAILURES, RayError) as error:  # a request must never end the thread
            if len(asks) > 1:
                for ask in asks:
                    self._routed(loaded, [ask])
                return
            self._end(asks[0], Failed(error))
            return
        spent = (time.perf_counter() - began) * 1e3
        for ask in asks:
            choice, mixture = ask.choice, found.get(id(ask))
            if mixture is not None:
                pairs = zip(mixture.names, mixture.weights[0].tolist(), strict=True)
                choice = Choice({loaded.names[key]: weight for key, weight in pairs}, choice.task)
            spec = Spec(ask.text, loaded.snapshot.number, choice, ask.sampling, ask.templated, ask.route_only)
            waited = (began - ask.began) * 1e3
            facts = {"queue_ms": waited, "retrieval_ms": spent, "ood_score": strange.get(ask.text)}
            asyncio.run_coroutine_threadsafe(self._listen(ask, spec, facts), self._loop)

    async def _listen(self, ask: EngineRequest, spec: Spec, facts: dict[str, Any]) -> None:
        try:
            async with aclosing(self._stream(spec)) as events:
                async for event in events:
                    if ask.cancelled:
                        break
                    if isinstance(event, Started):
                        made = event.made
                        later = {name: facts[name] + getattr(made, name) for name in ("queue_ms", "retrieval_ms")}
                        event = Started(replace(made, **{**facts, **later}))
                    ask.send(event)
        except (*FAILURES, RayError) as error:  # a replica that dies fails its own answers only
            known = (
                error if isinstance(error, RayclError) else RayclError(f"the replica that answered is gone: {error}")
            )
            ask.send(Failed(known))
        finally:
            self._over(ask)

    def _end(self, ask: EngineRequest, event: Event) -> None:
        self._over(ask)
        ask.send(event)

    def _over(self, ask: EngineRequest) -> None:
        with self._lock:
            self._unfinished.discard(id(ask))
