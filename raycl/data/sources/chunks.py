"""Reading scattered rows of a memory-mapped Arrow table without copying whole columns.

Arrow's own `take` joins all chunks of a list column first, which would pull the file into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Indices = NDArray[np.int64]
RowIndices = Sequence[int] | Indices


class ChunkedRows:
    """Row access to a table whose columns share their chunks, as record batches give them."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        lengths = [len(chunk) for chunk in table.column(0).chunks]
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._numbers: dict[str, NDArray[Any]] = {}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def values(self, column: str, rows: RowIndices) -> list[Any]:
        """Return the Python values of `rows`, in their order."""
        chunks = self._table.column(column).chunks
        return [chunks[chunk][offset].as_py() for chunk, offset in self._positions(rows)]

    def numbers(self, column: str, rows: RowIndices) -> NDArray[Any]:
        """Return values of a number column, `[len(rows)]`; the column stays in memory."""
        if column not in self._numbers:
            self._numbers[column] = self._table.column(column).to_numpy()
        return self._numbers[column][np.asarray(rows, dtype=np.int64)]

    def lists(self, column: str, rows: RowIndices) -> list[NDArray[np.int32]]:
        """Return views of a list<int32> column's rows into the mapped file."""
        chunks = self._table.column(column).chunks
        views = []
        for chunk, offset in self._positions(rows):
            start, end = (chunks[chunk].offsets[index].as_py() for index in (offset, offset + 1))
            views.append(chunks[chunk].values.slice(start, end - start).to_numpy())
        return views

    def list_lengths(self, column: str) -> NDArray[np.int64]:
        """Return the length of every row of a list column, `[rows]`; touches the offsets alone."""
        chunks = [np.diff(chunk.offsets.to_numpy()) for chunk in self._table.column(column).chunks]
        return np.concatenate([*chunks, np.zeros(0)]).astype(np.int64)

    def _positions(self, rows: RowIndices) -> Iterator[tuple[int, int]]:
        wanted = np.asarray(rows, dtype=np.int64)
        assert not len(wanted) or (wanted.min() >= 0 and wanted.max() < len(self)), "row outside its table"
        chunks = np.searchsorted(self._starts, wanted, side="right") - 1
        return zip(chunks.tolist(), (wanted - self._starts[chunks]).tolist(), strict=True)
