"""Additions to Ray Serve's proxies: limits on connections, and the proxies' own errors as JSON.

Serve has no settings for either, but calls a function before a proxy listens.
"""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware
from uvicorn.config import HTTP_PROTOCOLS

from raycl.launch.http.connections import LimitedProtocol
from raycl.serve.http.access import answer

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
