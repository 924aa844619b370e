"""One input file, wherever it is: its name in error messages, its bytes, its lines, its content hash.

Why it exists: readers must name file and row in every error, and the cache must notice changed content without
reading a large file again each time. What it does not know: formats.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NoReturn

from raycl.data.sources.cache import write_atomically
from raycl.errors import DataError, StorageError
from raycl.storage import Storage

_CHUNK = 1 << 20
_SETTLED_NS = 2_000_000_000
"""A file changed less than this before being hashed may change again within its time stamp's resolution."""


@dataclass(frozen=True)
class SourceFile:
    """A file `name` in a folder."""

    folder: Storage
    name: str

    @staticmethod
    def at(uri: str | Path) -> SourceFile:
        """The file at a path or URI; nothing is read.

        Raises:
            StorageError: an unknown scheme.
        """
        whole = Storage.at(uri)
        parent, _, name = whole.root.rpartition("/")
        return SourceFile(replace(whole, uri=whole.uri.rpartition("/")[0], root=parent), name)

    @property
    def uri(self) -> str:
        """What error messages call it."""
        return f"{self.folder.uri}/{self.name}"

    def refuse(self, problem: str, row: int | None = None) -> NoReturn:
        """Raise a DataError about this file, and one row of it (1-based) if given."""
        place = self.uri if row is None else f"{self.uri}, row {row}"
        raise DataError(f"{place}: {problem}")

    def exists(self) -> bool:
        """Whether the file is there."""
        return self.folder.exists(self.name)

    def require(self) -> None:
        """Make sure that the file is there.

        Raises:
            DataError: it is not, or its file system does not answer.
        """
        try:
            found = self.folder.exists(self.name)
        except OSError as error:
            raise DataError(f"cannot look for '{self.uri}': {error}") from error
        if not found:
            self.refuse("the file does not exist: expected a data file there, check the path")

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """A seekable binary stream, positioned behind a byte order mark if there is one.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            with self.folder.open(self.name) as stream:
                if stream.read(3) != b"\xef\xbb\xbf":
                    stream.seek(0)
                yield stream
        except (StorageError, OSError) as error:
            raise DataError(f"cannot read '{self.uri}': {error}") from error

    def lines(self, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
        """Numbered lines (1-based, without line end), decoded one by one.

        Raises:
            DataError: a line is not UTF-8.
        """
        with self.open() as stream:
            for number, line in enumerate(_split_lines(stream), start=1):
                try:
                    yield number, line.decode(encoding)
                except UnicodeDecodeError as error:
                    self.refuse(
                        f"invalid UTF-8 (byte {error.object[error.start]:#04x} at byte {error.start + 1} of the line): "
                        "expected UTF-8 text, convert the file to UTF-8",
                        number,
                    )

    def content_hash(self, cache: Path) -> str:
        """SHA-256 of the bytes in hex, remembered in `cache` under size and time of change.

        Raises:
            DataError: the file cannot be read.
        """
        self.require()
        info = self.folder.filesystem.get_file_info(self.folder.path(self.name))
        stamp = f"{self.uri}|{self.folder.endpoint}|{info.size}|{info.mtime_ns}"
        memo = cache / "hashes" / hashlib.sha256(stamp.encode()).hexdigest()
        if memo.is_file():
            return memo.read_text()
        digest = hashlib.sha256()
        with self.open() as stream:
            stream.seek(0)
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        if info.mtime_ns is not None and time.time_ns() - info.mtime_ns > _SETTLED_NS:
            write_atomically(memo, digest.hexdigest().encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class SourceFiles:
    """Files of one format whose rows are one split, in this order."""

    folder: Storage
    files: tuple[SourceFile, ...]

    @property
    def name(self) -> str:
        """Of the first file."""
        return self.files[0].name

    @property
    def uri(self) -> str:
        """What error messages call it."""
        return f"{self.folder.uri} ({len(self.files)} files)"

    def refuse(self, problem: str, row: int | None = None) -> NoReturn:
        """Raise a DataError about these files, and one row of all together (1-based) if given."""
        raise DataError(f"{self.uri}{'' if row is None else f', row {row} of all'}: {problem}")

    def exists(self) -> bool:
        """Whether all files are there."""
        return all(file.exists() for file in self.files)

    def require(self) -> None:
        """As `SourceFile.require`, for each."""
        for file in self.files:
            file.require()

    def content_hash(self, cache: Path) -> str:
        """SHA-256 in hex of the files' names and hashes."""
        parts = [(file.name, file.content_hash(cache)) for file in self.files]
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def _split_lines(stream: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while chunk := stream.read(_CHUNK):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in whole)
    if rest:
        yield rest.removesuffix(b"\r")
