"""HTTP directly in the replica's process, without Ray Serve's proxy.

The proxy costs a request several milliseconds of CPU, as much as a small model's answer. Replicas of one machine share
the port, and the kernel spreads connections over them (SO_REUSEPORT).
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raycl.errors import LaunchError
from raycl.launch.http.connections import (
    LimitedProtocol,
    bind_error,
    bound,
    family_of,
    is_dual,
    server_of,
    url_of,
)
from raycl.serve.settings import ServeConfig

KEEP_ALIVE_S = 75
"""Longer than clients keep a connection that they do not use, so that clients close it."""

START_S = 30.0


class Listener:
    """An ASGI application on the endpoint's address, in a thread with an event loop of its own.

    Args:
        protocol: uvicorn's protocol, with the limits of a connection.

    Raises:
        LaunchError: the address is not available.
    """

    def __init__(self, web: Any, config: ServeConfig, protocol: type[LimitedProtocol] = LimitedProtocol) -> None:
        listens = bound(config.host, config.port, shared=True)
        self._patience_s = max(1, math.ceil(config.limits.timeout_s))
        self._server = server_of(
            web,
            protocol,
            lifespan="on" if config.forwards else "off",
            access_log=config.access_log,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=self._patience_s,
        )
        if config.access_log:
            _show_access()
        self._thread = threading.Thread(target=self._server.run, args=([listens],), name="raycl-http", daemon=True)
        self._thread.start()
        began = time.monotonic()
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() - began > START_S:
                raise LaunchError(f"the HTTP server on {url_of(config.host, config.port)} did not start")
            time.sleep(0.01)

    @property
    def alive(self) -> bool:
        """Return whether it listens."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Take nothing new; returns when what has begun is answered, or after `limits.timeout_s`."""
        self._server.should_exit = True
        self._thread.join(timeout=self._patience_s + 5)


@contextmanager
def claimed(config: ServeConfig) -> Iterator[ServeConfig]:
    """Yield the settings of an endpoint whose Ray is started on this machine, with port and ingress.

    The port stays reserved while this is open, although nothing listens there yet.

    Raises:
        LaunchError: the port is taken.
    """
    with bound(config.host, config.port) as listener:
        port = int(listener.getsockname()[1])
    ingress = config.ingress
    if ingress == "auto":  # the kernel does not know which of several replicas is busy
        ingress = "proxy" if config.scales or config.replicas > 1 else "direct"
    with socket.socket(family_of(config.host)) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if held.family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not is_dual(config.host)))
        try:
            held.bind((config.host, port))
        except OSError as error:
            raise bind_error(config.host, port, error) from error
        yield config.model_copy(update={"port": port, "ingress": ingress})


def _show_access() -> None:
    """Lines about requests go where Serve's own lines go."""
    access, serve = logging.getLogger("uvicorn.access"), logging.getLogger("ray.serve")
    access.setLevel(logging.INFO)
    access.handlers = list(serve.handlers) or [logging.StreamHandler()]
