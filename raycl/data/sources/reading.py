"""Reads sources within limits, names them in errors, and collects rows that cannot be used for one report.

Limits are on the size of a row, the depth of its JSON, and the expansion of a compressed file: a file of a few
kilobytes must not fill memory or disk; larger limits can be set for files that need them.
"""

from __future__ import annotations

import lzma
import zipfile
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from pydantic import Field

from raycl.config import Section
from raycl.errors import DataError
from raycl.storage.records import is_deeper

if TYPE_CHECKING:
    from raycl.data.sources.fields import Refuse

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
        self.row = row
        self.problem = problem
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


FREE_BYTES = 256 << 20
"""This many bytes of rows are read from a compressed file however small it is."""

MAX_DEPTH = 300
"""Python's own limit of nested calls is near 1,000, and every reader and writer of JSON takes one for each level."""


class ReadLimits(Section):
    """Limits on files of rows, so that a small file cannot fill memory or disk."""

    depth: int = Field(
        64, ge=2, le=MAX_DEPTH, description="levels of lists and objects inside each other that a row may have"
    )
    row_mb: int = Field(16, ge=1, description="size of a row at most, in MiB")
    expansion: int = Field(
        1000,
        ge=1,
        description="size of all rows of a compressed file (Parquet, .gz, ...) at most, as a multiple of the file's; "
        "256 MiB are always read",
    )

    @property
    def row_bytes(self) -> int:
        """Return the largest size of one row."""
        return self.row_mb << 20

    def expanded_bytes(self, size: int) -> int:
        """Return the largest size of all rows of a compressed file of this size."""
        return max(FREE_BYTES, self.expansion * size)

    @property
    def too_deep(self) -> str:
        """The error for JSON beyond `depth`."""
        remedy = f", or raise {_setting('depth')}" if self.depth < MAX_DEPTH else ""
        return (
            f"JSON that is nested more than {self.depth} levels deep: expected less, repair or remove the row{remedy}"
        )

    @property
    def too_large(self) -> str:
        """The error for a row beyond `row_mb`."""
        return (
            f"a row is larger than {self.row_mb:,} MiB: expected less, split or remove it (where a quote or bracket is "
            f"never closed, close it), or raise {_setting('row_mb')}"
        )

    def too_expanded(self, size: int) -> str:
        """Return the error for a compressed file of this size beyond `expansion`."""
        return (
            f"its rows take more than {self.expanded_bytes(size) >> 20:,} MiB, and the file {size:,} bytes: expected "
            f"less, check where it comes from, or raise {_setting('expansion')}"
        )

    def is_too_deep(self, item: Any, text: str, start: int, end: int) -> bool:
        """Return whether the value read from this part of a text is nested too deeply; flat values cost little."""
        if text.find("[", start, end) < 0 and text.find("{", start + 1, end) < 0:
            return False
        if text.count("[", start, end) + text.count("{", start, end) <= self.depth:
            return False
        return is_deeper(item, self.depth)


USUAL_LIMITS = ReadLimits()


def _setting(name: str) -> str:
    return f"stream.limits.{name} (in raycl predict: --{name.replace('_', '-')})"


_CHUNK = 1 << 20
_SHORT = {".tgz": "gzip", ".tbz2": "bz2", ".txz": "xz"}


def check_compressed(path: Path, limits: ReadLimits, refuse: Refuse) -> None:
    """Check how far a compressed file expands.

    Raises:
        DataError: it is damaged, or expands further than the limits allow.
    """
    import fsspec  # only `datasets` reads these
    from fsspec.utils import infer_compression

    kind = _SHORT.get(path.suffix.lower()) or infer_compression(path.name)
    if kind is None:
        return
    size, expanded = path.stat().st_size, 0
    try:
        if kind == "zip":
            expanded = sum(member.file_size for member in zipfile.ZipFile(path).infolist())
        else:
            with fsspec.open(str(path), "rb", compression=kind) as stream:
                while expanded <= limits.expanded_bytes(size) and (chunk := stream.read(_CHUNK)):
                    expanded += len(chunk)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        refuse(f"'{path.name}' cannot be expanded ({error}): compress it again")
    if expanded > limits.expanded_bytes(size):
        refuse(f"'{path.name}': {limits.too_expanded(size)}")
