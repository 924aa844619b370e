"""The endpoints: OpenAI's chat and completions, labels, routes, models, administration, health and the playground.

What it does not know: Ray; how many replicas there are.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from raycl import __version__
from raycl.errors import BankError, RayclError
from raycl.serve.access import Gate, Keys
from raycl.serve.asks import Piece, Sampling, Started
from raycl.serve.playground import add_playground
from raycl.serve.refusals import TooMuchError, UnknownError, answer_of
from raycl.serve.schema import (
    ActivateRequest,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    ErrorAnswer,
    Generation,
)
from raycl.serve.service import (
    Answer,
    Service,
    how,
    labelled,
    routed,
    spoken_out,
    take,
)

log = logging.getLogger(__name__)

REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorAnswer} for code in (400, 401, 404, 413, 422, 429, 500, 503, 504)
}


def make_web(service: Service, keys: Keys) -> Any:
    """The ASGI application of one replica."""
    app = FastAPI(title="raycl", version=__version__, responses=REFUSALS, docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_texts(app, service)
    _add_labels(app, service)
    _add_facts(app, service)
    add_playground(app)
    return Gate(app, keys, service.config.limits.body_kb * 1024)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            reason = first.get("ctx", {}).get("error", first["msg"])
            return _error(400, f"the body is no valid JSON: {reason}", "invalid_request_error")
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        text = f"{place}: {first['msg']}" if place else str(first["msg"])
        return _error(400, text, "invalid_request_error", place or None)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, str(error.detail), "invalid_request_error")

    @app.exception_handler(RayclError)
    async def ours(request: Request, error: RayclError) -> Response:
        return _failed(error)


def _failed(error: RayclError) -> Response:
    status, kind, code = answer_of(error)
    headers = {"Retry-After": "1"} if status == 429 else None
    return _error(status, str(error), kind, code=code, headers=headers)


def _error(
    status: int,
    message: str,
    kind: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return JSONResponse(body, status, headers)


# ---- texts -------------------------------------------------------------------------------------------------------


def _add_texts(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: ChatRequest) -> Response:
        if not request.prompt.strip():
            raise TooMuchError("the messages hold no text: expected at least one word")
        most = request.max_completion_tokens or request.max_tokens
        return await _texts(service, request, [request.prompt], most, chat=True)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: CompletionRequest) -> Response:
        prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        if not prompts:
            raise TooMuchError("prompt is an empty list: expected at least one text")
        return await _texts(service, request, prompts, request.max_tokens, chat=False)


async def _texts(
    service: Service, request: Generation, prompts: Sequence[str], max_tokens: int | None, chat: bool
) -> Response:
    if service.kind == "encoder":
        raise TooMuchError("this endpoint's backbone gives labels, not texts: use POST /v1/classify")
    if len(prompts) * request.n > service.config.limits.inputs:
        raise TooMuchError(f"{len(prompts)} prompts x n={request.n}: at most {service.config.limits.inputs} answers")
    settings = service.sampling(request, max_tokens)
    texts = [prompt for prompt in prompts for _ in range(request.n)]
    samplings = [_numbered(settings, number % request.n) for number in range(len(texts))]
    templated = chat if request.raycl.template is None else request.raycl.template
    head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}
    head["model"] = request.model
    if request.stream:
        pieces = _stream(service, request, texts, samplings, templated, head, chat)
        first = await anext(pieces)  # what cannot be answered fails before the stream begins
        return StreamingResponse(_after(first, pieces), media_type="text/event-stream")
    hosted, choice = await service.chosen(request)
    try:
        async with service.asked(hosted, choice, texts, sampling=samplings, templated=templated) as queues:
            answers = [await service.complete(queue, spoken_out) for queue in queues]
    finally:
        service.roster.give_back(hosted)
    made = [answer.made for answer in answers if answer.made is not None]
    choices = [_choice(number, answer, chat) for number, answer in enumerate(answers)]
    for one, facts in zip(choices, made, strict=True):
        one["raycl"] = how(hosted, facts).model_dump()
    body = {**head, "object": "chat.completion" if chat else "text_completion", "choices": choices}
    body["usage"] = _usage(answers, request.n)
    body["raycl"] = how(hosted, made[0]).model_dump()
    return JSONResponse(body)


def _numbered(settings: Sampling, number: int) -> Sampling:
    return Sampling(
        settings.max_tokens, settings.temperature, settings.top_p, (settings.seed + number) % 2**63, settings.stop
    )


def _choice(number: int, answer: Answer, chat: bool) -> dict[str, Any]:
    content = {"message": {"role": "assistant", "content": answer.text}} if chat else {"text": answer.text}
    return {"index": number, **content, "finish_reason": answer.finish, "logprobs": None}


def _usage(answers: Sequence[Answer], n: int) -> dict[str, int]:
    """A prompt counts once, however many answers it gets."""
    asked = sum(answer.made.prompt_tokens for answer in answers[::n] if answer.made)
    said = sum(answer.tokens for answer in answers)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


async def _after(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for piece in rest:
        yield piece


async def _stream(
    service: Service,
    request: Generation,
    texts: Sequence[str],
    samplings: list[Sampling],
    templated: bool,
    head: dict[str, Any],
    chat: bool,
) -> AsyncIterator[str]:
    """Server-sent events; answers to several prompts, or n > 1, come one after another."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    hosted, choice = await service.chosen(request)
    answers: list[Answer] = []

    def chunk(number: int, text: str, finish: str | None, **more: Any) -> str:
        content = {"delta": {"role": "assistant", "content": text} if text or not finish else {}}
        one = {"index": number, **(content if chat else {"text": text}), "finish_reason": finish, "logprobs": None}
        return _event({**head, "object": kind, "choices": [one], **more})

    try:
        async with service.asked(hosted, choice, texts, sampling=samplings, templated=templated) as queues:
            for number, queue in enumerate(queues):
                answer, began = Answer(), time.perf_counter()
                async for event in service.events(queue, spoken_out):
                    take(answer, event, began)
                    if isinstance(event, Started):
                        yield chunk(number, "", None, raycl=how(hosted, event.made).model_dump())
                    elif isinstance(event, Piece) and (event.text or event.finish):
                        yield chunk(number, event.text, event.finish)
                service.observe(answer)
                answers.append(answer)
        if (request.stream_options or {}).get("include_usage"):
            yield _event({**head, "object": kind, "choices": [], "usage": _usage(answers, request.n)})
        yield "data: [DONE]\n\n"
    except RayclError as error:
        if not answers and "answer" not in locals():
            raise
        yield _event(json.loads(bytes(_failed(error).body)))
    finally:
        service.roster.give_back(hosted)


