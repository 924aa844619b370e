"""The endpoints in front of another engine: OpenAI's, with `model: auto` replaced by the adapter for the text."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import aiohttp
from fastapi import Body as JsonBody
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import Field, ValidationError
from starlette.responses import StreamingResponse

from raycl import __version__
from raycl.data.sources.conversation import ROLES, Message, text_of
from raycl.errors import RayclError
from raycl.serve.errors import BusyError, DeadlineExceededError, InvalidRequestError, UnavailableError, error_response
from raycl.serve.http.access import Keys, guarded
from raycl.serve.http.schema import (
    AUTO,
    HealthAnswer,
    ModelName,
    ModelsAnswer,
    Name,
    OwnFields,
    Text,
    Texts,
    Unsupported,
    Wire,
)
from raycl.serve.http.web import ERROR_RESPONSES, TOO_DEEP, add_errors
from raycl.serve.service.service import check_lengths, log_prompts
from raycl.serve.settings import ServeConfig
from raycl.serve.upstream.export import AdapterChoice

CHOSEN = "x-raycl-model"
"""Header of an answer: the model that the engine was asked for."""

T = TypeVar("T", bound=Wire)
Body = Annotated[dict[str, Any], JsonBody()]
"""A JSON object, sent as such: FastAPI refuses another Content-Type, which a web page elsewhere may send unasked."""


CONNECT_S = 5.0
"""Time for a connection to the engine."""

KEEP_ALIVE_S = 2.0
"""Shorter than servers keep a connection that is not used (uvicorn, and so vLLM: 5 s), so that none is found closed."""

REQUEST_HEADERS = ("accept", "x-request-id")
ANSWER_HEADERS = ("content-type", "retry-after", "x-request-id")
"""Passed on; a client's key is raycl's and stays here."""

EVENTS = "text/event-stream"


class UpstreamClient:
    """HTTP to the engine, from any event loop in which it is opened.

    Ray Serve opens the application of a replica in its own loop, also where the replica listens in another one.
    """

    def __init__(self, config: ServeConfig) -> None:
        assert config.upstream.url is not None, "settings without an engine have no client"
        self.url: str = config.upstream.url.rstrip("/").removesuffix("/v1")
        self._key = os.environ.get(config.upstream.key_env, "")
        self._limits = config.limits
        self._pending = 0
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep connections of this event loop inside."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            loop = asyncio.get_running_loop()
            self._sessions[loop] = session
            try:
                yield
            finally:
                del self._sessions[loop]

    async def get(self, path: str, timeout_s: float | None = None) -> tuple[int, bytes]:
        """Status and body of a GET.

        Raises:
            UnavailableError, DeadlineExceededError: no answer.
        """
        async with self._failures(timeout_s):
            answer = await self._ask("GET", path, {}, None)
            return answer.status, await answer.read()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str], added: Mapping[str, str]) -> Response:
        """Return the engine's answer to a JSON body: status, body and events are its own.

        Args:
            headers: headers of the client's request. added: headers that are added to the answer.

        Raises:
            UnavailableError, DeadlineExceededError: no answer. BusyError: too many requests are unanswered.
        """
        if self._pending >= self._limits.queue:
            raise BusyError(f"{self._pending} requests are pending: retry in a second")
        deadline = asyncio.get_running_loop().time() + self._limits.timeout_s
        self._pending += 1
        streams = False
        try:
            async with self._failures():
                answer = await self._ask("POST", path, headers, body)
                kept = {name: answer.headers[name] for name in ANSWER_HEADERS if name in answer.headers} | dict(added)
                streams = answer.content_type == EVENTS
                if not streams:
                    return Response(await answer.read(), answer.status, kept)
                kept["cache-control"] = "no-cache"
                return StreamingResponse(self._events(answer, deadline), answer.status, kept)
        finally:
            if not streams:
                self._pending -= 1

    async def _ask(
        self, method: str, path: str, headers: Mapping[str, str], data: bytes | None
    ) -> aiohttp.ClientResponse:
        session = self._sessions[asyncio.get_running_loop()]
        sent = {name: headers[name] for name in REQUEST_HEADERS if name in headers}
        if data is not None:
            sent["content-type"] = "application/json"
        if self._key:
            sent["authorization"] = f"Bearer {self._key}"
        return await session.request(method, f"{self.url}{path}", data=data, headers=sent, allow_redirects=False)

    async def _events(self, answer: aiohttp.ClientResponse, deadline: float) -> AsyncIterator[bytes]:
        """Server-sent events as they come; what fails between them is the last one."""
        try:
            while True:
                async with self._failures(deadline - asyncio.get_running_loop().time()):
                    piece = await answer.content.readany()
                if not piece:
                    return
                yield piece
        except RayclError as error:
            yield f"\n\ndata: {json.dumps(error_response(error)[1])}\n\n".encode()
        finally:
            self._pending -= 1
            answer.close()  # the engine stops if its answer is not complete

    @asynccontextmanager
    async def _failures(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Limit the time of what is inside, and raise failures of HTTP as one sentence."""
        seconds = self._limits.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(seconds):
                yield
        except aiohttp.ClientConnectorError as error:
            raise UnavailableError(
                f"the engine at {self.url} (upstream.url) cannot be reached ({_reason(error)}): "
                "start it, or correct the address"
            ) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise UnavailableError(
                f"the engine at {self.url} (upstream.url) takes no connection within {CONNECT_S:g} s"
            ) from error
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the engine at {self.url} has not answered within {self._limits.timeout_s:g} s (limits.timeout_s): "
                "request less, or retry later"
            ) from error
        except aiohttp.ClientError as error:
            raise UnavailableError(
                f"the engine at {self.url} broke off its answer ({type(error).__name__}): retry, or see its log"
            ) from error


