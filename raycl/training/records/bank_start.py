"""Training states in the bank: what a snapshot names in addition to its adapters, and runs that start from one.

A run that starts from a snapshot begins with the checkpoint and the phase records of the run that published it, as if
it had been that run and got more tasks. It evaluates the snapshot's phase first, whose row was not known yet when the
snapshot was published.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from raycl.bank import Bank, Snapshot
from raycl.bank.bank import info_of
from raycl.bank.pruning import hold_lease
from raycl.bank.states import get_record, put_state, restore_record
from raycl.bank.tensor_groups import PUBLISHED, TensorGroups
from raycl.errors import BankError, CheckpointError, DamagedError
from raycl.methods.base import Method, State, under
from raycl.routing.routers import without
from raycl.storage.records import fields_of
from raycl.training.definition.inputs import Inputs, changes
from raycl.training.definition.training_context import TrainingContext
from raycl.training.records.checkpoint import Checkpoint, write_checkpoint
from raycl.training.records.journal import Journal
from raycl.training.records.schema import Natural, PhaseRecord, RouterRecord
from raycl.training.records.tensor_objects import TensorObjects
from raycl.types import RouterState, Score

log: logging.Logger = logging.getLogger("raycl")

PARAMETERS = "parameters"
"""Group of the parameters of a training state."""

VALUES = ("phase", "steps", "method", "modifiers", "router")
"""Fields of a checkpoint that a training state holds as they are."""


@dataclass(frozen=True)
class _TrainingState:
    """What a training state holds beside tensors."""

    phase: Natural
    steps: Natural
    method: dict[str, Any]
    modifiers: dict[str, Any]
    router: RouterRecord
    phases: list[PhaseRecord]


def put_training_state(bank: Bank, done: Checkpoint, phases: list[dict[str, Any]], objects: TensorObjects) -> str:
    """Store the state at the end of a phase; returns its hash.

    Args:
        phases: journal records of the phases before.
        objects: objects of the run, with the hashes of unchanged tensors.
    """
    groups = groups_of(done)
    infos = {group: objects.info(group, tensors) for group, tensors in groups.items()}
    sha256 = put_state(bank, _values(done, phases), groups, infos)
    objects.are_published(infos.values())
    return sha256


def restore_training_state(bank: Bank, snapshot: Snapshot, done: Checkpoint, phases: list[dict[str, Any]]) -> bool:
    """Write the record of a training state that is lost or damaged again; returns whether it was.

    Args:
        done: the last checkpoint of the snapshot's phase. phases: see `put_training_state`.
    """
    objects = {group: info_of(tensors) for group, tensors in groups_of(done).items()}
    return restore_record(bank, snapshot, _values(done, phases), objects)


def groups_of(done: Checkpoint) -> dict[str, Mapping[str, Tensor]]:
    """Return the tensors of a training state."""
    groups = {PARAMETERS: done.parameters, **TensorGroups.of(done.frozen_state).groups}
    return {name: held for name, held in groups.items() if held}


def _values(done: Checkpoint, phases: list[dict[str, Any]]) -> dict[str, Any]:
    values = {name: getattr(done, name) for name in VALUES}
    bare = [  # summaries grow with the number of tasks, times phases
        {**record, "summary": {}, "bank": record["bank"] and {**record["bank"], "bank": ""}} for record in phases
    ]
    return {**values, "phases": bare, "router": _at(done.router, "")}


def _at(router: Mapping[str, Any], encoder: str) -> dict[str, Any]:
    """Return a router's values with this place of its sentence encoder.

    A training state names no places, since others get it as it is: the snapshot has that of the encoder.
    """
    return {**router, "encoder": {**router["encoder"], "name": encoder}} if router.get("encoder") else dict(router)


def without_task(
    values: Mapping[str, Any],
    frozen: Mapping[str, Tensor],
    method: type[Method],
    task: str,
    adapters: Collection[str],
    keep: bool = False,
) -> State:
    """Return values and frozen tensors of a training state without a task, as far as the method keeps tasks apart.

    Args:
        adapters: names of the task's adapters. keep: see `TaskRemoval`.

    Raises:
        BankError: the method has no adapters of its own for each task, or it is the only task.
    """
    if method.without_task is None:
        raise BankError(
            f"method {method.__name__} has no adapters of '{task}' alone: expected a method with adapters for "
            "each task, such as slm, sapt or inclora; or train again without the task"
        )
    if not values["phase"]:
        raise BankError(f"'{task}' is the only task that was learned: start a new run instead")
    names = [record["times"]["phase"] for record in values["phases"]]
    position = names.index(task) if task in names else len(names) - 1  # the row of the newest task is not known yet
    kept = [record for number, record in enumerate(values["phases"]) if number != position]
    rows = [{name: cell for name, cell in record["row"].items() if name != task} for record in kept]
    phases = [{**record, "phase": number, "row": rows[number]} for number, record in enumerate(kept)]
    state, left = method.without_task(values["method"], frozen, task, adapters, keep)
    router, start = values["router"], f"{PUBLISHED}/"
    published = without(RouterState(router["kind"], router["settings"], dict(under(start, left))), task)
    left = TensorGroups.of(left).select(
        lambda name: not name.startswith(start) or name.removeprefix(start) in published.tensors
    )
    owners = [pair for pair in router["owners"] if pair[0] not in adapters]
    router = {**router, "settings": published.settings, "owners": owners}
    return {**values, "phase": values["phase"] - 1, "phases": phases, "method": state, "router": router}, left


@dataclass(frozen=True)
class Revision:
    """A task that is learned again.

    Attributes:
        keep: it begins with the weights of its adapters.
        before: score of every task before, by its name.
    """

    task: str
    keep: bool
    before: Mapping[str, Score]


def read_training_state(
    bank: Bank, snapshot: Snapshot, objects: TensorObjects
) -> tuple[Checkpoint, list[dict[str, Any]]]:
    """Return the checkpoint at the end of the snapshot's phase, and the records of the phases before.

    Raises:
        BankError: the training state is missing or damaged.
    """
    values, infos = get_record(bank, snapshot)
    try:
        groups = objects.get(infos)
    except CheckpointError as error:
        raise BankError(f"the training state of snapshot {snapshot.number} cannot be read: {error}") from error
    versions = {entry.name: entry.version for entry in snapshot.adapters}
    record = f"the training state of snapshot {snapshot.number}"
    try:
        fields_of(values, record, _TrainingState)
    except DamagedError as error:
        raise BankError(f"{record} cannot be read: {error}") from error
    values["router"] = _at(values["router"], snapshot.encoder.name if snapshot.encoder else "")
    checkpoint = Checkpoint(
        **{name: values[name] for name in VALUES},
        step=values["steps"],
        parameters=dict(groups.pop(PARAMETERS, {})),
        spent={"train_s": 0.0, "tokens": 0.0},
        published={"bank": bank.storage.address, "snapshot": snapshot.number, "adapters": versions},
        frozen_state=TensorGroups(groups),
        snapshot=bank.storage.read(snapshot.file),
    )
    return checkpoint, values["phases"]


def start_from_snapshot(
    bank: Bank, snapshot: Snapshot, context: TrainingContext, objects: TensorObjects, revision: Revision | None = None
) -> None:
    """Start a run that has not started yet where the snapshot's run was when it published it.

    Frozen tensors stay in the bank: the run's checkpoints name them.

    Args:
        objects: objects of the run.
        revision: the task that is learned again; the run starts without it.

    Raises:
        BankError: the training state is missing or damaged, or of another backbone or other data; the run has not
            started then.
    """
    check_backbone(snapshot, context)
    check_snapshot_inputs(snapshot, context.info.inputs, revision.task if revision is not None else None)
    checkpoint, phases = read_training_state(bank, snapshot, objects)
    summary: dict[str, Any] = {"started_from": f"{bank.storage.address}@{snapshot.sha256}"}
    if revision is not None:
        adapters, values = adapters_of_task(snapshot, revision.task), _values(checkpoint, phases)
        values, frozen = without_task(
            values, checkpoint.frozen_state, type(context.method), revision.task, adapters, revision.keep
        )
        before = {name: asdict(score) for name, score in revision.before.items()}
        phases = values["phases"]
        changed = {name: values[name] for name in ("phase", "method", "router")}
        checkpoint = replace(checkpoint, **changed, frozen_state=frozen)
        summary["revised"] = {"task": revision.task, "snapshot": snapshot.number, "before": before}
    name = f"phase{checkpoint.phase:03d}-start-{snapshot.sha256[:12]}"
    manifest = write_checkpoint(objects.storage, name, checkpoint, objects)
    hold_lease(bank.storage, objects.storage.address, [snapshot.number])
    summary["versions"] = snapshot.provenance.get("versions")
    journal = Journal.claim(objects.storage, context.info, workers=0, driver="", **summary)
    journal.begin_with(name, manifest, phases)
    if revision is not None:
        log.info("without '%s', which is learned next:", revision.task)


def check_backbone(snapshot: Snapshot, context: TrainingContext) -> None:
    """Refuse a snapshot of another backbone; on the first worker, which knows the run's.

    Raises:
        BankError: it is one.
    """
    if snapshot.backbone.sha256 != context.identity:
        raise BankError(
            f"snapshot {snapshot.number} was trained on backbone '{snapshot.backbone.name}' "
            f"({snapshot.backbone.sha256[:12]}), this run has '{context.info.tree['backbone']['name']}' "
            f"({context.identity[:12]}): use the one that it was trained on"
        )


def check_snapshot_inputs(snapshot: Snapshot, inputs: Inputs, revised: str | None) -> None:
    """Refuse to go on from a snapshot with other data or pretrained models than it was learned from.

    Args:
        inputs: inputs of the run that starts. revised: a task that is learned again, perhaps from other data.

    Raises:
        BankError: some differ; names them.
    """
    if changed := changes(snapshot.provenance.get("inputs", {}), inputs, [revised] if revised else []):
        raise BankError(
            f"this run cannot start from snapshot {snapshot.number}, which was learned from other inputs: "
            f"{'; '.join(changed)}; restore those, or start a new run"
        )


def adapters_of_task(snapshot: Snapshot, task: str) -> list[str]:
    """Return names of the adapters that know this task and no other.

    Raises:
        BankError: the snapshot has no such task, or an adapter of it knows others too.
    """
    snapshot.require_task(task)
    for entry in snapshot.adapters:
        others = [other for other in entry.tasks if other != task]
        if task in entry.tasks and others:
            raise BankError(
                f"adapter {entry} learned '{task}' together with {', '.join(others)}, and no part of it is of one task "
                "alone: train again without it, or with a method that gives every task an adapter of its own"
            )
    return [entry.name for entry in snapshot.adapters if entry.tasks == (task,)]
