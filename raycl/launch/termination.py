"""SIGTERM and Ctrl-C in a command: schedulers send the one before they take a machine away, `ray job stop` before it
kills; people press the other.

A run in progress, or every running trial of a sweep and run of a comparison, gets a request to write a checkpoint and
end; the command then exits with status 75 (EX_TEMPFAIL) or 130: start it again, and it continues.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from raycl.errors import InterruptedRunError, StoppedError, StorageError
from raycl.storage import Storage
from raycl.training.records.journal import read_state
from raycl.training.records.stops.request import request_stop

log = logging.getLogger("raycl")

CTRL_C = "Ctrl-C"
ERRORS: dict[str, type[StoppedError]] = {"SIGTERM": StoppedError, CTRL_C: InterruptedRunError}
"""Signal -> the error of a run that it has stopped."""

REASONS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: CTRL_C}


def exit_on_sigterm() -> None:
    """Leave in order with status 75, so that Ray ends the workers; the journal keeps what is done.

    Call it again after `ray.init`, which puts a handler of its own in its place.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)


def exits_on_sigterm() -> bool:
    """Return whether `exit_on_sigterm` is in force."""
    return signal.getsignal(signal.SIGTERM) is _leave


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(StoppedError.exit_status)


def stopped_by(reason: str, text: str) -> StoppedError:
    """Return the error of a run that was stopped, with the status of what stopped it."""
    return ERRORS.get(reason, StoppedError)(f"stopped by {reason}, {text}")


class StopOnSignal:
    """While it is entered (in the main thread), SIGTERM and Ctrl-C request workers to stop, and exit if they are late.

    A second Ctrl-C does not wait for them; schedulers may send SIGTERM more than once.

    Attributes:
        reason: which of them came; "": neither.
    """

    def __init__(self, storage: Storage, driver: str, grace_s: float, many: bool = False) -> None:
        """Change nothing yet.

        Args:
            storage: storage of the run, or of the sweep or comparison of many runs. driver: the process that started
                the workers. grace_s: seconds that they get. many: the workers belong to runs of a host.
        """
        self.storage = storage.with_retries(0)  # there is no time to wait for one that is away
        self.driver, self.grace_s, self.many = driver, grace_s, many
        self.reason = ""
        self._late = False
        self._over = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in REASONS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._late or (self.reason == CTRL_C and number == signal.SIGINT):
            raise SystemExit(ERRORS[self.reason].exit_status)
        if not self.reason:
            self.reason = REASONS[signal.Signals(number)]
            # not here: whatever this thread was doing may hold the locks that writing and logging need
            threading.Thread(target=self._request, name="stop", daemon=True).start()

    def _request(self) -> None:
        try:
            request_stop(self.storage, self.driver, self.reason)
            if self.many or any(attempt.get("driver") == self.driver for attempt in read_state(self.storage).attempts):
                log.info(
                    "%s: the workers write a checkpoint and end, within launch.grace_s=%g s%s",
                    *(self.reason, self.grace_s, "; again: without it" if self.reason == CTRL_C else ""),
                )
                self._over.wait(self.grace_s)
        except StorageError as error:
            log.warning("%s: the checkpoint request cannot be written: %s", self.reason, error)
        self._late = True
        if not self._over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
