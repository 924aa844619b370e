"""Tests of refusals: each has the right status and one sentence in OpenAI's shape, and the next request is answered."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_client import Wire, listening, problem
from service_client import WAIT_S, bank_of
from tiny import Taught

from raycl.errors import ConfigError
from raycl.serve.http.access import Keys, check_access
from raycl.serve.settings import AuthConfig, ServeConfig

LIMITS = {"body_kb": 256, "inputs": 6, "n": 3, "max_tokens": 50, "text_chars": 3000, "prompt_tokens": 60}
TURN = [{"role": "user", "content": "fire is"}]
CHAT, TEXT, CLASSIFY, ROUTE, ACTIVATE = (
    *("/v1/chat/completions", "/v1/completions", "/v1/classify", "/v1/route"),
    "/admin/activate",
)


@pytest.fixture(scope="module")
def wire(taught: Taught, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with listening(bank_of(taught("t5", "separate"), tmp_path_factory.mktemp("wire")), limits=LIMITS) as result:
        yield result


def chat(**settings: Any) -> dict[str, Any]:
    return {"messages": TURN, "model": "base", **settings}


def pins(**settings: Any) -> dict[str, Any]:
    return chat(model="auto", raycl=settings)


REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "no messages": (CHAT, {}, 400, "messages: Field required"),
    "empty messages": (CHAT, {"messages": []}, 400, "messages: List should have at least 1 item"),
    "an empty turn": (CHAT, {"messages": [{"role": "user", "content": " \n"}]}, 400, "a text is empty"),
    "an unknown role": (CHAT, {"messages": [{"role": "bot", "content": "x"}]}, 400, "messages.0.role: Input should be"),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages.0.content.0.type: Input should be 'text'",
    ),
    "a list": (CHAT, [], 400, "the body: Input should be a valid dictionary"),
    "an unknown pin": (CHAT, pins(snaphot=1), 400, "raycl: 'snaphot' is unknown: did you mean 'snapshot'?"),
    "an unknown pin of labels": (
        *(ROUTE, {"input": "x", "raycl": {"labels": 1}}, 400),
        "raycl: 'labels' is unknown: expected one of snapshot, adapters, task, mix, template",
    ),
    "a number as text": (CHAT, chat(max_tokens="5"), 400, "max_tokens: Input should be a valid integer"),
    "a truth as a number": (CHAT, chat(n=True), 400, "n: Input should be a valid integer"),
    "a text as truth": (CHAT, chat(stream="yes"), 400, "stream: Input should be a valid boolean"),
    "no tokens": (CHAT, chat(max_tokens=0), 400, "max_tokens: Input should be greater than or equal to 1"),
    "many tokens": (CHAT, chat(max_tokens=51), 400, "max_tokens is 51: this endpoint allows at most 50"),
    "many completion tokens": (CHAT, chat(max_completion_tokens=10**40), 400, "at most 50"),
    "heat": (CHAT, chat(temperature=2.5), 400, "temperature: Input should be less than or equal to 2"),
    "cold": (CHAT, chat(temperature=-0.1), 400, "temperature: Input should be greater than or equal to 0"),
    "no nucleus": (CHAT, chat(top_p=0), 400, "top_p: Input should be greater than 0"),
    "many answers": (CHAT, chat(n=4), 400, "n is 4: this endpoint allows at most 3"),
    "many answers in all": (TEXT, {"prompt": ["a"] * 3, "n": 3}, 400, "expected 1 to 6 answers in one request"),
    "a seed": (CHAT, chat(seed=2**63), 400, "seed: Input should be less than"),
    "no stop": (CHAT, chat(stop=""), 400, "stop: String should have at least 1 character"),
    "many stops": (CHAT, chat(stop=["a"] * 17), 400, "stop: List should have at most 16 items"),
    "a long stop": (CHAT, chat(stop="a" * 257), 400, "stop: String should have at most 256 characters"),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), 400, "tools.0.function: Field required"),
    "tools of no template": (
        *(CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400),
        "the prompt of this text has no chat template that renders tools",
    ),
    "a penalty": (CHAT, chat(presence_penalty=2.5), 400, "presence_penalty: Input should be less than or equal to 2"),
    "no repetition": (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty: Input should be greater than 0"),
    "a negative top_k": (CHAT, chat(top_k=-2), 400, "top_k: Input should be greater than or equal to -1"),
    "a large min_p": (CHAT, chat(min_p=1.5), 400, "min_p: Input should be less than or equal to 1"),
    "a word's bias": (TEXT, {"prompt": "fire", "logit_bias": {"sea": -1}}, 400, "logit_bias"),
    "an unknown token": (TEXT, {"prompt": "fire", "logit_bias": {"999999999": 1}}, 400, "token 999999999: expected"),
    "more chances": (CHAT, chat(top_logprobs=3), 400, "top_logprobs needs logprobs: set it to true"),
    "a tool to call": (CHAT, chat(tool_choice="required"), 400, "tool_choice is 'required' and tools is empty"),
    "the model's own end": (CHAT, chat(ignore_eos=True), 400, "ignore_eos: Input is not supported"),
    "special tokens": (CHAT, chat(skip_special_tokens=False), 400, "skip_special_tokens: Input is not supported"),
    "beams": (TEXT, {"prompt": "fire", "use_beam_search": True}, 400, "use_beam_search: Input is not supported"),
    "another template": (CHAT, chat(chat_template="{{ 1 }}"), 400, "chat_template: Input is not supported"),
    "speech": (CHAT, chat(modalities=["text", "audio"]), 400, "modalities: Input is not supported"),
    "many chances": (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs: Input should be less than"),
    "chances of a prompt": (
        *(TEXT, {"prompt": "fire", "logprobs": 1, "echo": True}, 400),
        "echo with logprobs needs a model whose prompt and answer are one sequence",
    ),
    "nothing to answer": (TEXT, {"prompt": "fire", "max_tokens": 0}, 400, "max_tokens is 0 and echo is not true"),
    "XML": (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type: Input should be 'text'"),
    "the best of some": (TEXT, {"prompt": "fire", "best_of": 3}, 400, "best_of: Input should be less than or equal"),
    "no prompt": (TEXT, {"prompt": ""}, 400, "prompt: String should have at least 1 character"),
    "a blank prompt": (TEXT, {"prompt": ["fire", "\t"]}, 400, "a text is empty: expected at least one word"),
    "no prompts": (TEXT, {"prompt": []}, 400, "expected 1 to 6 answers"),
    "unknown tokens": (TEXT, {"prompt": [1, 10**6]}, 400, "prompt has token 1000000: expected ids from 0 to"),
    "tokens with a prompt": (
        *(TEXT, {"prompt": [[1], [2]], "raycl": {"template": True}}, 400),
        "raycl.template is true and the prompt is token ids",
    ),
    "many prompt tokens": (TEXT, {"prompt": [1] * 61}, 400, "the prompt has 61 tokens, this endpoint reads at most 60"),
    "texts among tokens": (TEXT, {"prompt": [1, "a"]}, 400, "prompt"),
    "a long text": (ROUTE, {"input": "a " * 1501}, 400, "a text has 3002 characters: this endpoint reads at most 3000"),
    "a long prompt": (
        TEXT,
        {"prompt": "fire " * 60, "model": "base"},
        400,
        "the prompt has 61 tokens, this endpoint reads at most 60",
    ),
    "an unknown model": (CHAT, chat(model="gpt-9"), 404, "model 'gpt-9' does not exist: expected auto, base, snapshot"),
    "an unknown version": (CHAT, chat(model="colour@2"), 404, "model 'colour@2' does not exist"),
    "an unknown snapshot": (CHAT, chat(model="snapshot:7"), 404, "has no snapshot 7: it has 1, 2"),
    "no number": (CHAT, chat(model="snapshot:one"), 404, "model 'snapshot:one': expected snapshot:NUMBER"),
    "a long number": (CHAT, chat(model="snapshot:" + "9" * 150), 404, "expected snapshot:NUMBER"),
    "a long name": (CHAT, chat(model="m" * 201), 400, "model: String should have at most 200 characters"),
    "no model": (CHAT, chat(model=""), 400, "model: String should have at least 1 character"),
    "a path as snapshot": (CHAT, pins(snapshot="../../etc/passwd"), 400, "raycl.snapshot: Input should be a valid"),
    "a path as model": (CHAT, chat(model="../../etc/passwd"), 404, "does not exist"),
    "a path as adapter": (CHAT, pins(adapters={"../colour": 1.0}), 404, "snapshot 2 has no adapter ../colour"),
    "a snapshot below 1": (CHAT, pins(snapshot=0), 400, "raycl.snapshot: Input should be greater than"),
    "a huge snapshot": (CHAT, pins(snapshot=10**30), 400, "raycl.snapshot: Input should be less than"),
    "an unknown adapter": (CHAT, pins(adapters={"shape": 1.0}), 404, "has no adapter shape: expected some of"),
    "a heavy adapter": (CHAT, pins(adapters={"colour": 1000.5}), 400, "raycl.adapters.colour: Input should be less"),
    "a huge weight": (CHAT, pins(adapters={"colour": -1e300}), 400, "raycl.adapters.colour: Input should be greater"),
    "a weight as text": (CHAT, pins(adapters={"colour": "1"}), 400, "raycl.adapters.colour: Input should be a valid"),
    "an unknown task": (CHAT, pins(task="shape"), 404, "snapshot 2 has no task 'shape': expected one of colour"),
    "no task": (CHAT, pins(), 400, "needs the task of each text: name it"),
    "pins as a list": (CHAT, chat(raycl=[]), 400, "raycl: Input should be a valid dictionary"),
    "labels": (CLASSIFY, {"input": "fire"}, 400, "answers with texts: use POST /v1/chat/completions"),
    "no input": (ROUTE, {"input": []}, 400, "expected 1 to 6 answers"),
    "many inputs": (ROUTE, {"input": ["a"] * 7}, 400, "7 texts with 1 answer each: expected 1 to 6"),
    "an empty input": (ROUTE, {"input": ["a", ""]}, 400, "input.1: String should have at least 1 character"),
    "half a character": (TEXT, {"prompt": "a\ud83d"}, 400, "prompt: Input should be a valid string, unable to parse"),
    "half a name": (CHAT, pins(adapters={"\ud83d": 1.0}), 400, "raycl.adapters.[key]: Input should be a valid string"),
    "an unknown activation": (ACTIVATE, {"snapshot": 9}, 404, "has no snapshot 9: it has 1, 2"),
    "an activation of nothing": (ACTIVATE, {}, 400, "snapshot: Field required"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_requests_get_one_sentence(wire: Wire, name: str) -> None:
    path, body, status, message = REFUSED[name]
    response = wire.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert problem(response)[0] == status, response.text
    assert message in problem(response)[1]
    if status == 400 and ": " in message and " " not in message.partition(": ")[0] and "the body" not in message:
        assert response.json()["error"]["param"] == message.partition(": ")[0]


def test_invalid_requests_are_refused_while_streaming(wire: Wire) -> None:
    for name in ("a long prompt", "an unknown model", "no task", "many answers in all"):
        path, body, status, message = REFUSED[name]
        response = wire.post(path, {**body, "stream": True})
        assert response.headers["content-type"] == "application/json"
        assert problem(response)[0] == status and message in problem(response)[1]
    assert wire.post(*REFUSED["a long prompt"][:2]).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "the body is no valid JSON: "),
        (b'{"messages": NaN}', "messages: Input should be a valid list"),
        (
            b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
            "temperature: Input should be a finite",
        ),
        (b'{"messages": [{"role": "user", "content": "a"}], "top_p": -Infinity}', "top_p: Input should be a finite"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', "temperature: Input should be a"),
        (b'{"messages": [{"role": "user", "content": "a"}], "raycl": {"adapters": {"colour": NaN}}}', "finite number"),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e400}', "max_tokens: Input should be"),
        (b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}", "more than 4,300 digits"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"\xff\xfe{}", ""),
        (b"", "the body: Field required"),
        (b"null", "the body"),
        (b'"text"', "the body: Input should be a valid dictionary"),
    ],
)
def test_invalid_bodies(wire: Wire, raw: bytes, message: str) -> None:
    response = wire.http.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert problem(response)[0] == 400 and message in problem(response)[1]


def test_bodies_without_a_content_type(wire: Wire) -> None:
    raw = json.dumps(chat()).encode()
    for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        response = wire.http.post(CHAT, content=raw, headers=kind)
        assert problem(response)[0] == 400 and "send it with 'Content-Type: application/json'" in problem(response)[1]
    assert wire.http.post(CHAT, content=raw, headers={"content-type": "application/json; charset=utf-8"}).is_success


def test_the_official_client_knows_the_errors(wire: Wire) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'gpt-9' does not exist") as missing:
        wire.chat("fire", model="gpt-9")
    assert missing.value.type == "not_found_error" and missing.value.param is None
    with pytest.raises(openai.BadRequestError, match="temperature: Input should be less") as bad:
        wire.chat("fire", temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        wire.openai.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        wire.openai.embeddings.create(model="auto", input="x")


def test_paths_and_methods(wire: Wire) -> None:
    assert problem(wire.http.get("/v2/nothing"))[0] == 404
    wrong = wire.http.get(CHAT)
    assert problem(wrong)[0] == 405 and wrong.headers["allow"] == "POST"
    assert problem(wire.http.delete("/v1/models"))[0] == 405


def test_unusual_texts_are_accepted(wire: Wire) -> None:
    for text in ("\x00fire\x00is", "😀 fire \u200b", "\u202efire", "\ufffd", "fire" * 500, "🇩🇪" * 300, "a\u0301" * 200):
        result = wire.chat(text, extra_body={"raycl": {"task": "colour"}})
        assert result.raycl["template"] == "colour" and result.usage.prompt_tokens <= 24
        assert wire.post(TEXT, {"prompt": text, "model": "base"}).is_success
    cut = wire.chat("fire " * 500, extra_body={"raycl": {"task": "colour"}})
    assert cut.raycl["cut_tokens"] == 500 + 3 - 24 and cut.usage.prompt_tokens == 24
    weights = {"extra_body": {"raycl": {"adapters": {"colour": -1000, "animal": 1000}}}}
    assert wire.chat("fire is", **weights).raycl["adapters"] == {"animal": 1000.0, "colour": -1000.0}


@pytest.mark.parametrize("host", ["rebound.example", "rebound.example:8000", "10.0.0.1", "[", ""])
def test_cross_origin_requests_are_refused_without_keys(wire: Wire, host: str) -> None:
    refused = problem(wire.http.get("/v1/models", headers={"host": host}))
    assert refused[0] == 403 and "without API keys only requests from this machine to 127.0.0.1" in refused[1]
    for name in ("localhost", f"localhost:{wire.port}", f"127.0.0.1:{wire.port}", "[::1]:80"):
        assert wire.http.get("/v1/models", headers={"host": name}).status_code == 200


def test_limits_of_size(wire: Wire) -> None:
    long = wire.post(TEXT, {"prompt": "fire " * 40_000, "model": "base"})
    assert problem(long) == (400, "a text has 200000 characters: this endpoint reads at most 3000")
    large = wire.post(TEXT, {"prompt": "fire " * 200_000})
    assert problem(large) == (413, "the request is larger than 256 KiB: send less text")
    parts = iter([b'{"prompt": "', *[b"fire " * 20_000] * 10, b'"}'])
    assert problem(wire.http.post(TEXT, content=parts, headers={"content-type": "application/json"}))[0] == 413
    with pytest.raises(openai.APIStatusError) as error:
        wire.chat("fire " * 200_000)
    assert error.value.status_code == 413
    with socket.create_connection(("127.0.0.1", wire.port), timeout=WAIT_S) as door:
        door.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        assert door.recv(100).startswith(b"HTTP/1.1 413 ")
    assert wire.engine.pending == 0


# ---- too much, too late ----------------------------------------------------------------------------------------------


def test_a_full_queue_returns_retry_after(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("t5", "separate"), tmp_path)
    with listening(bank, limits={"queue": 3}) as wire:
        with wire.paused():
            for _ in range(3):
                wire.ask("fire is", weights={})
            assert wire.engine.pending == 3
            with pytest.raises(openai.RateLimitError, match="3 requests are pending") as busy:
                wire.chat("fire is", model="base")
            assert busy.value.response.headers["retry-after"] == "1"
            for stream in (False, True):
                response = wire.post(ROUTE, {"input": "fire is", "model": "base", "stream": stream})
                assert problem(response)[0] == 429 and response.json()["error"]["type"] == "rate_limit_error"
            assert problem(wire.http.get("/readyz")) == (503, "the queue is full")
            assert wire.get("/healthz")["status"] == "ok"
        wire.settle()
        assert wire.chat("fire is", model="base").choices and wire.get("/readyz")["status"] == "ready"
        assert wire.chat("fire is", model="base", n=5).choices[4].index == 4, "an idle endpoint takes what is allowed"
        assert wire.engine.pending == 0


def test_limits_of_time(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("t5", "separate"), tmp_path)
    with listening(bank, limits={"timeout_s": 0.3}) as wire:
        with wire.paused():
            began = time.monotonic()
            response = wire.post(ROUTE, {"input": ["fire is"] * 64, "model": "base"})
            assert problem(response) == (504, "no answer within 0.3 s: request less, or retry later")
            assert time.monotonic() - began < 50 * 0.3, "the time is the request's, not each answer's"
            assert problem(wire.post(CHAT, chat(stream=True)))[0] == 504
            with pytest.raises(openai.InternalServerError) as late:
                wire.chat("fire is", model="base")
            assert late.value.status_code == 504 and late.value.type == "timeout_error"
        wire.settle()
        with socket.create_connection(("127.0.0.1", wire.port), timeout=WAIT_S) as door:
            door.sendall(b"POST /v1/route HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
            assert door.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_stream_that_fails_later_ends_with_the_error(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = bank_of(taught("t5", "separate"), tmp_path)
    with listening(bank) as wire:

        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr("raycl.generation.dynamic_cache.step", broken)
        with wire.http.stream("POST", TEXT, json={"prompt": "fire is", "model": "colour", "stream": True}) as stream:
            assert stream.status_code == 200
            events = stream.read().decode().strip().split("\n\n")
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["message"].startswith("the model failed on this request") and "secret" not in error["message"]
        assert "raycl" in json.loads(events[0].removeprefix("data: ")) and "[DONE]" not in events[-1]
        with pytest.raises(openai.APIError, match="the model failed"):
            list(wire.openai.completions.create(model="colour", prompt="fire is", stream=True))
        assert problem(wire.post(TEXT, {"prompt": "fire is", "model": "colour"}))[0] == 500
        assert wire.engine.pending == 0


def test_internal_errors_have_the_error_schema(taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(bank_of(taught("t5", "separate"), tmp_path)) as wire:
        monkeypatch.setattr(wire.service, "check", lambda *_, **__: 1 / 0)
        status, message = problem(wire.post(CHAT, chat()))
        assert (status, message) == (500, "an internal error (ZeroDivisionError): see the server's log")
    monkeypatch.undo()


# ---- who may ask -----------------------------------------------------------------------------------------------------


def test_api_keys(taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, file = bank_of(taught("t5", "separate"), tmp_path), tmp_path / "keys"
    file.write_text("# people\nplain-1\n  plain-2  \n\nadmin:root-1\n")
    monkeypatch.setenv("RAYCL_API_KEYS", "from-env, admin:root-2")
    with listening(bank, AuthConfig(keys_file=str(file))) as wire:
        body = {"input": "fire is", "model": "base"}
        for key in ("plain-1", "plain-2", "root-1", "from-env", "root-2"):
            assert wire.post(ROUTE, body, headers={"Authorization": f"Bearer {key}"}).is_success
            assert wire.client(key).models.list().data[0].id == "auto"
        for header in (
            "Bearer plain-3",
            "Bearer",
            "Bearer admin:root-1",
            "plain-1",
            "Basic plain-1",
            "Bearer plain-1x",
        ):
            response = wire.post(ROUTE, body, headers={"Authorization": header})
            assert problem(response) == (401, "an API key is needed: send 'Authorization: Bearer KEY'")
            assert response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            wire.client("wrong").models.list()
        assert problem(wire.http.get("/v1/models"))[0] == problem(wire.http.get("/v2/nothing"))[0] == 401
        for path in ("/", "/healthz", "/readyz", "/openapi.json"):
            assert wire.http.get(path).status_code == 200, "what probes and the page need"
        for key, status in (("plain-1", 401), ("from-env", 401), ("root-1", 200), ("root-2", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert wire.post(ACTIVATE, {"snapshot": 2}, headers=headers).status_code == status
        for path in ("/admin", "/admin/", "/admin/nothing", "/admin/activate/", "/admin/../admin/activate"):
            assert wire.post(path, {"snapshot": 2}, headers={"Authorization": "Bearer plain-1"}).status_code == 401


def test_without_an_admin_key_administration_is_refused(taught: Taught, tmp_path: Path) -> None:
    """Requests from this machine are refused too: behind a proxy every client is on it."""
    bank, file = bank_of(taught("t5", "separate"), tmp_path), tmp_path / "keys"
    file.write_text("plain-1\n")
    with listening(bank, AuthConfig(keys_file=str(file))) as wire:
        for headers in ({}, {"Authorization": "Bearer plain-1"}, {"Authorization": "Bearer"}):
            refused = problem(wire.post(ACTIVATE, {"snapshot": 1}, headers=headers))
            assert refused == (401, "an admin key is needed: send 'Authorization: Bearer KEY'")
        assert wire.get("/readyz")["snapshot"] == 2


def test_invalid_keys_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYCL_API_KEYS", raising=False)
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys(AuthConfig(keys_file=str(file)))
    for text, message in (("# none\n", "holds no key"), ("admin:\n", "nothing behind it")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            Keys(AuthConfig(keys_file=str(file)))
    file.write_bytes(b"\xff\xfe\x00key")
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys(AuthConfig(keys_file=str(file)))
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="lets others on the network in, and there are no API keys"):
            check_access(ServeConfig(bank="x", host=host))
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        assert not check_access(ServeConfig(bank="x", host=host))
    monkeypatch.setitem(os.environ, "RAYCL_API_KEYS", "one")
    assert check_access(ServeConfig(bank="x", host="0.0.0.0"))


@pytest.mark.parametrize("told", [False, True])
def test_logs_hold_prompts_only_if_configured(
    taught: Taught, tmp_path: Path, caplog: pytest.LogCaptureFixture, told: bool
) -> None:
    caplog.set_level(logging.DEBUG, logger="raycl")
    caplog.set_level(logging.DEBUG, logger="uvicorn")
    with listening(bank_of(taught("t5", "separate"), tmp_path), log_prompts=told) as wire:
        wire.chat("purrs secretly", model="base")
        wire.post(ROUTE, {"input": "sleeps secretly", "model": "base"})
        wire.post(CHAT, chat(temperature="barks secretly"))
        wire.post(TEXT, {"prompt": "runs secretly " * 100, "model": "nobody"})
    assert ("purrs secretly" in caplog.text) == ("sleeps secretly" in caplog.text) == told
    assert "barks secretly" not in caplog.text and "runs secretly" not in caplog.text
