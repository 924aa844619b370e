"""Readers: a file of one of eight formats, or of one that a package adds, becomes a stream of rows, one at a time.

Data comes as NaturalInstructions objects, lists of sentences, JSON lines, CSV, Parquet or plain text, and the code
after the reader sees one type, `SourceRow`. Every error names file and row, the value, what was expected and what to
do.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator

from raycl.data.sources.conversation import CHAT_NAMES
from raycl.data.sources.fields import INSTRUCTION, QUESTION, Columns, SourceRow, usable_rows
from raycl.data.sources.hub import HubSplit
from raycl.data.sources.json_values import JsonStream, json_line
from raycl.data.sources.parquet import parquet_items
from raycl.data.sources.reading import BadRow, Findings
from raycl.data.sources.source import SourceFile, SourceFiles
from raycl.data.sources.splits import COLUMN, SplitPart
from raycl.data.sources.table_cells import table_items
from raycl.errors import DataError, PluginError, meant
from raycl.plugins import Names, find, load

AUTO = "auto"
"""The setting under which the format is detected by suffix, and for `.json` by the file's beginning."""

Source = SourceFile | SourceFiles | HubSplit | SplitPart
"""The source of a split's rows."""

Reader = Callable[[SourceFile, Columns, Findings], Iterator[SourceRow]]
"""Reads a file: its columns of text and label, and where bad rows are noted."""

_SENTIMENTS = ("negative", "neutral", "positive")
_PEEK = 1 << 16


def read_rows(
    file: Source, format: str = AUTO, columns: Columns | None = None, findings: Findings | None = None
) -> Iterator[SourceRow]:
    """Yield the rows of `file` in order, streaming; `format` applies to files only.

    Args:
        findings: notes and bad rows are written here; None: bad rows are refused.

    Raises:
        DataError: the file or a row cannot be used.
    """
    file.require()
    columns, findings = columns or Columns(), findings or Findings()
    if isinstance(file, SplitPart):
        return _part(file, format, columns, findings)
    if isinstance(file, HubSplit):
        return file.rows(columns, findings)
    if isinstance(file, SourceFiles):
        return _joined(file, format, columns, findings)
    chosen = detect(file) if format == AUTO else format
    read = reader_of(chosen)
    if chosen != "parquet" and (encoding := file.encoding()) != "UTF-8":
        findings.note(f"{file.name}: read as {encoding}, by its byte order mark")
    return read(file, columns, findings)


def _part(part: SplitPart, format: str, columns: Columns, findings: Findings) -> Iterator[SourceRow]:
    """Yield the rows of a part of a source; notes are those of the whole source."""
    wanted = replace(columns, others=bool(part.value))
    found = _FindingsOfPart(part, findings)

    def read() -> Iterator[SourceRow]:
        findings.left_out = 0  # the source is read twice where a slice depends on the number of rows
        findings.problems.clear()
        return read_rows(part.source, format, wanted, found)

    return part.chosen(read)


class _FindingsOfPart(Findings):
    """What is found in a source, without the bad rows of its other parts."""

    def __init__(self, part: SplitPart, findings: Findings) -> None:
        super().__init__(findings.on_bad_row, notes=findings.notes)
        self._part, self._findings = part, findings

    def bad_row(self, problem: BadRow) -> None:
        if self._part.counts(problem.item):
            self._findings.bad_row(problem)


def splits_in(file: SourceFile | HubSplit, format: str, columns: Columns) -> bool:
    """Return whether the first row of a file names its split.

    Raises:
        DataError: the file cannot be read.
    """
    row = next(read_rows(file, format, replace(columns, others=True), Findings("skip")), None)
    return row is not None and COLUMN in (row.others or {})


def _joined(source: SourceFiles, format: str, columns: Columns, findings: Findings) -> Iterator[SourceRow]:
    number = before = 0
    for file in source.files:
        for row in read_rows(file, format, columns, findings):
            number = before + row.number
            yield row._replace(number=number)
        before = number


