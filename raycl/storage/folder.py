"""A folder on some file system, and the files below it."""

from __future__ import annotations

import json
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from pyarrow import ArrowException, NativeFile
from pyarrow import fs as pafs

from raycl.errors import AlreadyExistsError, DamagedError, StorageError
from raycl.storage.remote import create_gs, create_s3, with_retries
from raycl.storage.unfinished import UNFINISHED, Buffer, finished_beside

T = TypeVar("T")

_OF_URIS = "%:/?#[]@!$&'()*+,;=~"
"""Signs of a URI that are not encoded; pyarrow accepts no others except ASCII letters and digits."""

GCS_RETRIES_S = 10
"""Seconds for which pyarrow repeats a request to Google's store; its default of 15 minutes says nothing meanwhile."""

LARGE = 1024**2
"""Bytes from which on a thread writes a file while its hash is computed; starting one takes longer for less."""

_READ_ATTEMPTS = 10
"""Attempts to read an object that is continually replaced before `read` gives up."""


@dataclass(frozen=True)
class StoredFile:
    """One file of a listing.

    Attributes:
        size: bytes. age: seconds since it was last written. written: time of that, in seconds since 1970.
        unfinished: its writer has not finished, or died.
    """

    size: int
    age: float
    unfinished: bool
    written: float


