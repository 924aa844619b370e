"""Reads a file into checked raw rows in the node's cache.

A source is read once per node, streaming, and every row is checked before any worker starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import pyarrow as pa

from raycl.data.sources.cache import CacheEntry, ChunkedRows, Indices, Info, entry, key_of
from raycl.data.sources.fields import Columns, Refuse, SourceRow
from raycl.data.sources.formats import AUTO, Source, detect, first_file, package_of, read_definition, read_rows
from raycl.data.sources.hub import NO_LABEL, HubSplit
from raycl.data.sources.reading import BadRow, Findings, OnBadRow
from raycl.data.sources.splits import SplitPart
from raycl.errors import counted

Labels = tuple[str, ...] | Literal["auto"] | None

MAX_AUTO_LABELS = 64
"""Train files with more distinct answers than this have free text, not a label set."""

_VERSION = 9
_BATCH = 1024
_SCHEMA = pa.schema(
    [("text", pa.string()), ("references", pa.list_(pa.string())), ("row", pa.int64()), ("group", pa.string())]
)


@dataclass(frozen=True)
class FileReading:
    """Settings of reading a file.

    Attributes:
        labels: the closed set that every label must be in, "auto" to gather it, None for free text.
        unlabelled: labels that mark a row as having none.
        keep_unlabelled: keep such rows; else they are dropped and counted.
        first_label: number of the first label where files hold class numbers, else None.
        words: (label, word) pairs: the word is the answer instead of the label.
        around: what every text begins and ends with, which is taken off.
        on_bad_row: refuse: a row that cannot be used is an error; skip: it is left out and counted.
    """

    format: str = AUTO
    columns: Columns = field(default_factory=Columns)
    labels: Labels = None
    unlabelled: tuple[str, ...] = ()
    keep_unlabelled: bool = False
    first_label: int | None = None
    words: tuple[tuple[str, str], ...] = ()
    around: tuple[str, str] = ("", "")
    on_bad_row: OnBadRow = "refuse"

    @property
    def answers(self) -> Labels:
        """The label set with the words in place of their labels."""
        words = dict(self.words)
        return tuple(words.get(name, name) for name in self.labels) if isinstance(self.labels, tuple) else self.labels


@dataclass(frozen=True)
class RawRows:
    """Rows of one split as they are on disk.

    Attributes:
        key: a key that changes with content and reading. where: its name in error messages.
        labels: the closed label set, given or gathered; None for free text.
        problems: what is wrong with the first rows that are left out.
        notes: how the source was read, where that is not the usual way.
        count: number of rows. sha256: of texts and references, which does not depend on how they are stored.
        dropped: unlabelled rows that are left out. blank: those of them with an empty label.
        left_out: rows that are left out because they cannot be used.
        is_chat: texts are conversations. names_groups: rows name a group that they belong to.
        definition: the instruction that the file carries, or an empty text.
    """

    key: str
    where: str
    entry: CacheEntry
    labels: tuple[str, ...] | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    count: int
    sha256: str
    dropped: int
    blank: int
    left_out: int
    is_chat: bool
    names_groups: bool
    definition: str

    @staticmethod
    def of(key: str, where: str, entry: CacheEntry) -> RawRows:
        """Return the rows of an entry, whose info `write_rows` gave."""
        info = dict(entry.info)
        labels = info.pop("labels")
        problems, notes = tuple(info.pop("problems")), tuple(info.pop("notes"))
        return RawRows(key, where, entry, None if labels is None else tuple(labels), problems, notes, **info)

    @cached_property
    def groups(self) -> Indices:
        """`[count]` number of each row's group, in the order of their first rows; a row without one is its own.

        The turns of a conversation are a group.
        """
        if not (self.is_chat or self.names_groups):
            return np.arange(self.count)
        numbers: dict[str | int, int] = {}
        groups = self.entry.table().column("group").to_pylist()
        keys = (row if group is None else group for row, group in enumerate(groups))
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)

    def open(self) -> ChunkedRows:
        """Open the columns `text`, `references`, `row` (1-based number in the file) and `group` (None: its own)."""
        return ChunkedRows(self.entry.table())

    def label_codes(self, rows: Indices) -> Indices:
        """Return the index in `labels` of each row's first reference, -1 if it is not a label."""
        codes = {label: code for code, label in enumerate(self.labels or ())}
        references = self.open().values("references", rows)
        return np.array([codes.get(names[0], -1) for names in references], dtype=np.int64)


