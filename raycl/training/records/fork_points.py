"""Fork points: checkpoint and journal records of a run after its first phases, from which another run can continue.

Two runs with the same effective settings up to some phase are the same run up to there, bit for bit; the second one
starts with the checkpoint and journal records of the first, as if it had been resumed there.
"""

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from typing import Any

from raycl.bank.manifest import Sha256
from raycl.bank.pruning import hold_lease
from raycl.config.names import FolderName
from raycl.config.trust import Server
from raycl.errors import AlreadyExistsError, CheckpointError, DamagedError
from raycl.storage import Storage
from raycl.storage.records import read_fields, seal
from raycl.training.definition.training_context import RunInfo
from raycl.training.records import checkpoint as checkpoints
from raycl.training.records import progress
from raycl.training.records.journal import Journal, read_state
from raycl.training.records.schema import PhaseRecord
from raycl.training.records.tensor_objects import TensorObjects

log: logging.Logger = logging.getLogger("raycl")

FORK_POINT = "fork_point.json"
FORMAT = 4
PREDICTIONS = "predictions"


@dataclass(frozen=True)
class ForkPoint:
    """The record of a fork point.

    Attributes:
        run: address of the run that saved it. phases: its records of its phases.
        checkpoint: name of its folder here. sha256: hash of the checkpoint's manifest.
    """

    run: str
    checkpoint: FolderName
    sha256: Sha256
    phases: list[PhaseRecord]


def save_fork_point(storage: Storage, done: int, to: Storage) -> None:
    """Save a fork point after `done` phases, its manifest last. If there is one already, nothing is written."""
    state = read_state(storage)
    if to.exists(FORK_POINT) or len(state.phases) != done or not state.checkpoints:
        return
    name = state.checkpoints[-1]
    run = hashlib.sha256(storage.address.encode()).hexdigest()[:16]
    copy, manifest = f"{name}-{run}", state.manifests[name]  # runs that save at the same time write different files
    checkpoints.copy_checkpoint(storage, f"{checkpoints.FOLDER}/{name}", to, copy, manifest)
    fork_point = ForkPoint(storage.address, copy, manifest, state.phases)
    try:
        to.create(FORK_POINT, seal({"format": FORMAT, **vars(fork_point)}))
    except AlreadyExistsError:
        log.info("    fork point '%s' was saved by another run", to.uri)


def read_fork_point(fork_point: Storage) -> ForkPoint | None:
    """Return the manifest that `save_fork_point` wrote; None: there is no fork point.

    Raises:
        StorageError: it is damaged, or names a run that is not beside it.
    """
    if not fork_point.exists(FORK_POINT):
        return None
    record = read_fields(fork_point, FORK_POINT, FORMAT, ForkPoint)
    if Server.of(record.run) != Server.of(fork_point.address):  # which no sweep writes
        raise DamagedError(f"'{fork_point.uri}/{FORK_POINT}' names a run on another storage: remove it")
    return record


def start_from(
    fork_point: Storage,
    storage: Storage,
    phases: list[dict[str, Any]],
    run: RunInfo | None = None,
    bank: Storage | None = None,
) -> None:
    """Start the run in `storage`, which has not started yet, after the phases of `fork_point`.

    Args:
        phases: their journal records, without values that depend on the source run's own settings.
        run: the run that starts.
        bank: holds what the source run published, if it did.

    Raises:
        CheckpointError: the fork point is damaged; the run has not started then.
    """
    point = read_fork_point(fork_point)
    assert point is not None, "there is no fork point here"
    name = point.checkpoint
    folder = f"{checkpoints.FOLDER}/{name}"
    try:
        checkpoints.copy_checkpoint(fork_point, name, storage, folder, point.sha256)
        checkpoints.read_checkpoint(storage, name, TensorObjects(storage, bank), sha256=point.sha256)
    except CheckpointError:
        storage.delete(folder)
        raise
    source_run = Storage.at(point.run)
    if run is not None:  # what it reads is compared with what the source run read when its workers claim it
        run = replace(run, inputs=read_state(source_run).inputs)
    for record in phases:
        folder = f"{PREDICTIONS}/{record['phase']:03d}-{record['times']['phase']}"
        for file in source_run.sub(folder).files():
            storage.sub(folder).write(file, source_run.sub(folder).read(file))
    steps = [json.dumps(step) for step in progress.read_trace(source_run) if step["phase"] < len(phases)]
    journal = Journal.claim(storage, run, workers=0, driver="", forked_from=source_run.uri)
    storage.write(f"{progress.FOLDER}/attempt-{journal.attempt:04d}.jsonl", ("\n".join(steps) + "\n").encode())
    if bank is not None and phases[-1]["bank"]:
        hold_lease(bank, storage.address, [phases[-1]["bank"]["snapshot"]])
    journal.begin_with(name, point.sha256, phases)
