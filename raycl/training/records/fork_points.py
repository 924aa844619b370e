"""Places to branch from: what a run had after its first phases, kept so that another run can go on from there.

Why it exists: two runs whose settings agree on all that acts up to some phase learn the same up to there, bit for bit;
the second one then starts with the first one's checkpoint and journal records, as if it had been resumed there.
What it does not know: which runs agree (`raycl.sweep.trials.prefix`).
"""

from __future__ import annotations

import json
import logging
from typing import Any

from raycl.config import Tree
from raycl.errors import AlreadyExistsError, CheckpointError
from raycl.storage import Storage
from raycl.storage.records import read_record, seal
from raycl.training.records import checkpoint as checkpoints
from raycl.training.records import progress
from raycl.training.records.journal import Journal, read_state
from raycl.training.training_context import RunInfo

log = logging.getLogger("raycl")

FORK_POINT = "fork_point.json"
FORMAT = 3
PREDICTIONS = "predictions"


def save_fork_point(storage: Storage, done: int, to: Storage) -> None:
    """Keep a place to go on from after `done` phases; the file that says so comes last. Kept once, by the first."""
    state = read_state(storage)
    if to.exists(FORK_POINT) or len(state.phases) != done or not state.checkpoints:
        return
    name = state.checkpoints[-1]
    copy = f"{name}-{storage.uri.rsplit('/', 1)[-1]}"  # two lenders at once do not write the same files
    _copy(storage.sub(f"{checkpoints.FOLDER}/{name}"), to.sub(copy))
    fork_point = {"format": FORMAT, "run": storage.address, "checkpoint": copy, "phases": state.phases}
    try:
        to.create(FORK_POINT, seal(fork_point))
    except AlreadyExistsError:
        log.info("    somebody else lent '%s' first", to.uri)


def read_fork_point(fork_point: Storage) -> Tree | None:
    """What `save_fork_point` kept; None: nothing is there.

    Raises:
        StorageError: it is damaged.
    """
    return read_record(fork_point, FORK_POINT, FORMAT) if fork_point.exists(FORK_POINT) else None


def start_from(fork_point: Storage, storage: Storage, phases: list[dict[str, Any]], run: RunInfo | None = None) -> None:
    """Begin the run in `storage`, which has not begun yet, behind the phases of `fork_point`.

    Args:
        phases: their journal records, without what the lender's own settings had a part in.
        run: that begins.

    Raises:
        CheckpointError: what was lent is damaged; the run has not begun then.
    """
    tree = read_fork_point(fork_point)
    assert tree is not None, "nobody borrows from where nothing was lent"
    name = str(tree["checkpoint"])
    folder = f"{checkpoints.FOLDER}/{name}"
    _copy(fork_point.sub(name), storage.sub(folder))
    try:
        checkpoints.read_checkpoint(storage, name)
    except CheckpointError:
        storage.delete(folder)
        raise
    source_run = Storage.at(tree["run"])
    for record in phases:
        folder = f"{PREDICTIONS}/{record['phase']:03d}-{record['times']['phase']}"
        _copy(source_run.sub(folder), storage.sub(folder))
    steps = [json.dumps(step) for step in progress.read_trace(source_run) if step["phase"] < len(phases)]
    journal = Journal.claim(storage, run, workers=0, driver="", forked_from=source_run.uri)
    storage.write(f"{progress.FOLDER}/attempt-{journal.attempt:04d}.jsonl", ("\n".join(steps) + "\n").encode())
    journal.begin_with([name], phases)


def _copy(source: Storage, target: Storage) -> None:
    for name in source.files():
        target.write(name, source.read(name))
