"""Leases of unfinished runs, whose objects pruning keeps, and records of prunings.

    leases/<hash of the run's address>.json     written again at every checkpoint, deleted at the end of the run
    pruned/<number>.json                        written before anything is removed

A lease names the snapshots that an unfinished run may continue from. A run that ended without finishing leaves its
lease behind, which expires after `LEASE_S`. A missing snapshot is a loss unless a record says that it was removed.
"""

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from raycl.errors import AlreadyExistsError, BankError, DamagedError, FormatError
from raycl.storage import Storage
from raycl.storage.records import numbered, numbers, read_fields, seal

LEASES, PRUNED = "leases", "pruned"
FORMAT = 1
LEASE_S = 30 * 24 * 3600.0
"""Age at which a lease expires."""

_LEASE_FILE = re.compile(r"leases/[0-9a-f]{16}\.json")


@dataclass(frozen=True)
class _Lease:
    run: str
    snapshots: list[int]


def hold_lease(storage: Storage, run: str, snapshots: Sequence[int]) -> None:
    """Record that the run may continue from these snapshots, and from no others."""
    storage.write(_lease_file(run), seal({"format": FORMAT, "run": run, "snapshots": sorted(set(snapshots))}))


def release_lease(storage: Storage, run: str) -> None:
    """Delete the lease of a finished run."""
    if storage.exists(_lease_file(run)):
        storage.delete(_lease_file(run))


def leased(storage: Storage) -> dict[int, str]:
    """Return snapshots that unfinished runs may continue from -> the run.

    Raises:
        BankError: a lease is damaged, so its snapshots are unknown.
    """
    runs: dict[int, str] = {}
    for lease in _leases(storage):
        if isinstance(lease, BankError):
            raise lease
        runs |= dict.fromkeys(lease.snapshots, lease.run)
    return runs


def lease_problems(storage: Storage) -> list[str]:
    """Return a sentence for each damaged lease."""
    return [str(lease) for lease in _leases(storage) if isinstance(lease, BankError)]


def _leases(storage: Storage) -> Iterator[_Lease | BankError]:
    """Yield each lease that counts; in the place of a damaged one, what is wrong with it."""
    for file, entry in storage.files(LEASES).items():
        if not is_lease(file) or entry.age >= LEASE_S:
            continue
        try:
            lease = read_fields(storage, file, FORMAT, _Lease)
            if _lease_file(lease.run) != file:
                raise DamagedError(
                    f"'{storage.uri}/{file}' is the lease of '{lease.run}': it was moved; restore a copy"
                )
        except (DamagedError, FormatError) as error:
            yield BankError(f"{error}, or remove it if its run is finished or will never be continued")
        else:
            yield lease


def is_lease(file: str) -> bool:
    """Return whether a file is called as a lease is."""
    return _LEASE_FILE.fullmatch(file) is not None


def _lease_file(run: str) -> str:
    return f"{LEASES}/{hashlib.sha256(run.encode()).hexdigest()[:16]}.json"


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
    number: int
    snapshots: list[int]
    adapters: list[str]
    samples: list[str]
    time: float


def record_removal(
    storage: Storage, snapshots: Sequence[int], adapters: Sequence[str], samples: Sequence[str] = ()
) -> None:
    """Write down what is removed next."""
    fields = {"snapshots": list(snapshots), "adapters": list(adapters), "samples": list(samples), "time": time.time()}
    while True:
        number = max(numbers(storage, PRUNED), default=0) + 1
        try:
            storage.create(f"{PRUNED}/{numbered(number)}", seal({"format": FORMAT, "number": number, **fields}))
            return
        except AlreadyExistsError:
            continue


def removed_from(storage: Storage) -> Removed:
    """Return all that was removed so far."""
    removed = Removed()
    for number in numbers(storage, PRUNED):
        file = f"{PRUNED}/{numbered(number)}"
        try:
            record = read_fields(storage, file, FORMAT, _Removal)
            if record.number != number:
                raise DamagedError(f"'{file}' holds record {record.number}: it was moved; restore a copy")
        except (DamagedError, FormatError) as error:
            removed.problems.append(str(error))
            continue
        removed.snapshots.update(record.snapshots)
        removed.adapters.update(record.adapters)
        removed.samples.update(record.samples)
    return removed
