"""The active snapshot of a bank: a log of decisions, each created exclusively and never changed.

Replicas on any node, and after any restart, must agree, and a rollback must hold until the next decision although newer
snapshots are there.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NotRequired

from pydantic import FiniteFloat
from typing_extensions import TypedDict

from raycl.bank.bank import Bank
from raycl.bank.branches import MAIN, Branch, numbered_folders
from raycl.bank.manifest import Snapshot, bank_errors
from raycl.errors import AlreadyExistsError, BankError
from raycl.storage.numbered import NumberedRecords
from raycl.storage.records import read_fields

FOLDER = "serving"
FORMAT = 3
RACES = 20
REMEDY = ", or activate a snapshot again"


class Reason(TypedDict):
    """The reason and time of a decision, for people; with `rejected`, the snapshot that was not activated."""

    why: str
    time: FiniteFloat
    rejected: NotRequired[int]


@dataclass(frozen=True)
class Activation:
    """One decision.

    Attributes:
        number: number of the decision, ascending.
        seen: newest move of the branch at the time of the decision; only later moves are news.
    """

    number: int
    snapshot: int
    seen: int
    provenance: Reason

    @property
    def rejection(self) -> str:
        """The reason why the newest snapshot was not activated; "" for another decision."""
        return self.provenance["why"] if "rejected" in self.provenance else ""


class Activations:
    """Decisions for the endpoints that follow one branch of a bank."""

    def __init__(self, bank: Bank, branch: str = MAIN) -> None:
        self.bank = bank
        self.branch: Branch = Branch(bank, branch)
        self.folder: str = f"{FOLDER}/{branch}"
        self.records: NumberedRecords[Activation] = NumberedRecords(bank.storage, self.folder, self._read)

    def latest(self) -> Activation | None:
        """Return the decision that counts; None before the first.

        Raises:
            BankError: it is damaged or missing.
        """
        with bank_errors(REMEDY):
            return self.records.newest()

    def all(self) -> Iterator[Activation | BankError]:
        """Yield every decision in order; in the place of a damaged one, what is wrong with it."""
        for number in self.records.numbers():
            try:
                yield self._read(number)
            except BankError as error:
                yield error

    def recent(self, count: int) -> list[Activation]:
        """Return up to `count` decisions that can be read, the newest first."""
        found = []
        for number in reversed(self.records.numbers()[-count:]):
            with suppress(BankError):
                found.append(self._read(number))
        return found

    def _read(self, number: int) -> Activation:
        file = self.records.file(number)
        with bank_errors(REMEDY):
            record = read_fields(self.bank.storage, file, FORMAT, Activation)
        if record.number != number:
            raise BankError(f"'{file}' holds decision {record.number}: it was moved; activate a snapshot again")
        return record

    def add(
        self, snapshot: int | Snapshot, why: str, seen: int | None = None, rejected: int | None = None
    ) -> Activation:
        """Decide for a snapshot of the bank.

        Args:
            snapshot: its number, or the snapshot that was just read.
            seen: only later moves of the branch are news; None: the newest existing move.
            rejected: the snapshot that the decision does not activate.

        Raises:
            BankError: the bank has no such snapshot, or other decisions are always faster.
        """
        number = snapshot if isinstance(snapshot, int) else snapshot.number
        if isinstance(snapshot, int):
            self.bank.open(snapshot)
        for _ in range(RACES):
            provenance: Reason = {"why": why, "time": time.time()}
            if rejected is not None:
                provenance["rejected"] = rejected
            # the last record is not read: this one follows, and so repairs, a damaged or lost one
            newest = max(self.branch.numbers(), default=0) if seen is None else seen
            fresh = Activation(self.records.next_number(), number, newest, provenance)
            try:
                self.records.create(fresh.number, {"format": FORMAT, **asdict(fresh)})
            except AlreadyExistsError:
                continue
            return fresh
        raise BankError(f"{RACES} activations in a row were written by others: read /v1/snapshots and try again")


def followed(bank: Bank) -> list[str]:
    """Return the branches that have decisions."""
    return numbered_folders(bank, FOLDER)


def activated(bank: Bank) -> set[int]:
    """Return the snapshots that endpoints answer from now.

    Raises:
        BankError: a last decision is damaged.
    """
    latest = [Activations(bank, branch).latest() for branch in followed(bank)]
    return {decision.snapshot for decision in latest if decision is not None}
