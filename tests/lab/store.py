"""An S3-compatible server that can be stopped and started again, for tests of what happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moto.server import ThreadedMotoServer
from pyarrow import fs as pafs

from raycl.storage import Storage


class Store:
    """An S3-compatible server on one port that can be stopped; what it holds stays in this process's memory."""

    def __init__(self) -> None:
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        self.port = self.server.get_host_and_port()[1]

    def uri(self, name: str) -> str:
        return f"s3://bucket/{name}?endpoint_override=127.0.0.1:{self.port}&scheme=http"

    def folder(self, name: str, retry_s: float) -> Storage:
        """Without pyarrow's own tries, which take six seconds."""
        once = pafs.AwsStandardS3RetryStrategy(max_attempts=1)
        host = f"127.0.0.1:{self.port}"
        filesystem = pafs.S3FileSystem(endpoint_override=host, scheme="http", retry_strategy=once)
        return Storage(f"s3://bucket/{name}", filesystem, f"bucket/{name}", f"http://{host}", retry_s)

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self.server.start()

    @contextmanager
    def away(self, seconds: float) -> Iterator[None]:
        """Stopped now, and back after so many seconds."""
        self.stop()
        back = threading.Timer(seconds, self.start)
        back.start()
        try:
            yield
        finally:
            back.join()