def ingest(file: Source, reading: FileReading, cache: Path) -> RawRows:
    """Return the rows of `file`, from the cache if this content was read this way before.

    Raises:
        DataError: the file, a row or a label cannot be used, or there are no rows.
    """
    package = [package_name] if (package_name := package_of(file, reading.format)) else []
    read_as = (asdict(reading), file.limits.model_dump(), *package)
    key = key_of(_VERSION, "file", file.content_hash(cache), file.name, *read_as)

    def build(writer: pa.RecordBatchFileWriter) -> Info:
        findings = Findings(reading.on_bad_row)
        base = file.source if isinstance(file, SplitPart) else file
        if isinstance(base, HubSplit):
            read, names = reading, base.labels(reading.columns)
            if names is not None:  # classes that the dataset declares; rows without a label have none of them
                labels = names if reading.labels == "auto" else reading.labels
                read = replace(reading, labels=labels, unlabelled=(*reading.unlabelled, NO_LABEL))
            rows = read_rows(file, AUTO, reading.columns, findings)
            return {**write_rows(rows, read, writer, file.refuse, findings), "definition": ""}
        first = first_file(file)
        assert first is not None, "what is no dataset has files"
        format = detect(first) if reading.format == AUTO else reading.format
        rows = read_rows(file, format, reading.columns, findings)
        definition = read_definition(first) if format == "natural_instructions" else ""
        return {**write_rows(rows, reading, writer, file.refuse, findings), "definition": definition}

    raw = RawRows.of(key, file.uri, entry(cache / "raw", key, _SCHEMA, build))
    blank = tuple(label for label in raw.labels or () if not label.strip())
    if reading.labels != "auto" or not blank:
        return raw
    if reading.on_bad_row == "refuse":  # an empty cell is a missing label, not a class
        columns, everything = raw.open(), np.arange(raw.count)
        empty = [row for row, names in enumerate(columns.values("references", everything)) if names[0] in blank]
        (number,) = columns.values("row", empty[:1])
        file.refuse(
            f"{counted(len(empty), 'row')} of {raw.count:,} with an empty label, the first is row {number}: expected a "
            "label, complete or remove them, or leave them out with stream.on_bad_row=skip"
        )
    return ingest(file, replace(reading, unlabelled=(*reading.unlabelled, *blank)), cache)


def ingest_pairs(
    pairs: Iterable[tuple[str, str]], where: str, key: str, labels: tuple[str, ...], cache: Path
) -> RawRows:
    """Return the rows of generated (text, label) pairs; `pairs` is consumed only if `key` is not cached."""
    key = key_of(_VERSION, key)

    def build(writer: pa.RecordBatchFileWriter) -> Info:
        rows = (SourceRow(number, text, (label,)) for number, (text, label) in enumerate(pairs, start=1))
        return {**write_rows(rows, FileReading(labels=labels), writer, refuse, Findings()), "definition": ""}

    def refuse(problem: str, row: int | None = None) -> NoReturn:
        raise AssertionError(f"{where}, row {row}: {problem}")

    return RawRows.of(key, where, entry(cache / "raw", key, _SCHEMA, build))


def write_rows(
    rows: Iterator[SourceRow],
    reading: FileReading,
    writer: pa.RecordBatchFileWriter,
    refuse: Refuse,
    findings: Findings,
) -> Info:
    """Check rows and write them in batches; memory holds one batch at a time."""
    check, digest = _Check(reading, refuse), hashlib.sha256()
    usable = _kept(rows, check, findings)
    while batch := list(islice(usable, _BATCH)):
        digest.update(json.dumps([(row.text, row.references) for row in batch]).encode())
        texts, references, numbers = zip(*((row.text, row.references, row.number) for row in batch), strict=True)
        # the turns of a conversation share the number of its row
        groups = [row.group or (f"row {row.number}" if row.is_chat else None) for row in batch]
        writer.write_batch(pa.record_batch([texts, references, numbers, groups], schema=_SCHEMA))
    if not check.count and check.dropped:
        refuse(f"none of its {check.dropped:,} rows has a label: expected labels, choose another split or file")
    if not check.count and findings.left_out:
        refuse(f"none of its {findings.left_out:,} rows can be used, for example: {findings.problems[0]}")
    if not check.count:
        refuse("the split is empty: expected at least one row, fill the file or leave the task out")
    summary = {"count": check.count, "dropped": check.dropped, "labels": check.labels(), "sha256": digest.hexdigest()}
    return {
        **summary,
        **findings.tree(),
        "blank": check.blank,
        "is_chat": bool(check.is_chat),
        "names_groups": check.names_groups,
    }


