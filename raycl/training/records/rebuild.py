"""Objects of a bank that are gone or damaged, built again from the checkpoints of the run that published them.

A checkpoint holds the same tensors under other names, and an object's hash confirms that a candidate is the object. So
only the original bytes are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from raycl.bank import Bank, Snapshot
from raycl.bank.manifest import Layout, ObjectInfo, SnapshotAdapter
from raycl.bank.pruning import removed_from
from raycl.bank.states import state_objects
from raycl.errors import BankError, CheckpointError
from raycl.methods.base import under
from raycl.storage import Storage
from raycl.training.records.bank_start import groups_of
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint
from raycl.training.records.journal import RunState
from raycl.training.records.tensor_objects import TensorObjects
from raycl.types import COPY, MAGNITUDE

Candidates = Callable[[Checkpoint], Iterator[dict[str, Tensor]]]
"""Yields the tensors of a checkpoint that may be the object."""


@dataclass(frozen=True)
class BankObject:
    """An object that a snapshot names.

    Attributes:
        what: description for messages.
        adapter: it contains an adapter's tensors, which later snapshots name too.
        candidates: finds it in a checkpoint.
    """

    what: str
    summary: ObjectInfo
    adapter: bool
    candidates: Candidates


def objects_of(bank: Bank, snapshot: Snapshot) -> list[BankObject]:
    """Return all objects that a snapshot names: adapters, what is kept beside them, the router's tensors, training
    state."""
    bank_objects = []
    for entry in snapshot.adapters:
        bank_objects.append(
            BankObject(f"{entry}", entry.tensors, True, _adapter(entry, snapshot.layouts[entry.layout]))
        )
        for kind, summary in entry.extras.items():
            bank_objects.append(BankObject(f"{entry} ({kind})", summary, False, _extra(entry.name, kind)))
    if snapshot.router.tensors is not None:
        what = f"the router of snapshot {snapshot.number}"
        bank_objects.append(BankObject(what, snapshot.router.tensors, False, _router(snapshot)))
    with suppress(BankError):  # only the record names them
        for group, info in state_objects(bank, snapshot).items():
            what = f"the training state of snapshot {snapshot.number} ({group})"
            bank_objects.append(BankObject(what, info, False, _state(group)))
    return bank_objects


def lost_objects(bank: Bank, snapshots: Sequence[Snapshot]) -> list[BankObject]:
    """Return objects of these snapshots that are missing or damaged. Each object is read once and its hash is checked.

    Raises:
        StorageError: the bank is out of reach.
    """
    named: dict[str, BankObject] = {}
    for snapshot in snapshots:
        for bank_object in objects_of(bank, snapshot):
            named.setdefault(bank_object.summary.sha256, bank_object)
    removed = removed_from(bank.storage).samples
    return [
        bank_object
        for bank_object in named.values()
        if bank_object.summary.file not in removed and not _is_whole(bank, bank_object)
    ]


def rebuild(bank: Bank, storage: Storage, state: RunState, lost: Sequence[BankObject]) -> set[str]:
    """Write lost objects again, from the run's checkpoints; returns the hashes of those that are there again.

    Raises:
        RunError: a checkpoint is of another version. StorageError: bank or run are out of reach.
    """
    left = {lost_object.summary.sha256: lost_object for lost_object in lost}
    for name in reversed(state.checkpoints):
        if not left:
            break
        with suppress(CheckpointError):
            objects = TensorObjects(storage, bank.storage)
            checkpoint = read_checkpoint(storage, name, objects, partial=True, sha256=state.manifests[name])
            for sha256, lost_object in list(left.items()):
                if any(
                    bank.restore_object(lost_object.summary, tensors) for tensors in lost_object.candidates(checkpoint)
                ):
                    del left[sha256]
    return {lost_object.summary.sha256 for lost_object in lost} - left.keys()


def _is_whole(bank: Bank, bank_object: BankObject) -> bool:
    if not bank.storage.exists(bank_object.summary.file):  # raises where the store is out of reach
        return False
    try:
        bank.read_object(bank_object.summary, bank_object.what)
    except BankError:
        return False
    return True


def _adapter(entry: SnapshotAdapter, layout: Layout) -> Candidates:
    """Return a frozen adapter that the checkpoint carries, or the one whose training was just over."""
    parts = [f"{path}.{part}" for path in layout for part in ("lora_A", "lora_B")]
    trained = {part: f"model.{part}" for part in parts}
    trained |= {path + MAGNITUDE: f"model.{path}{MAGNITUDE}" for path in layout if entry.use_dora}
    trained |= {path + COPY: f"model.{path}{COPY}" for path in entry.copies}
    if entry.labels:
        trained |= {part: part for part in ("head.weight", "head.bias")}

    def candidates(checkpoint: Checkpoint) -> Iterator[dict[str, Tensor]]:
        yield from _unless_empty(under(f"slot/{entry.name}/", checkpoint.frozen_state))
        if trained and checkpoint.is_phase_end and checkpoint.parameters.keys() >= set(trained.values()):
            yield {part: checkpoint.parameters[name] for part, name in trained.items()}

    return candidates


def _extra(adapter: str, kind: str) -> Candidates:
    return lambda checkpoint: _unless_empty(under(f"{kind}/{adapter}/", checkpoint.frozen_state))


def _router(snapshot: Snapshot) -> Candidates:
    """Return any group of carried tensors, without what it holds of adapters and tasks that came later
    (`RouterState`)."""
    known = {entry.name for entry in snapshot.adapters} | {task.name for task in snapshot.tasks}
    known |= set(snapshot.router.settings.get("tasks", ()))
    known |= {entry.name.rpartition("-")[0] for entry in snapshot.adapters}  # slots with a value for every sub-key

    def candidates(checkpoint: Checkpoint) -> Iterator[dict[str, Tensor]]:
        for group in dict.fromkeys(name.partition("/")[0] for name in checkpoint.frozen_state):
            held = under(f"{group}/", checkpoint.frozen_state)
            yield from _unless_empty({name: value for name, value in held.items() if _of(name, known)})

    return candidates


def _state(group: str) -> Candidates:
    def candidates(checkpoint: Checkpoint) -> Iterator[dict[str, Tensor]]:
        if checkpoint.is_phase_end:
            yield from _unless_empty(groups_of(checkpoint).get(group, {}))

    return candidates


def _of(name: str, known: set[str]) -> bool:
    _, slash, owner = name.partition("/")
    return not slash or owner in known


def _unless_empty(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    if tensors:
        yield dict(tensors)