def _reason(error: aiohttp.ClientConnectorError) -> str:
    """asyncio's own text repeats the address instead of what happened."""
    return os.strerror(error.errno) if error.errno else str(error.os_error)


class UpstreamFields(OwnFields):
    """The fields of a request that name its adapter."""

    task: Name | None = Field(None, description="the text's task, for routers that go by it")
    input: Text | None = Field(None, description="what the router reads; null: the whole prompt")
    adapters: Unsupported = None
    mix: Unsupported = None
    snapshot: Unsupported = None
    template: Unsupported = None


class RoutedRequest(Wire):
    """The fields of a request that are read; all others are the engine's."""

    model: ModelName = AUTO
    raycl: UpstreamFields | None = None


TokenIds = Annotated[list[int], Field(fail_fast=True)]


class PromptTexts(Wire):
    """The texts of a completion for the router."""

    prompt: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]


class Front:
    """Requests on their way to the engine."""

    def __init__(self, choice: AdapterChoice, client: UpstreamClient, config: ServeConfig) -> None:
        self.choice = choice
        self.client = client
        self.config = config
        self._thread = ThreadPoolExecutor(1, "raycl-route")  # the sentence encoder is one thread's

    async def answer(self, path: str, request: Request, body: dict[str, Any], is_chat: bool) -> Response:
        """Return the engine's answer, by the adapter that the request names or that is chosen for its text."""
        given = _read(RoutedRequest, body)
        name = self.config.model_of(given.model)
        if name == AUTO:
            name = await self._choose(body, given.raycl or UpstreamFields(), is_chat)
        model = self.choice.record.model_of(name)
        sent = _json({key: value for key, value in body.items() if key != "raycl"} | {"model": model})
        return await self.client.post(path, sent, request.headers, {CHOSEN: quote(model, safe=":/@+ ")})

    async def _choose(self, body: dict[str, Any], routing: UpstreamFields, is_chat: bool) -> str:
        """Return the adapter for a request's texts.

        Raises:
            InvalidRequestError: they are no texts, or need different adapters. LimitExceededError: one is too long.
        """
        if self.choice.record.fixed is not None:
            return self.choice.record.fixed
        texts = [routing.input] if routing.input else _texts(body, is_chat)
        check_lengths(texts, self.config.limits)
        log_prompts(texts, self.config)
        loop = asyncio.get_running_loop()
        reads_chat = is_chat and not routing.input
        adapters = await loop.run_in_executor(self._thread, self.choice.adapters, texts, routing.task, reads_chat)
        if len(set(adapters)) > 1:
            raise InvalidRequestError(
                f"the prompts belong to different adapters ({', '.join(sorted(set(adapters))[:8])}), and the engine "
                "gives a request one: send them one by one"
            )
        return adapters[0]

    async def models(self) -> Response:
        """Return the engine's own list, `auto` and names that stand for other models."""
        status, body = await self.client.get("/v1/models")
        try:
            tree = json.loads(body) if status == 200 else {}
            listed = list(tree["data"]) if tree else []
        except (ValueError, LookupError, TypeError) as error:
            raise UnavailableError(f"what answers at {self.client.url} is no OpenAI-compatible engine") from error
        if status != 200:
            return Response(body, status, media_type="application/json")
        own = {"object": "model", "created": 0, "owned_by": "raycl"}
        names = [{"id": name, **own} for name in (AUTO, *self.config.model_aliases)]
        return JSONResponse({**tree, "data": [*names, *listed]})


