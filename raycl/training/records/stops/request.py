"""A request to stop: one small file of the run for each driver, which its workers look for while they train.

SIGTERM reaches the driver, training happens in other processes, and all that they share is the run's folder. A request
is for the workers of one driver: it does not stop the run again when another driver resumes it. A sweep or a comparison
has one request in its own folder for the workers of all its runs.
"""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from raycl.errors import StorageError, UnreachableError
from raycl.storage import Storage
from raycl.storage.records import read_fields, seal

FOLDER = "stop"
FORMAT = 1


class StopRequested(Exception):
    """Ends the training loop of one worker after its checkpoint; never leaves the loop."""


@dataclass(frozen=True)
class StopRequest:
    """A request; `time` in seconds since 1970."""

    reason: str
    time: float
    host: str


_REQUEST = TypeAdapter(StopRequest)


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
        """Why they are to stop; "": there is no request, or the storage does not answer."""
        try:
            stop = stop_of(Storage.at(self.folder), self.driver)
        except UnreachableError:
            return ""
        except StorageError:
            return "a request that cannot be read"
        return "" if stop is None else stop.reason

    @property
    def is_requested(self) -> bool:
        """Whether there is a request."""
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
    return read_fields(storage, _file(driver), FORMAT, _REQUEST) if is_stop_requested(storage, driver) else None


def _file(driver: str) -> str:
    return f"{FOLDER}/{driver}.json"
