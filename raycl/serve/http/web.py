"""The endpoints: labels, routes, models, administration, health and the playground; `texts` has the others."""

import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware

from raycl import __version__
from raycl.bank import Snapshot
from raycl.data.sources.conversation import is_one_message, messages_of
from raycl.data.stream import Stream
from raycl.errors import BankError, RayclError
from raycl.launch.http.page_files import add_page
from raycl.serve.errors import RETRYABLE, InvalidRequestError, NotFoundError, body_of, error_response
from raycl.serve.gate.earlier_rows import stream_of
from raycl.serve.http.access import Keys, guarded
from raycl.serve.http.direct import DirectEndpoints, endpoints_of
from raycl.serve.http.drift import add_drift, record
from raycl.serve.http.request_selection import details_of, select, served_tasks
from raycl.serve.http.schema import (
    AUTO,
    ActivateAnswer,
    ActivateRequest,
    AdaptersAnswer,
    ClassifyRequest,
    ErrorAnswer,
    HealthAnswer,
    LabelAnswer,
    ListedModel,
    MetricsAnswer,
    ModelsAnswer,
    RouteAnswer,
    SnapshotsAnswer,
    TasksAnswer,
)
from raycl.serve.http.texts import add_texts, usage
from raycl.serve.service.history import History
from raycl.serve.service.service import ServedAnswer, Service
from raycl.serve.settings import ServeConfig
from raycl.types import Task

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorAnswer} for code in (400, 401, 403, 404, 408, 413, 422, 429, 500, 503, 504)
}


TOO_DEEP = "the body's JSON is nested too deeply: send fewer lists and objects inside each other"


def make_web(service: Service, keys: Keys) -> Any:
    """Return the ASGI application of one replica."""
    history = History(service.config.keep_unsure)
    app = FastAPI(title="raycl", version=__version__, responses=ERROR_RESPONSES, docs_url=None, redoc_url=None)
    add_errors(app)
    add_texts(app, service, history)
    _add_labels(app, service, history)
    _add_models(app, service)
    _add_tasks(app, service, bool(keys))
    _add_metrics(app, history)
    add_drift(app, service, history)
    _add_health(app, service)
    add_page(app, "raycl.serve.http.playground", "/playground")
    direct = ServerErrorMiddleware(DirectEndpoints(app, endpoints_of(app), refused), fault)
    return ResponseCounter(guarded(direct, keys, service.config), history)


# ---- errors ------------------------------------------------------------------------------------------------------


