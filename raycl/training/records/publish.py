"""The end of a task, as the bank sees it: its adapters published, then a snapshot of all adapters so far.

Publishing the same again (an attempt that died before its checkpoint) gives the versions that are there already.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.bank.branches import Branch, is_ancestor
from raycl.bank.manifest import AdapterRef, ModelInfo, TaskInfo, dump, manifest_of, parse_snapshot
from raycl.bank.pruning import removed_from
from raycl.bank.states import has_state, put_router
from raycl.errors import BankError, BranchMovedError, CheckpointError, RunError, StorageError
from raycl.methods.base import Learned
from raycl.storage import Storage
from raycl.training.definition.inputs import of_tasks, versions
from raycl.training.definition.settings import BankConfig
from raycl.training.definition.training_context import TrainingContext
from raycl.training.records.bank_start import put_training_state, restore_training_state
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint, read_snapshot
from raycl.training.records.journal import RunState
from raycl.training.records.rebuild import BankObject, lost_objects, objects_of, rebuild
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Phase

log = logging.getLogger("raycl")

LISTED = 10
"""Names in a message before the rest is only counted."""


def open_bank(config: BankConfig, storage: Storage) -> Bank:
    """Return the configured bank, or the run's own."""
    return Bank(Storage.at(config.dir).with_retries(storage.retry_s)) if config.dir else Bank(storage.sub("bank"))


def publish(
    context: TrainingContext, phase: Phase, learned: Learned, done: Checkpoint, state: RunState, objects: TensorObjects
) -> tuple[dict[str, Any], bytes]:
    """Publish a phase's adapters and a snapshot; only rank 0 calls it.

    Args:
        done: the phase's last checkpoint. state: the run before this phase. objects: objects of the run.

    Returns:
        record for the journal (bank address, snapshot number and `name -> version`), and the snapshot's record.
    """
    storage = objects.storage
    bank = open_bank(context.bank, storage)
    before = state.phases[-1].get("bank") if state.phases else None
    codec = context.backbone.codec
    backbone = ModelInfo(name=context.info.tree["backbone"]["name"], sha256=context.identity, kind=codec.kind)
    provenance: dict[str, Any] = {"run": storage.uri, "fingerprint": context.info.fingerprint}
    provenance |= {"phase": phase.index, "phase_name": phase.name}
    seen = [task for done in context.phases[: phase.index + 1] for task in done.tasks]
    mine = [task.name for task in (phase.tasks if context.own_adapters else seen)]
    known = {name: bank.versions(name) for name in learned.adapters}
    fresh = [
        bank.publish(name, state, backbone, learned.owners.get(name, mine), provenance, extras=learned.extras.get(name))
        for name, state in learned.adapters.items()
    ]
    names = {manifest.name for manifest in fresh}
    parent = bank.open(before["snapshot"]) if before else None
    kept = []
    if parent is not None:
        again = {task.name for task in phase.tasks} if context.own_adapters else set()
        kept = [
            (entry, parent.layouts[entry.layout])
            for entry in parent.adapters
            if entry.name not in names and not (entry.tasks and again.issuperset(entry.tasks))
        ]
    router, encoder = put_router(bank, learned.router)
    provenance = {**provenance, "config": context.info.tree, "versions": versions(context.info.plugins)}
    prompts = {task.name: context.stream.prompt(task, codec).record() for task in seen}
    snapshot = bank.snapshot(
        NewSnapshot(
            [*fresh, *kept],
            backbone,
            router,
            [TaskInfo(name=task.name, labels=task.labels, metric=task.metric, **prompts[task.name]) for task in seen],
            encoder,
            parent=parent.number if parent else None,
            provenance={**provenance, "inputs": of_tasks(state.inputs, list(prompts))},
            training=put_training_state(bank, done, state.phases, objects),
        ),
        again=all(manifest.version in known[manifest.name] for manifest in fresh),
    )
    published = {entry.name: entry.version for entry in snapshot.adapters}
    return {"bank": bank.storage.address, "snapshot": snapshot.number, "adapters": published}, dump(snapshot)


