"""An endpoint's own HTTP server: shared ports, clear errors, requests that finish before shutdown."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from raycl.errors import LaunchError
from raycl.launch.http.connections import LimitedProtocol, bound, url_of
from raycl.serve.http.server import Listener, claimed
from raycl.serve.settings import ServeConfig, load_serve_config


def settings(**changed: Any) -> ServeConfig:
    """Return the settings of an endpoint on a port that is free."""
    with bound("127.0.0.1", 0) as result:
        return ServeConfig.model_validate({"bank": "nowhere", "port": result.getsockname()[1], **changed})


def saying(text: str, begun: threading.Event | None = None, takes_s: float = 0.0) -> Any:
    """Return an application with one answer."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun is not None:
            begun.set()
        await asyncio.sleep(takes_s)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})

    return app


@contextmanager
def listening(app: Any, config: ServeConfig, protocol: type[LimitedProtocol] = LimitedProtocol) -> Iterator[Listener]:
    listener = Listener(app, config, protocol)
    try:
        yield listener
    finally:
        listener.close()


def get(url: str) -> str:
    """Return the answer to one request by a connection of its own; no time is spent on certificates."""
    return httpx.get(url, timeout=10, trust_env=False, verify=False).text


def ask(config: ServeConfig) -> str:
    return get(f"http://127.0.0.1:{config.port}/")


def test_replicas_share_a_port_and_one_may_end() -> None:
    config = settings()
    with listening(saying("one"), config):
        with listening(saying("other"), config):
            assert {ask(config) for _ in range(64)} == {"one", "other"}
        assert {ask(config) for _ in range(16)} == {"one"}


def test_running_requests_finish_before_shutdown() -> None:
    config, begun, said = settings(), threading.Event(), []
    with listening(saying("late", begun, takes_s=1.0), config) as listener:
        asking = threading.Thread(target=lambda: said.append(ask(config)))
        asking.start()
        assert begun.wait(10) and listener.alive
    asking.join(10)
    assert said == ["late"] and not listener.alive
    with pytest.raises(httpx.ConnectError):
        ask(config)


def test_a_taken_port_is_an_error_before_startup() -> None:
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
    ],
)
def test_the_ingress_follows_from_the_settings(changed: dict[str, Any], expected: str) -> None:
    with claimed(settings(**changed)) as config:
        assert config.ingress == expected


def test_any_free_port() -> None:
    with claimed(settings(port=0)) as config:
        assert config.port > 0


def test_replicas_that_listen_themselves_do_not_scale() -> None:
    with pytest.raises(ValidationError, match="ingress=direct hides requests from Ray Serve"):
        settings(ingress="direct", max_replicas=2)


class ImpatientProtocol(LimitedProtocol):
    """A protocol that waits 0.3 s for a request's head."""

    head_s = 0.3


def test_slow_and_reused_connections_are_kept() -> None:
    """The head has a time; the answer, and the pause until the next request, have others."""
    config = settings()
    with (
        listening(saying("one", takes_s=0.8), config, ImpatientProtocol),
        httpx.Client(base_url=f"http://127.0.0.1:{config.port}", verify=False) as client,
    ):
        answers, clients = [], set()
        for _ in range(2):
            answers.append(client.get("/", timeout=10))
            clients.add(answers[-1].extensions["network_stream"].get_extra_info("client_addr"))
            time.sleep(0.6)
    assert [answer.text for answer in answers] == ["one", "one"]
    assert len(clients) == 1, "the second request came by the same connection"


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:80"), ("127.0.0.1", "http://127.0.0.1:80")])
def test_an_address_as_a_browser_takes_it(host: str, url: str) -> None:
    assert url_of(host, 80) == url


def test_an_endpoint_on_every_address() -> None:
    asked = load_serve_config(None, ["bank=nowhere", "host=::", "port=0"])
    with claimed(asked) as config, listening(saying("one"), config):
        assert {get(f"http://{host}:{config.port}/") for host in ("[::1]", "127.0.0.1")} == {"one"}