def detect(file: SourceFile) -> str:
    """Detect the format of `file` by its suffix, and for `.json` by how it begins; `.name` for a format of a package.

    Raises:
        DataError: neither is of a known format.
    """
    suffix = PurePosixPath(file.name).suffix.lower()
    if suffix == ".txt" and _is_phrasebank(file):
        return "phrasebank"
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if suffix != ".json" and suffix.removeprefix(".") in FORMAT_NAMES:
        return suffix.removeprefix(".")
    if suffix != ".json":
        file.refuse(
            f"the suffix '{suffix}' is of no known format: expected .json, .jsonl, .csv, .tsv, .parquet or .txt, or "
            "set 'format'"
        )
    return "olora" if is_list(file) else _format_of_object(file)


def is_list(file: SourceFile) -> bool:
    """Return whether a JSON file begins as a list, as O-LoRA's files do."""
    return _head(file).startswith(b"[")


def _head(file: SourceFile) -> bytes:
    with file.open() as stream:
        return stream.read(_PEEK).lstrip()


def _is_phrasebank(file: SourceFile) -> bool:
    with file.open() as stream:
        first = stream.read(_PEEK).partition(b"\n")[0].decode("latin-1").strip()
    return first.rpartition("@")[2] in _SENTIMENTS and "@" in first


def _format_of_object(file: SourceFile) -> str:
    """Return the format of a JSON file that begins with an object."""
    head = _head(file)
    first, _, more = head.partition(b"\n")
    if more.strip() and _is_json(first):
        return "jsonl"
    names, lists, several = _fields(file)
    usual = Columns()
    is_row = names & {*CHAT_NAMES, INSTRUCTION, QUESTION, *usual.text, *usual.label}
    if "Instances" in names:
        return "natural_instructions"
    one_line = b"\n" not in head.rstrip()
    return "jsonl" if several or (one_line and (is_row or not lists)) else "object"


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _fields(file: SourceFile) -> tuple[set[str], list[str], bool]:
    """Return names in a file's first object, up to `Instances`, those of lists of objects, and whether more follows."""
    names, lists = set[str](), list[str]()
    with file.open() as stream:
        text = JsonStream(file, stream)
        try:
            for name in text.names():
                names.add(name)
                if name == "Instances":
                    return names, lists, False
                if text.next() == "[":
                    for index, element in enumerate(text.elements()):
                        lists += [name] if index == 0 and isinstance(element, dict) else []
                else:
                    text.skip()
            return names, lists, bool(text.next())
        except DataError:
            return names, lists, False  # the reader reports where it breaks


def read_definition(file: SourceFile) -> str:
    """Return the joined `Definition` of a NaturalInstructions file, stripped; empty if it has none.

    Raises:
        DataError: the part of the file before its end is not JSON.
    """
    with file.open() as stream:
        text = JsonStream(file, stream)
        for name in text.names():
            if name == "Definition":
                definition = text.value()
                parts = definition if isinstance(definition, list) else [definition]
                return "\n".join(part for part in parts if isinstance(part, str)).strip()
            text.skip()
    return ""


def _natural_instructions(file: SourceFile, columns: Columns, findings: Findings) -> Iterator[SourceRow]:
    names = Columns(("input",), ("output",) if columns.label else (), group=columns.group, others=columns.others)
    return usable_rows(_items_of(file, "Instances"), names, file.refuse, findings)


def _object(file: SourceFile, columns: Columns, findings: Findings) -> Iterator[SourceRow]:
    _, names, _ = _fields(file)
    if len(names) != 1:
        deque(_items_of(file, ""), maxlen=0)  # where the file is cut or damaged, that is what is wrong
        problem = f"{len(names)} lists of objects ({', '.join(names)})" if names else "no list of objects"
        file.refuse(f"the object has {problem}: expected rows in one of its fields, or save the rows as JSON lines")
    findings.note(f"{file.name}: its rows are the list '{names[0]}'")
    return usable_rows(_items_of(file, names[0]), columns, file.refuse, findings)


