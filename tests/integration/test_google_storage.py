"""Google Cloud Storage: of several racing writers exactly one wins; one that does not answer is an error soon."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote

import pytest

from raycl.errors import AlreadyExistsError, StorageError
from raycl.storage import Storage, folder


class _Generations(BaseHTTPRequestHandler):
    """The two answers of Google's JSON API that creation needs (no server of theirs runs on a laptop)."""

    held: ClassVar[dict[str, dict[str, object]]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        mark = self.headers["Content-Type"].split("boundary=")[1].strip('"').encode()
        parts = [part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n") for part in body.split(b"--" + mark)[1:-1]]
        facts = json.loads(parts[0])
        with self.lock:
            taken = facts["name"] in self.held and "ifGenerationMatch=0" in self.path
            if not taken:
                self.held[facts["name"]] = {**facts, "data": parts[1].decode()}
        self._answer(412 if taken else 200, facts)

    def do_GET(self) -> None:
        self._answer(200, self.held[unquote(self.path.split("/o/")[1].split("?")[0])])

    def _answer(self, status: int, tree: dict[str, object]) -> None:
        data = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_creation_on_google_cloud_storage_is_by_generation() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Generations) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"gs://anonymous@bucket/x?scheme=http&endpoint_override=127.0.0.1:{server.server_port}"

        def try_one(number: int) -> bool:
            try:
                Storage.at(uri).create("commit", f"{number}".encode())
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(try_one, range(4)))
        server.shutdown()
    assert sum(won) == 1
    assert _Generations.held["x/commit"]["data"] == f"{won.index(True)}"


def test_a_store_that_does_not_answer_is_an_error_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "GCS_RETRIES_S", 1)
    store = Storage.at("gs://anonymous@bucket/x?scheme=http&endpoint_override=127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(StorageError, match="cannot reach 'gs://"):
        store.exists("run")
    assert time.monotonic() - began < 30
