"""The word of a host (a sweep) on whether a run goes on after a phase: one small file of the run for each phase.

Why it exists: workers must not begin a task that is about to be stopped, and killing them in the middle of one leaves
their place on the cluster occupied for most of a minute. So they ask between two tasks, and end by themselves.
What it does not know: why a run is stopped, and who decides.
"""

from __future__ import annotations

import logging
import time

from raycl.errors import DamagedError
from raycl.storage import Storage
from raycl.storage.records import read_record, seal

log = logging.getLogger("raycl")

FOLDER = "decisions"
FORMAT = 3
POLL_S, PATIENCE_S = 0.05, 120.0
"""How often workers look (object stores: every second), and when they go on without a word."""


def write_decision(storage: Storage, done: int, continues: bool) -> None:
    """Say whether the run goes on after `done` finished phases."""
    storage.write(_file(done), seal({"format": FORMAT, "done": done, "continues": continues}))


def read_decision(storage: Storage, done: int) -> bool | None:
    """What was said; None: nothing yet.

    Raises:
        StorageError: the file is damaged.
    """
    if not storage.exists(_file(done)):
        return None
    record = read_record(storage, _file(done), FORMAT)
    if record["done"] != done:
        raise DamagedError(f"'{storage.uri}/{_file(done)}' is about phase {record['done']}: it was moved; remove it")
    return bool(record["continues"])


def is_stopped(storage: Storage, done: int) -> bool:
    """Whether the run was told to stop after so many phases."""
    return done > 0 and read_decision(storage, done) is False


def wait_for_decision(storage: Storage, done: int) -> bool:
    """Whether to go on; a host that says nothing for long (it died, or lost the question) does not hold the run up."""
    end = time.monotonic() + PATIENCE_S
    while (decision := read_decision(storage, done)) is None:
        if time.monotonic() > end:
            log.warning("no word on going on after %d phases for %.0f s: going on", done, PATIENCE_S)
            return True
        time.sleep(POLL_S if storage.is_local else 1.0)
    return decision


def _file(done: int) -> str:
    return f"{FOLDER}/{done:03d}.json"