@dataclass(frozen=True)
class Storage:
    """A folder on some file system; every name below is relative to it, with forward slashes.

    Attributes:
        uri: as the user wrote it without its query; for local folders the absolute path; in others, signs that a URI
            cannot have are encoded.
        endpoint: address of an S3-compatible server other than AWS (the URI's `endpoint_override`).
        retry_s: how long operations of a store that does not answer are retried, with growing pauses.
        region: region of an S3 URI that names one (`region`); None: as AWS_* variables say.
        options: the URI's other parameters, `name=value`.
    """

    uri: str
    filesystem: pafs.FileSystem
    root: str
    endpoint: str | None = None
    retry_s: float = 0.0
    region: str | None = None
    options: tuple[str, ...] = ()

    @staticmethod
    def at(uri: str | Path) -> Storage:
        """Open a folder by path or URI (nothing is created).

        Raises:
            StorageError: an unknown scheme, secrets in the URI, or a file system that cannot be reached.
        """
        text = str(uri)
        if "://" not in text:
            path = str(Path(text).expanduser().absolute())
            return Storage(path, pafs.LocalFileSystem(), path.rstrip("/"))
        text = quote(text, safe=_OF_URIS, errors="replace")
        if any(urlsplit(part).password for part in (text, _endpoint(text) or "")):
            raise StorageError("the URI holds a secret, which would end up in logs: give it by AWS_* variables instead")
        opened = text
        if text.startswith(("gs:", "gcs:")) and "retry_limit_seconds=" not in text:
            opened += f"{'&' if '?' in text else '?'}retry_limit_seconds={GCS_RETRIES_S}"
        try:
            filesystem, root = pafs.FileSystem.from_uri(opened)
        except (ArrowException, OSError, ValueError) as error:
            raise StorageError(
                f"cannot open '{text}': {error}; expected a path or an s3://, gs:// or hdfs:// URI"
            ) from error
        if isinstance(filesystem, pafs.LocalFileSystem):  # names below it may hold signs that a URI cannot have
            return Storage(root, filesystem, root.rstrip("/"))
        place, _, query = text.partition("?")
        region, endpoint = _query(text).get("region", [None])[0], _endpoint(text)
        named = {"region", *(() if endpoint is None else ("scheme", "endpoint_override"))}
        options = [option for option in query.split("&") if option and option.partition("=")[0] not in named]
        return Storage(
            *(place.rstrip("/"), filesystem, root.rstrip("/"), endpoint), region=region, options=tuple(sorted(options))
        )

    @property
    def address(self) -> str:
        """The address with which `Storage.at` opens this folder in another process."""
        query = [f"region={self.region}"] if self.region else []
        if self.endpoint is not None:
            scheme, _, host = self.endpoint.partition("://")
            query += [f"scheme={scheme}", f"endpoint_override={host}"]
        query += self.options
        return f"{self.uri}?{'&'.join(query)}" if query else self.uri

    @property
    def is_local(self) -> bool:
        """Return whether the files are on this machine's own file system."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)

    def path(self, name: str = "") -> str:
        """Return the path inside the file system."""
        return f"{self.root}/{name}" if name else self.root

    def sub(self, name: str) -> Storage:
        """Return a folder below this one."""
        uri = f"{self.uri}/{name if self.is_local else quote(name)}"
        return replace(self, uri=uri, root=self.path(name))

    def with_retries(self, seconds: float) -> Storage:
        """Return the same folder, whose operations are retried for this many seconds if the store does not answer."""
        return replace(self, retry_s=seconds)

    def exists(self, name: str = "") -> bool:
        """Return whether a file or folder is there."""
        return bool(self._kind(name) != pafs.FileType.NotFound)

    def _kind(self, name: str) -> pafs.FileType:
        return self._with_retries("reach", name, lambda: self.filesystem.get_file_info(self.path(name)).type)

    def list(self, name: str = "") -> list[str]:
        """Return names directly below a folder, sorted; empty if it does not exist.

        Raises:
            StorageError: it is a file, or cannot be reached.
        """
        return sorted(info.base_name for info in self._below(name) if not UNFINISHED.search(info.base_name))

    def folders(self, name: str = "") -> Sequence[Storage]:
        """Return the folders directly below a folder, by name; empty if it does not exist.

        Raises:
            StorageError: see `list`.
        """
        names = sorted(info.base_name for info in self._below(name) if info.type == pafs.FileType.Directory)
        return [self.sub(f"{name}/{below}" if name else below) for below in names]

    def _below(self, name: str) -> Sequence[pafs.FileInfo]:
        if self._kind(name) == pafs.FileType.File:
            raise StorageError(f"cannot list '{self._full(name)}': it is a file, give the folder that holds it")
        selector = pafs.FileSelector(self.path(name), allow_not_found=True)
        return self._with_retries("list", name, lambda: self._entries(selector))

    def files(self, name: str = "") -> dict[str, StoredFile]:
        """Return every file below a folder, unfinished ones too: name relative to this storage -> size and age."""
        selector = pafs.FileSelector(self.path(name), allow_not_found=True, recursive=True)
        entries = self._with_retries("list", name, lambda: self._entries(selector))
        start, now = len(self.root) + 1, time.time()
        files = {}
        for info in entries:
            if info.type == pafs.FileType.File:
                written, unfinished = (info.mtime_ns or 0) / 1e9, bool(UNFINISHED.search(info.path))
                files[info.path[start:]] = StoredFile(info.size, now - written, unfinished, written)
        return files

    def _entries(self, selector: pafs.FileSelector) -> Sequence[pafs.FileInfo]:
        """Return the entries; a folder that appears while pyarrow checks for it is listed again."""
        try:
            return self.filesystem.get_file_info(selector)  # type: ignore[no-any-return]
        except FileNotFoundError:
            return self.filesystem.get_file_info(selector)  # type: ignore[no-any-return]

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return the whole file, as one writer wrote it.

        pyarrow requests the length of an object first and the bytes later, and if the object is replaced in
        between hands out a cut or zero-filled mixture; so the object's version is compared before and after.

        Args:
            most: the largest size in bytes; None: any size.

        Raises:
            StorageError: it cannot be read. DamagedError: it is larger.
        """

        def read() -> bytes | None:
            with self._stream(name) as stream:
                if most is not None and (size := stream.size()) > most:
                    raise DamagedError(
                        f"'{self._full(name)}' has {size:,} bytes: expected at most {most:,}, restore a copy"
                    )
                version, data = stream.metadata(), bytes(stream.read())
            if self.is_local:  # an open local file cannot be replaced
                return data
            with self._stream(name) as stream:
                return data if stream.metadata() == version else None

        for _ in range(_READ_ATTEMPTS):
            if (data := self._with_retries("read", name, read)) is not None:
                return data
        raise StorageError(f"cannot read '{self._full(name)}': it is replaced during every read, try again later")

    def read_text(self, name: str) -> str:
        """Return the whole file as text.

        Raises:
            StorageError: it cannot be read, or is not UTF-8.
        """
        try:
            return self.read(name).decode()
        except UnicodeDecodeError as error:
            raise StorageError(f"'{self._full(name)}' is not valid UTF-8: {error}") from error

    def read_from(self, name: str, start: int) -> bytes:
        """Return the bytes from `start` on of a file that only grows: whatever version is met, those before are the
        same.

        Raises:
            StorageError: it cannot be read.
        """

        def read() -> bytes:
            with self._stream(name) as stream:
                stream.seek(min(start, stream.size()))
                return bytes(stream.read())

        return self._with_retries("read", name, read)

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a seekable binary stream of a file that is not replaced meanwhile (see `read`).

        Raises:
            StorageError: it cannot be opened.
        """
        with self._with_retries("read", name, lambda: self._stream(name)) as stream:
            yield stream

    def _stream(self, name: str) -> NativeFile:
        """Return an open file; on local disk a regular one alone, since reading a pipe or a device may never end."""
        path = self.path(name)
        if self.is_local and not stat.S_ISREG(Path(path).stat().st_mode):
            raise OSError("it is no regular file")
        return self.filesystem.open_input_file(path)

    def write(self, name: str, *parts: Buffer) -> None:
        """Write so that readers see the old file or the whole new one, never a part (HDFS: they may see a part).

        Args:
            parts: the file's parts in order.

        Raises:
            StorageError: it cannot be written.
        """
        self.write_parts(name, lambda: parts)

    def write_parts(self, name: str, parts: Callable[[], Iterable[Buffer]]) -> None:
        """Write parts that are produced one after another; see `write`.

        Args:
            parts: called once, and again where a store that does not answer is retried.
        """

        def write() -> None:
            if self.is_local:
                with finished_beside(Path(self.path(name)), parts()) as temporary:
                    os.replace(temporary, self.path(name))
                return
            with self.filesystem.open_output_stream(
                self.path(name)
            ) as stream:  # an object becomes visible when it is closed
                for part in parts():
                    stream.write(part)
                    del part

        self._with_retries("write", name, write)

    @contextmanager
    def staging(self, folder: str, *parts: Buffer) -> Iterator[Callable[[str], None]]:
        """Write a file that gets its name afterwards; yields a function that names it. Without a name no file stays.

        On local disk a large file is written in parallel to the caller (hashing the parts costs no extra time).

        Args:
            folder: some folder below which the file will be.

        Raises:
            StorageError: it cannot be written.
        """
        if not self.is_local or sum(map(len, parts)) < LARGE:
            yield lambda name: self.write(name, *parts)
            return
        with ThreadPoolExecutor(1) as pool:
            beside = finished_beside(Path(self.path(f"{folder}/staged")), parts)
            written = pool.submit(beside.__enter__)

            def name_it(name: str) -> None:
                path = Path(self.path(name))

                def place() -> None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(written.result(), path)

                self._with_retries("write", name, place)

            def finish() -> None:
                written.result()
                beside.__exit__(None, None, None)

            try:
                yield name_it
            finally:
                self._with_retries("write", folder, finish)

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not exist yet; of several racing writers exactly one wins.

        Raises:
            AlreadyExistsError: the file exists already.
            StorageError: it cannot be written, or this file system offers no exclusive creation.
        """
        if self.is_local:
            path = Path(self.path(name))

            def link() -> bool:
                with finished_beside(path, (data,)) as temporary:
                    try:
                        os.link(temporary, path)  # fails if the name exists, and shows only a complete file
                    except OSError as error:
                        if temporary.stat().st_nlink > 1:  # a network file system did it, and its answer was lost
                            return True
                        if isinstance(error, FileExistsError):
                            return False
                        raise
                    return True

            won = self._with_retries("create", name, link)
        elif isinstance(self.filesystem, pafs.S3FileSystem | pafs.GcsFileSystem):
            is_s3 = isinstance(self.filesystem, pafs.S3FileSystem)
            put = partial(create_s3, region=self.region) if is_s3 else create_gs
            bucket, _, key = self.path(name).partition("/")
            writer = uuid.uuid4().hex
            full = self._full(name)
            won = self._with_retries("create", name, lambda: put(bucket, key, data, self.endpoint, full, writer))
        else:
            raise StorageError(
                f"'{self.uri}' offers no exclusive creation, which commits need: use a local or shared path, s3:// or "
                "gs://"
            )
        if not won:
            raise AlreadyExistsError(f"'{self._full(name)}' exists already: another writer was first")

    def delete(self, name: str) -> None:
        """Remove a file or a folder with its content; nothing happens if it is absent.

        Raises:
            StorageError: it cannot be removed.
        """
        kinds = {pafs.FileType.Directory: self.filesystem.delete_dir, pafs.FileType.File: self.filesystem.delete_file}
        remove = kinds.get(self._kind(name))

        def delete() -> None:
            with suppress(FileNotFoundError):  # of two that remove it, one comes later
                if remove is not None:
                    remove(self.path(name))

        self._with_retries("delete", name, delete)

    def read_json(self, name: str) -> Any:
        """Parse a JSON file.

        Raises:
            StorageError: it is not JSON.
        """
        try:
            return json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise StorageError(f"'{self._full(name)}' is not valid JSON: {error}") from error

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` as indented JSON, atomically."""
        self.write(name, (json.dumps(value, indent=2) + "\n").encode())

    def _full(self, name: str) -> str:
        return f"{self.uri}/{name}" if name else self.uri

    def _with_retries(self, verb: str, name: str, action: Callable[[], T]) -> T:
        """Return the result of `action`; errors of the file system become a StorageError that names the file."""
        return with_retries(action, f"{verb} '{self._full(name)}'", self.retry_s, self.is_local)


def _endpoint(uri: str) -> str | None:
    """Return the endpoint_override of an S3 URI, so that pyarrow and boto3 use the same server."""
    query = _query(uri)
    if "endpoint_override" not in query:
        return None
    host = query["endpoint_override"][0]
    return host if "://" in host else f"{query.get('scheme', ['https'])[0]}://{host}"


def _query(uri: str) -> dict[str, list[str]]:
    return parse_qs(urlsplit(uri).query)
