"""Restores what a bank has lost of a run's snapshots from the checkpoints of the run.

A checkpoint holds the same tensors under other names, and an object's hash confirms that a candidate is the object. So
only the original bytes are written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from raycl.bank import Bank, Snapshot
from raycl.bank.manifest import Layout, ObjectInfo, SnapshotAdapter, dump, manifest_of, parse_snapshot
from raycl.bank.pruning import removed_from
from raycl.bank.states import has_state, state_objects
from raycl.errors import BankError, CheckpointError, some
from raycl.methods.base import under
from raycl.storage import Storage
from raycl.training.definition.training_context import TrainingContext
from raycl.training.records.bank_start import groups_of, restore_training_state
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint, read_snapshot
from raycl.training.records.journal import RunState
from raycl.training.records.publish import open_bank
from raycl.training.records.tensor_objects import TensorObjects
from raycl.types import COPY, MAGNITUDE

log = logging.getLogger("raycl")

LISTED = 10
"""Names in a message before the rest is only counted."""

Candidates = Callable[[Checkpoint], Iterator[Mapping[str, Tensor]]]
"""Yields the tensors of a checkpoint that may be the object."""


def restore_objects(context: TrainingContext, storage: Storage, state: RunState) -> bool:
    """Write tensors that the bank has lost again, as far as checkpoints hold them; whether any was written.

    Checkpoints name what is published, so one that cannot be read may be readable then.

    Raises:
        BankError: the snapshot that the run continues from was pruned, with tensors that no other snapshot names.
    """
    if not context.bank.publish or not state.checkpoints:
        return False
    bank = open_bank(context.bank, storage)
    published = PublishedSnapshots(bank, storage, state)
    last = max(published.phases, default=0)
    lost = lost_objects(bank, published.snapshots(last)[0].values())
    left = published.restore(lost)
    if left and last in published.removed:
        raise BankError(
            f"snapshot {last}, from which the run continues, was pruned from the bank '{bank.storage.uri}': "
            f"start a run from one that is there, with bank.start={bank.storage.address}@REF "
            f"(raycl bank branches {bank.storage.address} lists them)"
        )
    return len(left) < len(lost)


def publish_again(bank: Bank, storage: Storage, state: RunState, continues: bool, keeps_adapters: bool = True) -> None:
    """Put back what the bank has lost of the run's snapshots, from the checkpoints that are left; the rest is logged.

    Args:
        continues: the run has phases to come: the next snapshot is made from the last one, even if that was pruned.
        keeps_adapters: the next snapshot names the adapters of the last one too.

    Raises:
        BankError: an object that the next phase needs is lost for good. StorageError: bank or run are out of reach.
    """
    published = PublishedSnapshots(bank, storage, state)
    last = max(published.phases) if continues and published.phases else None
    snapshots, gone = published.snapshots(last)
    published.restore_states(snapshots.values())
    needed = {entry.tensors.sha256 for entry in snapshots[last].adapters} if last in snapshots else set()
    left = published.restore(lost_objects(bank, snapshots.values()))
    wanted = [lost for lost in left if lost.info.sha256 in needed and keeps_adapters]
    if missing := wanted or left:
        files = some([f"'{lost.info.file}'" for lost in missing], LISTED)
        built_on = ", and the next phase is built on them" if wanted else ""
        message = f"{_gone(missing, bank)}{built_on}: no checkpoint of the run holds them; restore {files} from a copy"
        if wanted:
            raise BankError(message)
        log.warning("%s", message)
    _restore_manifests(bank, snapshots, published.removed_adapters)
    for number in gone:
        phase = published.phases[number]
        what = f"snapshot {number} of phase {phase} is gone from the bank '{bank.storage.uri}' or damaged"
        try:
            if number not in published.copies:
                raise BankError(f"no checkpoint of phase {phase} is kept to publish it again from")
            bank.restore_snapshot(published.copies[number])
        except BankError as error:
            if number == last:
                raise BankError(
                    f"{what}, and the next phase is built on it: {error}; restore it from a copy"
                ) from error
            log.warning("%s: %s", what, error)
        else:
            log.warning("%s: published again", what)


class PublishedSnapshots:
    """The snapshots that a run has published.

    Attributes:
        phases: number -> its phase. copies: number -> the copy of its record in a checkpoint.
        removed: numbers that were pruned, and are not there again. removed_adapters: names with versions.
    """

    def __init__(self, bank: Bank, storage: Storage, state: RunState) -> None:
        self.bank, self.storage, self.state = bank, storage, state
        removed, self._numbers = removed_from(bank.storage), set(bank.snapshots())
        self.removed, self.removed_adapters = removed.snapshots - self._numbers, removed.adapters
        self.phases = {record["bank"]["snapshot"]: record["phase"] for record in state.phases if record["bank"]}
        self.copies: dict[int, bytes] = {}
        for name in state.checkpoints:
            with suppress(CheckpointError):
                if record := read_snapshot(storage, name, state.manifests[name]):
                    snapshot = parse_snapshot(record, None)
                    self.copies[snapshot.number] = record
                    self.phases.setdefault(snapshot.number, int(snapshot.provenance["phase"]))

    def snapshots(self, last: int | None) -> tuple[dict[int, Snapshot], list[int]]:
        """Return snapshots by number, by their copies where the bank's are lost; and which the bank has lost.

        Args:
            last: is wanted though it may have been pruned.
        """
        snapshots, gone = {}, []
        for number in sorted(self.phases):
            if number in self.removed and number != last:
                continue
            with suppress(BankError):
                if number in self._numbers:
                    snapshots[number] = self.bank.open(number)
                    continue
            gone.append(number)
            if number in self.copies:
                snapshots[number] = parse_snapshot(self.copies[number], None)
        return snapshots, gone

    def restore_states(self, snapshots: Iterable[Snapshot]) -> None:
        """Restore missing or damaged records of training states; their tensors are restored with all others."""
        lost = {item.number: item for item in snapshots if item.training is not None and not has_state(self.bank, item)}
        for checkpoint in self._checkpoints() if lost else ():
            snapshot = lost.get(checkpoint.published.get("snapshot", 0))
            phases = self.state.phases[: checkpoint.phase]
            if snapshot and restore_training_state(self.bank, snapshot, checkpoint, phases):
                del lost[snapshot.number]
                log.warning("the training state of snapshot %d: published again", snapshot.number)
        if lost:
            numbers = ", ".join(map(str, sorted(lost)))
            log.warning("the training state of snapshot %s is gone or damaged: no run can start from there", numbers)

    def restore(self, lost: Sequence[BankObject]) -> list[BankObject]:
        """Write lost objects again, from the run's checkpoints; returns those that no checkpoint holds.

        Raises:
            RunError: a checkpoint is of another version. StorageError: bank or run are out of reach.
        """
        left = list(lost)
        for checkpoint in self._checkpoints(partial=True) if lost else ():
            left = [item for item in left if not self._is_restored(item, checkpoint)]
            if not left:
                break
        if again := [item for item in lost if item not in left]:
            log.warning("%s: published again from the run's checkpoints", _gone(again, self.bank))
        return left

    def _is_restored(self, lost: BankObject, checkpoint: Checkpoint) -> bool:
        return any(self.bank.restore_object(lost.info, held) for held in lost.candidates(checkpoint) if held)

    def _checkpoints(self, partial: bool = False) -> Iterator[Checkpoint]:
        """Yield the readable checkpoints, the newest first."""
        for name in reversed(self.state.checkpoints):
            with suppress(CheckpointError):
                objects = TensorObjects(self.storage, self.bank.storage)
                yield read_checkpoint(self.storage, name, objects, partial, self.state.manifests[name])


@dataclass(frozen=True)
class BankObject:
    """An object that a snapshot names.

    Attributes:
        what: description for messages. candidates: finds it in a checkpoint.
    """

    what: str
    info: ObjectInfo
    candidates: Candidates


def lost_objects(bank: Bank, snapshots: Iterable[Snapshot]) -> list[BankObject]:
    """Return objects of these snapshots that are missing or damaged. Each object is read once and its hash is checked.

    Raises:
        StorageError: the bank is out of reach.
    """
    named: dict[str, BankObject] = {}
    for snapshot in snapshots:
        for item in _objects_of(bank, snapshot):
            named.setdefault(item.info.sha256, item)
    removed, exists = removed_from(bank.storage).samples, bank.storage.exists  # raises where the store is out of reach
    objects = [item for item in named.values() if item.info.file not in removed]
    return [item for item in objects if not (exists(item.info.file) and bank.is_whole(item.info))]


def _objects_of(bank: Bank, snapshot: Snapshot) -> Iterator[BankObject]:
    """Yield all objects that a snapshot names: adapters, what is kept beside them, the router's, training state."""
    for entry in snapshot.adapters:
        yield BankObject(str(entry), entry.tensors, _adapter(entry, snapshot.layouts[entry.layout]))
        for kind, info in entry.extras.items():
            yield BankObject(f"{entry} ({kind})", info, _group(f"{kind}/{entry.name}/"))
    if snapshot.router.tensors is not None:
        yield BankObject(f"the router of snapshot {snapshot.number}", snapshot.router.tensors, _router(snapshot))
    objects: Mapping[str, ObjectInfo] = {}
    with suppress(BankError):  # only the record names them
        objects = state_objects(bank, snapshot)
    for group, info in objects.items():
        yield BankObject(f"the training state of snapshot {snapshot.number} ({group})", info, _state(group))


