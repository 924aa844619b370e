"""Rows that tasks had before they were learned again, as far as they differ from those of a candidate.

The rows of a revised task are whatever its run was given. A snapshot that is right on these alone may have lost those
that the task had.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from raycl import config as configs
from raycl.bank import Snapshot
from raycl.config import Tree
from raycl.data.resolve import missing_files
from raycl.data.stream import Stream, StreamConfig, open_stream
from raycl.data.tokens import Split
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import recorded_data
from raycl.training.setup.fingerprints import rows_of
from raycl.types import Task

log: logging.Logger = logging.getLogger("raycl")


def stream_of(snapshot: Snapshot, config: ServeConfig) -> Stream:
    """Return the stream that a snapshot was trained on, with the overrides of `gate.stream`.

    Raises:
        BankError: the snapshot does not record it. ConfigError: it names storage that the user does not.
        RayclError: data cannot be read.
    """
    tree, seed = _recorded(snapshot, config)
    return open_stream(configs.validate(StreamConfig, tree), seed)


class EarlierRows(NamedTuple):
    """The rows of the active snapshot's tasks, where they are others than in the candidate's stream.

    Attributes:
        stream: the stream with these rows. tasks: its tasks whose rows differ.
        gone: tasks with other rows that are not there any more.
    """

    stream: Stream
    tasks: tuple[Task, ...] = ()
    gone: tuple[str, ...] = ()


def earlier_rows(active: Snapshot, candidate: Snapshot, stream: Stream, config: ServeConfig) -> EarlierRows:
    """Find earlier rows by the snapshots' records of data and fingerprints.

    Args:
        stream: stream of the candidate.

    Raises:
        BankError, ConfigError: see `stream_of`. RayclError: data cannot be read.
    """
    (old, old_seed), (new, new_seed) = (_recorded(snapshot, config) for snapshot in (active, candidate))
    mine, theirs = (_specs(tree, [task.name for task in active.tasks]) for tree in (old, new))
    split, now = config.gate.split, {task.name: task for task in stream.tasks}
    before, after = ({name: _fingerprint(snapshot, name, split) for name in mine} for snapshot in (active, candidate))
    changed = [
        name
        for name in mine
        if before[name] != after[name] or (_alone(old, mine[name]), old_seed) != (_alone(new, theirs[name]), new_seed)
    ]
    gone = [name for name in changed if missing_files(configs.validate(StreamConfig, _alone(old, mine[name])))]
    tasks = [mine[name] if name in changed and name not in gone else theirs[name] for name in mine]
    earlier_stream = (
        open_stream(configs.validate(StreamConfig, {**old, "tasks": tasks}), old_seed) if changed else stream
    )
    differing = []
    for task in earlier_stream.tasks if changed else ():
        if task.name not in changed or task.name in gone:
            continue
        here = rows_of(earlier_stream, task).get(split, {}).get("sha256")
        if before[task.name] not in (None, here) and not config.gate.stream:
            gone.append(task.name)
        elif here is not None and here != rows_of(stream, now[task.name]).get(split, {}).get("sha256"):
            differing.append(task)
    for name in gone:
        log.warning(
            "task '%s' is not evaluated on the rows that it had in snapshot %d: they are gone", name, active.number
        )
    return EarlierRows(earlier_stream, tuple(differing), tuple(gone))


def _recorded(snapshot: Snapshot, config: ServeConfig) -> tuple[Tree, int]:
    """Return the stream's settings, and the seed."""
    overrides = [f"stream.{override}" for override in config.gate.stream]
    tree, seed = recorded_data(snapshot, config.bank, overrides, config.gate.allow_storage, "gate.allow_storage")
    return tree["stream"], seed


def _specs(tree: Tree, tasks: Sequence[str]) -> dict[str, Any]:
    """Return task -> how its rows are found: as the stream says, else by its name."""
    given = {spec if isinstance(spec, str) else spec["name"]: spec for spec in tree.get("tasks") or ()}
    return {name: given.get(name, name) for name in tasks}


def _alone(tree: Tree, spec: Any) -> Tree:
    """Return settings of a stream of this task alone."""
    return {**tree, "tasks": [spec]}


def _fingerprint(snapshot: Snapshot, task: str, split: Split) -> str | None:
    """SHA-256 of the rows that a task had; None: it is not recorded."""
    rows = snapshot.provenance.get("inputs", {}).get("tasks", {}).get(task, {})
    fingerprint: str | None = rows.get(split, {}).get("sha256")
    return fingerprint
