"""Access control, request size limits, disconnected clients and Ray Serve's proxies: ASGI, before anything is parsed.

Frameworks notice that a client has gone only when they write to it, and until then a text is generated in vain.
"""

import asyncio
import hmac
import json
import os
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from uvicorn.config import HTTP_PROTOCOLS

from raycl.errors import ConfigError
from raycl.launch.http.connections import LimitedProtocol, is_local, is_loopback
from raycl.serve.errors import RETRYABLE, body_of
from raycl.serve.settings import AuthConfig, LimitsConfig, ServeConfig


async def cancel_on_disconnect(app: Any, scope: Any, body: bytes, receive: Any, send: Any) -> None:
    """Run an ASGI application on a body that has been read; cancelled if the client leaves before the answer's end.

    Args:
        receive: the server's function after the body; nothing else may read from it.
    """
    given, answered, is_cancelled = False, False, False
    gone, work = asyncio.Event(), asyncio.current_task()
    assert work is not None, "a request is answered in a task"

    async def replayed() -> Any:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def watched(message: Any) -> None:
        nonlocal answered
        await send(message)
        answered = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def left() -> None:
        nonlocal is_cancelled
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        if not answered:
            is_cancelled = work.cancel()

    watch = asyncio.ensure_future(left())
    try:
        await app(scope, replayed, watched)
    except asyncio.CancelledError:
        if not is_cancelled or work.uncancel():  # others cancel this task too
            raise
    finally:
        watch.cancel()


OPEN = ("/", "/healthz", "/readyz", "/openapi.json")
"""Paths that need no key, and all below /playground/: the page that prompts for a key, and health probes."""

LOCAL_ONLY = (
    "without API keys only requests from this machine to 127.0.0.1 or localhost are answered: set auth.keys_file"
)

DRAINED = 16
"""Too large bodies are read up to this multiple of the limit, since clients read no response while they send."""

KEYS_ENV = "RAYCL_API_KEYS"
"""Environment variable with API keys, separated by commas."""


