"""Branches of a bank: names that point at snapshots, as in git.

    branches/<name>/<number>.json     a move: the branch points at this snapshot, or at none (it is deleted)
    branches/<name>/newest.json       the number of the newest move
    branches/tags/<name>/...          a tag: a branch that moves once
    not_served.json                   why a run whose bank this is publishes no snapshot

Each move is created exclusively and never changed: of two writers that saw the same head, one creates the next move,
and the other gets an error (compare-and-swap without a lock). Writers move a branch forward only: its head is always an
ancestor of the new one. Only `Branch.go_back` moves it back to a snapshot that it had before.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import AfterValidator

from raycl.bank.bank import Bank
from raycl.bank.manifest import NAME, Snapshot, bank_errors, snapshot_file
from raycl.errors import AlreadyExistsError, BankError, BranchMovedError
from raycl.storage.numbered import NOTE, NumberedRecords
from raycl.storage.records import number_of, read_fields, seal

FOLDER, MAIN = "branches", "main"
FORMAT = 1
TAGS = "tags/"
"""The beginning of a tag's name among branches; a reference to it may leave it out."""

LATEST = "latest"
"""The reference of a bank's newest snapshot, whatever its branch."""

NOT_SERVED = "not_served.json"
DEPTH = 8
"""The most parts of a branch's name."""

REMEDY = ", or delete the branch and promote its snapshot again"

SHORTEST_HASH = 8
"""The least digits of a snapshot's hash that name it."""

WHOLE_HASH = 64


@dataclass(frozen=True)
class Move:
    """One move of a branch.

    Attributes:
        number: number of the move, ascending; it is never used again, even after the branch was deleted.
        snapshot: number of the branch's snapshot; None: the branch is deleted.
        sha256: hash of the snapshot's record, "" if the branch is deleted.
        why, time: reason, for people; time in seconds since 1970.
        branch: name of the branch.
    """

    number: int
    snapshot: int | None
    sha256: str
    why: str
    time: float
    branch: str


@dataclass(frozen=True)
class _Reason:
    reason: str


def check_branch(name: str) -> str:
    """Return a branch's name: plain file names separated by slashes.

    Raises:
        BankError: the name is invalid, or could be a snapshot's number.
    """
    parts = name.split("/")
    fits = len(parts) <= DEPTH and all(NAME.fullmatch(part) and ".." not in part for part in parts)
    if (
        not fits
        or name.isdigit()
        or name == LATEST
        or any(number_of(part) is not None or part == NOTE for part in parts)
    ):
        raise BankError(
            f"'{name}' cannot name a branch: use letters, digits, '.', '_', '-' and '/', for example main or "
            "team/experiment, and no number alone and not latest, which name snapshots"
        )
    return name


def _branch_name(value: str) -> str:
    try:
        return check_branch(value)
    except BankError as error:
        raise ValueError(str(error)) from error


BranchName = Annotated[str, AfterValidator(_branch_name)]
"""The type of settings that name a branch."""