def move_branch(context: TrainingContext, storage: Storage, published: dict[str, Any], resumed: bool = False) -> None:
    """Move the run's branch to a snapshot that it published; where the branch is there already, nothing is done.

    A head that this run published itself may be replaced: a run that goes back to an older checkpoint publishes again.

    Args:
        published: result of `publish`.
        resumed: the run continues after that snapshot, and publishes what its branch may have beyond it again.

    Raises:
        RunError: another writer moved the branch, or it was rolled back; the snapshot is stored.
    """
    bank, config = open_bank(context.bank, storage), context.bank
    snapshot, branch = bank.open(published["snapshot"]), Branch(bank, config.branch)

    def is_own(number: int) -> bool:
        with suppress(BankError):
            by = bank.open(number).provenance  # not its address: a run's folder may be moved or copied
            derived = {"forgotten", "merged"} & by.keys()
            return by.get("fingerprint") in (context.info.fingerprint, context.info.replaces) and not derived
        return False

    head = branch.head()
    is_behind = head is not None and head > snapshot.number and is_own(head)
    if head is not None and is_behind and (resumed or is_ancestor(bank, snapshot.number, bank.open(head))):
        return  # it was published again, as it was
    elsewhere = f"continue on another branch with --resume {storage.address} bank.branch=NAME"
    if (left := branch.left(snapshot.number)) is not None:
        raise RunError(
            f"branch '{config.branch}' of '{bank.storage.uri}' went back from snapshot {left} to {head}, and this run "
            f"continues from the former: {elsewhere}, or learn the next tasks from the latter with bank.start="
            f"{bank.storage.address}@{config.branch}"
        )
    try:
        branch.advance(snapshot, f"run {storage.uri}", is_own)
    except BranchMovedError as error:
        raise RunError(f"{error}: {elsewhere}") from error


def went_back(config: BankConfig, storage: Storage, state: RunState) -> bool:
    """Return whether the run's branch was rolled back from what the run published last."""
    published = [record["bank"]["snapshot"] for record in state.phases if record["bank"]]
    if not published or not config.publish:
        return False
    return Branch(open_bank(config, storage), config.branch).left(published[-1]) is not None


def complete_bank(
    context: TrainingContext,
    storage: Storage,
    state: RunState,
    world: DistributedContext,
    published: dict[str, Any] | None,
) -> None:
    """Publish lost objects of the bank again from rank 0 before a run continues. Collective: all raise its errors.

    Args:
        published: result of the last `publish`; its branch is moved there if the run ended before that.

    Raises:
        BankError, RunError, StorageError: see `publish_again` and `move_branch`.
    """
    error = None
    if world.is_first and context.bank.publish:
        continues = len(state.phases) < len(context.phases)
        try:
            publish_again(open_bank(context.bank, storage), storage, state, continues, context.own_adapters)
            if continues and published:
                move_branch(context, storage, published, resumed=True)
        except (BankError, RunError, StorageError) as raised:
            error = raised
    world.raise_any(error)


def restore_objects(context: TrainingContext, storage: Storage, state: RunState) -> bool:
    """Write tensors that the bank has lost again, as far as checkpoints hold them; whether any was written.

    Checkpoints name what is published, so one that cannot be read may be readable then.

    Raises:
        BankError: the snapshot that the run continues from was pruned, with tensors that no other snapshot names.
    """
    if not context.bank.publish or not state.checkpoints:
        return False
    bank = open_bank(context.bank, storage)
    numbers, copies = set(bank.snapshots()), _copies(storage, state)
    wanted = {record["bank"]["snapshot"] for record in state.phases if record["bank"]} | copies.keys()
    removed = removed_from(bank.storage).snapshots - numbers
    there = {n: _opened(bank, n, numbers) for n in sorted(wanted) if n not in removed or n == max(wanted)}
    lost = lost_objects(bank, list(_with_copies(there, copies).values()))
    again = rebuild(bank, storage, state, lost) if lost else set()
    _log_restored(bank, lost, again)
    if len(again) < len(lost) and max(wanted) in removed:
        raise BankError(
            f"snapshot {max(wanted)}, from which the run continues, was pruned from the bank '{bank.storage.uri}': "
            f"start a run from one that is there, with bank.start={bank.storage.address}@REF "
            f"(raycl bank branches {bank.storage.address} lists them)"
        )
    return bool(again)


def publish_again(bank: Bank, storage: Storage, state: RunState, continues: bool, keeps_adapters: bool = True) -> None:
    """Put back what the bank has lost of the run's snapshots, from the checkpoints that are left; the rest is logged.

    Args:
        continues: the run has phases to come: the next snapshot is made from the last one, even if that was pruned.
        keeps_adapters: the next snapshot names the adapters of the last one too.

    Raises:
        BankError: an object that the next phase needs is lost for good. StorageError: bank or run are out of reach.
    """
    numbers, removed = set(bank.snapshots()), removed_from(bank.storage).snapshots
    published = {record["bank"]["snapshot"]: record["phase"] for record in state.phases if record["bank"]}
    copies = _copies(storage, state)
    published |= {number: phase for number, (phase, _) in copies.items() if number not in published}
    last = max(published) if continues and published else None
    there = {n: _opened(bank, n, numbers) for n in sorted(published) if n not in removed or n == last}
    known = _with_copies(there, copies)
    _states_again(bank, storage, state, list(known.values()))
    needed = objects_of(bank, known[last]) if last in known and keeps_adapters else []
    _objects_again(
        bank,
        storage,
        state,
        list(known.values()),
        {needed_object.summary.sha256 for needed_object in needed if needed_object.adapter},
    )
    _manifests_again(bank, known)
    for number, opened in there.items():
        if opened is not None:
            continue
        phase = published[number]
        what = f"snapshot {number} of phase {phase} is gone from the bank '{bank.storage.uri}' or damaged"
        try:
            if number not in copies:
                raise BankError(f"no checkpoint of phase {phase} is kept to publish it again from")
            bank.restore_snapshot(copies[number][1])
        except BankError as error:
            if number == last:
                raise BankError(
                    f"{what}, and the next phase is built on it: {error}; restore it from a copy"
                ) from error
            log.warning("%s: %s", what, error)
        else:
            log.warning("%s: published again", what)


