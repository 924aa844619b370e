"""An S3-compatible server that can be stopped and started again, for tests of what happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.server import MotoRequestHandler, ThreadedMotoServer
from pyarrow import fs as pafs
from werkzeug.serving import make_server

from raycl.storage import Storage


class Dispatcher(DomainDispatcherApplication):
    """Finds the service of a host once: moto looks through the folders of all its services for every request."""

    def __init__(self) -> None:
        super().__init__(create_backend_app)
        self._services: dict[str | None, Any] = {}

    def get_backend_for_host(self, host: str | None) -> Any:
        if host not in self._services:
            self._services[host] = super().get_backend_for_host(host)
        return self._services[host]


class RequestHandler(MotoRequestHandler):
    """Logs no requests: nobody reads these lines."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Do nothing."""


class MotoServer(ThreadedMotoServer):
    """A server on a loopback port, 0: a free one, that ends at once: moto's own looks twice a second if it should."""

    def __init__(self, port: int = 0) -> None:
        super().__init__("127.0.0.1", port, verbose=False)

    def _server_entry(self) -> None:
        self._server = make_server(self._ip_address, self._port, Dispatcher(), True, request_handler=RequestHandler)
        self._server_ready_event.set()
        self._server.serve_forever(poll_interval=0.02)


class Store:
    """An S3-compatible server on one port that can be stopped; what it holds stays in this process's memory."""

    def __init__(self) -> None:
        self.server = MotoServer()
        self.server.start()
        self.port = self.server.get_host_and_port()[1]

    def uri(self, name: str) -> str:
        return f"s3://bucket/{name}?endpoint_override=127.0.0.1:{self.port}&scheme=http"

    def folder(self, name: str, retry_s: float) -> Storage:
        """Return a folder without pyarrow's own tries, which take six seconds."""
        once = pafs.AwsStandardS3RetryStrategy(max_attempts=1)
        host = f"127.0.0.1:{self.port}"
        filesystem = pafs.S3FileSystem(endpoint_override=host, scheme="http", retry_strategy=once)
        return Storage(f"s3://bucket/{name}", filesystem, f"bucket/{name}", f"http://{host}", retry_s)

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server = MotoServer(self.port)
        self.server.start()

    @contextmanager
    def away(self, seconds: float) -> Iterator[None]:
        """Stop the store now, and bring it back after so many seconds."""
        self.stop()
        back = threading.Timer(seconds, self.start)
        back.start()
        try:
            yield
        finally:
            back.join()
