"""SIGTERM in a command: schedulers send it before they take a machine away, `ray job stop` before it kills.

A run in progress, or every running trial of a sweep, gets a request to write a checkpoint and end; the command then
exits with status 75 (EX_TEMPFAIL): start it again, and it continues.
What it does not know: how workers stop (`raycl.training.control`).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from raycl.errors import StorageError
from raycl.storage import Storage
from raycl.training.records.journal import read_state
from raycl.training.records.stop_request import request_stop

log = logging.getLogger("raycl")

SIGNAL = signal.SIGTERM


def exit_on_sigterm() -> None:
    """Leave in order with status 75, so that Ray ends the workers; the journal keeps what is done.

    Call it again after `ray.init`, which puts a handler of its own in its place.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(SIGNAL, _leave)


def exits_on_sigterm() -> bool:
    """Whether `exit_on_sigterm` is in force."""
    return signal.getsignal(SIGNAL) is _leave


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(os.EX_TEMPFAIL)


class StopOnSigterm:
    """While it is entered (in the main thread), SIGTERM requests workers to stop, and exits when they are late.

    Attributes:
        requested: whether the signal came.
    """

    def __init__(self, storage: Storage, driver: str, grace_s: float, many: bool = False) -> None:
        """Nothing is changed yet.

        Args:
            storage: of the run, or of the sweep of many runs. driver: the process that started the workers.
            grace_s: seconds that they get. many: the workers belong to runs of a host.
        """
        self.storage = storage.with_retries(0)  # there is no time to wait for one that is away
        self.driver, self.grace_s, self.many = driver, grace_s, many
        self.requested = False
        self._late = False
        self._over = threading.Event()
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(SIGNAL, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._before is not None:
            signal.signal(SIGNAL, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._late:
            raise SystemExit(os.EX_TEMPFAIL)
        if not self.requested:  # schedulers may send it more than once
            self.requested = True
            # not here: whatever this thread was doing may hold the locks that writing and logging need
            threading.Thread(target=self._request, name="sigterm", daemon=True).start()

    def _request(self) -> None:
        try:
            request_stop(self.storage, self.driver, "SIGTERM")
            if self.many or any(attempt.get("driver") == self.driver for attempt in read_state(self.storage).attempts):
                log.info("SIGTERM: the workers write a checkpoint and end, within launch.grace_s=%g s", self.grace_s)
                self._over.wait(self.grace_s)
        except StorageError as error:
            log.warning("SIGTERM: the checkpoint request cannot be written: %s", error)
        self._late = True
        if not self._over.is_set():
            os.kill(os.getpid(), SIGNAL)