class Branch:
    """One branch of a bank; it exists once it has moved."""

    def __init__(self, bank: Bank, name: str = MAIN) -> None:
        self.bank = bank
        self.name: str = check_branch(name)
        self.folder: str = f"{FOLDER}/{name}"
        self.records: NumberedRecords[Move] = NumberedRecords(bank.storage, self.folder, self.move)

    def numbers(self) -> list[int]:
        """Return numbers of all moves, ascending."""
        return self.records.numbers()

    def last(self) -> Move | None:
        """Return the newest move; None: there never was one.

        Raises:
            BankError: it is damaged or missing.
        """
        with bank_errors(REMEDY):
            return self.records.newest()

    def head(self) -> int | None:
        """Return the number of the snapshot that the branch points at; None: there is no such branch.

        Raises:
            BankError: its newest move is damaged.
        """
        last = self.last()
        return None if last is None else last.snapshot

    def move(self, number: int) -> Move:
        """Return the move with a number.

        Raises:
            BankError: it is damaged.
        """
        file = self.records.file(number)
        with bank_errors(REMEDY):
            record = read_fields(self.bank.storage, file, FORMAT, Move)
        if (record.branch, record.number) != (self.name, number):
            raise BankError(
                f"'{file}' is move {record.number} of branch '{record.branch}': it was moved; restore a copy"
            )
        return record

    def newest_first(self, after: int = 0) -> Iterator[int]:
        """Yield snapshots of the moves after number `after`, newest first, each once; damaged moves are passed over."""
        given: set[int] = set()
        stamps = self.records.there()
        for number in sorted(stamps, reverse=True):
            if number <= after:
                return
            try:
                snapshot = self.records.known(number, stamps[number]).snapshot
            except BankError:
                continue
            if snapshot is None:
                return
            if snapshot not in given:
                given.add(snapshot)
                yield snapshot

    def advance(self, snapshot: Snapshot, why: str, replaces: Callable[[int], bool] | None = None) -> Move:
        """Move to a snapshot that descends from the head (a fast-forward), or takes the place of a head whose record is
        lost. If the head is that snapshot, stay.

        Args:
            replaces: whether the snapshot may replace a head that is no ancestor of it; None: never.

        Raises:
            BranchMovedError: the head is no ancestor of the snapshot, or another writer moved the branch just now.
            BankError: the newest move is damaged.
        """
        last = self.last()
        head = None if last is None else last.snapshot
        if last is not None and (head, last.sha256) == (snapshot.number, snapshot.sha256):
            return last
        is_lost = head is not None and not self.bank.storage.exists(snapshot_file(head))
        is_lost = is_lost or head == snapshot.number  # its number was used again
        if (
            head is not None
            and not is_lost
            and not is_ancestor(self.bank, head, snapshot)
            and not (replaces and replaces(head))
        ):
            raise self._moved(snapshot, head)
        return self._add(last.number if last else 0, snapshot.number, snapshot.sha256, why, snapshot)

    def go_back(self, snapshot: Snapshot, why: str) -> Move:
        """Move to a snapshot that the branch had before; moves and snapshots that came later stay.

        Raises:
            BankError: there is no such branch, or it never had the snapshot. BranchMovedError: another writer moved it
                just now.
        """
        last = self.last()
        if last is None or last.snapshot is None:
            raise missing_branch(self.bank, self.name)
        if last.snapshot == snapshot.number:
            raise BankError(f"branch '{self.name}' points at snapshot {snapshot.number} already: name an older one")
        head = self.bank.open(last.snapshot)
        if snapshot.number not in self.newest_first() and not is_ancestor(self.bank, snapshot.number, head):
            raise BankError(
                f"branch '{self.name}' never had snapshot {snapshot.number}: expected one that 'log {self.name}' lists"
            )
        return self._add(last.number, snapshot.number, snapshot.sha256, why, snapshot)

    def left(self, snapshot: int) -> int | None:
        """Return the snapshot, or its nearest ancestor, that the branch had and went back from; None: there is none."""
        line = line_of(self.bank, self.name)
        on_line = next(line, None)
        if on_line is None and (head := self.head()) is not None and head > snapshot:
            return None  # the head's record is lost, and the branch had gone forward to it
        had: set[int] | None = None
        number: int | None = snapshot
        while number is not None:
            while on_line is not None and on_line > number:  # numbers descend from child to parent
                on_line = next(line, None)
            if on_line == number:
                return None
            had = set(self.newest_first()) if had is None else had
            if number in had:
                return number
            number = self.bank.open(number).parent if self.bank.storage.exists(snapshot_file(number)) else None
        return None

    def steps_back(self) -> list[tuple[int, Move]]:
        """Return each readable move that left a snapshot behind, oldest first, with that snapshot."""
        steps: list[tuple[int, Move]] = []
        before: int | None = None
        for number in self.numbers():
            with suppress(BankError):  # also if a snapshot was pruned
                move = self.move(number)
                left, before = before, move.snapshot
                if left is None or before is None or left == before:
                    continue
                if not is_ancestor(self.bank, left, self.bank.open(before)):
                    steps.append((left, move))
        return steps

    def delete(self, why: str) -> Move:
        """Delete the branch, also one whose newest move is damaged; its snapshots stay until they are pruned.

        Raises:
            BankError: there is no such branch. BranchMovedError: another writer moved it just now.
        """
        try:
            exists = self.head() is not None
        except BankError:
            exists = True
        if not exists:
            raise missing_branch(self.bank, self.name)
        return self._add(self.records.next_number() - 1, None, "", why, None)

    def _add(self, last: int, snapshot: int | None, sha256: str, why: str, new: Snapshot | None) -> Move:
        """Return the move after number `last`.

        Raises:
            BranchMovedError: another writer was first. BankError: it would move a tag.
        """
        if self.name.startswith(TAGS) and snapshot is not None and self.head() is not None:
            raise BankError(
                f"tag '{self.name.removeprefix(TAGS)}' names snapshot {self.head()} and never moves: delete it first "
                f"(delete {self.name}), or choose another name"
            )
        move = Move(last + 1, snapshot, sha256, why, time.time(), self.name)
        try:
            self.records.create(move.number, {"format": FORMAT, **asdict(move)})
        except AlreadyExistsError as error:
            head = self.head()
            if new is not None and head == new.number:  # another attempt of the same run moved it
                return self.move(move.number)
            raise self._moved(new, head) from error
        return move

    def _moved(self, snapshot: Snapshot | None, head: int | None) -> BranchMovedError:
        stored = f"snapshot {snapshot.number} is stored, but " if snapshot is not None else ""
        at = f"snapshot {head}" if head is not None else "no snapshot"
        return BranchMovedError(
            f"{stored}branch '{self.name}' of '{self.bank.storage.uri}' was moved to {at} by another writer"
        )


