"""One input file, wherever it is: its name in error messages, its bytes, its lines, its content hash.

Readers must name file and row in every error, and the cache must notice changed content without reading a large file
again each time.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, ClassVar

from raycl.data.sources.reading import USUAL_LIMITS, NamedSource, ReadLimits
from raycl.errors import DamagedError, DataError, StorageError
from raycl.storage import Storage
from raycl.storage.records import read_fields, seal

log: logging.Logger = logging.getLogger("raycl")

_FORMAT = 1
"""The format of the cache's records of hashes."""
_CHUNK = 1 << 20
_SETTLED_NS = 2_000_000_000
"""A file changed less than this before being hashed may change again within its time stamp's resolution."""
_MARKS = (
    (codecs.BOM_UTF8, "UTF-8"),
    (codecs.BOM_UTF32_LE, "UTF-32-LE"),
    (codecs.BOM_UTF32_BE, "UTF-32-BE"),
    (codecs.BOM_UTF16_LE, "UTF-16-LE"),
    (codecs.BOM_UTF16_BE, "UTF-16-BE"),
)
"""Byte order marks; that of UTF-32 begins with that of UTF-16."""


@dataclass(frozen=True)
class _Hashed:
    """A hash in the cache, with its file's name, size and time when it was computed."""

    stamp: str
    sha256: str


