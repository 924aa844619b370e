"""CSV files that people open with spreadsheet programs, which run a cell that begins like a formula.

Names and texts may come from a stranger, and `=HYPERLINK(...)` or `=cmd|...` in a cell sends requests or starts
programs. Such cells get an apostrophe in front, which marks text in Excel, LibreOffice and Google Sheets.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from raycl.errors import printable

_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)*|\.\d+)([eE][+-]?\d+)?%?")


class _Sink(Protocol):
    def write(self, text: str, /) -> object: ...


class SpreadsheetWriter:
    """Writes CSV as `csv.writer` does, with cells of text that no spreadsheet program takes for a formula."""

    def __init__(self, out: _Sink) -> None:
        self._rows = csv.writer(out, lineterminator="\n")

    def writerow(self, cells: Iterable[Any]) -> None:
        """Write a row; None is an empty cell."""
        self._rows.writerow([text_cell(cell) if isinstance(cell, str) else cell for cell in cells])

    def writerows(self, rows: Iterable[Sequence[Any]]) -> None:
        """Write several rows."""
        for cells in rows:
            self.writerow(cells)


def text_cell(text: str) -> str:
    """Return a text that no program takes for a formula and no terminal obeys; numbers stay as they are."""
    plain = "\r".join(map(printable, text.split("\r"))) if not text.isprintable() else text
    return f"'{plain}" if _FORMULA.match(plain) and not _NUMBER.fullmatch(plain) else plain