class _Plain(Response):
    """JSON in ASCII: a rejected body may not be valid text."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def add_errors(app: FastAPI) -> None:
    """Turn errors into responses in OpenAI's form."""

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        first, location = _clearest(error)
        reason = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "json_invalid":
            text, location = f"the body is no valid JSON: {first.get('ctx', {}).get('error', reason)}", ""
        elif isinstance(error.body, bytes):
            text = "the body is not JSON, or its Content-Type is not: send it with 'Content-Type: application/json'"
        else:
            text = f"{location or 'the body'}: {reason}"
        return _Plain(body_of(text, "invalid_request_error", location or None), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        text = str(error.detail) if error.__cause__ is None else _unreadable(error.__cause__)
        return _Plain(body_of(text, kind), error.status_code, error.headers)

    @app.exception_handler(RayclError)
    async def ours(request: Request, error: RayclError) -> Response:
        return refused(error)

    app.add_exception_handler(Exception, fault)


async def fault(request: Request, error: Exception) -> Response:
    """Return the response to an error that is the server's own."""
    name = type(error).__name__
    return _Plain(body_of(f"an internal error ({name}): see the server's log", "server_error"), 500)


def refused(error: RayclError) -> Response:
    """Return the response to an error of a request."""
    status, body = error_response(error)
    return _Plain(body, status, {"Retry-After": "1"} if status in RETRYABLE else None)


def _unreadable(cause: BaseException) -> str:
    """Return why FastAPI could not read a body as JSON, where it is not malformed."""
    if isinstance(cause, RecursionError):
        return TOO_DEEP
    if isinstance(cause, UnicodeDecodeError):
        return f"the body is no valid UTF-8 (byte {cause.start + 1}): send JSON in UTF-8"
    return "the body has a number of more than 4,300 digits: send less, or send it as text"


def _clearest(error: RequestValidationError) -> tuple[dict[str, Any], str]:
    """Return the deepest problem of the first wrong field, and its dotted path; of alternatives that of the value's
    type."""
    problems = [(dict(problem), _place(problem["loc"], error.body)) for problem in error.errors()]
    field = problems[0][1].partition(".")[0]
    return max(
        (problem for problem in problems if problem[1].partition(".")[0] == field),
        key=lambda problem: (problem[1].count("."), not str(problem[0]["type"]).endswith("_type")),
    )


def _place(where: Sequence[Any], body: Any) -> str:
    """Return the dotted path of a field, without the names of alternatives that the validator tried."""
    path: list[str] = []
    here = body
    for part in where[1:]:
        if isinstance(here, dict) and isinstance(part, str) and (part in here or part == where[-1]):
            path, here = [*path, part], here.get(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            path, here = [*path, str(part)], here[part]
    return ".".join(path)


# ---- labels and routes -------------------------------------------------------------------------------------------


def _add_labels(app: FastAPI, service: Service, history: History) -> None:
    @app.post("/v1/classify", response_model=None, responses={200: {"model": LabelAnswer}})
    async def classify(request: ClassifyRequest) -> Response:
        """Return the label of each text, with the probability of every label that was in question."""
        if service.capabilities.answers != "label":
            raise InvalidRequestError("this endpoint's backbone answers with texts: use POST /v1/chat/completions")
        answers, details = await _each(service, request, history)
        data = [
            {"index": number, "label": next(iter(answer.scores)), "scores": answer.scores, "raycl": metadata}
            for number, (answer, metadata) in enumerate(zip(answers, details, strict=True))
        ]
        return JSONResponse({"object": "list", "model": request.model, "data": data, "usage": usage(answers)})

    @app.post("/v1/route", response_model=None, responses={200: {"model": RouteAnswer}})
    async def route(request: ClassifyRequest) -> Response:
        """Return the mixture of each text, without an answer."""
        _, details = await _each(service, request)
        data = [{"index": number, "raycl": metadata} for number, metadata in enumerate(details)]
        return JSONResponse({"object": "list", "model": request.model, "data": data})


async def _each(
    service: Service, request: ClassifyRequest, history: History | None = None
) -> tuple[list[ServedAnswer], list[dict[str, Any]]]:
    """Return answers to the texts, and the details of each.

    Args:
        history: counts the answers; None: each is a mixture alone.
    """
    deadline, texts, route_only = service.deadline, request.texts, history is None
    is_templated = request.pins.template is not False
    service.check(texts)
    async with (
        select(service, request) as (loaded, selection),
        service.submit(loaded, selection, texts, route_only=route_only, templated=is_templated) as queues,
    ):
        answers = [await service.complete(queue, deadline, route_only) for queue in queues]
        made = [answer.metadata for answer in answers if answer.metadata is not None]
        details = [details_of(loaded, metadata).model_dump() for metadata in made]
        if history is not None:
            for text, answer, metadata in zip(texts, answers, details, strict=True):
                record(history, loaded, answer, metadata["tasks"], text, service.is_active(loaded))
    return answers, details


# ---- models, adapters and snapshots -----------------------------------------------------------------------------


def _add_models(app: FastAPI, service: Service) -> None:
    snapshot_manager = service.snapshot_manager

    def names() -> list[dict[str, Any]]:
        loaded = snapshot_manager.active
        listed = [AUTO, "base", *(f"snapshot:{number}" for number in snapshot_manager.bank.snapshots())]
        listed += [*served_tasks(loaded), *(entry.name for entry in loaded.snapshot.adapters)]
        listed += service.config.model_aliases
        created = int(snapshot_manager.active_since)
        models = {"object": "model", "created": created, "owned_by": "raycl"}
        return [{"id": name, **models} for name in dict.fromkeys(listed)]

    @app.get("/v1/models", response_model=None, responses={200: {"model": ModelsAnswer}})
    def models() -> Response:
        """Return every value of `model`."""
        return JSONResponse({"object": "list", "data": names()})

    @app.get("/v1/models/{name:path}", response_model=None, responses={200: {"model": ListedModel}})
    def model(name: str) -> Response:
        """Return a model by name."""
        matching = [entry for entry in names() if entry["id"] == name]
        if not matching:
            raise NotFoundError(f"model '{name}' does not exist: GET /v1/models lists all")
        return JSONResponse(matching[0])

    @app.get("/v1/adapters", response_model=None, responses={200: {"model": AdaptersAnswer}})
    async def adapters() -> Response:
        """Return adapters of the active snapshot."""
        active = snapshot_manager.active.snapshot
        names = {"name", "version", "tasks", "labels", "rank"}
        data = [entry.model_dump(include=names) | {"bytes": entry.tensors.bytes} for entry in active.adapters]
        return JSONResponse({"object": "list", "snapshot": active.number, "data": data})

    @app.get("/v1/snapshots", response_model=None, responses={200: {"model": SnapshotsAnswer}})
    def snapshots() -> Response:
        """Return numbers of all snapshots, and which one answers here."""
        active = snapshot_manager.active.snapshot
        return JSONResponse(
            {
                "object": "list",
                "active": active.number,
                "tasks": [task.name for task in active.tasks],
                "kind": service.kind,
                "chat": service.reads_chats,
                "data": snapshot_manager.bank.snapshots(),
                "decision": snapshot_manager.decision,
                "decisions": snapshot_manager.decisions,
                "problem": service.problem,
            }
        )

    @app.post("/admin/activate", response_model=None, responses={200: {"model": ActivateAnswer}})
    def activate(request: ActivateRequest) -> Response:
        """Answer from this snapshot from now on, on every replica: a rollback, or a step forward."""
        before = snapshot_manager.active.snapshot.number
        try:
            snapshot_manager.activate(request.snapshot, "requested")
        except BankError as error:
            raise NotFoundError(str(error)) from error
        return JSONResponse({"active": snapshot_manager.active.snapshot.number, "before": before})


def _add_tasks(app: FastAPI, service: Service, has_keys: bool) -> None:
    examples = Examples(service.config, has_keys)

    @app.get("/v1/tasks", response_model=None, responses={200: {"model": TasksAnswer}})
    def tasks() -> Response:
        """Return tasks of the active snapshot, with examples of their texts."""
        active = service.snapshot_manager.active.snapshot
        texts = examples.of(active)
        data = [
            {
                "name": task.name,
                "labels": None if task.labels is None else list(task.labels),
                "definition": task.definition or task.system,
                "examples": texts.get(task.name, []),
            }
            for task in active.tasks
        ]
        return JSONResponse({"object": "list", "snapshot": active.number, "data": data})


def _add_metrics(app: FastAPI, history: History) -> None:
    @app.get("/v1/metrics", response_model=None, responses={200: {"model": MetricsAnswer}})
    async def metrics() -> Response:
        """Return requests, times, weights and out-of-distribution scores of this replica's last hour."""
        return JSONResponse(history.tree(), headers={"Cache-Control": "no-store"})


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", response_model=None, responses={200: {"model": HealthAnswer}})
    async def healthy() -> Response:
        """Return whether this replica can answer at all."""
        if not service.engine.alive:
            return _Plain(body_of("the model's thread has ended: restart the replica", "server_error"), 503)
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", response_model=None, responses={200: {"model": HealthAnswer}})
    async def ready() -> Response:
        """Return whether it takes more requests now."""
        if service.engine.pending >= service.config.limits.queue:
            return _Plain(body_of("the queue is full", "server_error"), 503)
        active = service.snapshot_manager.active.snapshot.number
        return JSONResponse({"status": "ready", "snapshot": active, "metrics": service.metrics_url})


COUNTED = ("/v1/chat/completions", "/v1/completions", "/v1/classify")
"""Paths of requests for answers; the playground asks for mixtures alone while a text is typed."""


class ResponseCounter:
    """ASGI middleware; an error inside a stream comes after its status, and is not counted as one."""

    def __init__(self, app: Any, history: History) -> None:
        self.app = app
        self.history = history

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.history.add_response(message["status"])
            await send(message)

        counts = scope["type"] == "http" and scope["path"].endswith(COUNTED)
        await self.app(scope, receive, counted if counts else send)


log: logging.Logger = logging.getLogger(__name__)

DEFAULT = 2
"""Examples of each task where the setting is null and only this machine is answered."""

LONGEST = 600
"""Characters of an example: a longer text is not taken."""

READ = 50
"""Rows of a task that are looked at."""


class Examples:
    """Reads the examples of one snapshot at a time, and keeps those of the last one.

    Args:
        has_keys: others than this machine may be answered.
    """

    def __init__(self, config: ServeConfig, has_keys: bool) -> None:
        self._config = config
        self._count = config.examples if config.examples is not None else 0 if has_keys else DEFAULT
        self._lock = threading.Lock()
        self._read: tuple[str, dict[str, list[str]]] = ("", {})

    def of(self, snapshot: Snapshot) -> dict[str, list[str]]:
        """Return task -> texts; nothing where none are wanted, or the data cannot be read here."""
        if not self._count:
            return {}
        with self._lock:
            if self._read[0] != snapshot.sha256:
                self._read = (snapshot.sha256, self._texts(snapshot))
            return self._read[1]

    def _texts(self, snapshot: Snapshot) -> dict[str, list[str]]:
        try:
            stream = stream_of(snapshot, self._config)
            learned = {task.name for task in snapshot.tasks}
            return {task.name: self._of_task(stream, task) for task in stream.tasks if task.name in learned}
        except RayclError as error:
            log.info("the playground shows no examples: %s", error)
            return {}

    def _of_task(self, stream: Stream, task: Task) -> list[str]:
        """Return the first test texts that are not too long; of conversations those that are one message."""
        source = stream.source(task, "test")
        if source is None:
            return []
        texts = source.open().values("text", stream.rows(task, "test")[:READ])
        if stream.is_chat(task):
            texts = [messages_of(text)[0].content for text in texts if is_one_message(text)]
        return [text for text in texts if text.strip() and len(text) <= LONGEST][: self._count]
