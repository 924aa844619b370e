"""Tensors of checkpoints that are not learned any more, stored once under their hash in the run's folder.

    objects/<2 hex>/<sha256>.safetensors     one group of tensors, for example a frozen adapter

Checkpoints name them instead of copying them, so a checkpoint does not grow with the number of tasks. What the run has
published, or read from the bank that it started from, is in the bank alone; with `bank.copies=true`, what is published
is stored here too. An object that is missing or damaged here is read from the bank.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from torch import Tensor

from raycl.bank.bank import ObjectReader, info_of
from raycl.bank.manifest import ObjectInfo
from raycl.bank.pruning import removed_from
from raycl.bank.tensors import StoredTensors, pack, views
from raycl.errors import BankError, CheckpointError
from raycl.storage import Storage
from raycl.storage.unfinished import Buffer

CHANGING = "modifier/"
"""Groups whose tensors are changed in place."""


SharedReader = Callable[[Storage], ObjectReader]
"""Opens a reader of a storage's objects whose memory all processes of a node share (Ray's object store)."""


class TensorObjects:
    """The objects of one run.

    Attributes:
        bank: storage of a bank that holds objects of the run, or None.
        shared: None: every process reads objects into memory of its own.
        copies: store published objects in the run's folder as well.
    """

    def __init__(
        self, storage: Storage, bank: Storage | None = None, shared: SharedReader | None = None, copies: bool = False
    ) -> None:
        self.storage = storage
        self.bank = bank
        self.shared = shared
        self.copies = copies
        self._hashed: dict[str, tuple[list[tuple[Tensor, int]], ObjectInfo]] = {}
        self._stored: set[str] = set()
        self._published: dict[str, str] = {}

    def info(self, group: str, tensors: Mapping[str, Tensor]) -> ObjectInfo:
        """Return the object of a group; tensors that have not changed since they were read or hashed are not hashed
        again."""
        if isinstance(tensors, StoredTensors):
            return tensors.info
        known = self._hashed.get(group)
        now = _versions(tensors)
        if known is not None and len(known[0]) == len(now):
            pairs = zip(known[0], now, strict=True)
            if all(old is new and before == after for (old, before), (new, after) in pairs):
                return known[1]
        info = info_of(tensors)
        self._hashed[group] = (now, info)
        return info

    def put(self, group: str, tensors: Mapping[str, Tensor]) -> ObjectInfo:
        """Store a group, unless this run has stored, published or read it."""
        info = self.info(group, tensors)
        if info.sha256 not in self._stored:
            if not self.storage.exists(info.file):
                self.storage.write(info.file, *pack(tensors))
            self._stored.add(info.sha256)
        return info

    def are_published(self, infos: Iterable[ObjectInfo]) -> None:
        """Mark objects that a snapshot of this run names, which stay in the bank as long as the run needs them."""
        if not self.copies:
            self._published = {info.file: info.sha256 for info in infos}
            self._stored |= set(self._published.values())

    def delete_copies(self) -> None:
        """Delete what an earlier checkpoint stored in the run's folder and a snapshot names since."""
        for file in self.storage.files("objects").keys() & self._published.keys():
            self.storage.delete(file)
        self._published = {}

    def get(self, infos: Mapping[str, ObjectInfo], partial: bool = False) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors of each group, hash checked. Those that are shared, and those of adapters, are read-only.

        Args:
            partial: groups that cannot be read are left out, as stored samples are that were removed on purpose.

        Raises:
            CheckpointError: one is missing or damaged, in the bank too.
        """
        objects = {} if self.shared is None else self._shared(self.shared, infos)
        for group, info in infos.items():
            if group in objects:
                continue
            try:
                objects[group] = self._own(info, group)
            except CheckpointError:
                if not partial and not (self.bank is not None and info.file in removed_from(self.bank).samples):
                    raise
        objects = {group: objects[group] for group in infos if group in objects}
        held = {group: tensors for group, tensors in objects.items() if not isinstance(tensors, StoredTensors)}
        self._hashed |= {group: (_versions(tensors), infos[group]) for group, tensors in held.items()}
        self._stored |= {infos[group].sha256 for group in objects}
        return objects

    def _shared(self, shared: SharedReader, infos: Mapping[str, ObjectInfo]) -> dict[str, Mapping[str, Tensor]]:
        """Return those groups that can be shared: of the bank, which other runs read too, and of this run; one request
        each.

        What modifiers keep stays their own: they change it in place.
        """
        tensors: dict[str, Mapping[str, Tensor]] = {}
        for storage in (self.bank, self.storage):
            files = storage.files("objects") if storage is not None else {}
            wanted = [
                (group, info)
                for group, info in infos.items()
                if group not in tensors and info.file in files and not group.startswith(CHANGING)
            ]
            if storage is None or not wanted:
                continue
            with suppress(BankError):  # a damaged one: each is read on its own then, and looked for in both places
                buffers = shared(storage).read_objects(wanted)
                tensors |= {
                    group: _tensors(data, group, info) for (group, info), data in zip(wanted, buffers, strict=True)
                }
        return tensors

    def _own(self, info: ObjectInfo, group: str) -> Mapping[str, Tensor]:
        data = self._whole(self.storage, info)
        if data is None and self.bank is not None:
            data = self._whole(self.bank, info)
            if data is not None and self.storage.exists(info.file):
                self.storage.write(info.file, data)
        if data is None:
            where, elsewhere = self.storage.uri, ""
            if self.bank is not None and self.storage.exists(info.file):
                elsewhere = f", and in the bank '{self.bank.uri}' too"
            elif self.bank is not None:
                where = self.bank.uri
            raise CheckpointError(
                f"'{where}/{info.file}' ({group}) is missing or damaged (expected SHA-256 "
                f"{info.sha256[:12]}){elsewhere}: restore a copy"
            )
        try:
            tensors = _tensors(data, group, info)
        except BankError as error:
            raise CheckpointError(str(error)) from error
        stored = isinstance(tensors, StoredTensors)
        return tensors if stored else {name: tensor.clone() for name, tensor in tensors.items()}

    def _whole(self, storage: Storage, info: ObjectInfo) -> bytes | None:
        """Return the object's bytes; None: missing or damaged."""
        if not storage.exists(info.file):
            return None
        data = storage.read(info.file)
        return data if hashlib.sha256(data).hexdigest() == info.sha256 else None

    def copy(self, infos: Iterable[ObjectInfo], target: Storage) -> None:
        """Write objects to another folder, unless it has them; those that only the bank has stay there."""
        for info in infos:
            if not target.exists(info.file) and self.storage.exists(info.file):
                target.write(info.file, self.storage.read(info.file))

    def delete(self, infos: Iterable[ObjectInfo]) -> None:
        """Delete objects that no checkpoint names any more."""
        self._stored -= {info.sha256 for info in infos}
        for info in infos:
            if self.storage.exists(info.file):
                self.storage.delete(info.file)


def _tensors(data: Buffer, group: str, info: ObjectInfo) -> Mapping[str, Tensor]:
    """Return those of an adapter, or of samples, are created when they are used: there may be thousands of them."""
    if group.endswith("/") and not group.startswith(CHANGING):
        return StoredTensors(data, group, info)
    return views(data, group)


def _versions(tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, int]]:
    """Return each with the number of changes in place so far."""
    return [(tensor, tensor._version) for tensor in tensors.values()]
