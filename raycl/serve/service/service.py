"""The endpoint's service without HTTP: requests go to the engine, its events become answers."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raycl.errors import BankError, counted
from raycl.generation.requests import (
    Event,
    Failed,
    LabelScores,
    PromptLogprobs,
    ResponseMetadata,
    Started,
    TextDelta,
    TokenLogprobs,
)
from raycl.serve.engine.engine_requests import AdapterSelection, EngineRequest, is_last
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot
from raycl.serve.engine.serving_engine import ServingEngine
from raycl.serve.errors import BusyError, DeadlineExceededError, LimitExceededError, NotFoundError
from raycl.serve.settings import LimitsConfig, ServeConfig
from raycl.serve.snapshots.manager import SnapshotManager
from raycl.types import Capabilities

log: logging.Logger = logging.getLogger(__name__)

LOADS = 8
"""Snapshots that requests may have loaded at once: each takes a thread."""


@dataclass
class ServedAnswer:
    """One answer, complete.

    Attributes:
        first_s, total_s: seconds to its first piece and to its end.
        logprobs, prompt_logprobs: of its tokens and of the prompt's, where they are wanted.
    """

    metadata: ResponseMetadata | None = None
    text: str = ""
    tokens: int = 0
    finish: str = "stop"
    scores: dict[str, float] = field(default_factory=dict)
    first_s: float = 0.0
    total_s: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None


Observe = Callable[[ServedAnswer], None]


class EventQueues:
    """Brings events from the engine's thread to an event loop, all that are there with one wake-up.

    A wake-up for each would hand the interpreter to the loop in the midst of a batch's answers, and again for every
    token of every row.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: deque[tuple[asyncio.Queue[Event], Event]] = deque()
        self._woken = False

    def post(self, queue: asyncio.Queue[Event], event: Event) -> None:
        """Post an event from any thread."""
        self._items.append((queue, event))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before the first is taken: what comes from now on wakes again
        while self._items:
            queue, event = self._items.popleft()
            queue.put_nowait(event)


