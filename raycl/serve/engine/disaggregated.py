"""Routing apart from the model: an engine's interface whose answers come from replicas elsewhere.

The text is encoded and its mixture worked out here, on CPUs; replicas with the model get the mixture with the text.
"""

from __future__ import annotations

import asyncio
import logging
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
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot
from raycl.serve.engine.requests import CLOSED, FAILURES, AdapterSelection, EngineRequest
from raycl.serve.engine.routing import mixtures_of, ood_score_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteRequest:
    """A request on its way to a replica, without the receiver of its events."""

    text: str
    snapshot: int
    selection: AdapterSelection
    sampling: Sampling | None
    templated: bool
    route_only: bool
    is_chat: bool


Stream = Callable[[RemoteRequest], AsyncGenerator[Event, None]]


class RemoteEngine:
    """Routes requests and passes them to replicas; the interface of `raycl.serve.engine.engine.Engine`."""

    def __init__(self, stream: Stream, kind: str, max_batch: int) -> None:
        """Start the routing thread and the loop that listens to replicas."""
        self.kind, self.max_batch = kind, max_batch
        self.capabilities = capabilities_of(kind)
        self._stream = stream
        self._unfinished: set[int] = set()
        self._lock = threading.Lock()  # of the set: requests begin and end on different threads
        self._inbox: queue.SimpleQueue[EngineRequest | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="raycl-listen", daemon=True),
            threading.Thread(target=self._route_all, name="raycl-route", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: EngineRequest) -> None:
        """As an engine."""
        with self._lock:
            self._unfinished.add(id(request))
        self._inbox.put(request)

    @property
    def pending(self) -> int:
        """Requests whose last event has not been sent."""
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
            request = self._inbox.get()
            if request is not None:
                self._end(request, Failed(RayclError(CLOSED)))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads[0].join(timeout=60)

    def _route_all(self) -> None:
        while True:
            requests = [self._inbox.get()]
            while not self._inbox.empty() and len(requests) < self.max_batch:
                requests.append(self._inbox.get())
            active = [request for request in requests if request is not None and not request.cancelled]
            for request in requests:
                if request is not None and request.cancelled:
                    self._over(request)
            for loaded in {id(request.loaded): request.loaded for request in active}.values():
                self._routed(loaded, [request for request in active if request.loaded is loaded])
            if None in requests:
                return

    def _routed(self, loaded: LoadedSnapshot, requests: list[EngineRequest]) -> None:
        began = time.perf_counter()
        free = [] if loaded.reads_prompts or loaded.needs_task else requests  # the replica refuses what lacks its task
        try:
            found = dict(zip(map(id, free), mixtures_of(loaded, free), strict=True))
        except (*FAILURES, RayError) as error:  # a request must never end the thread
            if len(requests) > 1:
                for request in requests:
                    self._routed(loaded, [request])
                return
            self._end(requests[0], Failed(error))
            return
        spent = (time.perf_counter() - began) * 1e3
        for request in requests:
            selection, mixture = request.selection, found.get(id(request))
            retrieval: dict[str, Any] = {"queue_ms": (began - request.began) * 1e3, "retrieval_ms": spent}
            if mixture is not None:
                retrieval["ood_score"] = ood_score_of(mixture)
                pairs = zip(mixture.names, mixture.weights[0].tolist(), strict=True)
                selection = AdapterSelection({loaded.names[key]: weight for key, weight in pairs}, selection.task)
            remote_request = RemoteRequest(
                *(request.text, loaded.snapshot.number, selection, request.sampling),
                *(request.templated, request.route_only, request.is_chat),
            )
            asyncio.run_coroutine_threadsafe(self._listen(request, remote_request, retrieval), self._loop)

    async def _listen(self, request: EngineRequest, remote_request: RemoteRequest, retrieval: dict[str, Any]) -> None:
        try:
            async with aclosing(self._stream(remote_request)) as events:
                async for event in events:
                    if request.cancelled:
                        break
                    if isinstance(event, Started):
                        metadata = event.metadata
                        sums = {key: retrieval[key] + getattr(metadata, key) for key in ("queue_ms", "retrieval_ms")}
                        event = Started(replace(metadata, **{**retrieval, **sums}))
                    request.send(event)
        except (*FAILURES, RayError) as error:  # a replica that dies fails its own answers only
            if not isinstance(error, RayclError):
                log.warning("a replica failed while answering: %s", error)
                error = RayclError(
                    "the replica that had this text has ended, and others answer: send the request again"
                )
            request.send(Failed(error))
        finally:
            self._over(request)

    def _end(self, request: EngineRequest, event: Event) -> None:
        self._over(request)
        request.send(event)

    def _over(self, request: EngineRequest) -> None:
        with self._lock:
            self._unfinished.discard(id(request))
