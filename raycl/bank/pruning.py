"""Records of prunings of a bank, each written before anything is removed.

A missing snapshot is a loss unless it was removed; only a record distinguishes the two.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from raycl.errors import AlreadyExistsError, BankError, DamagedError, FormatError
from raycl.storage import Storage
from raycl.storage.records import numbered, numbers, read_fields, seal

FOLDER = "pruned"
FORMAT = 1


@dataclass
class Removed:
    """The removed objects that the records explain.

    Attributes:
        adapters: `name@version`. samples: files of stored samples.
        problems: one sentence for each record that cannot be read; it explains nothing.
    """

    snapshots: set[int] = field(default_factory=set)
    adapters: set[str] = field(default_factory=set)
    samples: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Removal:
    """The record of a pruning."""

    number: int
    snapshots: list[int]
    adapters: list[str]
    samples: list[str]
    time: float


_REMOVAL = TypeAdapter(_Removal)


def record_removal(
    storage: Storage, snapshots: Sequence[int], adapters: Sequence[str], samples: Sequence[str] = ()
) -> None:
    """Write down what is removed next."""
    fields = {"snapshots": list(snapshots), "adapters": list(adapters), "samples": list(samples), "time": time.time()}
    while True:
        number = max(numbers(storage, FOLDER), default=0) + 1
        try:
            storage.create(f"{FOLDER}/{numbered(number)}", seal({"format": FORMAT, "number": number, **fields}))
            return
        except AlreadyExistsError:
            continue


def removed_from(storage: Storage) -> Removed:
    """Return all that was removed so far."""
    removed = Removed()
    for number in numbers(storage, FOLDER):
        try:
            record = _read(storage, number)
        except BankError as error:
            removed.problems.append(str(error))
            continue
        removed.snapshots.update(record.snapshots)
        removed.adapters.update(record.adapters)
        removed.samples.update(record.samples)
    return removed


def _read(storage: Storage, number: int) -> _Removal:
    file = f"{FOLDER}/{numbered(number)}"
    try:
        record = read_fields(storage, file, FORMAT, _REMOVAL)
    except (DamagedError, FormatError) as error:
        raise BankError(str(error)) from error
    if record.number != number:
        raise BankError(f"'{file}' holds record {record.number}: it was moved; restore a copy")
    return record
