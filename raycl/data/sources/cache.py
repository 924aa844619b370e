"""A node-local cache of Arrow files: built once per node, complete or absent, read by memory map.

Several workers of a node need the same rows; one of them converts, the others wait on a file lock and then map the same
pages. An entry is `<key>.arrow` with the sealed record `<key>.json`, written last: it means committed. An entry that is
not what its record says is built again.
"""

import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock
from numpy.typing import NDArray

from raycl.errors import DataError, StorageError
from raycl.storage import Storage
from raycl.storage.records import Seal, check_sealed, read_seal, record_of, write_seal
from raycl.storage.unfinished import unfinished

log: logging.Logger = logging.getLogger("raycl")

Info = dict[str, Any]
"""JSON-able description of an entry."""


@dataclass(frozen=True)
class CacheEntry:
    """A committed cache entry.

    Attributes:
        sha256: hash of the file.
    """

    path: Path
    info: Info
    sha256: str

    def table(self) -> pa.Table:
        """Return the columns, memory-mapped: only pages that are touched become resident.

        Raises:
            DataError: the file was damaged since the entry was opened, or in between by another process.
        """
        try:
            check_sealed(self.path, self.sha256)
        except StorageError as error:
            raise DataError(f"{error}: start again, and this entry of the cache is made anew") from error
        with pa.memory_map(str(self.path)) as source:
            return pa.ipc.open_file(source.read_buffer()).read_all()  # of a file, a thread of Arrow's reads the footer


def cache_folder(configured: str | None) -> Path:
    """Return the configured folder, else `$RAYCL_CACHE`, else `~/.cache/raycl`."""
    return Path(configured or os.environ.get("RAYCL_CACHE") or "~/.cache/raycl").expanduser().absolute()


def key_of(*parts: Any) -> str:
    """Return 32 hex digits that change with any of `parts` (JSON-able values)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def entry(folder: Path, key: str, schema: pa.Schema, build: Callable[[pa.RecordBatchFileWriter], Info]) -> CacheEntry:
    """Return the entry `key` of `folder`; `build` writes its batches and returns its info unless the entry exists.

    If `build` raises, nothing is left behind and the next caller tries again.

    Raises:
        DataError: the folder cannot be written.
    """
    storage, name = Storage.at(folder), f"{key}.arrow"
    with suppress(StorageError):
        return _whole(storage, name, key)
    with ExitStack() as held:
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(folder / f"{key}.lock"))
        try:
            return _whole(storage, name, key)  # left by the process that had the lock
        except StorageError as error:
            if storage.exists(record_of(name)):
                log.warning("an entry of the cache is made anew: %s", error)
        path = Path(storage.path(name))
        with unfinished(path) as temporary:
            with _Sink(folder, temporary) as sink, pa.ipc.new_file(sink, schema) as writer:
                info = build(writer)
            with _writing(folder):
                with temporary.open("rb") as stream:
                    sha256, size = hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell()
                os.replace(temporary, path)
        write_seal(storage, name, Seal(name, key, sha256, size, info))
        return CacheEntry(path, info, sha256)


class _Sink(io.BufferedWriter):
    """A file that an entry is written to: what fails here is the cache's, and no error of the rows' own reader."""

    def __init__(self, folder: Path, path: Path) -> None:
        with _writing(folder):
            super().__init__(io.FileIO(path, "w"))
        self._folder = folder

    def write(self, data: Any) -> int:
        with _writing(self._folder):
            return super().write(data)

    def close(self) -> None:
        with _writing(self._folder):
            super().close()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write to the cache in '{folder}' ({error.strerror or error}): expected a folder that can be "
            "written and has room, make some there, or set stream.cache_dir or RAYCL_CACHE to another folder"
        ) from error


def _whole(storage: Storage, name: str, key: str) -> CacheEntry:
    seal, path = read_seal(storage, name, key), Path(storage.path(name))
    check_sealed(path, seal.sha256)
    return CacheEntry(path, seal.info, seal.sha256)


Indices = NDArray[np.int64]
RowIndices = Sequence[int] | Indices


class ChunkedRows:
    """Scattered rows of a memory-mapped table whose columns share their chunks, as record batches give them.

    Whole columns are not copied: Arrow's own `take` joins all chunks of a list column first. Arrays become NumPy's by
    DLPack, for `to_numpy` imports pandas.
    """

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
            self._numbers[column] = np.from_dlpack(self._table.column(column).combine_chunks())
        return self._numbers[column][np.asarray(rows, dtype=np.int64)]

    def lists(self, column: str, rows: RowIndices) -> list[NDArray[np.int32]]:
        """Return views of a list<int32> column's rows into the mapped file."""
        chunks = self._table.column(column).chunks
        views: list[NDArray[Any]] = []
        for chunk, offset in self._positions(rows):
            start, end = (chunks[chunk].offsets[index].as_py() for index in (offset, offset + 1))
            views.append(np.from_dlpack(chunks[chunk].values.slice(start, end - start)))
        return views

    def list_lengths(self, column: str) -> NDArray[np.int64]:
        """Return the length of every row of a list column, `[rows]`; touches the offsets alone."""
        chunks = [np.diff(np.from_dlpack(chunk.offsets)) for chunk in self._table.column(column).chunks]
        return np.concatenate([*chunks, np.zeros(0)]).astype(np.int64)

    def _positions(self, rows: RowIndices) -> Iterator[tuple[int, int]]:
        wanted = np.asarray(rows, dtype=np.int64)
        assert not len(wanted) or (wanted.min() >= 0 and wanted.max() < len(self)), "row outside its table"
        chunks = np.searchsorted(self._starts, wanted, side="right") - 1
        return zip(chunks.tolist(), (wanted - self._starts[chunks]).tolist(), strict=True)
