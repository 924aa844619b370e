"""An endpoint from the command line: started here, pointed at another snapshot, or at a candidate that passes.

What it does not know: how answers are made.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress

import ray
from ray import serve

from raycl.bank import Bank
from raycl.bank.activations import Activations
from raycl.errors import LaunchError
from raycl.serve.app import NAME, build_from
from raycl.serve.settings import ServeConfig

log = logging.getLogger("raycl")


def serve_forever(config: ServeConfig) -> None:
    """Start the endpoint on this cluster, or on one of our own, and stay until a signal comes.

    Raises:
        LaunchError: it did not come up. RayclError: config or bank.
    """
    application = build_from(config)
    stopped = threading.Event()
    with suppress(KeyboardInterrupt):
        start(config, application)
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which sets a handler of its own
            signal.signal(number, lambda *_: stopped.set())
        log.info("serving %s on http://%s:%d (Ctrl-C ends it)", config.bank, config.host, config.port)
        stopped.wait()
    log.info("stopping: answers that have begun are finished")
    serve.shutdown()
    ray.shutdown()


def start(config: ServeConfig, application: object) -> None:
    """Bring the application up and return.

    Raises:
        LaunchError: the cluster or a replica did not come up.
    """
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        began = time.monotonic()
        ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="error")
        log.info("Ray %s in %.0f s", "joined" if address else "started on this machine", time.monotonic() - began)
    serve.start(http_options={"host": config.host, "port": config.port})
    try:
        serve.run(application, name=NAME, route_prefix="/")
    except RuntimeError as error:
        status = serve.status().applications.get(NAME)
        reason = " ".join(str(status.message if status else error).split())[-800:]
        raise LaunchError(f"the endpoint did not come up: {reason}") from error


def activate(config: ServeConfig, number: int) -> int:
    """Answer from a snapshot, on every replica that watches this bank; the exit status."""
    bank = Bank.at(config.bank)
    decided = Activations(bank).add(number, "asked for")
    log.info("decision %d: snapshot %d answers", decided.number, number)
    return 0


def promote(config: ServeConfig, number: int, max_drop: float) -> int:
    """Activate a candidate if no task that was learned before falls by more than `max_drop`; the exit status."""
    raise NotImplementedError
