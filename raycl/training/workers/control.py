"""The control thread of one worker, which writes the run's heartbeat.

The thread writes `heartbeat.json` (rank 0) and ends a worker that makes no progress for too long: a hung collective or
file system raises no error, and only a new process recovers from it.
"""

import faulthandler
import logging
import os
import socket
import tempfile
import threading
import time
from types import TracebackType
from typing import Any, Self

from raycl.errors import StorageError
from raycl.storage import Storage
from raycl.training.workers.distributed import DistributedContext
from raycl.training.workers.stopping import HostStop, StopPoll, StopRequested

log: logging.Logger = logging.getLogger("raycl")

HEARTBEAT = "heartbeat.json"
BEAT_S = 5.0
"""Seconds between two heartbeats; one that begins a phase comes within a second."""

POLL_S = 0.5
"""Seconds between two polls for a stop request: `ray job stop` kills after 3."""

REPORT_S = 10.0
"""Seconds in which a hung worker can write its report; the storage itself may hang."""


def hang_file(driver: str, rank: int) -> str:
    """Return the path of a hung worker's report in the run's folder."""
    return f"errors/{driver}-hang-{rank}.json"


class Control:
    """Heartbeat, requests to stop and hang detection of one worker; as a context manager it runs the thread.

    Attributes:
        activity: the worker's present activity, for messages. stop: looks for requests to stop.
        failed_rows: rows of the micro-batch that raised an exception, with their tasks.
    """

    def __init__(
        self,
        storage: Storage,
        world: DistributedContext,
        driver: str = "",
        hang_s: float | None = None,
        poll_s: float = POLL_S,
        host: HostStop | None = None,
        beat_s: float = BEAT_S,
    ) -> None:
        """Set up; nothing is written yet.

        Args:
            driver: the driver that can stop the run; empty: none can.
            hang_s: seconds without progress after which the process ends; None: never.
            host: a sweep or a comparison that can stop the run as well; None: there is none.
            beat_s: seconds between two heartbeats.
        """
        self.storage: Storage = storage.with_retries(0)  # what it reads and writes can wait for the next time
        self.world = world
        self.driver = driver
        self.hang_s = hang_s
        self._beat_s = beat_s
        self.stop: StopPoll = StopPoll(self.storage, world, driver, host, poll_s)
        self.activity: str = "starting"
        self.failed_rows: list[str] = []
        self._summary: dict[str, Any] = {}
        self._progress = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run_checks, name="control", daemon=True)

    def progress(self, activity: str, **summary: Any) -> None:
        """Record progress in `activity`.

        Args:
            summary: values for the heartbeat, added to earlier ones.
        """
        self.activity, self._progress = activity, time.monotonic()
        self._summary = {**self._summary, **summary}

    def pause(self, activity: str, **summary: Any) -> None:
        """Record progress as `progress`, between two pieces of work other than optimizer steps. Collective.

        Raises:
            StopRequested: a stop is requested.
        """
        self.progress(activity, **summary)
        if self.stop.requested(now=True):
            raise StopRequested

    @property
    def position(self) -> dict[str, Any]:
        """The worker's `activity`, and `phase`, `task`, `step` once they are known."""
        known = {key: value for key, value in self._summary.items() if key in ("phase", "task", "step")}
        return {"activity": self.activity, **known}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(self._beat_s)
        self.activity = "ended" if error is None else "failed"
        self._beat()

    def _run_checks(self) -> None:
        beat, phase = time.monotonic(), self._summary.get("phase")
        self._beat()
        while not self._over.wait(min(1.0, self._beat_s)):
            idle = time.monotonic() - self._progress
            if self.hang_s is not None and idle > self.hang_s:
                self._end(idle)
            if time.monotonic() - beat >= self._beat_s or phase != self._summary.get("phase"):
                beat, phase = time.monotonic(), self._summary.get("phase")
                self._beat()

    def _beat(self) -> None:
        if not self.world.is_first:
            return
        idle = round(time.monotonic() - self._progress, 1)
        summary = {
            "time": time.time(),
            "driver": self.driver,
            "activity": self.activity,
            "idle_s": idle,
            **self._summary,
        }
        try:
            self.storage.write_json(HEARTBEAT, summary)
        except StorageError as error:  # the next one may succeed, and training raises storage errors itself
            log.debug("no heartbeat: %s", error)

    def _end(self, idle: float) -> None:
        """Write a report if the storage works, and end this process at once, whatever locks its threads hold."""
        report = threading.Thread(target=self._report, args=(idle,), daemon=True)
        report.start()
        report.join(REPORT_S)
        os._exit(os.EX_TEMPFAIL)

    def _report(self, idle: float) -> None:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            stack = file.read().decode(errors="replace")
        worker = f"worker {self.world.rank + 1} of {self.world.size} (process {os.getpid()} on {socket.gethostname()})"
        message = (
            f"{worker} made no progress for {idle:.0f} s while {self.activity}, launch.hang_s is {self.hang_s:g}: "
            "it was ended, so that the workers start again from the last checkpoint"
        )
        record = {"type": "Hang", "message": message, "stack": stack, "time": time.time()}
        self.storage.write_json(hang_file(self.driver, self.world.rank), record)
