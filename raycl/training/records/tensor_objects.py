"""Tensors of checkpoints that are not learned any more, stored once under their hash in the run's folder.

    objects/<2 hex>/<sha256>.safetensors     one group of tensors, for example a frozen adapter

Checkpoints name them instead of copying them, so a checkpoint does not grow with the number of tasks. The bank of a run
that publishes holds the same objects under the same hashes; one that is damaged here is read from there, and written
again.
What it does not know: which checkpoints name an object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from raycl.bank.manifest import ObjectInfo
from raycl.bank.tensors import pack, views
from raycl.errors import BankError, CheckpointError
from raycl.storage import Storage

WHOLE = "tensor"
"""Name of the tensor in a group that holds one."""


class TensorObjects:
    """The objects of one run.

    Attributes:
        bank: storage of a bank with the same objects, or None.
    """

    def __init__(self, storage: Storage, bank: Storage | None = None) -> None:
        self.storage, self.bank = storage, bank
        self._written: dict[str, tuple[list[tuple[Tensor, int]], ObjectInfo]] = {}

    def put(self, group: str, tensors: Mapping[str, Tensor]) -> ObjectInfo:
        """Store a group; tensors that have not changed since this object stored them are not hashed again."""
        now = [(tensor, tensor._version) for tensor in tensors.values()]
        known = self._written.get(group)
        if known is not None and _are_same(known[0], now):
            return known[1]
        parts, digest = pack(tensors), hashlib.sha256()
        for part in parts:
            digest.update(part)
        info = ObjectInfo(sha256=digest.hexdigest(), bytes=sum(len(part) for part in parts))
        if not self.storage.exists(info.file):
            self.storage.write(info.file, *parts)
        self._written[group] = (now, info)
        return info

    def get(self, info: ObjectInfo, group: str) -> dict[str, Tensor]:
        """The tensors of a group, hash checked.

        Raises:
            CheckpointError: missing or damaged, in the bank too.
        """
        data = self._whole(self.storage, info)
        if data is None and self.bank is not None:
            data = self._whole(self.bank, info)
            if data is not None:
                self.storage.write(info.file, data)
        if data is None:
            raise CheckpointError(
                f"'{self.storage.uri}/{info.file}' ({group}) is missing or damaged (expected SHA-256 "
                f"{info.sha256[:12]}): restore a copy"
            )
        try:
            return {name: tensor.clone() for name, tensor in views(data, group).items()}
        except BankError as error:
            raise CheckpointError(str(error)) from error

    def _whole(self, storage: Storage, info: ObjectInfo) -> bytes | None:
        """The object's bytes; None: missing or damaged."""
        if not storage.exists(info.file):
            return None
        data = storage.read(info.file)
        return data if hashlib.sha256(data).hexdigest() == info.sha256 else None

    def copy(self, infos: Iterable[ObjectInfo], target: Storage) -> None:
        """Write objects to another folder, unless it has them."""
        for info in infos:
            if not target.exists(info.file):
                target.write(info.file, self.storage.read(info.file))

    def delete(self, infos: Iterable[ObjectInfo]) -> None:
        """Delete objects that no checkpoint names any more."""
        gone = {info.sha256 for info in infos}
        self._written = {group: known for group, known in self._written.items() if known[1].sha256 not in gone}
        for info in infos:
            if self.storage.exists(info.file):
                self.storage.delete(info.file)


def _are_same(old: list[tuple[Tensor, int]], new: list[tuple[Tensor, int]]) -> bool:
    """Whether these are the same tensors, none changed in place."""
    same = (one is two and before == after for (one, before), (two, after) in zip(old, new, strict=False))
    return len(old) == len(new) and all(same)


def grouped(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors of a state by what they belong to: `slot/<adapter>/<part>` by adapter, shorter names each alone."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        owner, slash, part = rest.partition("/")
        group, inner = (f"{kind}/{owner}/", part) if slash else (name, WHOLE)
        groups.setdefault(group, {})[inner] = tensor
    return groups


def ungrouped(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Back from what `grouped` gave."""
    return {
        f"{group}{inner}" if group.endswith("/") else group: tensor
        for group, held in groups.items()
        for inner, tensor in held.items()
    }


def infos_of(manifest: Mapping[str, Any]) -> dict[str, ObjectInfo]:
    """Group -> object that a checkpoint's manifest names."""
    return {group: ObjectInfo(**info) for group, info in manifest["objects"].items()}
