"""Tests of what the middleware of Ray Serve's proxies makes of requests without an answer."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from uvicorn.config import HTTP_PROTOCOLS

from raycl.launch.http.connections import LimitedProtocol
from raycl.serve.http.access import limit_proxy


def test_a_request_without_an_answer_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's proxy leaves one where a replica is killed; uvicorn answers that with 500 as plain text."""
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    (middleware,) = limit_proxy()
    assert HTTP_PROTOCOLS["auto"] == f"{LimitedProtocol.__module__}:LimitedProtocol"

    async def ended(scope: Any, receive: Any, send: Any) -> None:
        pass

    response = TestClient(middleware.cls(ended, *middleware.args, **middleware.kwargs)).post("/v1/classify")
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "server_error" and "send the request again" in response.text

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        b"\xff".decode()

    wrong = TestClient(middleware.cls(reads)).get("/")
    assert wrong.status_code == 400 and "a header field is not UTF-8" in wrong.json()["error"]["message"]
    other = TestClient(middleware.cls(PlainTextResponse("mine", 500))).get("/")
    assert (other.status_code, other.text) == (500, "mine")