def _manifests_again(bank: Bank, snapshots: Mapping[int, Snapshot]) -> None:
    """Restore missing or damaged manifests of adapters from the first snapshot that names each."""
    removed, again = removed_from(bank.storage).adapters, []
    seen: set[str] = set()
    for _, snapshot in sorted(snapshots.items()):
        for entry in snapshot.adapters:
            if str(entry) in seen | removed:
                continue
            seen.add(str(entry))
            with suppress(BankError):
                bank.manifest(AdapterRef(name=entry.name, version=entry.version))
                continue
            lost = manifest_of(entry, snapshot)
            bank.storage.write(lost.file, dump(lost))
            again.append(str(entry))
    if again:
        log.warning(
            "the manifest of %s is gone from the bank '%s' or damaged: published again",
            _listed(again),
            bank.storage.uri,
        )


def _states_again(bank: Bank, storage: Storage, state: RunState, snapshots: Sequence[Snapshot]) -> None:
    """Restore missing or damaged records of training states; their tensors are restored with all others."""
    lost = {item.number: item for item in snapshots if item.training is not None and not has_state(bank, item)}
    for name in reversed(state.checkpoints) if lost else ():
        with suppress(CheckpointError):
            objects = TensorObjects(storage, bank.storage)
            checkpoint = read_checkpoint(storage, name, objects, sha256=state.manifests[name])
            snapshot = lost.get(checkpoint.published.get("snapshot", 0))
            if snapshot and restore_training_state(bank, snapshot, checkpoint, state.phases[: checkpoint.phase]):
                del lost[snapshot.number]
                log.warning("the training state of snapshot %d: published again", snapshot.number)
    if lost:
        numbers = ", ".join(map(str, sorted(lost)))
        log.warning("the training state of snapshot %s is gone or damaged: no run can start from there", numbers)


def _objects_again(
    bank: Bank, storage: Storage, state: RunState, snapshots: Sequence[Snapshot], needed: Collection[str]
) -> None:
    """Return tensors that are gone or damaged.

    Args:
        needed: hashes of those that the next snapshot names.
    """
    lost = lost_objects(bank, snapshots)
    if not lost:
        return
    again = rebuild(bank, storage, state, lost)
    _log_restored(bank, lost, again)
    left = [lost_object for lost_object in lost if lost_object.summary.sha256 not in again]
    wanted = [lost_object for lost_object in left if lost_object.summary.sha256 in needed]
    if missing := wanted or left:
        files = _listed([f"'{lost_object.summary.file}'" for lost_object in missing])
        built_on = ", and the next phase is built on them" if wanted else ""
        what = _gone([lost_object.what for lost_object in missing], bank)
        message = f"{what}{built_on}: no checkpoint of the run holds them; restore {files} from a copy"
        if wanted:
            raise BankError(message)
        log.warning("%s", message)


def _log_restored(bank: Bank, lost: Sequence[BankObject], again: Collection[str]) -> None:
    if back := [lost_object.what for lost_object in lost if lost_object.summary.sha256 in again]:
        log.warning("%s: published again from the run's checkpoints", _gone(back, bank))


def _gone(names: Sequence[str], bank: Bank) -> str:
    return f"the tensors of {_listed(names)} are gone from the bank '{bank.storage.uri}' or damaged"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _copies(storage: Storage, state: RunState) -> dict[int, tuple[int, bytes]]:
    """Return the number of a snapshot -> its phase and the copy of its record in a checkpoint."""
    copies: dict[int, tuple[int, bytes]] = {}
    for name in state.checkpoints:
        with suppress(CheckpointError):
            record = read_snapshot(storage, name, state.manifests[name])
            if record:
                snapshot = parse_snapshot(record, None)
                copies[snapshot.number] = (int(snapshot.provenance["phase"]), record)
    return copies


def _with_copies(opened: Mapping[int, Snapshot | None], copies: Mapping[int, tuple[int, bytes]]) -> dict[int, Snapshot]:
    """Return snapshots, from the copies in checkpoints where the bank's are gone."""
    return {
        n: snapshot_or_none or parse_snapshot(copies[n][1], None)
        for n, snapshot_or_none in opened.items()
        if snapshot_or_none or n in copies
    }


def _opened(bank: Bank, number: int, numbers: Collection[int]) -> Snapshot | None:
    """Return the snapshot; None: it is gone or damaged."""
    if number not in numbers:
        return None
    try:
        return bank.open(number)
    except BankError:
        return None
