"""Which snapshot of a bank answers: a log of decisions beside it, each created exclusively and never changed.

Why it exists: replicas on any node, and after any restart, must agree, and a rollback must hold until somebody
decides anew although newer snapshots are there.
What it does not know: who answers, and how.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from raycl.bank.bank import Bank
from raycl.bank.manifest import check_name
from raycl.errors import AlreadyExistsError, BankError

RACES = 20


@dataclass(frozen=True)
class Activation:
    """One decision.

    Attributes:
        number: of the decision, ascending.
        seen: newest snapshot when it was taken: only newer ones are news.
        made: who, when, why: for people.
    """

    number: int
    snapshot: int
    seen: int
    made: dict[str, object]


class Activations:
    """Decisions for one endpoint of a bank."""

    def __init__(self, bank: Bank, endpoint: str = "default") -> None:
        self.bank = bank
        self.folder = f"serving/{check_name(endpoint)}"
        self._known: Activation | None = None

    def latest(self) -> Activation | None:
        """The one that counts; None before the first.

        Raises:
            BankError: it cannot be read.
        """
        numbers = [int(name.removesuffix(".json")) for name in self.bank.storage.list(self.folder) if _is_record(name)]
        if not numbers:
            return None
        newest = max(numbers)
        if self._known is None or self._known.number != newest:
            self._known = self._read(newest)
        return self._known

    def _read(self, number: int) -> Activation:
        file = self._file(number)
        try:
            tree = self.bank.storage.read_json(file)
            return Activation(number, int(tree["snapshot"]), int(tree["seen"]), dict(tree["made"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BankError(f"'{file}' is no activation record ({error}): activate a snapshot again") from error

    def add(self, snapshot: int, why: str) -> Activation:
        """Decide for a snapshot of the bank.

        Raises:
            BankError: the bank has no such snapshot, or decisions come faster than this one.
        """
        self.bank.open(snapshot)
        for _ in range(RACES):
            last = self.latest()
            made: dict[str, object] = {"why": why, "time": time.time()}
            fresh = Activation((last.number if last else 0) + 1, snapshot, max(self.bank.snapshots()), made)
            record = {name: value for name, value in asdict(fresh).items() if name != "number"}
            try:
                self.bank.storage.create(self._file(fresh.number), json.dumps(record).encode())
            except AlreadyExistsError:
                continue
            return fresh
        raise BankError(f"{RACES} activations in a row were decided by others: look at /v1/snapshots and try again")

    def _file(self, number: int) -> str:
        return f"{self.folder}/{number:06d}.json"


def activated(bank: Bank) -> set[int]:
    """Snapshots that some endpoint answers from now."""
    latest = [Activations(bank, endpoint).latest() for endpoint in bank.storage.list("serving")]
    return {one.snapshot for one in latest if one is not None}


def _is_record(name: str) -> bool:
    return name.endswith(".json") and name.removesuffix(".json").isdigit()
