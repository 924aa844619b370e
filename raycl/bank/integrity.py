"""The integrity check of snapshots: each object is read and hashed once, and remembered.

A snapshot is activated before most of its adapters are needed; a damaged one must be found then, and not by the
requests that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from raycl.bank.bank import Bank, NamedObject
from raycl.bank.manifest import Snapshot

MAX_OBJECTS, MAX_BYTES = 256, 256 * 2**20
"""Objects and bytes of one read: other callers of the same reader are served in between."""


class IntegrityCheck:
    """Checks objects of a bank and remembers those that it has checked."""

    def __init__(self, read: Callable[[Sequence[NamedObject]], None]) -> None:
        """Start without checked objects.

        Args:
            read: reads objects and checks their hashes; raises `BankError` for the first that is missing or damaged.
        """
        self._read = read
        self._known: set[str] = set()

    @staticmethod
    def of(bank: Bank) -> IntegrityCheck:
        """Return a check that reads objects from the bank itself."""

        def read(wanted: Sequence[NamedObject]) -> None:
            for what, info in wanted:
                bank.read_object(info, what)

        return IntegrityCheck(read)

    def check(self, snapshot: Snapshot) -> None:
        """Check the snapshot's adapters and router that were not checked yet; pseudo-samples are not needed.

        Raises:
            BankError: an object is missing or damaged.
        """
        fresh = {info.sha256: (what, info) for what, info in objects_of(snapshot) if info.sha256 not in self._known}
        for group in in_groups(list(fresh.values()), MAX_BYTES, MAX_OBJECTS):
            self._read(group)
            self._known |= {info.sha256 for _, info in group}

    def mark_checked(self, snapshot: Snapshot) -> None:
        """Mark a snapshot's objects as checked without reading them."""
        self._known |= {info.sha256 for _, info in objects_of(snapshot)}


def objects_of(snapshot: Snapshot) -> list[NamedObject]:
    """Return all that answering from a snapshot can read."""
    adapters = [(str(entry), entry.tensors) for entry in snapshot.adapters]
    router = snapshot.router.tensors
    return adapters + ([(f"the router of snapshot {snapshot.number}", router)] if router else [])


def in_groups(
    wanted: Sequence[NamedObject], max_bytes: int, max_objects: int | None = None
) -> Iterator[list[NamedObject]]:
    """Yield groups of neighbours within these limits; a larger object is a group of its own."""
    group: list[NamedObject] = []
    size = 0
    for named_object in wanted:
        if group and (len(group) == max_objects or size + named_object[1].bytes > max_bytes):
            yield group
            group, size = [], 0
        group.append(named_object)
        size += named_object[1].bytes
    if group:
        yield group
