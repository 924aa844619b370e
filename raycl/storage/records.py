"""Small JSON records that carry their own hash, so that a change of a single bit is noticed on reading.

    {"record": {"format": 2, ...}, "sha256": "<of the record as compact JSON with sorted keys>"}

Manifests, snapshots, activations, checkpoints and the journal decide what is loaded; each is read by one rule. The
bytes must be exactly those that `seal` gives; an edited file with the same meaning is refused too.

Larger files are sealed by a record next to them: a cache entry, or a part of many answers.

    0a1b.arrow     the data
    0a1b.json      written last: {"file": "0a1b.arrow", "key": ..., "sha256": ..., "bytes": ..., "info": {...}}

A file is used again only if it is complete, unchanged and belongs to the requested key: a file under the name of
another is refused like a damaged one.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from raycl.errors import DamagedError, FormatError, StorageError
from raycl.storage.folder import Storage
from raycl.storage.unfinished import Buffer

T = TypeVar("T")

MAX_BYTES = 64 << 20
"""The largest record; parsed JSON takes up to twenty times as much memory."""
MAX_DEPTH = 64
"""The deepest nesting of lists and objects; readers take a nested Python call for each level."""

_NUMBERED = re.compile(r"(\d{6,})\.json")


def seal(record: dict[str, Any]) -> bytes:
    """Return a record with its hash; `record["format"]` is the number of the rules by which it is read."""
    return _sealed(json.loads(json.dumps(record)))  # keys that are numbers become text before they are sorted


def hashed(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree for people and programs to read as it is, with its hash as one more field."""
    return {**tree, "sha256": _hash(json.loads(json.dumps(tree)))}


def without_hash(tree: Any, file: str) -> dict[str, Any]:
    """Return the tree that was given to `hashed`.

    Args:
        file: its name for messages.

    Raises:
        DamagedError: the tree was changed since, or has no hash.
    """
    if not isinstance(tree, dict) or not isinstance(tree.get("sha256"), str):
        raise DamagedError(f"'{file}' has no hash of its content: expected the field sha256, as raycl writes it")
    content = {name: value for name, value in tree.items() if name != "sha256"}
    if _hash(content) != tree["sha256"]:
        raise DamagedError(f"'{file}' was changed after it was written (its hash differs)")
    return content


def _hash(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sealed(record: Any) -> bytes:
    return json.dumps({"record": record, "sha256": _hash(record)}, sort_keys=True).encode()


def unseal(data: bytes, file: str, version: int) -> dict[str, Any]:
    """Return the record that `seal` wrote.

    Args:
        file: its name for messages. version: the format that the caller reads.

    Raises:
        DamagedError: the record was cut or changed, or is none. FormatError: it has another format.
    """
    try:
        outer = json.loads(data)
        record, _ = outer["record"], outer["sha256"]
        found_format = record["format"]
        if data.count(b"{") + data.count(b"[") > MAX_DEPTH and is_deeper(outer, MAX_DEPTH):
            raise ValueError(f"more than {MAX_DEPTH} levels of lists and objects inside each other")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedError(
            f"'{file}' is damaged: not the JSON that raycl writes ({type(error).__name__}: {error}), unless an older "
            "version wrote it; restore a copy"
        ) from error
    if _sealed(record) != data:
        raise DamagedError(f"'{file}' was changed after it was written (its hash differs): restore a copy")
    if found_format != version:
        older = isinstance(found_format, int) and found_format < version
        remedy = "write it again, or use the version that wrote it" if older else "upgrade raycl"
        raise FormatError(f"'{file}' has format {found_format}, this version reads {version}: {remedy}")
    return record  # type: ignore[no-any-return]


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether a value of JSON has lists and objects on more levels than this."""
    level = [value]
    for _ in range(depth):
        groups = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [part for group in groups for part in group]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def read_record(storage: Storage, name: str, version: int) -> dict[str, Any]:
    """Read a record's file.

    Raises:
        DamagedError, FormatError: see `unseal`. StorageError: it cannot be read.
    """
    return unseal(storage.read(name, MAX_BYTES), f"{storage.uri}/{name}", version)


@lru_cache(maxsize=64)
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_fields(storage: Storage, name: str, version: int, kind: type[T]) -> T:
    """Return a record as an instance of `kind`, a dataclass; even a record with a valid hash may come from a stranger.

    Raises:
        DamagedError, FormatError: see `unseal`; or a field is missing or of another type.
        StorageError: it cannot be read.
    """
    return fields_of(read_record(storage, name, version), f"{storage.uri}/{name}", kind)


def fields_of(record: dict[str, Any], file: str, kind: type[T]) -> T:
    """Return the same for a record that was read.

    Args:
        file: its name for messages.
    """
    try:
        fields: T = _adapter(cast(Any, kind)).validate_python(record)
        return fields
    except ValidationError as error:
        problem = error.errors()[0]
        raise DamagedError(
            f"'{file}' is no valid record ({'.'.join(map(str, problem['loc']))}: {problem['msg']}): restore a copy"
        ) from error


def numbered(number: int) -> str:
    """Return the file name `000001.json`."""
    return f"{number:06d}.json"


def number_of(name: str, first: int = 1) -> int | None:
    """Return the number in `000001.json`; None for every other name, such as files of editors.

    Args:
        first: the lowest number in use.
    """
    match = _NUMBERED.fullmatch(name)
    number = int(match[1]) if match else -1
    return number if number >= first and numbered(number) == name else None


def numbers(storage: Storage, folder: str, first: int = 1) -> list[int]:
    """Return numbers of the records directly below a folder, ascending; other files are ignored."""
    candidates = (number_of(name, first) for name in storage.list(folder))
    return sorted(number for number in candidates if number is not None)


Stamp = tuple[int, float]
"""Size of a file and time of writing, which differ for another file of the same name."""


def named_stamps(storage: Storage, folder: str) -> dict[str, Stamp]:
    """Return the name of each file below a folder -> its stamp."""
    return {name[len(folder) + 1 :]: (file.size, file.written) for name, file in storage.files(folder).items()}


def stamps(named: Mapping[str, Stamp]) -> dict[int, Stamp]:
    """Return the number of each record directly in the folder of `named_stamps` -> its stamp."""
    by_number = {number_of(name): stamp for name, stamp in named.items()}
    return {number: stamp for number, stamp in by_number.items() if number is not None}


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


def write_sealed(storage: Storage, name: str, key: str, data: Buffer, **info: Any) -> None:
    """Write a file, then its record."""
    storage.write(name, data)
    write_seal(storage, name, Seal(name.rpartition("/")[2], key, hashlib.sha256(data).hexdigest(), len(data), info))


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
