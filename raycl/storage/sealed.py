"""Files sealed by a record next to them: a cache entry, or a part of many answers.

    0a1b.arrow     the data
    0a1b.json      written last: {"file": "0a1b.arrow", "key": ..., "sha256": ..., "bytes": ..., "info": {...}}

A file is used again only if it is complete, unchanged and belongs to the requested key: a file under the name of
another is refused like a damaged one.
"""

import hashlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from raycl.errors import DamagedError, StorageError
from raycl.storage.folder import Storage
from raycl.storage.records import read_fields, seal
from raycl.storage.unfinished import Buffer

FORMAT = 1


@dataclass(frozen=True)
class Seal:
    """The record of one file.

    Attributes:
        file: file name without folders. key: identifies the content. info: description of the content, JSON-able.
    """

    file: str
    key: str
    sha256: str
    bytes: int
    info: dict[str, Any]


def record_of(name: str) -> str:
    """Return the name of a file's record."""
    return f"{name.rpartition('.')[0]}.json"


def write_sealed(storage: Storage, name: str, key: str, data: Buffer, **info: Any) -> Seal:
    """Write a file, then its record."""
    storage.write(name, data)
    record = Seal(name.rpartition("/")[2], key, hashlib.sha256(data).hexdigest(), len(data), info)
    write_seal(storage, name, record)
    return record


def write_seal(storage: Storage, name: str, record: Seal) -> None:
    """Write the record of an existing file, which is valid from now on."""
    storage.write(record_of(name), seal({"format": FORMAT, **asdict(record)}))


def read_seal(storage: Storage, name: str, key: str) -> Seal:
    """Return the record of a file, which itself is not read.

    Raises:
        DamagedError: it is damaged, or of another file or key. FormatError: of another version.
        StorageError: it cannot be read.
    """
    record = read_fields(storage, record_of(name), FORMAT, Seal)
    if (record.file, record.key) != (name.rpartition("/")[2], key):
        raise DamagedError(f"'{storage.uri}/{record_of(name)}' is of '{record.file}', key {record.key}: it was moved")
    return record


def read_sealed(storage: Storage, name: str, key: str) -> tuple[bytes, Seal]:
    """Return a file and its record.

    Raises:
        DamagedError: one of them is damaged, or of another key. FormatError: of another version.
        StorageError: one of them cannot be read.
    """
    record = read_seal(storage, name, key)
    data = storage.read(name)
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise _damaged(f"{storage.uri}/{name}")
    return data, record


def check_sealed(path: Path, sha256: str) -> None:
    """Check a local file that is mapped into memory; a process reads an unchanged file only once.

    Raises:
        DamagedError: it is damaged. StorageError: it cannot be read.
    """
    try:
        status = path.stat()
        is_whole = _hash_of(path, status.st_size, status.st_mtime_ns, status.st_ino) == sha256
    except OSError as error:
        raise StorageError(f"cannot read '{path}': {error}") from error
    if not is_whole:
        raise _damaged(str(path))


@lru_cache(maxsize=4096)
def _hash_of(path: Path, *_: int) -> str:
    """Return the hash of the file with this size, time and inode."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _damaged(name: str) -> DamagedError:
    return DamagedError(f"'{name}' was changed or cut after it was written (its hash differs)")
