"""CSV and TSV files: as items, by separators, header, quotes and blank lines; and written for spreadsheet programs.

Such files are written by many programs, and a wrong guess about quotes or separators loses rows. Python's reader is
used, not Arrow's: it goes row by row, so an error names the broken row.
"""

import csv
import io
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import IO, Any

from raycl.data.sources.fields import Columns
from raycl.data.sources.reading import Findings
from raycl.data.sources.source import SourceFile
from raycl.errors import printable

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
_SWALLOWED = 3
"""A quote is taken for one that is never closed when this many lines in its cell look like rows."""

csv.field_size_limit((1 << 31) - 1)  # the reader's limit of 131,072 characters is shorter than some articles


def table_items(file: SourceFile, columns: Columns, findings: Findings) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows below the header by the names of their columns, numbered from 1; blank ones are left out.

    Raises:
        DataError: no text or label column, or quotes that are not closed.
    """
    rows, blank = _rows(file, columns, findings), 0
    first = next(rows, None)
    if first is None:
        return
    if columns.header is None:
        header: Sequence[str] = _header(first, columns, file, findings)
        columns.needed(header, file.refuse)
    else:
        header = columns.header
        rows = rows if tuple(first) == tuple(header) else chain([first], rows)  # the file may have a header line
    for number, cells in enumerate(rows, start=1):
        if len(cells) != len(header):
            wanted = f"expected {len(header)} as in the header, quote cells that hold separators"
            findings.bad_row(file.bad_row(f"{len(cells)} cells: {wanted}", number))
        elif not cells[0] and columns.label and not any(cells):
            blank += 1
        else:
            yield number, dict(zip(header, cells, strict=False))
    if blank:
        findings.note(f"{file.name}: rows of blank cells alone are left out ({blank:,})")


def _header(cells: Sequence[str], columns: Columns, file: SourceFile, findings: Findings) -> list[str]:
    """Return the names of the columns, without surrounding spaces unless the settings name them with spaces."""
    wanted = {*columns.text, *columns.label, *columns.parts, columns.group}
    names = [cell if cell in wanted else cell.strip() for cell in cells]
    if names != list(cells):
        findings.note(f"{file.name}: spaces around the names of its columns are not read")
    return names


def _rows(file: SourceFile, columns: Columns, findings: Findings) -> Iterator[list[str]]:
    first = next((line for _, line in file.lines() if line.strip()), "")
    usual = "\t" if file.name.lower().endswith(".tsv") else ","
    try:
        separator = _separator(first, usual, columns)
    except csv.Error:
        file.refuse(
            "lines end with carriage returns alone: expected line feeds, convert it, for example: "
            f"tr '\\r' '\\n' < {shlex.quote(file.name)} > converted"
        )
    if separator != usual:
        findings.note(f"{file.name}: its cells are separated by {SEPARATORS[separator]}")
    if separator == "\t":
        return _tab_rows(file, findings)
    return _quoted_rows(file, (line for _, line in file.lines()), separator, findings)


def _separator(first: str, usual: str, columns: Columns) -> str:
    """Return the separator: the usual one, unless the first line lacks it and another one fits."""
    counts = {mark: len(next(csv.reader([first], delimiter=mark), [])) for mark in (usual, *SEPARATORS)}
    if columns.header is not None:
        return next((mark for mark, count in counts.items() if count == len(columns.header)), usual)
    return usual if counts[usual] > 1 else max(counts, key=lambda mark: counts[mark])


def _quoted_rows(file: SourceFile, lines: Iterator[str], separator: str, findings: Findings) -> Iterator[list[str]]:
    """Yield rows whose cells in quotes may hold separators and line breaks (RFC 4180)."""
    number, before, size, row_bytes = -1, 0, 0, file.limits.row_bytes

    def ended() -> Iterator[str]:
        nonlocal size
        for line in lines:
            size += len(line)
            if size > row_bytes:
                file.refuse(file.limits.too_large, max(number, 0) + 1)
            yield f"{line}\n"

    reader = csv.reader(ended(), delimiter=separator, strict=True)
    try:
        for cells in reader:
            size = 0
            if not cells:
                continue
            number += 1
            if reader.line_num - before > _SWALLOWED:
                _note_swallowed(cells, number, separator, file, findings)
            before = reader.line_num
            yield cells
    except csv.Error as error:
        file.refuse(
            f"malformed CSV ({error}): expected quoted cells as in RFC 4180, re-export the file", max(number, 0) + 1
        )


def _note_swallowed(cells: list[str], number: int, separator: str, file: SourceFile, findings: Findings) -> None:
    """Note a cell whose lines all have as many cells as its row; its quote was probably never closed."""
    for cell in cells:
        inside = cell.split("\n")[1:-1]
        if len(inside) >= _SWALLOWED and all(line.count(separator) == len(cells) - 1 for line in inside):
            findings.note(
                f"{file.name}, row {number}: one cell in quotes has {len(inside):,} lines that look like rows: if its "
                'first quote is part of the text, write it as """"'
            )


def _tab_rows(file: SourceFile, findings: Findings) -> Iterator[list[str]]:
    """Yield a row for each line, unless cells in quotes hold tabs or line breaks.

    Tables separated by tabs are written with quotes by some programs and without by others. Where each line has as
    many cells as the first, lines are rows, and a quote that is not around a whole cell is part of its text.
    """
    by_line: bool | None = None
    lines = file.lines()
    for _, line in lines:
        cells = line.split("\t")
        if line.startswith('"') or '\t"' in line:
            if by_line is None:
                by_line = len({line.count("\t") for _, line in file.lines() if line}) == 1
            if not by_line:
                yield from _quoted_rows(file, chain([line], (following for _, following in lines)), "\t", findings)
                return
            if not all(_QUOTED.fullmatch(cell) for cell in cells if cell.startswith('"')):
                findings.note(f"{file.name}: quotes that are not around whole cells are read as text, a row a line")
            cells = [cell[1:-1].replace('""', '"') if _QUOTED.fullmatch(cell) else cell for cell in cells]
        if line:
            yield cells


_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)*|\.\d+)([eE][+-]?\d+)?%?")


class SpreadsheetWriter:
    """Writes CSV as `csv.writer` does, with cells of text that no spreadsheet program takes for a formula.

    Names and texts may come from a stranger, and `=HYPERLINK(...)` or `=cmd|...` in a cell sends requests or starts
    programs. Such cells get an apostrophe in front, which marks text in Excel, LibreOffice and Google Sheets.
    """

    def __init__(self, out: IO[str]) -> None:
        self._rows = csv.writer(out, lineterminator="\n")

    def writerow(self, cells: Iterable[Any]) -> None:
        """Write a row; None is an empty cell."""
        self._rows.writerow([text_cell(cell) if isinstance(cell, str) else cell for cell in cells])

    def writerows(self, rows: Iterable[Sequence[Any]]) -> None:
        for cells in rows:
            self.writerow(cells)


def spreadsheet(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as `SpreadsheetWriter` writes them."""
    text = io.StringIO()
    SpreadsheetWriter(text).writerows(rows)
    return text.getvalue()


def text_cell(text: str) -> str:
    """Return a text that no program takes for a formula and no terminal obeys; numbers stay as they are."""
    plain = "\r".join(map(printable, text.split("\r"))) if not text.isprintable() else text
    return f"'{plain}" if _FORMULA.match(plain) and not _NUMBER.fullmatch(plain) else plain
