"""States that belong to a snapshot: its router's, and what training needs to continue in addition to that of answering.

    states/<2 hex>/<sha256>.json     a record, named by its content: values, and the object of each group of tensors

Tensors of adapters and routers are stored once, as the same objects.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from raycl.bank.bank import Bank, ObjectReader, info_of
from raycl.bank.manifest import ModelInfo, ObjectInfo, RouterInfo, Snapshot, bank_errors, read_bytes
from raycl.bank.pruning import removed_from
from raycl.bank.tensors import views
from raycl.errors import BankError
from raycl.storage.records import fields_of, seal, unseal
from raycl.types import RouterState

ENCODER = "encoder"


def put_router(bank: Bank, state: RouterState) -> tuple[RouterInfo, ModelInfo | None]:
    """Store a router's tensors, and return its entry in a snapshot and that of its encoder."""
    tensors = bank.put(state.tensors) if state.tensors else None
    settings = state.settings if state.encoder is None else {**state.settings, ENCODER: state.encoder}
    router = RouterInfo(kind=state.kind, settings=settings, tensors=tensors, package=state.package)
    if state.encoder is None:
        return router, None
    return router, ModelInfo(name=str(state.encoder["name"]), sha256=state.encoder_sha256, kind="sentence encoder")


def get_router(reader: ObjectReader, snapshot: Snapshot) -> RouterState:
    """Return the router of a snapshot; its tensors are read-only.

    Raises:
        BankError: the router's tensors are missing or damaged.
    """
    router = snapshot.router
    settings = {key: value for key, value in router.settings.items() if key != ENCODER}
    what, tensors = f"the router of snapshot {snapshot.number}", {}
    if router.tensors:
        (data,) = reader.read_objects([(what, router.tensors)])
        tensors = views(data, what)
    encoder = snapshot.encoder.sha256 if snapshot.encoder else ""
    return RouterState(router.kind, settings, tensors, router.settings.get(ENCODER), encoder, router.package)


FORMAT = 2

_FILE = re.compile(r"states/([0-9a-f]{2})/\1[0-9a-f]{62}\.json")


@dataclass(frozen=True)
class _Stored:
    """The record of a training state: values, and the object of each group of tensors."""

    values: dict[str, Any]
    objects: dict[str, ObjectInfo]


def put_state(
    bank: Bank,
    values: Mapping[str, Any],
    groups: Mapping[str, Mapping[str, Tensor]],
    objects: Mapping[str, ObjectInfo] | None = None,
) -> str:
    """Store a training state; returns its SHA-256, which a snapshot names.

    Args:
        objects: the object of each group, where its hash is known; those that the bank has are not written again.
    """
    infos = objects or {group: info_of(tensors) for group, tensors in groups.items()}
    infos = _without_removed(bank, infos)
    for group, info in infos.items():
        if not bank.storage.exists(info.file):
            bank.put(groups[group])
    data = _sealed(values, infos)
    sha256 = hashlib.sha256(data).hexdigest()
    if not bank.storage.exists(state_file(sha256)):
        bank.storage.write(state_file(sha256), data)
    return sha256


def restore_record(
    bank: Bank, snapshot: Snapshot, values: Mapping[str, Any], objects: Mapping[str, ObjectInfo]
) -> bool:
    """Write a lost or damaged record again if these values and objects are what it named; returns whether it did."""
    data = _sealed(values, objects)
    assert snapshot.training is not None, "the snapshot names a training state"
    if has_state(bank, snapshot) or hashlib.sha256(data).hexdigest() != snapshot.training:
        return False
    bank.storage.write(state_file(snapshot.training), data)
    return True


def has_state(bank: Bank, snapshot: Snapshot) -> bool:
    """Return whether the record of the snapshot's training state can be read."""
    try:
        get_record(bank, snapshot)
    except BankError:
        return False
    return True


def _sealed(values: Mapping[str, Any], objects: Mapping[str, ObjectInfo]) -> bytes:
    named = {group: info.model_dump() for group, info in objects.items()}
    return seal({"format": FORMAT, "values": dict(values), "objects": named})


def get_state(bank: Bank, snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Return values and tensors by group, which are read-only.

    Raises:
        BankError: the snapshot has no training state, or a part of it is missing or damaged.
    """
    values, objects = get_record(bank, snapshot)
    objects = _without_removed(bank, objects)
    wanted = [(f"the training state of snapshot {snapshot.number} ({group})", info) for group, info in objects.items()]
    read = bank.read_objects(wanted)
    tensors = [views(data, what) for (what, _), data in zip(wanted, read, strict=True)]
    return values, dict(zip(objects, tensors, strict=True))


def _without_removed(bank: Bank, objects: Mapping[str, ObjectInfo]) -> dict[str, ObjectInfo]:
    """Return groups without samples that were removed from the bank on purpose, which a run must not publish again."""
    removed = removed_from(bank.storage).samples
    return {group: info for group, info in objects.items() if info.file not in removed}


def get_record(bank: Bank, snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, ObjectInfo]]:
    """Return values, and the object of each group of tensors.

    Raises:
        BankError: the snapshot has no training state, or its record is missing or damaged.
    """
    what = f"the training state of snapshot {snapshot.number}"
    if snapshot.training is None:
        raise BankError(
            f"snapshot {snapshot.number} of '{bank.storage.uri}' has no training state, so it answers but cannot be "
            "trained on: expected a snapshot that a run published and from which nothing was removed"
        )
    file = state_file(snapshot.training)
    if not bank.storage.exists(file):
        raise BankError(f"{what} is missing: restore '{file}' from a copy")
    data = read_bytes(bank.storage, file)
    if hashlib.sha256(data).hexdigest() != snapshot.training:
        raise BankError(f"{what} is damaged (the hash of '{file}' differs): restore a copy")
    with bank_errors():
        record = fields_of(unseal(data, file, FORMAT), file, _Stored)
    return record.values, record.objects


def state_objects(bank: Bank, snapshot: Snapshot) -> dict[str, ObjectInfo]:
    """Return group -> object that the snapshot's training state names; none without a training state.

    Raises:
        BankError: its record is missing or damaged.
    """
    return {} if snapshot.training is None else get_record(bank, snapshot)[1]


def state_file(sha256: str) -> str:
    """Return the file name, such as `states/ab/ab...json`."""
    return f"states/{sha256[:2]}/{sha256}.json"


def is_state(file: str) -> bool:
    """Return whether a file is called as a training state is."""
    return _FILE.fullmatch(file) is not None
