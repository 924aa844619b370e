"""Files behind one face: local paths and URIs (`s3://`, `gs://`, `hdfs://`) through pyarrow.fs.

Why it exists: readers, the run's ledger and the adapter bank all need "read", "write so that it is whole or
absent" and "create, and lose cleanly if somebody was first". pyarrow.fs has no conditional put: two writers
would overwrite each other in silence, so exclusive creation is done by the operating system on local disk and
by S3's `If-None-Match` through boto3.
What it does not know: what the files mean.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qs, urlsplit

from pyarrow import ArrowException
from pyarrow import fs as pafs

from raycl.errors import AlreadyExistsError, StorageError


@dataclass(frozen=True)
class Storage:
    """A folder on some file system; every name below is relative to it, with forward slashes.

    Attributes:
        uri: as the user wrote it without its query, absolute for local paths.
        endpoint: address of an S3-compatible server other than AWS (the URI's `endpoint_override`).
    """

    uri: str
    filesystem: pafs.FileSystem
    root: str
    endpoint: str | None = None

    @staticmethod
    def at(uri: str | Path) -> Storage:
        """Open a folder by path or URI (nothing is created).

        Raises:
            StorageError: an unknown scheme, or a file system that cannot be reached.
        """
        text = str(uri)
        if "://" not in text:
            text = str(Path(text).expanduser().absolute())
        try:
            filesystem, root = pafs.FileSystem.from_uri(text)
        except (ArrowException, OSError, ValueError) as error:
            raise StorageError(
                f"cannot open '{text}': {error}; expected a path or an s3://, gs:// or hdfs:// URI"
            ) from error
        return Storage(text.partition("?")[0].rstrip("/"), filesystem, root.rstrip("/"), _endpoint(text))

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine's own file system."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)

    def path(self, name: str = "") -> str:
        """Path inside the file system."""
        return f"{self.root}/{name}" if name else self.root

    def sub(self, name: str) -> Storage:
        """A folder below this one."""
        return Storage(f"{self.uri}/{name}", self.filesystem, self.path(name), self.endpoint)

    def exists(self, name: str = "") -> bool:
        """Whether a file or folder is there."""
        return bool(self.filesystem.get_file_info(self.path(name)).type != pafs.FileType.NotFound)

    def list(self, name: str = "") -> list[str]:
        """Names directly below a folder, sorted; empty if it does not exist."""
        selector = pafs.FileSelector(self.path(name), allow_not_found=True)
        return sorted(info.base_name for info in self.filesystem.get_file_info(selector))

    def read(self, name: str) -> bytes:
        """The whole file.

        Raises:
            StorageError: it cannot be read.
        """
        with self.open(name) as stream:
            return bytes(stream.read())

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """A seekable binary stream of a file.

        Raises:
            StorageError: it cannot be opened.
        """
        try:
            stream = self.filesystem.open_input_file(self.path(name))
        except (FileNotFoundError, OSError) as error:
            raise StorageError(f"cannot read '{self.uri}/{name}': {error}") from error
        with stream:
            yield stream

    def write(self, name: str, data: bytes) -> None:
        """Write so that readers see the old file or the whole new one, never a part."""
        path = self.path(name)
        self.filesystem.create_dir(os.path.dirname(path), recursive=True)
        if not self.is_local:  # an object store shows an object only when it is complete
            with self.filesystem.open_output_stream(path) as stream:
                stream.write(data)
            return
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not exist yet; of several racing writers exactly one wins.

        Raises:
            AlreadyExistsError: somebody was first.
            StorageError: this file system offers no exclusive creation.
        """
        if self.is_local:
            self._create_local(name, data)
        elif isinstance(self.filesystem, pafs.S3FileSystem):
            self._create_s3(name, data)
        else:
            raise StorageError(
                f"'{self.uri}' offers no exclusive creation, which commits need: use a local or shared path, or s3://"
            )

    def _create_local(self, name: str, data: bytes) -> None:
        path = Path(self.path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        temporary.write_bytes(data)
        try:
            os.link(temporary, path)  # fails if the name is taken, and shows the file only when it is whole
        except FileExistsError as error:
            raise AlreadyExistsError(f"'{self.uri}/{name}' exists already: another writer was first") from error
        finally:
            temporary.unlink()

    def _create_s3(self, name: str, data: bytes) -> None:
        import boto3  # the only door to S3's conditional put; an extra for those who need it
        from botocore.exceptions import ClientError

        bucket, _, key = self.path(name).partition("/")
        client = boto3.client("s3", endpoint_url=self.endpoint)
        try:
            client.put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise AlreadyExistsError(f"'{self.uri}/{name}' exists already: another writer was first") from error
            raise StorageError(f"cannot create '{self.uri}/{name}': {error}") from error

    def delete(self, name: str) -> None:
        """Remove a file or a folder with all it holds; nothing happens if it is absent."""
        info = self.filesystem.get_file_info(self.path(name))
        if info.type == pafs.FileType.Directory:
            self.filesystem.delete_dir(self.path(name))
        elif info.type == pafs.FileType.File:
            self.filesystem.delete_file(self.path(name))

    def read_json(self, name: str) -> Any:
        """Parse a JSON file.

        Raises:
            StorageError: it is not JSON.
        """
        try:
            return json.loads(self.read(name))
        except ValueError as error:
            raise StorageError(f"'{self.uri}/{name}' is not valid JSON: {error}") from error

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` as indented JSON, whole or not at all."""
        self.write(name, (json.dumps(value, indent=2) + "\n").encode())


def _endpoint(uri: str) -> str | None:
    """The endpoint_override of an S3 URI, so that both doors reach the same server."""
    query = parse_qs(urlsplit(uri).query)
    if "endpoint_override" not in query:
        return None
    host = query["endpoint_override"][0]
    return host if "://" in host else f"{query.get('scheme', ['https'])[0]}://{host}"