def _read(kind: type[T], body: dict[str, Any]) -> T:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        details = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(details, body=body) from error


def _json(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body).encode()
    except RecursionError as error:
        raise InvalidRequestError(TOO_DEEP) from error


def _texts(body: dict[str, Any], is_chat: bool) -> list[str]:
    """Return what the router reads: the conversation as one text, or each prompt.

    Raises:
        InvalidRequestError: no text, or token ids.
    """
    if is_chat:
        turns = _turns(body.get("messages"))
        if not any(turn.content.strip() for turn in turns):
            raise InvalidRequestError(
                "messages: no text of system, user or assistant to route by: give one in raycl.input, or name the model"
            )
        return [text_of(turns)]
    prompt = _read(PromptTexts, body).prompt
    texts = [prompt] if isinstance(prompt, str) else [text for text in prompt if isinstance(text, str)]
    if not texts:
        raise InvalidRequestError("token ids cannot be routed: give the text in raycl.input, or name the model")
    return texts


def _turns(messages: Any) -> list[Message]:
    """Return the texts of a chat. The engine decides what else a request may have: tool calls and their results,
    contents that are null, images, roles of its own. None of that is read here, or checked."""
    turns = []
    for message in messages if isinstance(messages, list) else ():
        role = ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
        content = message.get("content") if role else None
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        whole = "".join(text for text in texts if isinstance(text, str))
        if role and whole:
            turns.append(Message(role, whole.encode(errors="replace").decode()))  # tokenizers take no lone surrogates
    return turns


def make_front_web(choice: AdapterChoice, config: ServeConfig, keys: Keys) -> Any:
    """Return the ASGI application of one replica; connections to the engine are kept during its lifespan."""
    client = UpstreamClient(config)
    front = Front(choice, client, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with client.opened():
            yield

    settings: dict[str, Any] = {"docs_url": None, "redoc_url": None, "lifespan": lifespan}
    app = FastAPI(title="raycl", version=__version__, responses=ERROR_RESPONSES, **settings)
    add_errors(app)
    _add_texts(app, front)
    _add_health(app, front)
    return guarded(app, keys, config)


def _add_texts(app: FastAPI, front: Front) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, body: Body) -> Response:
        """Return the engine's answer to the messages."""
        return await front.answer("/v1/chat/completions", request, body, is_chat=True)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: Body) -> Response:
        """Return what follows the prompt, by the engine."""
        return await front.answer("/v1/completions", request, body, is_chat=False)

    @app.get("/v1/models", response_model=None, responses={200: {"model": ModelsAnswer}})
    async def models() -> Response:
        """Return every value of `model`."""
        return await front.models()


def _add_health(app: FastAPI, front: Front) -> None:
    @app.get("/healthz", response_model=None, responses={200: {"model": HealthAnswer}})
    async def healthy() -> Response:
        """Return whether this replica routes."""
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", response_model=None, responses={200: {"model": HealthAnswer}})
    async def ready() -> Response:
        """Return whether the engine answers."""
        status, _ = await front.client.get("/v1/models", CONNECT_S)
        if status >= 500:
            raise UnavailableError(f"the engine at {front.client.url} answers with status {status}")
        return JSONResponse({"status": "ready", "snapshot": front.choice.record.snapshot})
