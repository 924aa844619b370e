"""The folder of a run, before anything heavy is imported: whether there is one, and decisions whether it continues.

Workers must not begin a task that is about to be stopped, and killing them in the middle of one keeps their resources
occupied for most of a minute. So they read a sweep's decision, one small file of the run per phase, between two tasks,
and exit by themselves.
"""

import logging
import shlex
import time
from dataclasses import dataclass

from raycl.config import Tree, trust
from raycl.errors import DamagedError, ResumeError
from raycl.storage import Storage
from raycl.storage.records import read_fields, seal

log: logging.Logger = logging.getLogger("raycl")

CONFIG = "config.yaml"
"""The first file that a run writes."""

DECISIONS = "decisions"
FORMAT = 3
POLL_S, PATIENCE_S = 0.05, 120.0
"""Seconds between two polls (object stores: 1), and after which a run continues without a decision."""


def run_at(folder: str) -> Storage:
    """Return the folder of a run that is there.

    Raises:
        ResumeError: there is none. StorageError: it is out of reach.
    """
    storage = Storage.at(folder)
    if not storage.exists(CONFIG):
        raise ResumeError(f"'{folder}' holds no run (no {CONFIG}): give the run directory that an earlier run printed")
    return storage


def resume_arguments(storage: Storage, tree: Tree) -> str:
    """Return arguments of `raycl train` that resume a run.

    Args:
        tree: its config, which need not be validated.
    """
    return " ".join(["--resume", shlex.quote(storage.address), *map(shlex.quote, trust.as_overrides(tree))])


@dataclass(frozen=True)
class _Decision:
    done: int
    continues: bool


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
    record = read_fields(storage, _file(done), FORMAT, _Decision)
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
    return f"{DECISIONS}/{done:03d}.json"
