"""Answers as one file: CSV and Parquet with the same columns in every row, or JSON lines as they are in the parts.

Parts are for programs that continue after a stop; people open one table.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raycl.config import Tree
from raycl.data.sources.source import SourceFile
from raycl.data.sources.table_cells import SpreadsheetWriter
from raycl.errors import ConfigError
from raycl.serve.offline.prediction_files import OWN, PLACE
from raycl.serve.offline.prediction_input import Input

BATCH = 1024
"""Rows that are written at once."""

_OWN_TYPES = {"row": pa.int64(), "cut_tokens": pa.int64(), "ood_score": pa.float64()}
"""Other columns of ours are text."""

_INT64 = 1 << 63


def check_output(address: str, given: Input) -> None:
    """Refuse an address that `write_table` could not or should not write to, before any work starts.

    Raises:
        ConfigError: an unknown suffix, or a file that is read.
    """
    if not address.endswith(tuple(_WRITERS)):
        raise ConfigError(f"--output is '{address}': expected a file that ends with {', '.join(_WRITERS)}")
    if any(file.uri == SourceFile.at(address).uri for file in given.files):
        raise ConfigError(f"--output is '{address}', which is read: name another file")


def write_table(records: Callable[[], Iterator[Tree]], address: str) -> None:
    """Write records as one file, whole or not at all.

    Args:
        records: returns the records of all parts (`records_of`); called for each of two passes.

    Raises:
        StorageError: it cannot be written, or a part is damaged.
    """
    suffix = next(suffix for suffix in _WRITERS if address.endswith(suffix))
    columns = _columns(records())
    file = SourceFile.at(address)
    file.folder.write_parts(file.name, lambda: _WRITERS[suffix](records(), columns))


def _columns(records: Iterable[Tree]) -> dict[str, set[str]]:
    """Return columns in their order, with the kinds of their values: the file and row, the input's, then ours."""
    values_by_column: dict[str, set[str]] = {}
    for record in records:
        for name, value in record.items():
            values_by_column.setdefault(name, set()).add(_kind(value))
    order = (
        *PLACE,
        *(name for name in values_by_column if name not in OWN),
        *(name for name in OWN if name not in PLACE),
    )
    return {name: values_by_column.get(name, set()) for name in order if name in values_by_column or name == "error"}


def _kind(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and not -_INT64 <= value < _INT64:
        return "str"
    return type(value).__name__


def _jsonl(records: Iterator[Tree], columns: Mapping[str, set[str]]) -> Iterator[bytes]:
    while batch := list(islice(records, BATCH)):
        yield "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in batch).encode()


def _csv(records: Iterator[Tree], columns: Mapping[str, set[str]]) -> Iterator[bytes]:
    text = io.StringIO()
    writer = SpreadsheetWriter(text)
    writer.writerow(columns)
    while batch := list(islice(records, BATCH)):
        writer.writerows([_cell(record.get(name)) for name in columns] for record in batch)
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    yield text.getvalue().encode()


def _cell(value: Any) -> str | None:
    """Return a value as text; None as it is, and what has parts as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _parquet(records: Iterator[Tree], columns: Mapping[str, set[str]]) -> Iterator[bytes]:
    schema = pa.schema([(name, _OWN_TYPES.get(name) or _type(kinds)) for name, kinds in columns.items()])
    sink = _Written()
    with pq.ParquetWriter(sink, schema) as writer:
        while batch := list(islice(records, BATCH)):
            values = {field.name: _values(batch, field) for field in schema}
            writer.write_table(pa.table(values, schema))
            yield sink.taken()
    yield sink.taken()


def _type(kinds: set[str]) -> pa.DataType:
    """Return the type of an input column: text where its values are of several kinds or have parts."""
    known = kinds - {"NoneType"}
    if known == {"bool"}:
        return pa.bool_()
    if known == {"int"}:
        return pa.int64()
    return pa.float64() if known and known <= {"int", "float"} else pa.string()


def _values(batch: Sequence[Tree], field: pa.Field) -> list[Any]:
    values = [record.get(field.name) for record in batch]
    return [_cell(value) for value in values] if field.type == pa.string() else values


class _Written(io.RawIOBase):
    """The bytes that a writer has written since they were last taken."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._count = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Keep a copy."""
        part = bytes(data)
        self._parts.append(part)
        self._count += len(part)
        return len(part)

    def tell(self) -> int:
        """Return bytes written in all."""
        return self._count

    def taken(self) -> bytes:
        """Give it away."""
        text, self._parts = b"".join(self._parts), []
        return text


_WRITERS: Mapping[str, Callable[[Iterator[Tree], Mapping[str, set[str]]], Iterator[bytes]]] = {
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