class Service:
    """Answers on one replica.

    Attributes:
        kind: name of the backbone's kind. capabilities: capabilities of the backbone.
        observe: called with every finished answer, for metrics.
        max_loads: snapshots that requests may have loaded at once.
        gate_problem: why the gate has not evaluated the newest snapshot, where there is a gate.
        metrics_url: URL of this replica's metrics for Prometheus; None: nothing collects them.
    """

    def __init__(self, config: ServeConfig, engine: ServingEngine, snapshot_manager: SnapshotManager) -> None:
        self.max_loads = LOADS
        self.config = config
        self.engine = engine
        self.snapshot_manager = snapshot_manager
        self.kind: str = engine.kind
        self.capabilities: Capabilities = engine.capabilities
        self.observe: Observe = lambda answer: None
        self.gate_problem = ""
        self.metrics_url: str | None = None
        self._loading = 0
        self._event_queues: EventQueues | None = None

    @property
    def problem(self) -> str:
        """The reason why the newest snapshot does not answer although it should or might; "" where nothing is wrong."""
        return self.snapshot_manager.problem or self.gate_problem or self.snapshot_manager.rejection

    @property
    def reads_chats(self) -> bool:
        """Return whether a chat template renders conversations: the model's, or that of a learned task."""
        is_text = self.capabilities.answers == "text"
        return is_text and (bool(self.engine.codec.chat_template) or self.snapshot_manager.active.has_chats)

    # ---- snapshots -------------------------------------------------------------------------------------------

    def is_active(self, loaded: LoadedSnapshot) -> bool:
        """Return whether a snapshot answers requests that name none."""
        return self.snapshot_manager.active is loaded

    @asynccontextmanager
    async def use_snapshot(self, number: int | None) -> AsyncIterator[LoadedSnapshot]:
        """Yield a snapshot, which stays loaded inside; None: the active one.

        Raises:
            NotFoundError: no such snapshot. BusyError: too many are being loaded.
        """
        loaded = self.snapshot_manager.acquire_if_loaded(number) or await self._loaded(number)
        try:
            yield loaded
        finally:
            self.snapshot_manager.release(loaded)

    async def _loaded(self, number: int | None) -> LoadedSnapshot:
        """Return a snapshot that has to be loaded first; released if the request is cancelled meanwhile."""
        if self._loading >= self.max_loads:
            raise BusyError(f"{self.max_loads} snapshots are being loaded: retry in a second")
        self._loading += 1
        loading = asyncio.ensure_future(asyncio.to_thread(self.snapshot_manager.acquire, number))

        def ended(loading: asyncio.Future[LoadedSnapshot]) -> None:
            self._loading -= 1

        def release(loading: asyncio.Future[LoadedSnapshot]) -> None:
            if not loading.cancelled() and loading.exception() is None:
                self.snapshot_manager.release(loading.result())

        loading.add_done_callback(ended)
        try:
            return await asyncio.shield(loading)
        except BankError as error:
            raise NotFoundError(str(error)) from error
        except asyncio.CancelledError:
            loading.add_done_callback(release)
            raise

    # ---- limits ----------------------------------------------------------------------------------------------

    def check(self, texts: Sequence[str], answers: int = 1, are_tokens: bool = False) -> None:
        """Check the number and length of texts.

        Args:
            are_tokens: they stand for token ids, of which any is a prompt, and whose number is checked elsewhere.

        Raises:
            LimitExceededError: too many, too long, or nothing in one.
        """
        limits = self.config.limits
        if not 0 < len(texts) * answers <= limits.inputs:
            raise LimitExceededError(
                f"{counted(len(texts), 'text')} with {counted(answers, 'answer')} each: expected 1 to {limits.inputs} "
                "answers in one request"
            )
        if are_tokens:
            return
        if not all(text.strip() for text in texts):
            raise LimitExceededError("a text is empty: expected at least one word")
        check_lengths(texts, limits)

    @property
    def deadline(self) -> float:
        """The deadline of a request that arrives now, on the monotonic clock."""
        return time.monotonic() + self.config.limits.timeout_s

    # ---- answers ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def submit(
        self, loaded: LoadedSnapshot, selection: AdapterSelection, texts: Sequence[str], **settings: Any
    ) -> AsyncIterator[list[asyncio.Queue[Event]]]:
        """Submit one request per text; leaving cancels those that are not finished.

        Args:
            settings: settings of `EngineRequest`; `sampling` and `ids` may be lists, one for each text.

        Raises:
            BusyError: the queue is full.
        """
        if self.engine.pending + len(texts) > max(self.config.limits.queue, len(texts)):
            raise BusyError(f"{self.engine.pending} requests are pending: retry in a second")
        log_prompts(texts, self.config)
        loop = asyncio.get_running_loop()
        if self._event_queues is None or self._event_queues.loop is not loop:
            self._event_queues = EventQueues(loop)
        event_queues = self._event_queues
        requests, queues = [], []
        for index, text in enumerate(texts):
            events: asyncio.Queue[Event] = asyncio.Queue()
            mine = {name: value[index] if isinstance(value, list) else value for name, value in settings.items()}
            send = partial(event_queues.post, events)
            requests.append(EngineRequest(text, send, loaded=loaded, selection=selection, **mine))
            queues.append(events)
        for request in requests:
            self.engine.submit(request)
        try:
            yield queues
        finally:
            for request in requests:
                request.cancelled = True

    async def events(
        self, queue: asyncio.Queue[Event], deadline: float, route_only: bool = False
    ) -> AsyncIterator[Event]:
        """Yield the events of a request up to its last one.

        Args:
            deadline: on the monotonic clock.
            route_only: the request is answered with its mixture.

        Raises:
            DeadlineExceededError: the answer takes too long. RayclError: the request failed.
        """
        while True:
            try:
                if queue.empty():  # events that are there are delivered even when late
                    async with asyncio.timeout(deadline - time.monotonic()):
                        event = await queue.get()
                else:
                    event = queue.get_nowait()
            except TimeoutError as error:
                raise DeadlineExceededError(
                    f"no answer within {self.config.limits.timeout_s:g} s: request less, or retry later"
                ) from error
            if isinstance(event, Failed):
                raise event.error
            yield event
            if is_last(event, route_only):
                return

    async def complete(self, queue: asyncio.Queue[Event], deadline: float, route_only: bool = False) -> ServedAnswer:
        """Return a complete answer.

        Raises:
            DeadlineExceededError, RayclError: see `events`.
        """
        answer, began = ServedAnswer(), time.perf_counter()
        async for event in self.events(queue, deadline, route_only):
            take(answer, event, began)
        self.observe(answer)
        return answer


def check_lengths(texts: Sequence[str], limits: LimitsConfig) -> None:
    """Check the number of characters.

    Raises:
        LimitExceededError: one is too long.
    """
    longest = max(map(len, texts))
    if longest > limits.text_chars:
        raise LimitExceededError(f"a text has {longest} characters: this endpoint reads at most {limits.text_chars}")


def log_prompts(texts: Sequence[str], config: ServeConfig) -> None:
    """Log texts where the config says so, equal ones once."""
    for text in dict.fromkeys(texts if config.log_prompts else ()):
        log.info("prompt: %r", text)


def take(answer: ServedAnswer, event: Event, began: float) -> None:
    """Add an event to an answer."""
    if isinstance(event, Started):
        answer.metadata = event.metadata
    elif isinstance(event, PromptLogprobs):
        answer.prompt_logprobs = event
    elif isinstance(event, TextDelta):
        answer.first_s = answer.first_s or time.perf_counter() - began
        answer.text += event.text
        answer.logprobs += event.logprobs
        answer.tokens, answer.finish = event.tokens, event.finish or answer.finish
    elif isinstance(event, LabelScores):
        answer.scores = dict(event.scores)
    answer.total_s = time.perf_counter() - began