def is_ancestor(bank: Bank, number: int, snapshot: Snapshot) -> bool:
    """Return whether a snapshot's parents, or theirs, include `number`. Pruned parents end the search."""
    parent = snapshot.parent
    while parent is not None and parent > number:  # numbers ascend from parent to child
        try:
            parent = bank.open(parent).parent
        except BankError:
            return False
    return parent == number


def line_of(bank: Bank, name: str) -> Iterator[int]:
    """Yield snapshots of a branch: its head, the head's parent, and so on up to the first, or to where parents were
    pruned.

    Raises:
        BankError: a record is damaged.
    """
    number = Branch(bank, name).head()
    while number is not None and bank.storage.exists(snapshot_file(number)):
        yield number
        number = bank.open(number).parent


def branch_names(bank: Bank) -> list[str]:
    """Return names of all branches that exist.

    Raises:
        BankError: a newest move is damaged.
    """
    return [name for name in numbered_folders(bank, FOLDER) if Branch(bank, name).head() is not None]


def numbered_folders(bank: Bank, folder: str) -> list[str]:
    """Return names of branches that have records below a folder, deleted branches too."""
    names = {branch_of(file, folder) for file in bank.storage.files(folder)}
    return sorted(name for name in names if name is not None)


def branch_of(file: str, folder: str) -> str | None:
    """Return the branch whose record a file below `folder` is; None: it is none."""
    start, _, rest = file.partition("/")
    name, _, record = rest.rpartition("/")
    is_ours = number_of(record) is not None or record == NOTE
    return name if start == folder and is_ours and is_branch_name(name) else None


def is_branch_name(name: str) -> bool:
    try:
        check_branch(name)
    except BankError:
        return False
    return True


def explain_empty(bank: Bank, reason: str) -> None:
    """Store the reason why a run publishes no snapshot, for messages to users who ask for one."""
    bank.storage.write(NOT_SERVED, seal({"format": FORMAT, "reason": reason}))


def missing_branch(bank: Bank, name: str) -> BankError:
    """Return the error for a branch that does not exist, or for a bank that stays empty."""
    if bank.storage.exists(NOT_SERVED) and not bank.snapshots():
        reason = read_fields(bank.storage, NOT_SERVED, FORMAT, _Reason).reason
        return BankError(f"the bank '{bank.storage.uri}' has no snapshot: {reason}")
    names = ", ".join(branch_names(bank)[:20]) or "none yet"
    return BankError(f"the bank '{bank.storage.uri}' has no branch '{name}': expected one of its branches ({names})")


def head_of(bank: Bank, name: str = MAIN) -> Snapshot:
    """Return the snapshot that a branch points at.

    Raises:
        BankError: there is no such branch, its newest move or its snapshot is damaged, or is not the one it names.
    """
    last = Branch(bank, name).last()
    if last is None or last.snapshot is None:
        raise missing_branch(bank, name)
    snapshot = bank.open(last.snapshot)
    if snapshot.sha256 != last.sha256:
        raise BankError(
            f"branch '{name}' names snapshot {last.snapshot} with SHA-256 {last.sha256[:12]}, the bank has "
            f"{snapshot.sha256[:12]} under that number: restore a copy"
        )
    return snapshot


def resolve(bank: Bank, reference: str) -> Snapshot:
    """Return the snapshot that a reference names: a branch, a tag, `latest`, a number, or the first digits of a hash.

    Raises:
        BankError: the reference matches no snapshot, or several.
    """
    if reference.isdigit() and len(reference) < SHORTEST_HASH:
        return bank.open(int(reference))
    if reference == LATEST and bank.snapshots():
        return bank.open(bank.snapshots()[-1])
    for name in (reference, TAGS + reference):
        if is_branch_name(name) and Branch(bank, name).head() is not None:
            return head_of(bank, name)
    digits = reference.lower()
    if len(digits) >= SHORTEST_HASH and all(digit in "0123456789abcdef" for digit in digits):
        newest_first = map(bank.open, reversed(bank.snapshots()))
        matches = (snapshot for snapshot in newest_first if snapshot.sha256.startswith(digits))
        matching = list(itertools.islice(matches, 1 if len(digits) == WHOLE_HASH else 2))
        if len(matching) == 1:
            return matching[0]
    if not bank.snapshots():
        raise missing_branch(bank, reference)
    names = ", ".join(branch_names(bank)[:20]) or "none yet"
    raise BankError(
        f"the bank '{bank.storage.uri}' has no '{reference}': expected a branch or tag ({names}), {LATEST}, a "
        f"snapshot's number, or at least {SHORTEST_HASH} digits of its hash"
    )