class Keys:
    """API keys and those that may also administer."""

    def __init__(self, config: AuthConfig) -> None:
        """Read them.

        Raises:
            ConfigError: the file cannot be read, or holds no key.
        """
        lines = os.environ.get(KEYS_ENV, "").split(",")
        if config.keys_file is not None:
            try:
                lines += Path(config.keys_file).read_text(encoding="utf-8").splitlines()
            except (OSError, ValueError) as error:
                raise ConfigError(f"auth.keys_file '{config.keys_file}' cannot be read: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        self._admin = [key.removeprefix("admin:").encode() for key in keys if key.startswith("admin:")]
        self._plain = [key.encode() for key in keys if not key.startswith("admin:")]
        if b"" in self._admin:
            raise ConfigError("an API key is 'admin:' and nothing behind it: write the key there")
        if config.keys_file is not None and not keys:
            raise ConfigError(f"auth.keys_file '{config.keys_file}' holds no key: write one a line")

    def __bool__(self) -> bool:
        return bool(self._admin or self._plain)

    def knows(self, key: bytes, admin: bool) -> bool:
        """Return whether it is one of them; takes as long whichever it is, or none."""
        allowed = self._admin if admin else [*self._admin, *self._plain]
        return sum(hmac.compare_digest(key, other) for other in allowed) > 0


def check_access(config: ServeConfig) -> Keys:
    """Return the keys, if the endpoint may start with them.

    Raises:
        ConfigError: it would be open to the network.
    """
    keys = Keys(config.auth)
    if not keys and "*" in config.auth.allowed_origins:
        raise ConfigError(
            "auth.allowed_origins has '*', which lets every web page that a browser here opens use the endpoint, and "
            f"there are no API keys: name the pages' origins, or set auth.keys_file or {KEYS_ENV}"
        )
    if not keys and not is_loopback(config.host):
        raise ConfigError(
            f"host={config.host} lets others on the network in, and there are no API keys: set auth.keys_file, or "
            f"{KEYS_ENV}, or host=127.0.0.1"
        )
    return keys


def guarded(app: Any, keys: Keys, config: ServeConfig) -> Any:
    """Return an ASGI application behind access control, and behind CORS where pages of other origins may ask."""
    inner = AccessMiddleware(app, keys, config.limits)
    origins = config.auth.allowed_origins
    if not origins:
        return inner
    methods, exposed = ("GET", "HEAD", "POST"), ("retry-after", "x-raycl-model", "x-request-id")
    return CORSMiddleware(inner, origins, methods, ("*",), expose_headers=exposed)


class AccessMiddleware:
    """ASGI middleware: keys, size of bodies and time for them; behind it the whole body is there."""

    def __init__(self, app: Any, keys: Keys, limits: LimitsConfig) -> None:
        self.app = app
        self.keys = keys
        self.body_bytes: int = limits.body_kb * 1024
        self.timeout_s: float = limits.timeout_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or reject it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        client = scope.get("client")  # by its address, since a proxy of Ray Serve may listen on others than `host`
        is_from_here = client is not None and is_loopback(client[0])
        if not self.keys and not (is_from_here and is_local(headers.get(b"host", b"localhost"))):
            await answer(send, 403, LOCAL_ONLY, "permission_error")
            return
        reason = self._denied(scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")), headers)
        if reason is not None:
            await answer(send, 401, reason, "authentication_error")
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:19]) > DRAINED * self.body_bytes:
            await self._reject_large(send)
            return
        try:
            async with asyncio.timeout(self.timeout_s):
                body = await self._read(receive)
        except TimeoutError:
            message = f"the request was not complete within {self.timeout_s:g} s: send it faster"
            await answer(send, 408, message, "timeout_error")
            return
        except _GoneError:
            return
        if body is None:
            await self._reject_large(send)
        else:
            await cancel_on_disconnect(self.app, scope, body, receive, send)

    def _denied(self, path: str, headers: dict[bytes, bytes]) -> str | None:
        """Return why this client may not use this path; None: it may."""
        admin = path.startswith("/admin")
        if not self.keys or path in OPEN or path.startswith("/playground/"):
            return None
        given = headers.get(b"authorization", b"")
        key = given[7:].strip() if given[:7].lower() == b"bearer " else b""
        if self.keys.knows(key, admin):
            return None
        return f"{'an admin key' if admin else 'an API key'} is needed: send 'Authorization: Bearer KEY'"

    async def _read(self, receive: Any) -> bytes | None:
        """Return the whole body; None: it is too large (a part of it is read all the same, or the answer would be
        lost)."""
        parts: list[bytes] = []
        size, more = 0, True
        while more and size <= DRAINED * self.body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size <= self.body_bytes:
                parts.append(part)
        return b"".join(parts) if size <= self.body_bytes else None

    async def _reject_large(self, send: Any) -> None:
        message = f"the request is larger than {self.body_bytes // 1024} KiB: send less text"
        await answer(send, 413, message, "invalid_request_error")


class _GoneError(Exception):
    """The client went away before its request was whole."""


async def answer(send: Any, status: int, message: str, kind: str) -> None:
    """Send an error in OpenAI's shape.

    Args:
        kind: OpenAI's type of it.
    """
    body = json.dumps(body_of(message, kind)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in RETRYABLE:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# ---- Ray Serve's proxies, which have no settings for limits, but call a function before they listen --------------

PROXY_HOOK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Ray Serve's environment variable that names a function; each of its proxies calls it before it listens."""

ENDED = "the replica that had this request has ended, and others answer: send the request again"


def limit_proxy() -> list[Middleware]:
    """Limit the connections of a proxy of Ray Serve (see `PROXY_HOOK`); the middleware that it shall have.

    Ray Serve has no setting for it, so the proxy's uvicorn gets this protocol as its default one.
    """
    HTTP_PROTOCOLS["auto"] = f"{LimitedProtocol.__module__}:{LimitedProtocol.__name__}"
    return [Middleware(RetryableErrors)]


class RetryableErrors:
    """ASGI middleware: a request without an answer gets 503 as JSON, where uvicorn would send 500 as plain text.

    Serve's proxy leaves a request without one when its replica is killed, and when it cannot read the head.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""
        began = False

        async def watched(message: Any) -> None:
            nonlocal began
            began = True
            await send(message)

        status, message, kind = 503, ENDED, "server_error"
        try:
            await self.app(scope, receive, watched)
        except UnicodeDecodeError as error:  # Serve reads a few fields of the head as UTF-8
            status, message, kind = 400, f"a header field is not UTF-8 ({error.reason})", "invalid_request_error"
        if scope["type"] == "http" and not began:
            await answer(send, status, message, kind)
