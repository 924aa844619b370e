"""HTTP straight into the process that answers, past Ray Serve's proxy.

Why it exists: the proxy costs a request several milliseconds of CPU, as much as a small model's answer. Replicas of
one machine share the port, and the kernel spreads connections over them (SO_REUSEPORT).
What it does not know: what is answered.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from raycl.errors import LaunchError
from raycl.serve.settings import ServeConfig

KEEP_ALIVE_S = 75
"""Longer than clients keep a connection that they do not use, so that it is they who close it."""

START_S = 30.0


class Listener:
    """An ASGI application on the endpoint's address, in a thread with an event loop of its own.

    Raises:
        LaunchError: the address is not to be had.
    """

    def __init__(self, web: Any, config: ServeConfig) -> None:
        listens = bound(config.host, config.port, shared=True)
        self._patience_s = config.limits.timeout_s
        self._server = uvicorn.Server(
            uvicorn.Config(
                web,
                lifespan="off",
                log_config=None,
                access_log=config.access_log,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(self._patience_s),
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([listens],), name="raycl-http", daemon=True)
        self._thread.start()
        began = time.monotonic()
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() - began > START_S:
                raise LaunchError(f"the HTTP server on {config.host}:{config.port} did not start")
            time.sleep(0.01)

    @property
    def alive(self) -> bool:
        """Whether it listens."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Take nothing new; returns when what has begun is answered, or after `limits.timeout_s`."""
        self._server.should_exit = True
        self._thread.join(timeout=self._patience_s + 5)


@contextmanager
def claimed(config: ServeConfig) -> Iterator[ServeConfig]:
    """The settings of an endpoint whose Ray is started on this machine: its port, and who listens there.

    The port stays this endpoint's while this is open, although nobody may listen there yet.

    Raises:
        LaunchError: the port is taken.
    """
    with bound(config.host, config.port) as found:
        port = int(found.getsockname()[1])
    ingress = config.ingress
    if ingress == "auto":
        ingress = "proxy" if config.scales else "direct"
    held = socket.socket(_family(config.host))
    with held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((config.host, port))
        yield config.model_copy(update={"port": port, "ingress": ingress})


def bound(host: str, port: int, shared: bool = False) -> socket.socket:
    """A socket that listens.

    Args:
        port: 0: any that is free.
        shared: beside others of this user that share it too.

    Raises:
        LaunchError: the address is taken, or none of this machine's.
    """
    try:
        return socket.create_server((host, port), family=_family(host), backlog=2048, reuse_port=shared)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise LaunchError(
            f"{host}:{port} cannot be listened on ({reason}): choose a free port with port=NUMBER, and a host that is "
            "an address of this machine"
        ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