@dataclass(frozen=True)
class SourceFile(NamedSource):
    """A file `name` in a folder; its rows are refused beyond `limits`."""

    folder: Storage
    name: str
    limits: ReadLimits = USUAL_LIMITS

    @staticmethod
    def at(uri: str | Path) -> SourceFile:
        """Return the file at a path or URI; nothing is read.

        Raises:
            StorageError: an unknown scheme.
        """
        location = Storage.at(uri)
        parent, _, name = location.root.rpartition("/")
        return SourceFile(replace(location, uri=location.uri.rpartition("/")[0], root=parent), name)

    @property
    def uri(self) -> str:
        """The name that error messages use."""
        return f"{self.folder.uri}/{self.name}"

    def within(self, limits: ReadLimits) -> SourceFile:
        """Return the same with these limits."""
        return replace(self, limits=limits)

    def require(self) -> None:
        """Make sure that the file exists.

        Raises:
            DataError: the file does not exist, or its file system does not answer.
        """
        try:
            exists = self.folder.exists(self.name)
        except OSError as error:
            raise DataError(f"cannot look for '{self.uri}': {error}") from error
        if not exists:
            self.refuse("the file does not exist: expected a data file there, check the path")

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open a seekable binary stream after the byte order mark, if there is one; UTF-16 and UTF-32 come as UTF-8.

        Raises:
            DataError: the file cannot be read.
        """
        with self._raw() as stream:
            encoding, mark = _encoding(stream.read(4))
            stream.seek(len(mark))
            if encoding != "UTF-8":  # converted in memory: such files are exports of office programs, not corpora
                try:
                    stream = io.BytesIO(stream.read().decode(encoding).encode())
                except UnicodeDecodeError as error:
                    problem = f"invalid {encoding} ({error.reason} at byte {error.start})"
                    self.refuse(f"{problem}: expected text, export it again")
            yield stream

    @contextmanager
    def _raw(self) -> Iterator[IO[bytes]]:
        try:
            with self.folder.open(self.name) as stream:
                yield stream
        except (StorageError, OSError) as error:
            raise DataError(f"cannot read '{self.uri}': {error}") from error

    def encoding(self) -> str:
        """Return the encoding of a text file by its byte order mark; UTF-8 without one.

        Raises:
            DataError: the file begins with zero bytes, as UTF-16 without a byte order mark does.
        """
        with self._raw() as stream:
            head = stream.read(4)
        encoding, mark = _encoding(head)
        if not mark and b"\0" in head:
            guess = "UTF-16BE" if head.startswith(b"\0") else "UTF-16LE"
            self.refuse(f"text with zero bytes and no byte order mark: expected UTF-8, {self._convert(guess)}")
        return encoding

    def _convert(self, encoding: str) -> str:
        return f"convert it, for example: iconv -f {encoding} -t UTF-8 {shlex.quote(self.name)} > converted"

    def lines(self, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
        """Yield numbered lines (1-based, without line end), decoded one by one.

        Raises:
            DataError: a line is not UTF-8, or larger than a row may be.
        """
        with self.open() as stream:
            for number, line in enumerate(self._split_lines(stream), start=1):
                try:
                    yield number, line.decode(encoding)
                except UnicodeDecodeError as error:
                    self.refuse(
                        f"invalid UTF-8 (byte {error.object[error.start]:#04x} at byte {error.start + 1} of the line): "
                        f"expected UTF-8 text; if it is in Windows' Latin letters, {self._convert('WINDOWS-1252')}",
                        number,
                    )

    def _split_lines(self, stream: IO[bytes]) -> Iterator[bytes]:
        rest: list[bytes] = []
        number = 1
        while chunk := stream.read(_CHUNK):
            first, *lines = chunk.split(b"\n")
            rest.append(first)
            if sum(map(len, rest)) > self.limits.row_bytes:
                self.refuse(self.limits.too_large, number)
            if not lines:
                continue
            yield b"".join(rest).removesuffix(b"\r")
            rest = [lines.pop()]
            yield from (line.removesuffix(b"\r") for line in lines)
            number += 1 + len(lines)
        if last := b"".join(rest):
            yield last.removesuffix(b"\r")

    def content_hash(self, cache: Path) -> str:
        """Return the SHA-256 of the bytes in hex, remembered in `cache` under size and time of change.

        Raises:
            DataError: the file cannot be read.
        """
        self.require()
        info = self.folder.filesystem.get_file_info(self.folder.path(self.name))
        stamp = f"{self.uri}|{self.folder.endpoint}|{info.size}|{info.mtime_ns}"
        hashes, memo = Storage.at(cache / "hashes"), f"{hashlib.sha256(stamp.encode()).hexdigest()}.json"
        try:
            record = read_fields(hashes, memo, _FORMAT, _Hashed) if hashes.exists(memo) else None
            if record is not None and record.stamp != stamp:
                raise DamagedError(f"'{hashes.uri}/{memo}' is of another file: it was moved")
            if record is not None:
                return record.sha256
        except StorageError as error:
            log.warning("a file is hashed again: %s", error)
        digest = hashlib.sha256()
        with self._raw() as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        if info.mtime_ns is not None and time.time_ns() - info.mtime_ns > _SETTLED_NS:
            hashes.write(memo, seal({"format": _FORMAT, "stamp": stamp, "sha256": digest.hexdigest()}))
        return digest.hexdigest()


@dataclass(frozen=True)
class SourceFiles(NamedSource):
    """Files of one format whose rows are one split, in this order and numbered through."""

    counted: ClassVar[str] = " of all"

    folder: Storage
    files: tuple[SourceFile, ...]

    @property
    def name(self) -> str:
        return self.files[0].name

    @property
    def uri(self) -> str:
        """The name that error messages use."""
        return f"{self.folder.uri} ({len(self.files)} files)"

    @property
    def limits(self) -> ReadLimits:
        """The limits of each file."""
        return self.files[0].limits

    def within(self, limits: ReadLimits) -> SourceFiles:
        """Return the same with these limits."""
        return replace(self, files=tuple(file.within(limits) for file in self.files))

    def require(self) -> None:
        """Make sure that all files exist; see `SourceFile.require`."""
        for file in self.files:
            file.require()

    def content_hash(self, cache: Path) -> str:
        """Return the SHA-256 in hex of the files' names and hashes."""
        parts = [(file.name, file.content_hash(cache)) for file in self.files]
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def _encoding(head: bytes) -> tuple[str, bytes]:
    """Return the encoding of a file with this beginning, and its byte order mark."""
    return next(((name, mark) for mark, name in _MARKS if head.startswith(mark)), ("UTF-8", b""))
