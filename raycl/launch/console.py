"""Work beside a command that waits: what a thread repeats, and workers' progress lines, read from the run's log."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from raycl.errors import StorageError, printable
from raycl.storage import Storage

log = logging.getLogger("raycl")
FOLLOW_S = 1.0
LOGS = "log"
"""Folder of a run with the log of each attempt."""


@contextmanager
def repeating(work: Callable[[], None], every_s: float, name: str) -> Iterator[None]:
    """Call `work` every so many seconds while this is open.

    Args:
        work: function that must not raise. name: name of the thread.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def follow(storage: Storage, label: str = "", every_s: float = FOLLOW_S) -> Iterator[None]:
    """Log the workers' progress lines here, each after `label`; only those written from now on.

    Args:
        every_s: seconds between two looks at the log.
    """
    seen: dict[str, int] = {}

    def fresh(folder: Storage) -> Iterator[str]:
        for name in filter(is_log, folder.list(LOGS)):
            data = folder.read(f"{LOGS}/{name}")
            new, seen[name] = data[seen.get(name, 0) :], len(data)
            yield from new.decode(errors="replace").splitlines()

    def log_new() -> None:
        with suppress(StorageError):  # away for a moment: the next look finds all that was written meanwhile
            for line in fresh(storage.with_retries(0)):
                log.info("%s%s", label, line)

    for _ in fresh(storage):
        pass  # earlier lines are not logged again
    try:
        with repeating(log_new, every_s, "follow"):
            yield
    finally:
        log_new()


def is_log(name: str) -> bool:
    """Return whether a file of `LOGS` is an attempt's, and no editor's or file manager's."""
    return re.fullmatch(r"attempt-\d{4,}\.txt", name) is not None


class PlainFormatter(logging.Formatter):
    """Lines without characters that a terminal obeys."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return printable(super().format(record))


def log_to(handler: logging.Handler) -> None:
    """Send raycl's own lines, from INFO on, to one place only."""
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def log_to_stderr() -> None:
    """Log progress lines of this process without decoration."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(message)s"))
    log_to(handler)
