"""Stop signals: a sweep's decision whether a run continues after a phase, one small file of the run per phase.

Workers must not begin a task that is about to be stopped, and killing them in the middle of one keeps their resources
occupied for most of a minute. So they read the decision between two tasks, and exit by themselves.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from pydantic import TypeAdapter

from raycl.errors import DamagedError
from raycl.storage import Storage
from raycl.storage.records import read_fields, seal

log = logging.getLogger("raycl")

FOLDER = "decisions"
FORMAT = 3
POLL_S, PATIENCE_S = 0.05, 120.0
"""Seconds between two polls (object stores: 1), and after which a run continues without a decision."""


@dataclass(frozen=True)
class _Decision:
    """The record of a decision."""

    done: int
    continues: bool


_DECISION = TypeAdapter(_Decision)


def write_decision(storage: Storage, done: int, continues: bool) -> None:
    """Write the decision whether the run continues after `done` finished phases."""
    storage.write(_file(done), seal({"format": FORMAT, "done": done, "continues": continues}))


def read_decision(storage: Storage, done: int) -> bool | None:
    """Return the decision; None: there is none yet.

    Raises:
        StorageError: the file is damaged.
    """
    if not storage.exists(_file(done)):
        return None
    record = read_fields(storage, _file(done), FORMAT, _DECISION)
    if record.done != done:
        raise DamagedError(f"'{storage.uri}/{_file(done)}' belongs to phase {record.done}: it was moved; remove it")
    return record.continues


def is_stopped(storage: Storage, done: int) -> bool:
    """Return whether the decision after so many phases was to stop."""
    return done > 0 and read_decision(storage, done) is False


def wait_for_decision(storage: Storage, done: int, patience_s: float = PATIENCE_S) -> bool:
    """Return whether to continue. After `patience_s` without a decision (the sweep may have died) the run continues."""
    end = time.monotonic() + patience_s
    while (decision := read_decision(storage, done)) is None:
        if time.monotonic() > end:
            log.warning("no decision after %d phases arrived within %.0f s: the run continues", done, patience_s)
            return True
        time.sleep(POLL_S if storage.is_local else 1.0)
    return decision


def _file(done: int) -> str:
    return f"{FOLDER}/{done:03d}.json"
