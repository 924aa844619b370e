"""Findings while a source is read: how it was read, and rows that cannot be used.

The user reads once that a file is read differently than it looks, or with fewer rows than it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

from raycl.errors import DataError

OnBadRow = Literal["refuse", "skip"]

SHOWN = 3
"""Bad rows whose problems are kept as sentences."""


class BadRow(DataError):
    """A row that cannot be used; the other rows of its source can.

    Attributes:
        row: 1-based number. problem: the message without file and row.
        item: the part that was read; None: nothing.
    """

    def __init__(self, message: str, row: int = 0, problem: str = "") -> None:
        super().__init__(message)
        self.row, self.problem = row, problem
        self.item: Any = None


class NamedSource(ABC):
    """A source of rows, whose errors say its name and the row.

    Class attributes:
        counted: what follows the number of a row in messages.
    """

    counted: ClassVar[str] = ""

    @property
    @abstractmethod
    def uri(self) -> str:
        """The name that error messages use."""

    def bad_row(self, problem: str, row: int) -> BadRow:
        """Return the error about one row (1-based)."""
        return BadRow(f"{self.uri}, row {row}{self.counted}: {problem}", row, problem)

    def refuse(self, problem: str, row: int | None = None) -> NoReturn:
        """Raise a DataError about the source, or a BadRow about one row of it (1-based)."""
        raise DataError(f"{self.uri}: {problem}") if row is None else self.bad_row(problem, row)


@dataclass
class Findings:
    """Notes and bad rows of one source.

    Attributes:
        on_bad_row: refuse: the first bad row is an error; skip: bad rows are left out and counted.
        left_out: bad rows so far. problems: problems of the first of them.
        notes: unusual ways in which the source was read.
    """

    on_bad_row: OnBadRow = "refuse"
    left_out: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def bad_row(self, problem: BadRow) -> None:
        """Count a bad row.

        Raises:
            BadRow: bad rows are refused.
        """
        if self.on_bad_row == "refuse":
            raise problem
        self.left_out += 1
        if len(self.problems) < SHOWN:
            self.problems.append(str(problem))

    def note(self, sentence: str) -> None:
        """Say once how a source is read."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def tree(self) -> dict[str, Any]:
        """Return the findings as a tree without the setting, for JSON."""
        return {"left_out": self.left_out, "problems": self.problems, "notes": self.notes}
