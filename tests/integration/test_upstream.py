"""raycl's router in front of another engine: a stand-in for vLLM on loopback, a real bank and its real export."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from http_client import problem
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from local_endpoint import on_a_port
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter
from service_client import bank_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tiny import Taught, on_main

from raycl import config as configs
from raycl.bank import Bank, NewSnapshot
from raycl.bank.manifest import RouterInfo
from raycl.cli.commands import run
from raycl.errors import ConfigError
from raycl.launch.http.connections import bound
from raycl.serve.http.access import Keys
from raycl.serve.http.server import Listener
from raycl.serve.settings import AuthConfig, ServeConfig, load_serve_config
from raycl.serve.snapshots.parts import router_of
from raycl.serve.upstream.export import open_choice
from raycl.serve.upstream.web import UpstreamClient, make_front_web

RECORDED = (
    b'{"id":"chatcmpl-9f","object":"chat.completion","created":1764288000,"model":"llama:c","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":null,"refusal":null,"reasoning_content":null,"tool_calls":[{"id":'
    b'"chatcmpl-tool-4e","type":"function","function":{"name":"weather","arguments":"{\\"city\\": \\"Bern\\"}"}}]},'
    b'"logprobs":null,"finish_reason":"tool_calls","stop_reason":null}],"usage":{"prompt_tokens":198,"total_tokens":216,'
    b'"completion_tokens":18,"prompt_tokens_details":null},"prompt_logprobs":null,"kv_transfer_params":null}',
    b'data: {"id":"chatcmpl-9f","object":"chat.completion.chunk","created":1764288000,"model":"llama:c","choices":'
    b'[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    b'data: {"id":"chatcmpl-9f","object":"chat.completion.chunk","created":1764288000,"model":"llama:c","choices":'
    b'[{"index":0,"delta":{"tool_calls":[{"id":"chatcmpl-tool-4e","type":"function","index":0,"function":{"name":'
    b'"weather","arguments":"{\\"city\\": \\"Bern\\"}"}}]},"logprobs":null,"finish_reason":"tool_calls"}]}\n\n'
    b"data: [DONE]\n\n",
)
"""Answers with a tool call in the form of vLLM's published schema: whole, and as a stream."""

EVENTS, JSON = "text/event-stream", "application/json"

TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "text", "text": "Use tools."}]},
    {
        "role": "user",
        "content": [{"type": "text", "text": "fire is warm very"}, {"type": "image_url", "image_url": {}}],
    },
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "w"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "it purrs a sleeps"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "refusal": "no", "reasoning_content": "r"},
    {"role": "ipython", "content": {"of": "another engine"}},
    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
]
"""Turns of OpenAI's schema and of engines beyond it, of which the router reads one text of a user."""

TEXTS = ("fire is warm very", "the sea is cold", "it purrs a sleeps", "the barks runs much")
HEAD = "x-raycl-model"


class StandIn:
    """An engine that says which model it was asked for.

    Attributes:
        asked: bodies of requests, and headers. go: until it is set, streams stop after their first event.
        left: set when a stream's client has gone.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.go, self.left = threading.Event(), threading.Event()
        posts = [Route(f"/v1/{path}", self.answer, methods=["POST"]) for path in ("completions", "chat/completions")]
        self.web = Starlette(routes=[*posts, Route("/v1/models", self.models)])

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "llama", "object": "model"}]})

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append((body, dict(request.headers)))
        if body.get("user") == "recorded":
            return Response(RECORDED[bool(body.get("stream"))], media_type=EVENTS if body.get("stream") else None)
        if body["model"] == "unknown":
            return JSONResponse(
                {"error": {"message": "no such model"}}, 404, {"retry-after": "7", "server-timing": "x"}
            )
        if body.get("stream"):
            return StreamingResponse(self.events(body["model"]), media_type="text/event-stream")
        if body.get("max_tokens") == 99:
            await asyncio.sleep(3)
        message = {"role": "assistant", "content": f"by {body['model']}"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return JSONResponse({"id": "1", "object": "chat.completion", "model": body["model"], "choices": [choice]})

    async def events(self, model: str) -> AsyncIterator[bytes]:
        try:
            for piece in ("first", "second"):
                delta = {"index": 0, "delta": {"content": piece}}
                tree = {"id": "1", "object": "chat.completion.chunk", "model": model, "choices": [delta]}
                yield f"data: {json.dumps(tree)}\n\n".encode()
                while not self.go.is_set():
                    await asyncio.sleep(0.01)
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise


@pytest.fixture(scope="module")
def bank(taught: Taught, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return bank_of(taught("llama", "slm"), tmp_path_factory.mktemp("routed"))


@pytest.fixture(scope="module")
def export(bank: Bank, tmp_path_factory: pytest.TempPathFactory) -> str:
    return exported(bank, tmp_path_factory.mktemp("export") / "all")


def exported(bank: Bank, folder: Path, *options: str) -> str:
    assert run("bank", ["export", bank.storage.uri, "--engine", "vllm", "--to", str(folder), *options]) == 0
    return str(folder)


def settings(bank: Bank, export: str, url: str, **changed: Any) -> ServeConfig:
    tree = {"bank": bank.storage.uri, "upstream": {"url": url, "export": export}, **changed}
    return configs.validate(ServeConfig, tree)


@contextmanager
def in_front(bank: Bank, export: str, url: str, **changed: Any) -> Iterator[httpx.Client]:
    """raycl's router before the engine at `url`, behind the server that `raycl serve` starts."""
    with bound("127.0.0.1", 0) as result:
        config = settings(bank, export, url, port=result.getsockname()[1], **changed)
    listener = Listener(make_front_web(open_choice(config), config, Keys(AuthConfig())), config)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{config.port}", timeout=20, trust_env=False, verify=False
        ) as client:
            yield client
    finally:
        listener.close()


