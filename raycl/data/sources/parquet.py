"""Parquet files as items, a batch of rows in memory at a time.

A few kilobytes can hold gigabytes of rows (run lengths, dictionaries, compressed pages), so what a file expands to is
known before it is read: from the headers of its pages, by which Arrow reads, and not from its footer, which can say
anything.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ArrowException

from raycl.data.sources.fields import Columns, without_nulls
from raycl.data.sources.source import SourceFile

BATCH = 1024
_MOST_VALUE = 3 << 19
"""A dictionary of more bytes than this, more than writers usually make, makes batches smaller."""
_BATCH_BYTES = 256 << 20
"""Batches with a large dictionary take no more bytes than this, whatever the lengths of its values."""
_VALUE_BYTES = 8
"""The least bytes that a value takes, however its page is encoded."""
_HEADER_BYTES = 1 << 16
_DICTIONARY_PAGE = 2


def parquet_items(file: SourceFile, columns: Columns) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a Parquet file as dictionaries, numbered from 1.

    Raises:
        DataError: it is damaged, expands further or has larger rows than its limits allow, or has no such columns.
    """
    limits, number = file.limits, 1
    with file.open() as stream:
        try:
            parquet = pq.ParquetFile(stream, schema_depth_limit=2 * limits.depth, arrow_extensions_enabled=False)
            wanted = columns.needed(parquet.schema_arrow.names, file.refuse)
            size = stream.seek(0, 2)
            batch_rows = _batch_rows(parquet, wanted, stream, file)
            left = limits.expanded_bytes(size)
            plain = pa.schema([(name, _plain(parquet.schema_arrow.field(name).type)) for name in wanted])
            for batch in parquet.iter_batches(batch_size=batch_rows, columns=wanted):
                batch = batch if batch.schema.types == plain.types else batch.cast(plain)
                left -= batch.nbytes
                if left < 0:
                    file.refuse(limits.too_expanded(size))
                items = batch.to_pylist() if batch.nbytes <= limits.row_bytes else _one_by_one(batch, number, file)
                yield from enumerate((without_nulls(item, columns) for item in items), start=number)
                number += batch.num_rows
        except (ArrowException, MemoryError, _BadPageError) as error:
            file.refuse(f"not a readable Parquet file ({' '.join(str(error).split())}): re-export the file")


def check_parquet(file: SourceFile) -> int:
    """Return how many rows may be read at once of a file that a library reads.

    Raises:
        DataError: it is damaged, or expands further than its limits allow.
    """
    with file.open() as stream:
        try:
            parquet = pq.ParquetFile(stream, schema_depth_limit=2 * file.limits.depth)
            return _batch_rows(parquet, parquet.schema_arrow.names, stream, file)
        except (ArrowException, _BadPageError) as error:
            file.refuse(f"not a readable Parquet file ({' '.join(str(error).split())}): re-export the file")


def _batch_rows(parquet: pq.ParquetFile, columns: Sequence[str], stream: IO[bytes], file: SourceFile) -> int:
    size = stream.seek(0, 2)
    expanded = _expansion(parquet, columns, stream, every_page=file.folder.is_local)
    if expanded.total > file.limits.expanded_bytes(size):
        file.refuse(file.limits.too_expanded(size))
    return BATCH if expanded.largest <= _MOST_VALUE else max(1, _BATCH_BYTES // expanded.largest)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type that copies values where Arrow would share them between rows."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind):
        return pa.large_list(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain(field.type)) for field in kind.fields])
    return kind


def _one_by_one(batch: pa.RecordBatch, number: int, file: SourceFile) -> Iterator[Any]:
    """Yield the rows of a large batch one by one, since one of them may be too large."""
    for offset in range(batch.num_rows):
        row = batch.slice(offset, 1)
        if row.nbytes > file.limits.row_bytes:
            file.refuse(file.limits.too_large, number + offset)
        yield from row.to_pylist()


# ---- the headers of pages ------------------------------------------------------------------------------------------


@dataclass
class _Expansion:
    """The sizes to which pages expand.

    Attributes:
        total: bytes of all pages. largest: the largest mean bytes of a row in any page.
    """

    total: int = 0
    largest: int = 0


def _expansion(parquet: pq.ParquetFile, columns: Sequence[str], stream: IO[bytes], every_page: bool) -> _Expansion:
    """Return the sizes of the pages of these columns; of remote files the first page of each is read."""
    expansion = _Expansion()
    meta = parquet.metadata
    for group in range(meta.num_row_groups):
        for column in range(meta.num_columns):
            chunk = meta.row_group(group).column(column)
            if chunk.path_in_schema.partition(".")[0] in columns or chunk.path_in_schema in columns:
                _add_chunk(expansion, chunk, stream, every_page)
    return expansion


def _add_chunk(expansion: _Expansion, chunk: Any, stream: IO[bytes], every_page: bool) -> None:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    end, expanded, values, mean = start + chunk.total_compressed_size, 0, 0, _VALUE_BYTES
    while start < end:
        stream.seek(start)
        header, length = _page_header(stream.read(_HEADER_BYTES))
        size = _number(header, 2)
        expanded += size
        if _number(header, 1) == _DICTIONARY_PAGE:
            expansion.largest = max(expansion.largest, size)  # every row may be its longest value
            mean = max(mean, size // max(1, _number(header.get(7) or {}, 1)))
        else:
            data = header.get(5) or header.get(8) or {}
            count = _number(data, 1)
            values += count
            expansion.largest = max(expansion.largest, size // max(1, count))
        start += length + _number(header, 3)
        if not every_page:
            expanded = max(expanded, chunk.total_uncompressed_size)
            values = max(values, chunk.num_values)
            break
    expansion.total += max(expanded, values * mean)


def _number(header: Mapping[int, Any], field: int) -> int:
    value = header.get(field)
    if not isinstance(value, int) or value < 0:
        raise _BadPageError(f"a page's header has no field {field}")
    return value


class _BadPageError(Exception):
    """A page's header is damaged."""


def _page_header(data: bytes) -> tuple[dict[int, Any], int]:
    """Return the fields of a page's header (parquet.thrift, PageHeader) and its length."""
    reader = _Compact(data)
    try:
        return reader.struct(), reader.at
    except IndexError as error:
        raise _BadPageError("a page's header is cut") from error


class _Compact:
    """Reader of Thrift's compact protocol, as far as headers of pages use it; texts and lists are skipped."""

    def __init__(self, data: bytes) -> None:
        self.at, self._data = 0, data

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the fields by number: numbers, truth values, structs, or None."""
        fields: dict[int, Any] = {}
        number = 0
        if depth > 8:
            raise _BadPageError("a page's header is nested too deeply")
        while kind := self._byte():
            step = kind >> 4
            number = number + step if step else self._signed()
            fields[number] = self._value(kind & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._signed()
            case 7:
                self.at += 8
            case 8:
                length = self._varint()  # first, since it moves the position
                self.at += length
            case 12:
                return self.struct(depth + 1)
            case _:
                raise _BadPageError(f"a page's header has a field of kind {kind}")
        return None

    def _byte(self) -> int:
        byte = self._data[self.at]
        self.at += 1
        return byte

    def _varint(self) -> int:
        value = shift = 0
        while True:
            part = self._byte()
            value |= (part & 127) << shift
            if part < 128:
                return value
            shift += 7

    def _signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
