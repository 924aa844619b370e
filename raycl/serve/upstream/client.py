"""The engine behind the router: requests to it, its answers as they come, and what its failures become."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
from starlette.responses import Response, StreamingResponse

from raycl.errors import RayclError
from raycl.serve.errors import BusyError, DeadlineExceededError, UnavailableError, error_response
from raycl.serve.settings import ServeConfig

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
        except (aiohttp.ConnectionTimeoutError, TimeoutError) as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise UnavailableError(
                    f"the engine at {self.url} (upstream.url) takes no connection within {CONNECT_S:g} s"
                ) from error
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
