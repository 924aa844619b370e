"""An endpoint's own HTTP server: shared ports, clear refusals, answers that are finished before it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from raycl.errors import LaunchError
from raycl.serve.listening import Listener, bound, claimed
from raycl.serve.settings import ServeConfig


def settings(**changed: Any) -> ServeConfig:
    """Of an endpoint on a port that is free."""
    with bound("127.0.0.1", 0) as found:
        return ServeConfig.model_validate({"bank": "nowhere", "port": found.getsockname()[1], **changed})


def saying(text: str, begun: threading.Event | None = None, takes_s: float = 0.0) -> Any:
    """An application that says one thing."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun is not None:
            begun.set()
        await asyncio.sleep(takes_s)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})

    return app


@contextmanager
def listening(app: Any, config: ServeConfig) -> Iterator[Listener]:
    listener = Listener(app, config)
    try:
        yield listener
    finally:
        listener.close()


def ask(config: ServeConfig) -> str:
    return httpx.get(f"http://127.0.0.1:{config.port}/", timeout=10).text


def test_replicas_share_a_port_and_one_that_ends_is_missed_by_nobody() -> None:
    config = settings()
    with listening(saying("one"), config):
        with listening(saying("other"), config):
            assert {ask(config) for _ in range(64)} == {"one", "other"}
        assert {ask(config) for _ in range(16)} == {"one"}


def test_what_has_begun_is_answered_before_it_ends() -> None:
    config, begun, said = settings(), threading.Event(), []
    with listening(saying("late", begun, takes_s=1.0), config) as listener:
        asking = threading.Thread(target=lambda: said.append(ask(config)))
        asking.start()
        assert begun.wait(10) and listener.alive
    asking.join(10)
    assert said == ["late"] and not listener.alive
    with pytest.raises(httpx.ConnectError):
        ask(config)


def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    config = settings()
    with bound(config.host, config.port):
        with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{config.port} cannot be listened on \(Addr.*port=NUMBER"):
            claimed(config).__enter__()
        with pytest.raises(LaunchError, match="cannot be listened on"):
            Listener(saying("nothing"), config)


def test_a_second_endpoint_is_refused_before_the_first_listens_and_after() -> None:
    with claimed(settings()) as config:
        with pytest.raises(LaunchError, match="cannot be listened on"):
            claimed(config).__enter__()
        with listening(saying("one"), config):
            assert {ask(config) for _ in range(16)} == {"one"}
            with pytest.raises(LaunchError, match="cannot be listened on"):
                claimed(config).__enter__()
    with claimed(config):
        pass


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "direct"),
        ({"replicas": 2}, "proxy"),
        ({"replicas": 2, "ingress": "direct"}, "direct"),
        ({"max_replicas": 3}, "proxy"),
        ({"ingress": "proxy"}, "proxy"),
        ({"layout": "split", "ingress": "direct", "max_replicas": 3}, "direct"),
    ],
)
def test_who_listens_on_a_machine_of_ones_own(changed: dict[str, Any], expected: str) -> None:
    with claimed(settings(**changed)) as config:
        assert config.ingress == expected


def test_any_free_port() -> None:
    with claimed(settings(port=0)) as config:
        assert config.port > 0


def test_replicas_that_listen_themselves_do_not_scale() -> None:
    with pytest.raises(ValidationError, match="ingress=direct hides requests from Ray Serve"):
        settings(ingress="direct", max_replicas=2)