def _group(start: str) -> Candidates:
    return lambda checkpoint: iter([under(start, checkpoint.frozen_state)])


def _state(group: str) -> Candidates:
    return lambda checkpoint: iter([groups_of(checkpoint).get(group, {})] if checkpoint.is_phase_end else [])


def _adapter(entry: SnapshotAdapter, layout: Layout) -> Candidates:
    """Return a frozen adapter that the checkpoint carries, or the one whose training was just over."""
    parts = [f"{path}.{part}" for path in layout for part in ("lora_A", "lora_B")]
    trained = {part: f"model.{part}" for part in parts}
    trained |= {path + MAGNITUDE: f"model.{path}{MAGNITUDE}" for path in layout if entry.use_dora}
    trained |= {path + COPY: f"model.{path}{COPY}" for path in entry.copies}
    if entry.labels:
        trained |= {part: part for part in ("head.weight", "head.bias")}

    def candidates(checkpoint: Checkpoint) -> Iterator[Mapping[str, Tensor]]:
        yield under(f"slot/{entry.name}/", checkpoint.frozen_state)
        if checkpoint.is_phase_end and checkpoint.parameters.keys() >= set(trained.values()):
            yield {part: checkpoint.parameters[name] for part, name in trained.items()}

    return candidates


def _router(snapshot: Snapshot) -> Candidates:
    """Return any kind of carried tensors, without what is of adapters and tasks that came later (`RouterState`)."""
    known = {entry.name for entry in snapshot.adapters} | {task.name for task in snapshot.tasks}
    known |= set(snapshot.router.settings.get("tasks", ()))
    known |= {entry.name.rpartition("-")[0] for entry in snapshot.adapters}  # slots with a value for every sub-key

    def candidates(checkpoint: Checkpoint) -> Iterator[Mapping[str, Tensor]]:
        for kind in dict.fromkeys(name.partition("/")[0] for name in checkpoint.frozen_state):
            held = under(f"{kind}/", checkpoint.frozen_state)
            yield {name: value for name, value in held.items() if "/" not in name or name.partition("/")[2] in known}

    return candidates


def _restore_manifests(bank: Bank, snapshots: Mapping[int, Snapshot], removed: Collection[str]) -> None:
    """Restore missing or damaged manifests of adapters from the first snapshot that names each."""
    seen, again = set(removed), []
    for _, snapshot in sorted(snapshots.items()):
        for entry in snapshot.adapters:
            if str(entry) in seen:
                continue
            seen.add(str(entry))
            with suppress(BankError):
                bank.manifest(entry.ref)
                continue
            lost = manifest_of(entry, snapshot)
            bank.storage.write(lost.file, dump(lost))
            again.append(str(entry))
    if again:
        names = some(again, LISTED)
        log.warning(
            "the manifest of %s is gone from the bank '%s' or damaged: published again", names, bank.storage.uri
        )


def _gone(objects: Sequence[BankObject], bank: Bank) -> str:
    names = some([item.what for item in objects], LISTED)
    return f"the tensors of {names} are gone from the bank '{bank.storage.uri}' or damaged"
