"""Files with a record beside them that seals them: a cache entry, or a part of many answers.

    0a1b.arrow     the data
    0a1b.json      written last: {"file": "0a1b.arrow", "key": ..., "sha256": ..., "bytes": ..., "info": {...}}

What is taken up again is believed only if it is what was written, whole, and of what is asked for. The key names that:
a file under the name of another one is refused like a damaged one.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from raycl.errors import DamagedError, StorageError
from raycl.storage.folder import Storage
from raycl.storage.records import read_fields, seal
from raycl.storage.unfinished import Buffer

FORMAT = 1


@dataclass(frozen=True)
class Seal:
    """The record of one file.

    Attributes:
        file: its name, without folders. key: of what is in it. info: of it, JSON-able.
    """

    file: str
    key: str
    sha256: str
    bytes: int
    info: dict[str, Any]


_SEAL = TypeAdapter(Seal)


def record_of(name: str) -> str:
    """File of the record beside a file."""
    return f"{name.rpartition('.')[0]}.json"


def write_sealed(storage: Storage, name: str, key: str, data: Buffer, **info: Any) -> Seal:
    """Write a file, then its record."""
    storage.write(name, data)
    found = Seal(name.rpartition("/")[2], key, hashlib.sha256(data).hexdigest(), len(data), info)
    write_seal(storage, name, found)
    return found


def write_seal(storage: Storage, name: str, found: Seal) -> None:
    """Write the record of a file that is there: from now on it counts."""
    storage.write(record_of(name), seal({"format": FORMAT, **asdict(found)}))


def read_seal(storage: Storage, name: str, key: str) -> Seal:
    """Return the record of a file, which itself is not read.

    Raises:
        DamagedError: it is damaged, or of another file or key. FormatError: of another version.
        StorageError: it cannot be read.
    """
    found = read_fields(storage, record_of(name), FORMAT, _SEAL)
    if (found.file, found.key) != (name.rpartition("/")[2], key):
        raise DamagedError(f"'{storage.uri}/{record_of(name)}' is of '{found.file}', key {found.key}: it was moved")
    return found


def read_sealed(storage: Storage, name: str, key: str) -> tuple[bytes, Seal]:
    """Return a file and its record.

    Raises:
        DamagedError: one of them is damaged, or of another key. FormatError: of another version.
        StorageError: one of them cannot be read.
    """
    found = read_seal(storage, name, key)
    data = storage.read(name)
    if hashlib.sha256(data).hexdigest() != found.sha256:
        raise _damaged(f"{storage.uri}/{name}")
    return data, found


def check_sealed(path: Path, sha256: str) -> None:
    """The same for a local file that is mapped into memory; a process reads one that stays the same once.

    Raises:
        DamagedError: it is damaged. StorageError: it cannot be read.
    """
    try:
        found = path.stat()
        is_whole = _hash_of(path, found.st_size, found.st_mtime_ns, found.st_ino) == sha256
    except OSError as error:
        raise StorageError(f"cannot read '{path}': {error}") from error
    if not is_whole:
        raise _damaged(str(path))


@lru_cache(maxsize=4096)
def _hash_of(path: Path, *_: int) -> str:
    """Of the file that has this size, time and inode."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _damaged(name: str) -> DamagedError:
    return DamagedError(f"'{name}' was changed or cut after it was written (its hash differs)")
