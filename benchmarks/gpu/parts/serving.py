"""The serving engine's continuous batching: 64 requests, 16 mixtures, over the same requests without adapters.

The engine runs as behind the endpoint: it routes, reads prompts, decodes in one batch that requests join and leave, and
samples. Wall-clock time, since most of what could be slow here is not on the GPU.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.figures import Figure
from benchmarks.gpu.adapters import dense, drawn_adapters, loaded
from benchmarks.gpu.models import FIRST_WORD, decoder, sizes_of, twin
from benchmarks.gpu.parts.decoding import check_chosen
from benchmarks.gpu.setup import DENSE, LIMITS, RANK, TARGETS, Case, Setup, check_equal, ratio
from benchmarks.gpu.timing import Times, peak_gib, quartiles, reset_peak
from raycl.errors import WrongResultError
from raycl.generation.requests import Event, Failed, Sampling, TextDelta
from raycl.serve.engine.engine_requests import AdapterSelection, EngineRequest, is_last
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot, MultiSnapshotModel
from raycl.serve.engine.serving_engine import ServingEngine
from raycl.types import Mixture

REQUESTS, TINY_REQUESTS = 64, 6
BATCH, TINY_BATCH = 32, 4
"""Rows that are decoded together."""

PROMPT, TOKENS = 64, 64
TINY_PROMPT, TINY_TOKENS = 5, 4
ROUNDS = (2, 8)
WHERE = "q, v"
CHECKED = 4
"""Answers of which every token is checked."""


@dataclass(frozen=True)
class Request:
    """A text, the mixture that it pins, by adapter, and how many tokens its answer has."""

    text: str
    weights: dict[str, float]
    tokens: int


@dataclass(frozen=True)
class Answer:
    """A text and how many tokens it has."""

    text: str
    tokens: int


def cases(setup: Setup) -> Iterator[Case]:
    """Yield one."""
    yield Case("64 requests, 16 mixtures", partial(_figures, setup))


def _figures(setup: Setup, seconds: float) -> Iterator[Figure]:
    bare = decoder(setup, "7B")
    snapshot = loaded(drawn_adapters(bare.model, TARGETS[WHERE], DENSE, RANK))
    batch = TINY_BATCH if setup.tiny else BATCH
    engines = {}
    try:
        for name in ("bare", "mixed"):
            host = MultiSnapshotModel(twin(bare), DENSE * RANK)
            engines[name] = ServingEngine(host, batch, 4096, 64, static_cache=True)
            if name == "mixed":
                engines[name].load_snapshot(snapshot)
        yield from _compared(setup, engines, snapshot, seconds)
    finally:
        for engine in engines.values():
            engine.close()


def _compared(
    setup: Setup, engines: dict[str, ServingEngine], snapshot: LoadedSnapshot, seconds: float
) -> Iterator[Figure]:
    mixed = _requests(setup, snapshot)
    requests = {"bare": [replace(item, weights={}) for item in mixed], "mixed": mixed}
    ends = time.monotonic() + seconds
    spent: dict[str, list[float]] = {name: [] for name in engines}
    tokens = mixed[0].tokens
    peaks = {}
    for number in range(-1, 1 if setup.tiny else ROUNDS[1]):  # the first round loads, captures and warms up
        if number >= ROUNDS[0] and time.monotonic() > ends:
            break
        for name, engine in engines.items():
            reset_peak(setup.device)
            began = time.perf_counter()
            answers = answered(engine, snapshot, requests[name])
            taken = time.perf_counter() - began
            peaks[name] = peak_gib(setup.device)
            check_equal(f"tokens of {name} answers", {answer.tokens for answer in answers}, {tokens})
            if number >= 0:
                spent[name].append(taken)
    _check_answers(setup, engines["mixed"], snapshot, mixed)
    times = {name: Times(tuple(result), peaks[name]) for name, result in spent.items()}
    written, length = len(mixed) * tokens, len(mixed[0].text.split()) + 1
    for name in times:
        spread = quartiles(tuple(written / item for item in times[name].seconds))
        detail = f"{len(mixed)} requests of {length} + {tokens} tokens, {engines[name].max_batch} at a time"
        yield Figure(
            f"{name}: speed", written / times[name].median, "tokens/s", None, "<=", detail, spread, peaks[name]
        )
    detail = f"{DENSE} mixtures of {DENSE} adapters on {WHERE}"
    yield ratio("mixed over bare", times["mixed"], times["bare"], LIMITS[WHERE], detail)


def _requests(setup: Setup, snapshot: LoadedSnapshot) -> list[Request]:
    """Return the requests; each of `DENSE` mixtures is used by the same number of them."""
    count, length, tokens = (TINY_REQUESTS, TINY_PROMPT, TINY_TOKENS) if setup.tiny else (REQUESTS, PROMPT, TOKENS)
    words = sizes_of(setup, "7B").vocabulary - FIRST_WORD
    mixture = dense(list(snapshot.keys), DENSE)
    rows = [dict(zip(mixture.names, row, strict=True)) for row in mixture.weights.tolist()]

    def text(number: int) -> str:
        return " ".join(f"w{(number * 7919 + index * 104729) % words}" for index in range(length - 1))

    return [Request(text(number), rows[number % DENSE], tokens) for number in range(count)]


def answered(engine: ServingEngine, snapshot: LoadedSnapshot, requests: Sequence[Request]) -> list[Answer]:
    """Send all at once and wait for the last one.

    Raises:
        WrongResultError: one failed.
    """
    inboxes: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in requests]
    engine_requests = [
        EngineRequest(
            request.text,
            inbox.put,
            Sampling(request.tokens),
            loaded=snapshot,
            selection=AdapterSelection(request.weights),
            templated=False,
        )
        for request, inbox in zip(requests, inboxes, strict=True)
    ]
    everything_is_queued = threading.Event()
    engine.call(everything_is_queued.wait)  # else the first batch is what the thread happened to find
    for engine_request in engine_requests:
        engine.submit(engine_request)
    everything_is_queued.set()
    return [_collected(engine_request, inbox) for engine_request, inbox in zip(engine_requests, inboxes, strict=True)]


def _collected(engine_request: EngineRequest, inbox: queue.SimpleQueue[Event]) -> Answer:
    text, tokens = "", 0
    while True:
        event = inbox.get(timeout=300)
        if isinstance(event, Failed):
            raise WrongResultError(f"a request failed: {event.error}")
        if isinstance(event, TextDelta):
            text, tokens = text + event.text, event.tokens
        if is_last(event, engine_request.route_only):
            return Answer(text, tokens)


def _check_answers(setup: Setup, engine: ServingEngine, snapshot: LoadedSnapshot, requests: Sequence[Request]) -> None:
    """Check that every token is the best one of a plain pass, to rounding; in float32 answers equal those given
    alone."""
    together = answered(engine, snapshot, requests)
    check_equal("steps were captured", engine.captures > 0, setup.is_cuda)
    checked = 0
    for request, answer in list(zip(requests, together, strict=True))[:CHECKED]:
        checked += engine.call(partial(_check_tokens, setup, engine.model, snapshot, request, answer)).result()
        if setup.tiny:
            alone = answered(engine, snapshot, [request])[0]
            check_equal("an answer given together and alone", answer.text, alone.text)
    check_equal("some answers have their tokens checked", checked > 0, True)


def _check_tokens(
    setup: Setup, host: MultiSnapshotModel, snapshot: LoadedSnapshot, request: Request, answer: Answer
) -> bool:
    """Return whether the answer could be checked. Runs on the engine's thread, between two batches."""
    codec = host.backbone.codec
    prompt, whole = codec.encode_source([request.text, f"{request.text} {answer.text}"])
    ids = whole[len(prompt) :]
    if len(ids) != answer.tokens:
        return False  # a special token was drawn, which has no text
    with host.activate(snapshot.named(Mixture.same(request.weights, 1))):
        check_chosen("serving", host.backbone, [prompt], torch.tensor([ids], device=setup.device))
    return True