@pytest.fixture
def engine() -> Iterator[tuple[StandIn, str]]:
    stand_in = StandIn()
    with on_a_port(stand_in.web) as port:
        yield stand_in, f"http://127.0.0.1:{port}"


def chat(text: str, **settings: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **settings}


def until(happened: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < 10, "it never happened"
        time.sleep(0.01)


def test_each_text_goes_to_its_adapter(
    bank: Bank, export: str, engine: tuple[StandIn, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest weight of the bank's router decides; names of the client's own are passed on."""
    stand_in, url = engine
    monkeypatch.setenv("RAYCL_UPSTREAM_KEY", "the engine's")
    mixture = router_of(bank, bank.open(2)).route(TEXTS, None)
    expected = [f"llama:{mixture.names[column]}" for column in mixture.weights.argmax(1).tolist()]
    assert {model.partition(".")[0] for model in expected} == {"llama:colour", "llama:animal"}
    with in_front(bank, export, f"{url}/v1", model_aliases={"gpt-4o": "auto"}) as client:
        inner = httpx.Client(timeout=20, trust_env=False, verify=False)
        official = OpenAI(
            base_url=str(client.base_url.join("/v1")), api_key="a client's", max_retries=0, http_client=inner
        )
        said = [official.chat.completions.create(model="auto", **chat(text)) for text in TEXTS]
        assert [item.choices[0].message.content for item in said] == [f"by {model}" for model in expected]
        for text, model in zip(TEXTS, expected, strict=True):
            response = client.post("/v1/completions", json={"prompt": text, "top_k": 5, "raycl": {"mix": False}})
            assert response.status_code == 200 and response.headers[HEAD] == model
        body, headers = stand_in.asked[-1]
        assert body == {"model": expected[-1], "prompt": TEXTS[-1], "top_k": 5}
        assert headers["authorization"] == "Bearer the engine's"
        ids = {"prompt": [3, 4], "raycl": {"input": TEXTS[0]}}
        assert client.post("/v1/completions", json=ids).headers[HEAD] == expected[0]
        own = expected[1].removeprefix("llama:")
        for given, model in ((own, expected[1]), (expected[1], expected[1]), ("base", "llama"), ("other", "other")):
            response = client.post("/v1/chat/completions", json=chat(TEXTS[2], model=given))
            assert response.headers[HEAD] == stand_in.asked[-1][0]["model"] == model
        aliased = client.post("/v1/chat/completions", json=chat(TEXTS[0], model="gpt-4o"))
        assert aliased.headers[HEAD] == expected[0]
        assert [item["id"] for item in client.get("/v1/models").json()["data"]] == ["auto", "gpt-4o", "llama"]
        assert client.get("/readyz").json() == {"status": "ready", "snapshot": 2}

        count = len(stand_in.asked)
        for path, wrong, words in (
            ("/v1/completions", {"prompt": list(TEXTS)}, "the prompts belong to different adapters (animal."),
            ("/v1/completions", {"prompt": [3, 4]}, "token ids cannot be routed: give the text in raycl.input"),
            ("/v1/completions", {"prompt": "x" * 40_000}, "a text has 40000 characters"),
            ("/v1/completions", {"prompt": 3}, "prompt"),
            ("/v1/chat/completions", chat("a", raycl={"adapters": {"a": 0.5}}), "raycl.adapters: Input is not support"),
            ("/v1/chat/completions", chat("a", raycl={"tsk": "a"}), "raycl: 'tsk' is unknown: did you mean 'task'?"),
            ("/v1/chat/completions", {"messages": []}, "messages: no text of system, user or assistant to route by"),
            ("/v1/chat/completions", {"messages": TOOL_TURNS[2:]}, "messages: no text of system, user or assistant"),
            ("/v1/chat/completions", [], "the body: Input should be a valid dictionary"),
        ):
            status, message = problem(client.post(path, json=wrong))
            assert status == 400 and message.startswith(words), message
        for raw, kind, words in (
            # what a web page elsewhere may have a browser send without asking: it would spend the engine's key
            (json.dumps(chat("a")), "text/plain;charset=UTF-8", "the body is not JSON, or its Content-Type is not"),
            ("[" * 100_000, "application/json", ""),
            ("{", "application/json", "the body is no valid JSON: "),
        ):
            sent = client.post("/v1/chat/completions", content=raw, headers={"content-type": kind})
            status, message = problem(sent)
            assert status == 400 and message.startswith(words), message
        assert len(stand_in.asked) == count, "nothing of these reaches the engine"


def test_whatever_the_engine_may_read_reaches_it_unchanged(
    bank: Bank, export: str, engine: tuple[StandIn, str]
) -> None:
    """Conversations of OpenAI's published schema, and turns that only engines know; the router reads the texts."""
    stand_in, url = engine
    schema = TypeAdapter(list[ChatCompletionMessageParam]).json_schema(ref_template="#/components/schemas/{model}")
    request = {"required": True, "content": {JSON: {"schema": {name: schema[name] for name in ("type", "items")}}}}
    described = {
        "openapi": "3.1.0",
        "info": {"title": "chats", "version": "1"},
        "paths": {"/": {"post": {"requestBody": request, "responses": {}}}},
        "components": {"schemas": schema["$defs"]},
    }
    conversations = schemathesis.openapi.from_dict(described)["/"]["POST"].as_strategy()
    tools = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]
    beside = {
        "tools": tools,
        "tool_choice": {"type": "function", "function": {"name": "w"}},
        "top_k": 3,
        "guided_json": {},
    }
    adapter = f"llama:{open_choice(settings(bank, export, url)).adapters([TEXTS[0]])[0]}"
    with in_front(bank, export, url) as client:

        def passed(body: dict[str, Any]) -> httpx.Response:
            answered = client.post("/v1/chat/completions", content=json.dumps(body), headers={"content-type": JSON})
            assert answered.status_code == 200, answered.text
            expected = {name: value for name, value in body.items() if name != "raycl"}
            assert stand_in.asked[-1][0] == {**expected, "model": stand_in.asked[-1][0]["model"]}
            return answered

        @hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
        @given(conversations)
        def any_conversation(case: schemathesis.Case) -> None:
            passed({"messages": case.body, **beside, "raycl": {"input": TEXTS[0]}})
            passed({"messages": [*case.body, {"role": "user", "content": TEXTS[0]}], **beside})
            roles.update(message["role"] for message in case.body)

        roles: set[str] = set()
        any_conversation()
        assert {"user", "assistant", "tool"} <= roles
        assert passed({"messages": TOOL_TURNS, **beside}).headers[HEAD] == adapter
        body = {"messages": TOOL_TURNS, "model": "auto", "user": "recorded"}
        assert client.post("/v1/chat/completions", json=body).content == RECORDED[0]
        inner = httpx.Client(timeout=20, trust_env=False, verify=False)
        official = OpenAI(base_url=str(client.base_url.join("/v1")), api_key="none", http_client=inner)
        (choice,) = official.chat.completions.create(**body).choices
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Bern"}'
        streamed = client.post("/v1/chat/completions", json={**body, "stream": True})
        assert streamed.content == RECORDED[1] and streamed.headers["content-type"].startswith(EVENTS)


def test_each_event_loop_has_connections_of_its_own(bank: Bank, export: str, engine: tuple[StandIn, str]) -> None:
    """Ray Serve opens a replica's application in one loop, and the replica's own server in another."""
    upstream = UpstreamClient(settings(bank, export, engine[1]))

    async def status(other: bool) -> int:
        async with upstream.opened():
            if other:
                await asyncio.to_thread(asyncio.run, status(False))
            return (await upstream.get("/v1/models"))[0]

    assert asyncio.run(status(True)) == 200


def test_streams_pass_event_by_event_and_end_with_their_client(
    bank: Bank, export: str, engine: tuple[StandIn, str]
) -> None:
    stand_in, url = engine
    asked = chat(TEXTS[0], stream=True)
    with in_front(bank, export, url, limits={"timeout_s": 2, "queue": 1}) as client:
        with client.stream("POST", "/v1/chat/completions", json=asked) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert "first" in next(lines) and stream.headers["content-type"].startswith("text/event-stream")
            status, message = problem(client.post("/v1/chat/completions", json=asked))
            assert status == 429 and message.startswith("1 requests are pending")
            stand_in.go.set()  # the first event came while the engine was still at work
            assert "second" in next(lines) and list(lines) == ["data: [DONE]"]
        stand_in.go.clear()
        with client.stream("POST", "/v1/chat/completions", json=asked) as stream:
            lines = stream.iter_lines()
            assert "first" in next(lines)
            assert not stand_in.left.is_set()
        until(stand_in.left.is_set)
        with client.stream("POST", "/v1/chat/completions", json=asked) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert "first" in lines[0] and "has not answered within 2 s (limits.timeout_s)" in lines[-1]


def test_failures_of_the_engine(bank: Bank, export: str, engine: tuple[StandIn, str]) -> None:
    """Its own refusals come as they are; an engine that is silent or away gives one sentence."""
    _, url = engine
    with in_front(bank, export, url, limits={"timeout_s": 1}) as client:
        response = client.post("/v1/chat/completions", json=chat("a", model="unknown"))
        assert (response.status_code, response.json()) == (404, {"error": {"message": "no such model"}})
        assert response.headers["retry-after"] == "7" and "server-timing" not in response.headers
        status, message = problem(client.post("/v1/chat/completions", json=chat("a", max_tokens=99)))
        assert status == 504 and "has not answered within 1 s (limits.timeout_s)" in message
    with bound("127.0.0.1", 0) as free:
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    with in_front(bank, export, nowhere) as client:
        for response in (client.post("/v1/chat/completions", json=chat("a")), client.get("/v1/models")):
            status, message = problem(response)
            assert status == 503
            assert message.startswith(f"the engine at {nowhere} (upstream.url) cannot be reached (Connection refused)")
        assert client.get("/readyz").status_code == 503 and client.get("/healthz").status_code == 200


def test_a_fixed_mixture_and_what_cannot_be_routed(bank: Bank, export: str, tmp_path: Path) -> None:
    adapters = [entry.name for entry in bank.open(2).adapters][:2]
    mixed = exported(bank, tmp_path / "mixed", "--adapters", ",".join(f"{name}=0.5" for name in adapters))
    choice = open_choice(settings(bank, mixed, "http://x"))
    assert choice.adapters(["a", "b"]) == ["mixture"] * 2 and choice.record.model_of("mixture") == "llama:mixture"
    with pytest.raises(ConfigError, match=r"upstream\.export is '.*nowhere', where no export\.json can be read"):
        open_choice(settings(bank, "nowhere", "http://x"))
    with pytest.raises(ConfigError, match=r"upstream\.url is set and upstream\.export is not"):
        configs.validate(ServeConfig, {"bank": "b", "upstream": {"url": "http://x"}})
    with pytest.raises(ConfigError, match=r"max_batch=3.*upstream\.url"):
        load_serve_config(None, ["bank=b", "upstream.url=http://x", "upstream.export=x", "max_batch=3"])
    other = Bank.at(tmp_path / "bank")
    for reference in bank.open(2).adapters:
        state = bank.fetch(reference, bank.open(2).layouts[reference.layout])
        other.publish(reference.name, state, bank.open(2).backbone, reference.tasks)
    manifests = [other.manifest(entry) for entry in bank.open(2).adapters if entry.version == 1]
    kept = dict(bank.open(2).provenance)
    new = NewSnapshot(manifests, bank.open(2).backbone, RouterInfo(kind="attention"), provenance=kept)
    on_main(other, other.snapshot(new))
    folder = exported(other, tmp_path / "attention")
    with pytest.raises(ConfigError, match=r"router 'attention' of snapshot 1 reads the backbone's embeddings"):
        open_choice(settings(other, folder, "http://x"))
    with pytest.raises(ConfigError, match=r"upstream\.export is of snapshot 1 with hash .* name the bank that was exp"):
        open_choice(settings(bank, folder, "http://x"))


@pytest.mark.parametrize("url", ["http://me:s3cret@x", "http://s3cret@x:8001/v1", "http://x/v1?key=s3cret"])
def test_a_secret_in_the_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="url holds a user, a password or a query") as refused:
        load_serve_config(None, ["bank=b", f"upstream.url={url}", "upstream.export=x"])
    assert "s3cret" not in str(refused.value)
