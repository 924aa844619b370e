"""Addresses that servers listen on, and connections with limits: uvicorn's protocol lets a client hold any amount.

Uvicorn has settings for idle connections after an answer, but none for the size of a head (of its faster parser), for
the time until one is complete, for pipelined requests and for answers that a client does not read.
"""

import asyncio
import ipaddress
import os
import socket
from functools import lru_cache
from http import HTTPStatus
from typing import Any, ClassVar
from urllib.parse import urlsplit

import uvicorn
from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from raycl.errors import LaunchError

HEAD_S = 20.0
"""Seconds for a request's head, from the connection's start or the head's first byte; then it is closed."""

HEAD_BYTES, FIELD_BYTES = 32 * 1024, 32
"""The largest head, and what each field counts in addition to its text (as in RFC 9113, 6.5.2); beyond: 431."""

PIPELINED = 8
"""The most requests of one connection that wait for earlier answers; beyond: 429."""

UNREAD_S, UNREAD_BYTES = 30.0, 64 * 1024
"""A client must read the rest of its answer, or this many bytes, within this time; else the connection is closed."""


_LARGE = f"the head of the request is larger than {HEAD_BYTES // 1024} KiB: send fewer and shorter header fields"

HOSTS = 256
"""The number of hosts whose answers are remembered: each request asks about its client and its Host header, and parsing
both takes a tenth of what a small request costs."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection; it is closed when it sends or leaves unread too much, or takes too long.

    Attributes:
        head_s, unread_s: `HEAD_S` and `UNREAD_S`, which a subclass may set.
    """

    head_s: ClassVar[float] = HEAD_S
    unread_s: ClassVar[float] = UNREAD_S
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _left = 0
    _head = 0
    _since = 0
    _refusal: tuple[int, str] | None = None

    # ---- the server's events ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time of the first head."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the parser. The time of a head runs from its first byte to its end; bodies are not timed."""
        if self._unread is not None and not self.transport.get_write_buffer_size():
            self._end_unread()
        self._since += len(data)
        super().data_received(data)
        if self._since > HEAD_BYTES:  # the parser keeps a field until it is complete
            self._refuse(431, _LARGE)
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_wait()
        elif self._deadline is None:
            self._wait_for_head()

    def pause_writing(self) -> None:
        """Start the time for reading, since the client reads more slowly than the server writes."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Stop the time, since the client has read."""
        self._end_unread()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Go on after an answer is written, though perhaps not sent; closing a connection waits until it is."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._wait_for_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all times when the client is gone."""
        self._end_wait()
        self._end_unread()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """Stop all times when another protocol takes the connection."""
        self._end_wait()
        super().handle_websocket_upgrade()

    # ---- the parser's events ----

    def on_message_begin(self) -> None:
        """Count the bytes of a new head."""
        self._head = self._since = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a field of the head, or one after a body in chunks."""
        self._count(len(name) + len(value) + FIELD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the time of the head."""
        self._since = 0
        if len(self.pipeline) >= PIPELINED:
            self._stop(429, f"more than {PIPELINED} requests wait on this connection: read their answers first")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of a body."""
        self._since = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._since = 0
        super().on_message_complete()

    # ---- limits ----

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > HEAD_BYTES:
            self._stop(431, _LARGE)

    def _stop(self, status: int, message: str) -> None:
        self._refusal = status, message
        raise HttpParserError(message)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser could not, or should not, read."""
        status, message = self._refusal or (400, msg)
        self._refuse(status, message)

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else it would be in the middle of an answer
            body = message.encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self.transport.close()
        self._wait_for_reader()

    def _wait_for_head(self) -> None:
        self._deadline = self.loop.call_later(self.head_s, self.transport.abort)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _wait_for_reader(self) -> None:
        if self._unread is None:
            self._left = self.transport.get_write_buffer_size()
            self._unread = self.loop.call_later(self.unread_s, self._look_for_reader)

    def _look_for_reader(self) -> None:
        self._unread = None
        left = self.transport.get_write_buffer_size()
        if left and self._left - left < UNREAD_BYTES:
            self.transport.abort()
        elif left:
            self._wait_for_reader()

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def server_of(app: Any, protocol: type[LimitedProtocol], **settings: Any) -> uvicorn.Server:
    """Return a server of an ASGI application.

    Args:
        protocol: of its connections. settings: other settings of `uvicorn.Config`.
    """
    log: dict[str, Any] = {"log_config": None, "log_level": "error"}  # no line for each request that is none
    return uvicorn.Server(uvicorn.Config(app, http=protocol, ws="none", **log, **settings))


# ---- addresses ---------------------------------------------------------------------------------------------------


def bound(host: str, port: int, shared: bool = False, setting: str = "port=") -> socket.socket:
    """Return a socket that listens.

    Args:
        port: the port; 0: any free port.
        shared: other processes of this user may listen on it too.
        setting: the setting that chooses the port, for the message.

    Raises:
        LaunchError: the address is taken, or none of this machine's.
    """
    try:
        return socket.create_server(
            (host, port), family=family_of(host), backlog=2048, reuse_port=shared, dualstack_ipv6=is_dual(host)
        )
    except OSError as error:
        raise bind_error(host, port, error, setting) from error


def bind_error(host: str, port: int, error: OSError, setting: str = "port=") -> LaunchError:
    """Return the error of a user whose address cannot be listened on."""
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return LaunchError(
        f"{_written(host)}:{port} cannot be listened on ({reason}): choose a free port with {setting}NUMBER, and a "
        "host that is an address of this machine"
    )


def url_of(host: str, port: int) -> str:
    """Return the URL for clients."""
    return f"http://{_written(host)}:{port}"


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def family_of(host: str) -> socket.AddressFamily:
    """Return IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_dual(host: str) -> bool:
    """Return whether IPv4 clients connect to the same socket."""
    return host == "::" and socket.has_dualstack_ipv6()


@lru_cache(maxsize=HOSTS)
def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches it."""
    try:
        address = ipaddress.ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None  # of a dual-stack socket
        return (mapped or address).is_loopback
    except ValueError:
        return host == "localhost"


@lru_cache(maxsize=HOSTS)
def is_local(host: bytes) -> bool:
    """Return whether a Host header names this machine: a web page elsewhere may have its name point here (DNS
    rebinding)."""
    try:
        name = urlsplit(f"//{host.decode('latin-1')}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)