def _kept(rows: Iterator[SourceRow], check: _Check, findings: Findings) -> Iterator[SourceRow]:
    for row in rows:
        try:
            checked = check(row)
        except BadRow as problem:
            findings.bad_row(problem)
        else:
            if checked is not None:
                yield checked


def _beginning_and_end(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:50]}...{text[-25:]}"


class _Check:
    """Counts rows, gathers labels and refuses answers outside the label set; None means that the row is dropped."""

    def __init__(self, reading: FileReading, refuse: Refuse) -> None:
        self.count = self.dropped = self.blank = 0
        self._reading = reading
        self._refuse = refuse
        self._answers = dict(reading.words)  # by label, and by the number of one
        if reading.first_label is not None and isinstance(reading.answers, tuple):
            self._answers |= {str(number): name for number, name in enumerate(reading.answers, reading.first_label)}
        self._allowed = set(reading.answers) if isinstance(reading.answers, tuple) else None
        self._gathered: set[str] | None = set() if reading.labels == "auto" else None
        self.is_chat: bool | None = None
        self.names_groups = False

    def __call__(self, row: SourceRow) -> SourceRow | None:
        self._check_kind(row)
        if any(self._reading.around):
            row = row._replace(text=self._inner(row))
        if row.references[0] in self._reading.unlabelled:
            if not self._reading.keep_unlabelled:
                self.dropped += 1
                self.blank += not row.references[0].strip()
                return None
        else:
            if self._answers:
                row = row._replace(references=tuple(self._answers.get(name, name) for name in row.references))
            self._check_labels(row)
        self.names_groups = self.names_groups or bool(row.group)
        self.count += 1
        return row

    def _check_kind(self, row: SourceRow) -> None:
        """Refuse a mixture of conversations and texts, whose prompts differ, and label sets for conversations."""
        if self.is_chat is None:
            self.is_chat = row.is_chat
            if row.is_chat:
                self._gathered = None
        if row.is_chat != self.is_chat:
            kinds = ("a conversation", "a text") if row.is_chat else ("a text", "a conversation")
            self._refuse(f"found {kinds[0]}: expected {kinds[1]} as in the first row, split the file", row.number)

    def _inner(self, row: SourceRow) -> str:
        """Return the text of a row without what is around every text; of an empty input the two parts may overlap."""
        before, behind = self._reading.around
        if not (row.text.startswith(before) and row.text.endswith(behind)):
            self._refuse(
                f"the prompt {_beginning_and_end(row.text)!r} is not the benchmark's: expected it to begin with "
                f"{before!r} and to end with {behind!r}; correct the row, or set stream.prompt=plain to read prompts "
                "as they are",
                row.number,
            )
        return row.text[len(before) : len(row.text) - len(behind)]

    def _check_labels(self, row: SourceRow) -> None:
        if self._allowed is not None:
            assert isinstance(self._reading.labels, tuple), "a closed set is a tuple"
            for label in row.references:
                if label not in self._allowed:
                    self._refuse(
                        f"label '{label}' is outside the label set: expected one of {', '.join(self._reading.labels)}; "
                        "correct the row, or describe the task in 'tasks' with its own labels (labels: null for free "
                        "text)",
                        row.number,
                    )
        elif self._gathered is not None:
            self._gathered.update(row.references)
            if len(row.references) > 1 or len(self._gathered) > MAX_AUTO_LABELS:
                self._gathered = None

    def labels(self) -> list[str] | None:
        """Return the closed label set in its order (sorted if gathered), None for free text."""
        if isinstance(self._reading.answers, tuple):
            return list(self._reading.answers)
        return None if self._gathered is None else sorted(self._gathered)
