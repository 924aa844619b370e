"""Rows that tasks had before they were learned again, as far as they differ from those of a candidate.

Why it exists: the rows of a revised task are whatever its run was given. A snapshot that is right on these alone may
have lost those that the task had.
What it does not know: how a snapshot is scored.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from raycl import config as configs
from raycl.bank import Snapshot
from raycl.config import Tree
from raycl.data.resolve import missing_files
from raycl.data.stream import Stream, StreamConfig, open_stream
from raycl.data.tokens import Split
from raycl.errors import BankError
from raycl.serve.settings import ServeConfig
from raycl.types import Task

log = logging.getLogger("raycl")


def stream_of(snapshot: Snapshot, config: ServeConfig) -> Stream:
    """The stream that a snapshot was trained on, with the overrides of `gate.stream`.

    Raises:
        BankError: the snapshot does not record it. RayclError: data cannot be read.
    """
    tree, seed = _recorded(snapshot, config)
    return open_stream(configs.validate(StreamConfig, tree), seed)


def earlier_rows(
    active: Snapshot, candidate: Snapshot, stream: Stream, config: ServeConfig
) -> tuple[Stream, tuple[Task, ...]]:
    """A stream with the rows of the active snapshot's tasks, and those tasks of it whose rows are others in `stream`.

    Rows that are not there any more are logged, and left out.

    Args:
        stream: of the candidate.

    Raises:
        BankError: a snapshot does not record its stream. RayclError: data cannot be read.
    """
    (old, old_seed), (new, new_seed) = (_recorded(snapshot, config) for snapshot in (active, candidate))
    mine, theirs = (_specs(tree, [task.name for task in active.tasks]) for tree in (old, new))
    changed = [name for name in mine if (_alone(old, mine[name]), old_seed) != (_alone(new, theirs[name]), new_seed)]
    for name in list(changed):
        if why := missing_files(configs.validate(StreamConfig, _alone(old, mine[name]))):
            log.warning("task '%s' is not evaluated on its rows in snapshot %d: %s", name, active.number, why)
            changed.remove(name)
    if not changed:
        return stream, ()
    tasks = [mine[name] if name in changed else theirs[name] for name in mine]
    found = open_stream(configs.validate(StreamConfig, {**old, "tasks": tasks}), old_seed)
    split, now = config.gate.split, {task.name: task for task in stream.tasks}
    differing = (
        task
        for task in found.tasks
        if task.name in changed and _rows(found, task, split) not in ([], _rows(stream, now[task.name], split))
    )
    return found, tuple(differing)


def _recorded(snapshot: Snapshot, config: ServeConfig) -> tuple[Tree, int]:
    """The stream's settings, and the seed."""
    recorded = snapshot.provenance.get("config")
    if recorded is None:
        raise BankError(f"snapshot {snapshot.number} has no record of its training data: it cannot be evaluated")
    tree = {"stream": {**recorded["stream"], "unseen": None}}
    for override in config.gate.stream:
        configs.apply_override(tree, f"stream.{override}")
    return tree["stream"], int(recorded["seed"])


def _specs(tree: Tree, tasks: Sequence[str]) -> dict[str, Any]:
    """Task -> how its rows are found: as the stream says, else by its name."""
    given = {spec if isinstance(spec, str) else spec["name"]: spec for spec in tree.get("tasks") or ()}
    return {name: given.get(name, name) for name in tasks}


def _alone(tree: Tree, spec: Any) -> Tree:
    """Settings of a stream of this task alone."""
    return {**tree, "tasks": [spec]}


def _rows(stream: Stream, task: Task, split: Split) -> list[tuple[str, list[str]]]:
    """Text and references of each row; [] without data."""
    source, rows = stream.source(task, split), stream.rows(task, split)
    if source is None or not len(rows):
        return []
    opened = source.open()
    return list(zip(opened.values("text", rows), opened.values("references", rows), strict=True))
