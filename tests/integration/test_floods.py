"""Clients that send or hold without end: the endpoint's own server and the status page close their connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import repeat
from typing import Any

import psutil
import pytest

from raycl.launch.http.connections import LimitedProtocol, bound
from raycl.launch.page.server import PageServer
from raycl.serve.http.server import Listener
from raycl.serve.settings import ServeConfig

GET = b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGE = b"x" * 8_000_000
"""More than the kernel keeps for a client that does not read."""

FLOODS = {
    "many fields": (GET, b"a:b\r\n" * 10_000, b" 431 "),
    "one long field": (GET + b"a: ", b"x" * 50_000, b" 431 "),
    "a long target": (b"GET /", b"x" * 50_000, b" 431 "),
    "empty lines": (b"", b"\r\n" * 25_000, b" 431 "),
    "fields behind the body": (POST + b"0\r\n", b"a:b\r\n" * 10_000, b""),
    "a long extension of a chunk": (POST + b"1;", b"x" * 50_000, b""),
    "pipelined requests": (b"", (GET + b"\r\n") * 2_000, b""),
    "no HTTP": (b"", b"\x16\x03\x01" * 10_000, b" 400 "),
}
"""The beginning of a connection, what it sends again and again, and what the answer has, where one is certain."""

Server = Callable[..., Any]
"""(body, protocol) -> context of a port."""


class ImpatientProtocol(LimitedProtocol):
    """A protocol that closes connections after short times, so that a test can wait for it."""

    head_s = 0.6
    unread_s = 0.8


class Reader:
    """A reader of a run's progress, for the page."""

    def __init__(self, body: bytes) -> None:
        self.found = {"text": body.decode()}

    def progress(self) -> dict[str, Any]:
        return self.found


@contextmanager
def endpoint(body: bytes, protocol: type[LimitedProtocol] = LimitedProtocol) -> Iterator[int]:
    """A replica's server, which reads a request and answers with this; its port."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with bound("127.0.0.1", 0) as result:
        port = int(result.getsockname()[1])
    listener = Listener(app, ServeConfig.model_validate({"bank": "nowhere", "port": port}), protocol)
    try:
        yield port
    finally:
        listener.close()


@contextmanager
def page(body: bytes, protocol: type[LimitedProtocol] = LimitedProtocol) -> Iterator[int]:
    """Serve the status page of a run; yield its port."""
    with bound("127.0.0.1", 0) as listens:
        server = PageServer(Reader(body), listens, "127.0.0.1", protocol)  # type: ignore[arg-type]
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            yield int(listens.getsockname()[1])
        finally:
            server.stop()
            thread.join(timeout=10)


both = pytest.mark.parametrize("server", [endpoint, page])


def connected(port: int, received: int | None = None) -> socket.socket:
    """Return a client's socket, with a buffer of this size for what it receives."""
    client = socket.socket()
    if received is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
    client.settimeout(10)
    client.connect(("127.0.0.1", port))
    return client


def is_open(client: socket.socket, seconds: float) -> bool:
    """Return whether the server keeps a connection for so long, in which it sends nothing."""
    client.settimeout(seconds)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def asked(port: int) -> float:
    """Return the seconds until an ordinary request is answered."""
    began = time.monotonic()
    with connected(port) as client:
        client.sendall(GET + b"Connection: close\r\n\r\n")
        assert b" 200 " in client.recv(100)
    return time.monotonic() - began


@both
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_cut_off(server: Server, name: str) -> None:
    """A flood is cut off.

    Before it was, 40 MB of header fields took 922 MB and held other requests for 2 s, pipelined ones for 15 s.
    """
    begins, more, expected = FLOODS[name]
    answers: list[bytes] = []

    def flood() -> None:
        with connected(port) as client:
            with suppress(OSError):
                client.sendall(begins)
                for chunk in repeat(more, 100):
                    client.sendall(chunk)
            with suppress(OSError):
                answers.append(client.recv(1000))
            ended.append(not is_open(client, 5))

    ended: list[bool] = []
    with server(b"text") as port:
        asked(port)
        before = psutil.Process().memory_info().rss
        threads = [threading.Thread(target=flood) for _ in range(4)]
        for thread in threads:
            thread.start()
        slowest = max(asked(port) for _ in range(10))
        for thread in threads:
            thread.join(timeout=30)
        grown = (psutil.Process().memory_info().rss - before) / 2**20
    assert len(ended) == 4 and all(ended)
    assert slowest < 3 and grown < 40, (slowest, grown)
    if expected:  # where the kernel has not thrown it away, because more was sent than read
        assert all(expected in answer for answer in answers if answer)


@both
def test_large_and_pipelined_requests_are_still_answered(server: Server) -> None:
    fields = b"".join(b"x-field-%d: %s\r\n" % (number, b"y" * 150) for number in range(100))
    with server(b"text") as port, connected(port) as client:
        client.sendall((GET + fields + b"\r\n") + (GET + b"\r\n") * 5)
        result, ends = b"", time.monotonic() + 10
        while result.count(b"HTTP/1.1 ") < 6 and time.monotonic() < ends:
            result += client.recv(100_000)
        assert result.count(b" 200 ") == 6


@both
@pytest.mark.parametrize("closing", [b"", b"Connection: close\r\n"])
def test_answers_that_no_client_reads_are_dropped(server: Server, closing: bytes) -> None:
    """Unread answers are not held as long as the client likes; a client that reads slowly gets all of its answer."""
    with server(LARGE, ImpatientProtocol) as port, ExitStack() as stack:
        request = GET + closing + b"\r\n"
        clients = [stack.enter_context(connected(port, 4096)) for _ in range(10)]
        slow = stack.enter_context(connected(port, 2**16))
        for client in (*clients, slow):
            client.sendall(request)
        size = 0
        for _ in range(120):  # for longer than a client may leave its answer unread
            size += len(slow.recv(50_000))
            time.sleep(0.01)
        while size < len(LARGE) and (piece := slow.recv(2**20)):
            size += len(piece)
        assert size >= len(LARGE)
        held, ends = [0], time.monotonic() + 10
        while held and time.monotonic() < ends:
            time.sleep(0.05)
            here = psutil.Process().net_connections("tcp")
            held = [item.fd for item in here if item.laddr.port == port and item.raddr and item.fd != -1]
            held = held[1:]  # the one who read may keep its connection
        assert not held, f"{len(held)} of {len(clients)} connections are still held"


@both
def test_idle_connections_are_closed(server: Server) -> None:
    """Those that send nothing, or part of a request's head a byte at a time, and one that did so after an answer."""
    with server(b"text", ImpatientProtocol) as port, ExitStack() as stack:
        idle = [stack.enter_context(connected(port)) for _ in range(50)]
        half, again = (stack.enter_context(connected(port)) for _ in range(2))
        again.sendall(GET + b"\r\n")
        result = b""
        while not result.endswith((b"text", b"}")):
            result += again.recv(100_000)
        began = time.monotonic()
        with suppress(OSError):
            for byte in b"GET / HTTP/1.1\r\nX: " + b"y" * 80:
                half.send(bytes([byte]))
                again.send(bytes([byte]))
                time.sleep(0.02)
        assert not any(is_open(client, 3) for client in (*idle, half, again))
        assert time.monotonic() - began < 8
