"""A real endpoint over a tiny bank: HTTP on a free port of this process, so that a test can inspect it too."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from raycl import config as configs
from raycl.serve.http.access import Keys
from raycl.serve.http.web import make_web
from raycl.serve.service.opening import close_service, open_service
from raycl.serve.service.service import Service
from raycl.serve.settings import ServeConfig


@dataclass(frozen=True)
class Served:
    """A running endpoint.

    Attributes:
        url: without a slash at its end. service: the endpoint's service, in this process.
    """

    url: str
    service: Service

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return the status and parsed answer of a GET, or of a POST if there is a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json", **headers}, method="POST" if data else "GET"
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@contextmanager
def serving(bank: str, **settings: Any) -> Iterator[Served]:
    """Run the endpoint of a bank while the block runs; `settings` are those of `ServeConfig`."""
    tree = {"bank": bank, "device": "cpu", "threads": 1, "follow": {"poll_s": 0.1}, **settings}
    config = configs.validate(ServeConfig, tree)
    service = open_service(config)
    try:
        with on_a_port(make_web(service, Keys(config.auth))) as port:
            yield Served(f"http://127.0.0.1:{port}", service)
    finally:
        close_service(service)


@contextmanager
def on_a_port(web: Any) -> Iterator[int]:
    """Serve an ASGI application behind uvicorn, on a free loopback port."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        # Without log_config=None uvicorn closes the handlers there are, and absl's (of rouge_score) closes the stream
        # that pytest had set as stderr when absl was imported.
        config = uvicorn.Config(web, log_level="warning", log_config=None, lifespan="off", ws="none")
        config.timeout_graceful_shutdown = 2
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([door],), name="endpoint", daemon=True)
        thread.start()
        try:
            deadline = time.monotonic() + 30
            while not server.started:
                assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.01)
            yield door.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(timeout=30)
