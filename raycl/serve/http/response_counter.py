"""Counts responses to requests for answers by their status: pure ASGI, around everything that may refuse one."""

from __future__ import annotations

from typing import Any

from raycl.serve.service.history import History

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
