"""Training states in the bank: what a snapshot names beside its adapters, and runs that start from one.

A run that starts from a snapshot begins with the checkpoint and the phase records of the run that published it, as if
it had been that run and got more tasks. It evaluates the snapshot's phase first, whose row was not known yet when
the snapshot was published.
What it does not know: how its config was made (`raycl.run.start`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from raycl.bank import Bank, Snapshot
from raycl.bank.bank import ObjectReader, info_of
from raycl.bank.leases import hold_lease
from raycl.bank.manifest import dump
from raycl.bank.training_state import get_state, put_state, restore_record, state_objects
from raycl.errors import BankError
from raycl.storage import Storage
from raycl.training.records.checkpoint import Checkpoint, write_checkpoint
from raycl.training.records.journal import Journal
from raycl.training.records.tensor_objects import TensorObjects, grouped
from raycl.training.training_context import RunInfo

PARAMETERS = "parameters"


def put_training_state(bank: Bank, done: Checkpoint, phases: list[dict[str, Any]], objects: TensorObjects) -> str:
    """Store the state at the end of a phase; returns its hash.

    Args:
        phases: journal records of the phases before.
        objects: of the run; they know the hashes of tensors that have not changed.
    """
    groups = groups_of(done)
    infos = {group: objects.info(group, tensors) for group, tensors in groups.items()}
    return put_state(bank, _values(done, phases), groups, infos)


def restore_training_state(bank: Bank, snapshot: Snapshot, done: Checkpoint, phases: list[dict[str, Any]]) -> bool:
    """Write the record of a training state that is lost or damaged again; returns whether it was.

    Args:
        done: the last checkpoint of the snapshot's phase. phases: as in `put_training_state`.
    """
    objects = {group: info_of(tensors) for group, tensors in groups_of(done).items()}
    return restore_record(bank, snapshot, _values(done, phases), objects)


def groups_of(done: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """The tensors of a training state."""
    groups = {PARAMETERS: done.parameters, **grouped(done.frozen_state)}
    return {name: held for name, held in groups.items() if held}


def _values(done: Checkpoint, phases: list[dict[str, Any]]) -> dict[str, Any]:
    values = {"phase": done.phase, "steps": done.steps, "method": done.method, "modifiers": done.modifiers}
    bare = [{**record, "summary": {}} for record in phases]  # summaries grow with the number of tasks, times phases
    return {**values, "phases": bare}


def start_from_snapshot(
    bank: Bank, snapshot: Snapshot, identity: str, storage: Storage, run: RunInfo, reader: ObjectReader | None = None
) -> None:
    """Start the run in `storage`, which has not started yet, where the snapshot's run was when it published it.

    Frozen tensors stay in the bank: the run's checkpoints name them.

    Args:
        identity: SHA-256 of the run's backbone.
        reader: reads the bank's tensors; None: the bank itself.

    Raises:
        BankError: the training state is missing or damaged, or of another backbone; the run has not started then.
    """
    if snapshot.backbone.sha256 != identity:
        raise BankError(
            f"snapshot {snapshot.number} was trained on backbone '{snapshot.backbone.name}' "
            f"({snapshot.backbone.sha256[:12]}), this run has '{run.tree['backbone']['name']}' ({identity[:12]}): "
            "use the one that it was trained on"
        )
    values, groups = get_state(bank, snapshot, reader)
    objects = state_objects(bank, snapshot)
    versions = {entry.name: entry.version for entry in snapshot.adapters}
    checkpoint = Checkpoint(
        values["phase"],
        values["steps"],
        values["steps"],
        values["method"],
        groups.get(PARAMETERS, {}),
        spent={"train_s": 0.0, "tokens": 0.0},
        published={"bank": bank.storage.address, "snapshot": snapshot.number, "adapters": versions},
        modifiers=values["modifiers"],
        snapshot=dump(snapshot),
    )
    stored = {group: info for group, info in objects.items() if group != PARAMETERS}
    name = f"phase{checkpoint.phase:03d}-start-{snapshot.sha256[:12]}"
    write_checkpoint(storage, name, checkpoint, TensorObjects(storage), stored)
    hold_lease(bank.storage, storage.address, [snapshot.number])
    journal = Journal.claim(
        storage, run, workers=0, driver="", started_from=f"{bank.storage.address}@{snapshot.sha256}"
    )
    journal.begin_with([name], values["phases"])
