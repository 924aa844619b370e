"""Readers: a file of one of seven formats becomes a stream of rows, one at a time.

Why it exists: data comes as NaturalInstructions objects, lists of sentences, JSON lines, CSV, Parquet or plain
text, and everything behind the reader should see one thing. Every error names file and row, what was found, what
was expected and what to do. What it does not know: label sets, splits, prompts.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Literal, NoReturn

import pyarrow.parquet as pq
from pyarrow import ArrowException

from raycl.data.sources.fields import Columns, Row, rows_of
from raycl.data.sources.hub import HubSplit
from raycl.data.sources.source import SourceFile, SourceFiles

Format = Literal["auto", "natural_instructions", "olora", "jsonl", "csv", "parquet", "text", "phrasebank"]

Source = SourceFile | SourceFiles | HubSplit
"""Where the rows of a split come from."""

_SENTIMENTS = ("negative", "neutral", "positive")
_PEEK = 1 << 16


def read_rows(file: Source, format: Format = "auto", columns: Columns | None = None) -> Iterator[Row]:
    """The rows of `file` in order, streaming; `format` is of files alone.

    Raises:
        DataError: the file or a row cannot be used.
    """
    file.require()
    if isinstance(file, HubSplit):
        return file.open().rows(columns or Columns())
    if isinstance(file, SourceFiles):
        return _joined(file, format, columns)
    reader = _READERS[detect(file) if format == "auto" else format]
    return reader(file, columns or Columns())


def _joined(source: SourceFiles, format: Format, columns: Columns | None) -> Iterator[Row]:
    """The rows of all files, numbered through."""
    rows = (row for file in source.files for row in read_rows(file, format, columns))
    return (replace(row, number=number) for number, row in enumerate(rows, start=1))


def detect(file: SourceFile) -> Format:
    """The format of `file` by its suffix, and for `.json` by how it begins.

    Raises:
        DataError: neither is of a known format.
    """
    suffix = PurePosixPath(file.name).suffix.lower()
    if suffix == ".txt" and _is_phrasebank(file):
        return "phrasebank"
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if suffix != ".json":
        file.refuse(
            f"the suffix '{suffix}' is of no known format: expected .json, .jsonl, .csv, .tsv, .parquet or .txt, or "
            "set 'format'"
        )
    with file.open() as stream:
        head = stream.read(_PEEK).lstrip()
    if head.startswith(b"["):
        return "olora"
    return "jsonl" if _is_json_line(head) else "natural_instructions"


def _is_phrasebank(file: SourceFile) -> bool:
    """Whether the first line ends like one of the Financial PhraseBank."""
    with file.open() as stream:
        first = stream.read(_PEEK).partition(b"\n")[0].decode("latin-1").strip()
    return first.rpartition("@")[2] in _SENTIMENTS and "@" in first


def _is_json_line(head: bytes) -> bool:
    """Whether the first line alone is an object that is not a NaturalInstructions one."""
    try:
        first = json.loads(head.partition(b"\n")[0])
    except ValueError:
        return False
    return isinstance(first, dict) and "Instances" not in first


def read_definition(file: SourceFile) -> str:
    """The joined `Definition` of a NaturalInstructions file, stripped; empty if it has none.

    Raises:
        DataError: the part of the file before its end is not JSON.
    """
    import ijson  # read by these formats alone

    parts: list[str] = []
    with file.open() as stream:
        try:
            for prefix, event, value in ijson.parse(stream):
                if prefix in ("Definition", "Definition.item") and event == "string":
                    parts.append(value)
                elif prefix == "Definition" and event in ("end_array", "null"):
                    break
        except ijson.JSONError as error:
            _refuse_json(file, 0, error)
    return "\n".join(parts).strip()


def _natural_instructions(file: SourceFile, columns: Columns) -> Iterator[Row]:
    for number, item in enumerate(_json_items(file, "Instances.item"), start=1):
        yield from rows_of(item, number, Columns(("input",), ("output",) if columns.label else ()), file.refuse)


def _olora(file: SourceFile, columns: Columns) -> Iterator[Row]:
    for number, item in enumerate(_json_items(file, "item"), start=1):
        yield from rows_of(item, number, columns, file.refuse)


def _json_items(file: SourceFile, prefix: str) -> Iterator[Any]:
    import ijson  # read by these formats alone

    number = 0
    with file.open() as stream:
        try:
            for item in ijson.items(stream, prefix):
                number += 1
                yield item
        except ijson.JSONError as error:
            _refuse_json(file, number + 1, error)


def _refuse_json(file: SourceFile, row: int, error: Exception) -> NoReturn:
    """Report where the JSON breaks; the parser gives no position, so the broken file is parsed once more."""
    if "UTF8" in str(error):
        file.refuse("invalid UTF-8: expected UTF-8 text, convert the file to UTF-8", row)
    place, reason = "", str(error).splitlines()[0]
    with file.open() as stream:
        try:
            json.loads(stream.read())
        except json.JSONDecodeError as found:
            place, reason = f" at line {found.lineno}, column {found.colno}", found.msg
        except ValueError:
            pass
    file.refuse(
        f"malformed JSON{place} ({reason}): expected one complete JSON value, repair or re-export the file", row
    )


def _jsonl(file: SourceFile, columns: Columns) -> Iterator[Row]:
    for number, line in file.lines():
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            file.refuse(
                f"malformed JSON at column {error.colno} ({error.msg}): expected one object a line, repair the line",
                number,
            )
        yield from rows_of(item, number, columns, file.refuse)


def _csv(file: SourceFile, columns: Columns) -> Iterator[Row]:
    """Python's reader, not Arrow's: it goes row by row, so an error names the broken row."""
    lines = (f"{line}\n" for _, line in file.lines())
    reader = csv.reader(lines, delimiter="\t" if file.name.lower().endswith(".tsv") else ",", strict=True)
    header: Sequence[str] | None = columns.header
    number = 0
    try:
        for cells in reader:
            if header is not None and not number and tuple(cells) == tuple(header):
                continue  # the file has a header line after all
            if header is None:
                header = cells
                columns.needed(header, file.refuse)
                continue
            number += 1
            if len(cells) != len(header):
                file.refuse(
                    f"{len(cells)} cells: expected {len(header)} as in the header, quote cells with commas", number
                )
            yield from rows_of(dict(zip(header, cells, strict=True)), number, columns, file.refuse)
    except csv.Error as error:
        file.refuse(f"malformed CSV ({error}): expected quoted cells as in RFC 4180, re-export the file", number + 1)


def _parquet(file: SourceFile, columns: Columns) -> Iterator[Row]:
    with file.open() as stream:
        try:
            parquet = pq.ParquetFile(stream)
            names = parquet.schema_arrow.names
            wanted = columns.needed(names, file.refuse)
            number = 0
            for batch in parquet.iter_batches(batch_size=1024, columns=wanted):
                for item in batch.to_pylist():
                    number += 1
                    yield from rows_of(item, number, columns, file.refuse)
        except ArrowException as error:
            file.refuse(f"not a readable Parquet file ({' '.join(str(error).split())}): re-export the file")


def _phrasebank(file: SourceFile, columns: Columns) -> Iterator[Row]:
    """`sentence@sentiment` on each line, in Latin-1, as the Financial PhraseBank is published."""
    for number, line in file.lines("latin-1"):
        sentence, at, label = line.strip().rpartition("@")
        if not at or not sentence.strip() or label not in _SENTIMENTS:
            file.refuse(f"'{line[-30:]}' is no end of a line: expected sentence@{'|'.join(_SENTIMENTS)}", number)
        yield Row(number, sentence.strip(), (label if columns.label else "",))


def _text(file: SourceFile, columns: Columns) -> Iterator[Row]:
    """A text on each line; empty lines are left out."""
    if columns.label:
        file.refuse("plain text has no answers: expected rows with a label, or set stream.objective to mlm or clm")
    for number, line in file.lines():
        if line.strip():
            yield Row(number, line.strip(), ("",))


_SUFFIXES: Mapping[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}

_READERS: Mapping[str, Callable[[SourceFile, Columns], Iterator[Row]]] = {
    "natural_instructions": _natural_instructions,
    "olora": _olora,
    "jsonl": _jsonl,
    "csv": _csv,
    "parquet": _parquet,
    "text": _text,
    "phrasebank": _phrasebank,
}
