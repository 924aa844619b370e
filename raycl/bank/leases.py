"""Leases: the snapshots that an unfinished run may continue from, which pruning keeps.

    leases/<hash of the run's address>.json     written again at every checkpoint, deleted at the end of the run

A run that ended without finishing leaves its lease behind, which expires after `LEASE_S`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from raycl.errors import BankError, DamagedError, FormatError
from raycl.storage import Storage
from raycl.storage.records import read_fields, seal

FOLDER = "leases"
FORMAT = 1
LEASE_S = 30 * 24 * 3600.0
"""Age at which a lease expires."""

_FILE = re.compile(r"leases/[0-9a-f]{16}\.json")


@dataclass(frozen=True)
class _Lease:
    """The record of a lease."""

    run: str
    snapshots: list[int]


_LEASE = TypeAdapter(_Lease)


def hold_lease(storage: Storage, run: str, snapshots: Sequence[int]) -> None:
    """Record that the run may continue from these snapshots, and from no others."""
    storage.write(_file(run), seal({"format": FORMAT, "run": run, "snapshots": sorted(set(snapshots))}))


def release_lease(storage: Storage, run: str) -> None:
    """Delete the lease of a finished run."""
    if storage.exists(_file(run)):
        storage.delete(_file(run))


def leased(storage: Storage, max_age_s: float = LEASE_S) -> dict[int, str]:
    """Return snapshots that unfinished runs may continue from -> the run.

    Raises:
        BankError: a lease is damaged, so its snapshots are unknown.
    """
    runs: dict[int, str] = {}
    for lease in _leases(storage, max_age_s):
        if isinstance(lease, BankError):
            raise lease
        runs |= dict.fromkeys(lease.snapshots, lease.run)
    return runs


def lease_problems(storage: Storage) -> list[str]:
    """Return a sentence for each damaged lease."""
    return [str(lease) for lease in _leases(storage, LEASE_S) if isinstance(lease, BankError)]


def _leases(storage: Storage, max_age_s: float) -> Iterator[_Lease | BankError]:
    """Yield each lease that counts; in the place of a damaged one, what is wrong with it."""
    for file, entry in storage.files(FOLDER).items():
        if not is_lease(file) or entry.age >= max_age_s:
            continue
        try:
            lease = read_fields(storage, file, FORMAT, _LEASE)
            if _file(lease.run) != file:
                raise DamagedError(
                    f"'{storage.uri}/{file}' is the lease of '{lease.run}': it was moved; restore a copy"
                )
        except (DamagedError, FormatError) as error:
            yield BankError(f"{error}, or remove it if its run is finished or will never be continued")
        else:
            yield lease


def is_lease(file: str) -> bool:
    """Return whether a file is called as a lease is."""
    return _FILE.fullmatch(file) is not None


def _file(run: str) -> str:
    return f"{FOLDER}/{hashlib.sha256(run.encode()).hexdigest()[:16]}.json"
