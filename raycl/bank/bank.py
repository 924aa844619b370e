"""The bank: publish, fetch, snapshot, verify, prune, diff.

Versions and snapshots are created exclusively and never rewritten, so of two racing writers exactly one wins and the
other gets an error. Tensors are stored under their hash: without a manifest they are leftovers.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from raycl.bank.manifest import (
    AdapterManifest,
    AdapterRef,
    Layout,
    ModelInfo,
    ObjectInfo,
    RouterInfo,
    Snapshot,
    SnapshotAdapter,
    TaskInfo,
    adapter_of,
    check_name,
    dump,
    manifest_file,
    parse_manifest,
    parse_snapshot,
    read_bytes,
    snapshot_file,
)
from raycl.bank.tensors import DTYPES, pack, unpack, views
from raycl.errors import AlreadyExistsError, BankError, StorageError
from raycl.storage import Storage
from raycl.storage.records import Stamp, named_stamps, numbers, stamps
from raycl.storage.unfinished import Buffer
from raycl.types import AdapterState

R = TypeVar("R", AdapterManifest, Snapshot)

NamedObject = tuple[str, ObjectInfo]
"""A description for messages, and the object."""

RACES = 20
"""Attempts at the next free number; each failure means that another writer has published."""


class ObjectReader(Protocol):
    """Reads objects of a bank: the bank itself, or the object store of the cluster."""

    def read_objects(self, wanted: Sequence[NamedObject]) -> list[Buffer]:
        """Return the bytes of each, whose hashes are checked.

        Raises:
            BankError: one is missing or damaged.
        """
        ...


@dataclass(frozen=True)
class NewSnapshot:
    """The content of a new snapshot.

    Attributes:
        adapters: manifests, or entries of an older snapshot with their layouts.
        parent: number of the snapshot that it continues.
        training: SHA-256 of its training state (`raycl.bank.states`).
    """

    adapters: Iterable[AdapterManifest | tuple[SnapshotAdapter, Layout]]
    backbone: ModelInfo
    router: RouterInfo
    tasks: Sequence[TaskInfo] = ()
    encoder: ModelInfo | None = None
    parent: int | None = None
    provenance: Mapping[str, Any] | None = None
    training: str | None = None


class Bank:
    """A folder of adapters and snapshots on any storage."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @staticmethod
    def at(uri: str | Path) -> Bank:
        """Open a bank by path or URI; an empty one needs no creation."""
        return Bank(Storage.at(uri))

    # ---- adapters --------------------------------------------------------------------------------------------

    def publish(
        self,
        name: str,
        state: AdapterState,
        backbone: ModelInfo,
        tasks: Sequence[str] = (),
        provenance: Mapping[str, Any] | None = None,
        extras: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> AdapterManifest:
        """Store an adapter as a new version; the same tensors and provenance published again are the same version.

        Args:
            extras: kind -> tensors that belong to the adapter without being part of it (pseudo-samples).

        Raises:
            BankError: the name is no plain file name, or other writers are always faster.
        """
        check_name(name)
        parts = pack(state.tensors())
        beside = {kind: self.put(tensors) for kind, tensors in (extras or {}).items()}
        with self.storage.staging("objects", *parts) as write_as:  # continues while the hash is computed
            layout: Layout = {path: (int(a.shape[1]), int(b.shape[0])) for path, (a, b) in state.linears.items()}
            tensors = _object_info(parts)
            first = next((a for a, _ in state.linears.values()), state.prompt)
            fields = {
                "tensors": tensors,
                "layout": layout,
                "rank": state.rank,
                "scale": state.scale,
                "activation": state.activation,
                "use_dora": bool(state.magnitudes),
                "copies": {path: tuple(map(int, weight.shape)) for path, weight in state.copies.items()},
                "dtype": "float32" if first is None else str(first.dtype).removeprefix("torch."),
                "prompt": None if state.prompt is None else tuple(map(int, state.prompt.shape)),
                "labels": state.labels,
                "backbone": backbone,
                "tasks": tuple(tasks),
                "provenance": dict(provenance or {}),
                "extras": beside,
            }
            known = self.storage.exists(tensors.file)
            if not (known and self.is_whole(tensors)):
                write_as(tensors.file)
        taken = self.versions(name)
        for number in reversed(taken if known else taken[-1:]):  # new tensors cannot be those of an older version
            with suppress(BankError):  # a damaged manifest does not prevent publishing
                old = self.manifest(AdapterRef(name=name, version=number))
                if old == AdapterManifest(name=name, version=number, **fields):
                    return old
        manifest = self._create(lambda number: AdapterManifest(name=name, version=number, **fields), _next(taken))
        if manifest is None:
            raise BankError(f"'{name}': {RACES} versions in a row were taken by other writers: try again later")
        if not self.storage.exists(tensors.file):  # the object was pruned before the manifest was written
            raise BankError(f"the tensors of {manifest.ref} vanished while it was published: publish it again")
        return manifest

    def _create(self, record_of: Callable[[int], R], numbers: Iterable[int]) -> R | None:
        """Create the record of the first number that is free; None: other writers took all of them."""
        for number in numbers:
            record = record_of(number)
            with suppress(AlreadyExistsError):
                self.storage.create(record.file, dump(record))
                return record
        return None

    def is_whole(self, info: ObjectInfo) -> bool:
        """Return whether an object is there and its hash is right."""
        with suppress(BankError):
            self.read_object(info, "")
            return True
        return False

    def names(self) -> list[str]:
        """Return all adapters that have a version."""
        references = (adapter_of(file) for file in self.storage.files("adapters"))
        return sorted({ref.name for ref in references if ref is not None})

    def versions(self, name: str) -> list[int]:
        """Return the published versions of an adapter, ascending."""
        return numbers(self.storage, f"adapters/{check_name(name)}")

    def manifest(self, ref: AdapterRef) -> AdapterManifest:
        """Return the manifest of a version.

        Raises:
            BankError: it does not exist, or its manifest is damaged.
        """
        file = manifest_file(ref.name, ref.version)
        if not self.storage.exists(file):
            have = ", ".join(map(str, self.versions(ref.name))) or "none"
            raise BankError(f"the bank '{self.storage.uri}' has no {ref}: versions of '{ref.name}' are {have}")
        return parse_manifest(read_bytes(self.storage, file), file)

    def fetch(self, entry: AdapterManifest | SnapshotAdapter, layout: Layout | None = None) -> AdapterState:
        """Return an adapter's tensors, hash and shapes checked. On local disk they are views of the mapped file.

        Args:
            layout: layout in a snapshot's entry (`Snapshot.layouts`).

        Raises:
            BankError: the adapter is damaged, or differs from its manifest.
        """
        return unpack(self.read_object(entry.tensors, str(entry)), entry, layout)

    def read_object(self, info: ObjectInfo, what: str) -> Buffer:
        """Return the bytes of an object, whose hash is checked.

        Raises:
        BankError: the object is missing or damaged.
        """
        try:
            data = _mapped(self.storage.path(info.file)) if self.storage.is_local else self.storage.read(info.file)
        except (OSError, StorageError) as error:
            raise BankError(f"the tensors of {what} are missing: {error}; publish it again") from error
        digest = hashlib.sha256(data).hexdigest()
        if digest != info.sha256:
            raise BankError(
                f"the tensors of {what} are damaged: SHA-256 is {digest[:12]}, expected {info.sha256[:12]}: remove "
                f"'{info.file}' and publish it again"
            )
        return data

    def read_objects(self, wanted: Sequence[NamedObject]) -> list[Buffer]:
        return [self.read_object(info, what) for what, info in wanted]

    def put(self, tensors: Mapping[str, Tensor]) -> ObjectInfo:
        """Store tensors that belong to no adapter, such as a router's, under their hash."""
        parts = pack(tensors)
        with self.storage.staging("objects", *parts) as write_as:
            info = _object_info(parts)
            if not self.storage.exists(info.file):
                write_as(info.file)
        return info

    def restore_object(self, info: ObjectInfo, tensors: Mapping[str, Tensor]) -> bool:
        """Write an object that is lost or damaged once more, if these tensors are what it was; returns whether so."""
        kinds, size = {tensor.dtype for tensor in tensors.values()}, sum(tensor.nbytes for tensor in tensors.values())
        if size > info.bytes or not kinds <= set(DTYPES.values()):
            return False
        parts = pack(tensors)
        if _object_info(parts) != info:
            return False
        self.storage.write(info.file, *parts)
        return True

    def get(self, info: ObjectInfo, what: str) -> dict[str, Tensor]:
        """Return stored tensors after checking their hash.

        Raises:
        BankError: the object is missing or damaged.
        """
        return views(self.read_object(info, what), what)

    # ---- snapshots -------------------------------------------------------------------------------------------

    def snapshot(self, new: NewSnapshot, again: bool = False) -> Snapshot:
        """Publish an immutable snapshot; returns the newest one if it has the same content and provenance.

        Args:
            again: the snapshot may exist already, so that all older ones are compared and not only the newest.

        Raises:
            BankError: an adapter of another backbone, two of one name, or missing tensors.
        """
        backbone, router = new.backbone, new.router
        layouts: dict[str, Layout] = {}
        entries = []
        for given in new.adapters:
            if isinstance(given, AdapterManifest) and given.backbone.sha256 != backbone.sha256:
                raise BankError(
                    f"{given.ref} was made for backbone '{given.backbone.name}' ({given.backbone.sha256[:12]}), the "
                    f"snapshot is of '{backbone.name}' ({backbone.sha256[:12]}): they cannot be mixed"
                )
            layout = given.layout if isinstance(given, AdapterManifest) else given[1]
            key = hashlib.sha256(repr(sorted(layout.items())).encode()).hexdigest()[:16]
            if isinstance(given, AdapterManifest):
                held = given.model_dump(include=set(SnapshotAdapter.model_fields) - {"layout"})
                entry = SnapshotAdapter(**held, layout=key)
            else:
                entry = given[0]
            layouts[key] = layout
            entries.append(entry)
        names = [entry.name for entry in entries]
        if len(set(names)) != len(names):
            raise BankError(f"a snapshot cannot hold two versions of one adapter: {sorted(names)}")
        named = {entry.tensors.file for entry in entries} | ({router.tensors.file} if router.tensors else set())
        for file in named:
            if not self.storage.exists(file):
                raise BankError(f"'{file}' is missing from the bank: publish its adapter or router again")
        fields = {
            "backbone": backbone,
            "encoder": new.encoder,
            "router": router,
            "tasks": tuple(new.tasks),
            "layouts": layouts,
            "adapters": tuple(sorted(entries, key=lambda entry: entry.name)),
            "provenance": dict(new.provenance or {}),
            "training": new.training,
        }
        taken = self.snapshots()
        for number in reversed(taken if again else taken[-1:]):
            with suppress(BankError):  # a damaged record does not prevent publishing
                old = self.open(number)
                if old.provenance == fields["provenance"] and old.same_content(Snapshot(number=1, **fields)):
                    return old
        created = self._create(lambda number: Snapshot(number=number, parent=new.parent, **fields), _next(taken))
        if created is None:
            raise BankError(f"{RACES} snapshot numbers in a row were taken by other writers: try again later")
        return created

    def restore_snapshot(self, record: bytes) -> Snapshot:
        """Publish a snapshot that is lost or damaged once more, from a copy of its record.

        Raises:
            BankError: the record is damaged, or something that it names is missing.
        """
        snapshot = parse_snapshot(record, None)
        for entry in snapshot.adapters:
            for file in (entry.tensors.file, manifest_file(entry.name, entry.version)):
                if not self.storage.exists(file):
                    raise BankError(f"'{file}' is missing, which {entry} of snapshot {snapshot.number} needs")
        router = snapshot.router.tensors
        if router is not None and not self.storage.exists(router.file):
            raise BankError(f"'{router.file}' is missing, which the router of snapshot {snapshot.number} needs")
        self.storage.write(snapshot.file, record)
        return snapshot

    def snapshots(self) -> list[int]:
        """Return numbers of all snapshots, ascending."""
        return numbers(self.storage, "snapshots")

    def stamps(self) -> dict[int, Stamp]:
        """Return the number of each snapshot -> stamp of its record: a number that is used again after a deletion has
        another."""
        return stamps(named_stamps(self.storage, "snapshots"))

    def newest(self) -> Snapshot | None:
        """Return the snapshot of the highest number, or None."""
        numbers = self.snapshots()
        return self.open(numbers[-1]) if numbers else None

    def open(self, number: int) -> Snapshot:
        """Return a snapshot; no tensors are read.

        Raises:
            BankError: it does not exist or is damaged.
        """
        file = snapshot_file(number)
        if not self.storage.exists(file):
            have = ", ".join(map(str, self.snapshots()[-20:])) or "none"
            raise BankError(f"the bank '{self.storage.uri}' has no snapshot {number}: it has {have}")
        return parse_snapshot(read_bytes(self.storage, file), file)


def info_of(tensors: Mapping[str, Tensor]) -> ObjectInfo:
    """Return the object that `Bank.put` makes of these tensors; nothing is stored."""
    return _object_info(pack(tensors))


def _object_info(parts: Sequence[Buffer]) -> ObjectInfo:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return ObjectInfo(sha256=digest.hexdigest(), bytes=sum(len(part) for part in parts))


def _next(taken: Sequence[int]) -> range:
    first = max(taken, default=0) + 1
    return range(first, first + RACES)


def _mapped(path: str) -> Buffer:
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:  # an empty file has no pages to map
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
