"""A server of another author on a loopback port, which writes down what is asked of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def free_port() -> int:
    """Return a loopback port that no process listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Listener(ThreadingHTTPServer):
    """Answers 404 to everything.

    Attributes:
        asked: path and authorization of each request.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    def uri(self, name: str) -> str:
        """Return a folder of the bucket as an address of S3."""
        return f"s3://bucket/{name}?endpoint_override=127.0.0.1:{self.server_port}&scheme=http"


class _Handler(BaseHTTPRequestHandler):
    server: Listener

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization", "")))
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_PUT = do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def listener() -> Iterator[Listener]:
    """Run the server while the block runs."""
    with Listener() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
