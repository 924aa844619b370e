"""Hostile requests, one a second beside ordinary ones: malformed, oversized, extreme, never finished."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections import Counter
from contextlib import suppress
from urllib.parse import urlsplit

EVERY_S, WAIT_S = 1.0, 20.0
"""Seconds between two, and for an answer at most."""

REPLACEMENT = b"\xff\xfe\x00"


def _post(path: str, body: bytes, *fields: bytes) -> bytes:
    head = [f"POST {path} HTTP/1.1".encode(), b"Host: localhost", b"Connection: close", *fields]
    if not any(field.lower().startswith(b"content-type") for field in fields):
        head.append(b"Content-Type: application/json")
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body), b"", body])


def _classify(**body: object) -> bytes:
    return _post("/v1/classify", json.dumps(body).encode())


REQUESTS = (
    _post("/v1/classify", b"{"),
    _post("/v1/classify", b"[" * 100_000),
    _post("/v1/classify", REPLACEMENT),
    _post("/v1/classify", b'{"input": ' + b"9" * 5000 + b"}"),
    _post("/v1/classify", b'{"input": "a"}', b"Content-Type: text/plain"),
    _post("/v1/classify", b'{"input": "a"}', b"X-Request-ID: " + REPLACEMENT[:2]),
    _post("/v1/classify", b'{"input": "a"}', b"serve_multiplexed_model_id: " + REPLACEMENT[:2]),
    _post("/v1/classify", b'{"input": "a"}', b"x-request-timeout-seconds: " + REPLACEMENT[:2]),
    _post("/v1/classify", b'{"input": "' + b"x" * 300_000 + b'"}'),
    _classify(input=[""] * 1000),
    _classify(input="a\x00\u202e\ud800"),
    _classify(input="a", model="../../etc/passwd"),
    _classify(input="a", raycl={"adapters": {"plain": 1e308}}),
    _classify(input="a", raycl={"snapshot": 10**30}),
    _post("/v1/chat/completions", json.dumps({"messages": [], "temperature": 1e-300, "top_p": 1e-46}).encode()),
    _post("/admin/activate", json.dumps({"snapshot": -1}).encode()),
    b"GET /v1/models HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\r\n",
    b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 100_000,
    b"GET /%ff%00/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500,
    b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 100_000,
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET / HTTP/1.1\r\nHost: loc",
)


class Hostile:
    """Sends one of `REQUESTS` every second, in a thread; of those that are never finished, the connection stays open.

    Attributes:
        statuses: number of answers with each status; 0: the connection was closed or stayed without an answer.
        faults: statuses from 500 on other than 503, with the request's number.
    """

    def __init__(self, root: str) -> None:
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []
        parts = urlsplit(root)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hostile", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for number in itertools.cycle(range(len(REQUESTS))):
            if self._over.wait(EVERY_S):
                return
            threading.Thread(target=self._send, args=(number,), daemon=True).start()

    def _send(self, number: int) -> None:
        answer = b""
        with suppress(OSError), socket.create_connection(self._address, timeout=WAIT_S) as client:
            with suppress(OSError):  # it is refused before it is sent
                client.sendall(REQUESTS[number])
            answer = client.recv(1000)
        status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
        self.statuses[status] += 1
        if status >= 500 and status != 503:
            self.faults.append(f"{status} to number {number}")

    def close(self) -> None:
        """Send no more."""
        self._over.set()
        self._thread.join(timeout=5)
