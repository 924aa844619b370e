"""The end of a task, as the bank sees it: its adapters published, then a snapshot of all adapters so far.

Publishing the same again (an attempt that died before its checkpoint) gives the versions that are there already.
"""

from collections.abc import Collection
from contextlib import suppress
from typing import Any

from raycl.bank import Bank, NewSnapshot
from raycl.bank.branches import Branch, is_ancestor
from raycl.bank.manifest import ModelInfo, TaskInfo, dump
from raycl.bank.states import put_router
from raycl.errors import BankError, BranchMovedError, RunError
from raycl.methods.base import Learned
from raycl.storage import Storage
from raycl.training.definition.inputs import of_tasks, versions
from raycl.training.definition.settings import BankConfig
from raycl.training.definition.training_context import TrainingContext
from raycl.training.records.bank_start import put_training_state
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.records.journal import RunState
from raycl.training.records.tensor_objects import TensorObjects
from raycl.types import Phase


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
    prompts = {
        task.name: {**context.stream.prompt(task, codec).record(), "user_turns": context.stream.user_turns(task)}
        for task in seen
    }
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


def branch_of(config: BankConfig, storage: Storage) -> Branch:
    """Return the branch that the run moves."""
    return Branch(open_bank(config, storage), config.branch)


def move_branch(
    context: TrainingContext, storage: Storage, branch: Branch, published: dict[str, Any], resumed: bool = False
) -> None:
    """Move the run's branch to a snapshot that it published; where the branch is there already, nothing is done.

    A head that this run published itself may be replaced: a run that goes back to an older checkpoint publishes again.

    Args:
        branch: the run's (`branch_of`), which has read older moves already.
        published: result of `publish`.
        resumed: the run continues after that snapshot, and publishes what its branch may have beyond it again.

    Raises:
        RunError: another writer moved the branch, or it was rolled back; the snapshot is stored.
    """
    bank = branch.bank
    snapshot = bank.open(published["snapshot"])

    def is_own(number: int) -> bool:
        return _published_by(bank, number, (context.info.fingerprint, context.info.replaces))

    head = branch.head()
    is_behind = head is not None and head > snapshot.number and is_own(head)
    if head is not None and is_behind and (resumed or is_ancestor(bank, snapshot.number, bank.open(head))):
        return  # it was published again, as it was
    elsewhere = f"continue on another branch with --resume {storage.address} bank.branch=NAME"
    if (left := branch.left(snapshot.number)) is not None:
        raise RunError(
            f"branch '{branch.name}' of '{bank.storage.uri}' went back from snapshot {left} to {head}, and this run "
            f"continues from the former: {elsewhere}, or learn the next tasks from the latter with bank.start="
            f"{bank.storage.address}@{branch.name}"
        )
    try:
        branch.advance(snapshot, f"run {storage.uri}", is_own)
    except BranchMovedError as error:
        raise RunError(f"{error}: {elsewhere}") from error


def _published_by(bank: Bank, number: int, fingerprints: Collection[str]) -> bool:
    """Return whether a run with one of these fingerprints published a snapshot.

    Its address says nothing: a run's folder may be moved or copied.
    """
    with suppress(BankError):
        snapshot = bank.open(number)
        return snapshot.provenance.get("fingerprint") in fingerprints and not snapshot.is_derived
    return False


def is_elsewhere(config: BankConfig, storage: Storage, state: RunState) -> bool:
    """Return whether the run's branch was moved since the run published last: back, or forward by something else."""
    published = [record["bank"]["snapshot"] for record in state.phases if record["bank"]]
    if not published or not config.publish:
        return False
    branch = branch_of(config, storage)
    bank = branch.bank
    if branch.left(published[-1]) is not None:
        return True
    head = branch.head()
    return head is not None and head not in published and not _published_by(bank, head, (state.fingerprint,))
