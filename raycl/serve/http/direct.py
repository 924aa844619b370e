"""Requests for answers go to their endpoints without FastAPI's routes, which take a third of what a small one costs.

FastAPI answers whatever is no valid request of one of these endpoints, and so decides what is said about it.
"""

import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from raycl.errors import RayclError

Endpoint = Callable[[Any], Awaitable[Response]]
"""A coroutine function whose only parameter is the parsed body."""

JSON = b"application/json"


@dataclass(frozen=True)
class DirectEndpoints:
    """ASGI middleware: calls an endpoint with the parsed body of a valid request; passes everything else on.

    Attributes:
        endpoints: path -> the model of the body, and the endpoint.
        refused: returns the response to an error of a request.
    """

    app: Any
    endpoints: dict[str, tuple[type[BaseModel], Endpoint]]
    refused: Callable[[RayclError], Response]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or pass it on."""
        found = self._endpoint(scope) if scope["type"] == "http" else None
        if found is None:
            await self.app(scope, receive, send)
            return
        kind, endpoint = found
        first, is_read = await receive(), False

        async def again() -> Any:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return first

        try:
            request = kind.model_validate(json.loads(first.get("body", b"")))
        except (ValueError, RecursionError):  # not all of the body, or FastAPI says what is wrong with it
            await self.app(scope, again, send)
            return
        is_read = True
        try:
            response = await endpoint(request)
        except RayclError as error:
            response = self.refused(error)
        await response(scope, again, send)

    def _endpoint(self, scope: Any) -> tuple[type[BaseModel], Endpoint] | None:
        """Return what answers a request of this head; None: FastAPI does."""
        if scope["method"] != "POST":
            return None
        is_json = any(name == b"content-type" and value.lower() == JSON for name, value in scope["headers"])
        return (
            self.endpoints.get(scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))) if is_json else None
        )


def endpoints_of(app: FastAPI) -> dict[str, tuple[type[BaseModel], Endpoint]]:
    """Return the endpoints of an application that take nothing but a body, by path."""
    found: dict[str, tuple[type[BaseModel], Endpoint]] = {}
    for route in app.routes:
        if (
            not isinstance(route, APIRoute)
            or route.methods != {"POST"}
            or not inspect.iscoroutinefunction(route.endpoint)
        ):
            continue
        kinds = [one.annotation for one in inspect.signature(route.endpoint, eval_str=True).parameters.values()]
        if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
            found[route.path] = kinds[0], route.endpoint
    return found
