"""Endpoints that are called without FastAPI's routes answer as these do, and leave to them what is no valid request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.testclient import TestClient

from raycl.errors import RayclError
from raycl.serve.errors import BusyError
from raycl.serve.http.access import cancel_on_disconnect
from raycl.serve.http.direct import DirectEndpoints, endpoints_of
from raycl.serve.http.schema import ClassifyRequest
from raycl.serve.http.web import add_errors, fault, refused

REFUSED, BROKEN = "refuse this", "break here"
GOOD = json.dumps({"input": "a text"})


def application() -> FastAPI:
    app = FastAPI()
    add_errors(app)

    @app.post("/v1/classify", response_model=None)
    async def classify(request: ClassifyRequest) -> Response:
        if REFUSED in request.texts:
            raise BusyError("the queue is full: retry in a second")
        if BROKEN in request.texts:
            raise ZeroDivisionError
        return JSONResponse({"texts": list(request.texts), "model": request.model})

    @app.post("/admin/slow", response_model=None)
    def slow(request: ClassifyRequest) -> Response:
        return JSONResponse({"slow": list(request.texts)})

    @app.get("/v1/classify", response_model=None)
    async def page() -> Response:
        return JSONResponse("a page")

    return app


class Passed:
    """An application that counts what reaches it."""

    def __init__(self, app: Any) -> None:
        self.app, self.count = app, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.count += 1
        await self.app(scope, receive, send)


def clients(prefix: str = "") -> tuple[TestClient, TestClient, Passed]:
    """Return a client of the application, one of the same with its endpoints called directly, and what passes these."""
    app = application()
    passed = Passed(app)
    direct = ServerErrorMiddleware(DirectEndpoints(passed, endpoints_of(app), refused), fault)
    both = [
        TestClient(one, "http://localhost", raise_server_exceptions=False, root_path=prefix) for one in (app, direct)
    ]
    return both[0], both[1], passed


@pytest.mark.parametrize("prefix", ["", "/models/mine"])
@pytest.mark.parametrize("body", [GOOD, json.dumps({"input": ["a", "b"], "model": "base", "unknown": 1})])
def test_a_valid_request_goes_to_its_endpoint_at_once(body: str, prefix: str) -> None:
    plain, direct, passed = clients(prefix)
    head = {"Content-Type": "application/json"}
    answers = [client.post(f"{prefix}/v1/classify", content=body, headers=head) for client in (plain, direct)]
    assert answers[0].status_code == answers[1].status_code == 200 and answers[0].json() == answers[1].json()
    assert passed.count == 0


@pytest.mark.parametrize(
    ("method", "path", "kind", "body"),
    [
        ("POST", "/v1/classify", "application/json", '{"input": 3}'),
        ("POST", "/v1/classify", "application/json", "{"),
        ("POST", "/v1/classify", "application/json", ""),
        ("POST", "/v1/classify", "application/json", "[" * 5_000),
        ("POST", "/v1/classify", "application/json", "\xe9"),
        ("POST", "/v1/classify", "application/json; charset=utf-8", GOOD),
        ("POST", "/v1/classify", "text/plain", GOOD),
        ("POST", "/v1/other", "application/json", GOOD),
        ("POST", "/admin/slow", "application/json", GOOD),
        ("GET", "/v1/classify", "application/json", ""),
        ("PUT", "/v1/classify", "application/json", GOOD),
    ],
)
def test_everything_else_is_answered_as_before(method: str, path: str, kind: str, body: str) -> None:
    plain, direct, passed = clients()
    content, head = body.encode("latin-1"), {"Content-Type": kind}
    answers = [client.request(method, path, content=content, headers=head) for client in (plain, direct)]
    assert answers[0].status_code == answers[1].status_code and answers[0].content == answers[1].content
    assert passed.count == 1


@pytest.mark.parametrize(("text", "status"), [(REFUSED, 429), (BROKEN, 500)])
def test_errors_have_the_same_responses(text: str, status: int) -> None:
    plain, direct, passed = clients()
    answers = [client.post("/v1/classify", json={"input": text}) for client in (plain, direct)]
    assert answers[0].status_code == answers[1].status_code == status and answers[0].json() == answers[1].json()
    assert answers[0].headers.get("retry-after") == answers[1].headers.get("retry-after")
    assert passed.count == 0


def test_a_body_in_parts_reaches_the_application_whole() -> None:
    parts = [GOOD[:5].encode(), GOOD[5:].encode()]
    app = application()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/classify", "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json")]}
    asyncio.run(DirectEndpoints(app, endpoints_of(app), refused)(scope, receive, send))
    assert sent[0]["status"] == 200 and json.loads(sent[1]["body"])["texts"] == ["a text"]


# ---- clients that leave ----------------------------------------------------------------------------------------------


def left_after(app: Any, seconds: float, by_others: bool = False) -> str:
    """Run an application whose client leaves after so many seconds; return how that ended."""
    left = asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def run() -> str:
        work = asyncio.ensure_future(cancel_on_disconnect(app, {}, b"body", receive, send))
        await asyncio.sleep(seconds)
        work.cancel() if by_others else left.set()
        done, _ = await asyncio.wait([work], timeout=5)
        if not done:
            return "still running"
        return "cancelled" if work.cancelled() else str(work.exception() or "over")

    return asyncio.run(run())


def test_work_ends_when_its_client_leaves_and_others_may_cancel_it_too() -> None:
    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"body"
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    assert left_after(app, 0.05) == "over" and left_after(app, 0.05, by_others=True) == "cancelled"
    assert len(ended) == 2


def test_what_follows_an_answer_is_finished_when_the_client_has_left() -> None:
    """Counters are written after the last byte, when a connection may be closed."""
    finished = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"all"})
        await asyncio.sleep(0.2)
        assert (await receive())["type"] == "http.request" and (await receive())["type"] == "http.disconnect"
        finished.append(True)

    assert left_after(app, 0.05) == "over" and finished == [True]


def test_an_error_of_the_application_is_raised() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RayclError("it failed")

    assert left_after(app, 0.05) == "it failed"
