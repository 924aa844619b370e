"""Bodies of requests that are made to be expensive are refused in one sentence, and before they cost anything."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from raycl.serve.errors import InvalidRequestError
from raycl.serve.http.schema import ChatRequest, ClassifyRequest
from raycl.serve.http.web import add_errors
from raycl.serve.upstream.web import PromptTexts, _json

CHAT = '{"messages": [{"role": "user", "content": "a"}], '
MANY = ", ".join(["[]"] * 60_000)
PINNED = ", ".join(f'"{number}": ""' for number in range(26_000))

BODIES: dict[str, tuple[str, str | bytes, str]] = {
    "deep lists": ("/classify", f'{{"x": {"[" * 100_000}{"]" * 100_000}}}', "nested too deeply: send fewer"),
    "deep objects": ("/chat", '{"x": ' * 50_000, "nested too deeply: send fewer"),
    "digits": ("/chat", f'{CHAT}"seed": {"9" * 5_000}}}', "a number of more than 4,300 digits: send less"),
    "bytes": ("/classify", b'{"input": "\xff"}', "no valid UTF-8 (byte 12)"),
    "texts": ("/classify", f'{{"input": [{MANY}]}}', "input.0: Input should be a valid string"),
    "messages": ("/chat", f'{{"messages": [{MANY}]}}', "messages.0: Input should be a valid dictionary"),
    "parts": (
        *("/chat", f'{{"messages": [{{"role": "user", "content": [{MANY}]}}]}}'),
        "messages.0.content.0: Input should be a valid dictionary",
    ),
    "stops": ("/chat", f'{CHAT}"stop": [{MANY}]}}', "stop: List should have at most 16 items"),
    "pins": (
        "/chat",
        f'{CHAT}"raycl": {{"adapters": {{{PINNED}}}}}}}',
        "adapters: Input has 26000 entries: at most",
    ),
    "fields": ("/chat", f'{CHAT}"raycl": {{{PINNED}}}}}', "raycl: '0' is unknown"),
    "prompts": ("/prompts", f'{{"prompt": [{MANY.replace("[]", "{}")}]}}', "prompt.0: Input should be a valid string"),
}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = FastAPI()
    add_errors(app)

    @app.post("/classify")
    async def classify(request: ClassifyRequest) -> None: ...

    @app.post("/chat")
    async def chat(request: ChatRequest) -> None: ...

    @app.post("/prompts")
    async def prompts(request: PromptTexts) -> None: ...

    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("name", BODIES)
def test_expensive_bodies_are_refused_at_once(client: TestClient, name: str) -> None:
    path, body, words = BODIES[name]
    began = time.process_time()
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert time.process_time() - began < 1.5  # with a message for each of 60,000 it was 2 to 4 s


def test_what_is_too_deep_to_be_sent_on_is_refused() -> None:
    body: dict[str, Any] = {}
    for _ in range(2_000):
        body = {"a": body}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        _json(body)
    assert json.loads(_json({"a": [1]})) == {"a": [1]}
