"""Stopping a run, from the signal to the worker that writes a checkpoint.

Schedulers send SIGTERM before they take a machine away, `ray job stop` before it kills; people press Ctrl-C. The
command (`StopOnSignal`) writes a request, one small file of the run for each driver: training may happen in other
processes, and all that they share is the run's folder. Workers look for it while they train (`StopPoll`), write a
checkpoint and end. The command exits with status 75 (EX_TEMPFAIL) or 130: start it again, and it continues.
A request is for the workers of one driver: it does not stop the run again when another driver resumes it. A sweep or a
comparison has one request in its own folder for the workers of all its runs.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from raycl.errors import InterruptedRunError, StoppedError, StorageError, UnreachableError
from raycl.storage import Storage
from raycl.storage.records import read_fields, seal

if TYPE_CHECKING:
    from raycl.training.workers.distributed import DistributedContext

log: logging.Logger = logging.getLogger("raycl")

FOLDER = "stop"
FORMAT = 1

CTRL_C = "Ctrl-C"
ERRORS: dict[str, type[StoppedError]] = {"SIGTERM": StoppedError, CTRL_C: InterruptedRunError}
"""Signal -> the error of a run that it has stopped."""

REASONS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: CTRL_C}


# ---- the request ----------------------------------------------------------------------------------------------------


class StopRequested(Exception):
    """Ends the training loop of one worker after its checkpoint; never leaves the loop."""


@dataclass(frozen=True)
class StopRequest:
    """A request; `time` in seconds since 1970."""

    reason: str
    time: float
    host: str


@dataclass(frozen=True)
class HostStop:
    """The place where the host of many runs (a sweep, a comparison) requests that all of them stop; a plain value that
    travels to workers.

    Attributes:
        folder: address of the host's storage. driver: the host's process, as in `request_stop`.
    """

    folder: str
    driver: str

    @property
    def reason(self) -> str:
        """The reason of the request to stop; "": there is no request, or the storage does not answer."""
        try:
            stop = stop_of(Storage.at(self.folder), self.driver)
        except UnreachableError:
            return ""
        except StorageError:
            return "a request that cannot be read"
        return "" if stop is None else stop.reason

    @property
    def is_requested(self) -> bool:
        return bool(self.reason)


def request_stop(storage: Storage, driver: str, reason: str) -> None:
    """Ask the workers of `driver` to write a checkpoint and end.

    Raises:
        StorageError: it cannot be written.
    """
    record = StopRequest(reason, time.time(), socket.gethostname())
    storage.write(_file(driver), seal({"format": FORMAT, **asdict(record)}))


def is_stop_requested(storage: Storage, driver: str) -> bool:
    """Return whether there is a request, readable or not."""
    return storage.exists(_file(driver))


def stop_of(storage: Storage, driver: str) -> StopRequest | None:
    """Return the request; None: there is none.

    Raises:
        StorageError: the file is damaged.
    """
    return read_fields(storage, _file(driver), FORMAT, StopRequest) if is_stop_requested(storage, driver) else None


def _file(driver: str) -> str:
    return f"{FOLDER}/{driver}.json"


# ---- in the command ------------------------------------------------------------------------------------------------


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
    """A context of the main thread in which SIGTERM and Ctrl-C request workers to stop, and exit if they are late.

    A second Ctrl-C does not wait for them; schedulers may send SIGTERM more than once.

    Attributes:
        reason: which of them came; "": neither.
    """

    def __init__(self, storage: Storage, driver: str, grace_s: float, has_begun: Callable[[], bool]) -> None:
        """Change nothing yet.

        Args:
            storage: storage of the run, or of the sweep or comparison of many runs. driver: the process that started
                the workers. grace_s: seconds that they get. has_begun: whether there is a worker to wait for.
        """
        self.storage: Storage = storage.with_retries(0)  # there is no time to wait for one that is away
        self.driver = driver
        self.grace_s = grace_s
        self.has_begun = has_begun
        self.reason: str = ""
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
            if self.has_begun():
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


@contextmanager
def left_at_once() -> Iterator[None]:
    """End the process after the grace of a signal, or at a second Ctrl-C.

    Threads inside Ray cannot be interrupted, and taking Ray away from them aborts the process. Workers and a cluster of
    our own end with it, and the journals keep what is done.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stopped:
        log.error("stopped: repeat the command to continue")
        os._exit(stopped.code if isinstance(stopped, SystemExit) and isinstance(stopped.code, int) else 130)


# ---- in a worker ---------------------------------------------------------------------------------------------------


@dataclass
class StopPoll:
    """Looks for a request, on all workers of a run; see `raycl.training.workers.control.Control` for the attributes."""

    storage: Storage
    world: DistributedContext
    driver: str
    host: HostStop | None
    poll_s: float

    def __post_init__(self) -> None:
        self._looked, self._calls, self._skip, self._stop = time.monotonic(), 0, 0, False

    def requested(self, now: bool = False) -> bool:
        """Return whether a stop was requested. Collective; the storage is polled at most every `poll_s` seconds.

        Args:
            now: poll in any case.
        """
        self._calls += 1
        if not self.driver or self._stop or (self._calls <= self._skip and not now):
            return self._stop
        elapsed = time.monotonic() - self._looked
        calls = int(self.poll_s * self._calls / max(elapsed, 1e-3))  # that many of them take poll_s
        is_requested = self.world.is_first and self._look()
        self._stop, self._skip = self.world.broadcast((is_requested, 0 if now else calls))
        self._looked, self._calls = time.monotonic(), 0
        return self._stop

    def _look(self) -> bool:
        """Return whether there is a request; the host's is copied to the run's folder, where its status finds it."""
        try:
            if self.host is not None and (reason := self.host.reason):
                request_stop(self.storage, self.driver, reason)
            return is_stop_requested(self.storage, self.driver)
        except UnreachableError:
            return False