def _items_of(file: SourceFile, field: str | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the numbered elements of a list: the file itself, or a field of the object in it."""
    with file.open() as stream:
        text = JsonStream(file, stream)
        if field is None:
            yield from enumerate(text.elements(), start=1)
        for name in () if field is None else text.names():
            if name == field and text.next() == "[":
                yield from enumerate(text.elements(), start=1)
            else:
                text.skip()
        text.end()


def _json_lines(file: SourceFile, findings: Findings) -> Iterator[tuple[int, Any]]:
    for number, line in file.lines():
        if not line.strip():
            continue
        try:
            yield number, json_line(line, number, file)
        except BadRow as problem:
            findings.bad_row(problem)


def _reader(items_of: Callable[[SourceFile, Columns, Findings], Iterator[tuple[int, Any]]]) -> Reader:
    return lambda file, columns, findings: usable_rows(
        items_of(file, columns, findings), columns, file.refuse, findings
    )


def _phrasebank(file: SourceFile, columns: Columns, findings: Findings) -> Iterator[SourceRow]:
    """Yield `sentence@sentiment` on each line, in Latin-1, as the Financial PhraseBank is published."""
    for number, line in file.lines("latin-1"):
        sentence, at, label = line.strip().rpartition("@")
        if not at or not sentence.strip() or label not in _SENTIMENTS:
            file.refuse(f"'{line[-30:]}' is no end of a line: expected sentence@{'|'.join(_SENTIMENTS)}", number)
        yield SourceRow(number, sentence.strip(), (label if columns.label else "",))


def _text(file: SourceFile, columns: Columns, findings: Findings) -> Iterator[SourceRow]:
    """Yield a text on each line; empty lines are left out."""
    if columns.label:
        file.refuse("plain text has no answers: expected rows with a label, or set stream.objective to mlm or clm")
    for number, line in file.lines():
        if line.strip():
            yield SourceRow(number, line.strip(), ("",))


_SUFFIXES: Mapping[str, str] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}

FORMATS: Mapping[str, Reader] = {
    "natural_instructions": _natural_instructions,
    "olora": _reader(lambda file, columns, findings: _items_of(file)),
    "object": _object,
    "jsonl": _reader(lambda file, columns, findings: _json_lines(file, findings)),
    "csv": _reader(table_items),
    "parquet": _reader(lambda file, columns, findings: parquet_items(file, columns)),
    "text": _text,
    "phrasebank": _phrasebank,
}
"""Format -> what reads the rows of a file in it."""

FORMAT_NAMES = Names("format", FORMATS)
"""Built-in names and those of packages."""


def check_format(name: str) -> str:
    """Return the name, if files in that format can be read.

    Raises:
        ValueError: it is unknown. PluginError: its package cannot be used.
    """
    if name != AUTO and name not in FORMAT_NAMES:
        raise ValueError(f"'{name}' is no known format: {meant(name, [AUTO, *FORMAT_NAMES])}")
    return name


Format = Annotated[str, AfterValidator(check_format)]
"""A setting: `auto`, or the name of a format."""


def reader_of(name: str) -> Reader:
    """Return what reads the rows of a file: of `FORMATS`, else of an installed package.

    Raises:
        PluginError: neither has it, or the package cannot be used.
    """
    reader = FORMATS.get(name) or load("format", name)
    if reader is None:
        raise PluginError(f"unknown format '{name}': {meant(name, FORMAT_NAMES)}; is its package installed here?")
    return reader


def first_file(source: Source) -> SourceFile | None:
    """Return the first file of a source; None: it is a dataset."""
    if isinstance(source, SplitPart):
        return first_file(source.source)
    return source.files[0] if isinstance(source, SourceFiles) else source if isinstance(source, SourceFile) else None


def package_of(file: Source, format: str) -> str:
    """Return `my-package 1.0` where a package reads the file, on which caches of rows depend; else empty."""
    first = first_file(file)
    if first is None:
        return ""
    suffix = PurePosixPath(first.name).suffix.lower()
    name = format if format != AUTO else "" if suffix in (*_SUFFIXES, ".json") else suffix.removeprefix(".")
    plugin = None if not name or name in FORMATS else find("format", name)
    return "" if plugin is None else plugin.source