def _event(tree: dict[str, Any]) -> str:
    return f"data: {json.dumps(tree, ensure_ascii=False)}\n\n"


# ---- labels and routes -------------------------------------------------------------------------------------------


def _add_labels(app: FastAPI, service: Service) -> None:
    @app.post("/v1/classify", response_model=None)
    async def classify(request: ClassifyRequest) -> Response:
        """The label of each text, with the probability of every label that was in question."""
        if service.kind != "encoder":
            raise TooMuchError("this endpoint's backbone answers with texts: use POST /v1/chat/completions")
        answers, hosted = await _each(service, request, labelled, route_only=False)
        data = [
            {
                "index": number,
                "label": next(iter(answer.scores)),
                "scores": answer.scores,
                "raycl": how(hosted, answer.made).model_dump() if answer.made else None,
            }
            for number, answer in enumerate(answers)
        ]
        usage = _usage(answers, 1)
        return JSONResponse({"object": "list", "model": request.model, "data": data, "usage": usage})

    @app.post("/v1/route", response_model=None)
    async def route(request: ClassifyRequest) -> Response:
        """Who would speak for each text; nothing is answered."""
        answers, hosted = await _each(service, request, routed, route_only=True)
        data = [
            {"index": number, "raycl": how(hosted, answer.made).model_dump() if answer.made else None}
            for number, answer in enumerate(answers)
        ]
        return JSONResponse({"object": "list", "model": request.model, "data": data})


async def _each(service: Service, request: ClassifyRequest, until: Any, route_only: bool) -> tuple[list[Answer], Any]:
    texts = request.texts
    if not 0 < len(texts) <= service.config.limits.inputs:
        raise TooMuchError(f"input holds {len(texts)} texts: expected 1 to {service.config.limits.inputs}")
    if not all(text.strip() for text in texts):
        raise TooMuchError("input holds an empty text: expected at least one word in each")
    hosted, choice = await service.chosen(request)
    try:
        async with service.asked(hosted, choice, texts, route_only=route_only) as queues:
            return [await service.complete(queue, until) for queue in queues], hosted
    finally:
        service.roster.give_back(hosted)


# ---- facts -------------------------------------------------------------------------------------------------------


def _add_facts(app: FastAPI, service: Service) -> None:
    roster = service.roster

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        """Everything that `model` may say."""
        active = roster.active.snapshot
        names = ["auto", "base", *(f"snapshot:{number}" for number in roster.bank.snapshots())]
        names += [entry.name for entry in active.adapters]
        created = int(roster.active_since)
        data = [{"id": name, "object": "model", "created": created, "owned_by": "raycl"} for name in names]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/adapters", response_model=None)
    async def adapters() -> Response:
        """Adapters of the active snapshot."""
        active = roster.active.snapshot
        data = [
            {
                "name": entry.name,
                "version": entry.version,
                "tasks": entry.tasks,
                "labels": entry.labels,
                "rank": entry.rank,
                "bytes": entry.tensors.bytes,
            }
            for entry in active.adapters
        ]
        return JSONResponse({"object": "list", "snapshot": active.number, "data": data})

    @app.get("/v1/snapshots", response_model=None)
    async def snapshots() -> Response:
        """Numbers of all snapshots, and which one answers here."""
        number = roster.active.snapshot.number
        tasks = [facts.name for facts in roster.active.snapshot.tasks]
        return JSONResponse(
            {
                "object": "list",
                "active": number,
                "tasks": tasks,
                "kind": service.kind,
                "data": roster.bank.snapshots(),
                "problem": roster.problem,
                "decision": roster.decision,
            }
        )

    @app.post("/admin/activate", response_model=None)
    def activate(request: ActivateRequest) -> Response:
        """Answer from this snapshot from now on, on every replica: a rollback, or a step forward."""
        before = roster.active.snapshot.number
        try:
            roster.activate(request.snapshot, "asked for")
        except BankError as error:
            raise UnknownError(str(error)) from error
        return JSONResponse({"active": roster.active.snapshot.number, "before": before})

    @app.get("/healthz", response_model=None)
    async def healthy() -> Response:
        """Whether this replica can answer at all."""
        if not service.engine.alive:
            return _error(503, "the model's thread has ended: restart the replica", "server_error")
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", response_model=None)
    async def ready() -> Response:
        """Whether it takes more requests now."""
        if service.engine.load >= service.config.limits.queue:
            return _error(503, "the queue is full", "server_error")
        return JSONResponse({"status": "ready", "snapshot": roster.active.snapshot.number})
