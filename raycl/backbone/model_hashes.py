"""The identity of a model in a folder: SHA-256 over its files, each large file read once on a node.

A record next to the files, `.raycl-hashes.json`, holds the hash of each large file with its size, modification time and
inode. A folder that cannot be written to has it in the cache, `hashes/` of `$RAYCL_CACHE` or `~/.cache/raycl`. Where
several processes of a node ask at once, one reads the file and the others wait.
"""

import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from raycl.backbone.model_files import FetchedFiles, folder_of, identity_files, part_files
from raycl.errors import StorageError
from raycl.storage import Storage
from raycl.storage.records import read_fields, seal
from raycl.storage.unfinished import finished_beside

log: logging.Logger = logging.getLogger("raycl")

RECORD = ".raycl-hashes.json"
FORMAT = 1
LARGE = 16 * 2**20
"""Hashes of files from this size are stored; smaller files are read again."""


@dataclass(frozen=True)
class _HashRecord:
    files: dict[str, dict[str, int | str]]


def fingerprint_of(name: str, revision: str | None = None, pickles: bool = False) -> str:
    """Return the SHA-256 over config, tokenizer and weight files.

    Args:
        pickles: see `FetchedFiles`.

    Raises:
        BackboneError: it does not exist.
    """
    folder = folder_of(name, revision, FetchedFiles(pickles=pickles))
    digest = hashlib.sha256()
    for file in identity_files(folder):
        digest.update(f"{file.relative_to(folder).as_posix()} {hash_of(file)}\n".encode())
    return digest.hexdigest()


def parts_of(name: str, revision: str | None = None, pickles: bool = False, code: bool = False) -> dict[str, str]:
    """Return the SHA-256 over the files of each part: weights, config (with the layers of a sentence encoder),
    tokenizer (with its chat template).

    Args:
        pickles, code: see `FetchedFiles`; the Python files count as config.

    Raises:
        BackboneError: it does not exist.
    """
    parts = part_files(folder_of(name, revision, FetchedFiles(pickles=pickles, code=code)), code)
    named = {part: "".join(f"{file.name} {hash_of(file)}\n" for file in files) for part, files in parts.items()}
    return {part: hashlib.sha256(lines.encode()).hexdigest() for part, lines in named.items()}


def hash_of(file: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    if file.stat().st_size < LARGE:
        return _read(file)
    cache = Path(os.environ.get("RAYCL_CACHE") or "~/.cache/raycl").expanduser() / "hashes"
    cached = cache / f"{hashlib.sha256(str(file.parent.absolute()).encode()).hexdigest()[:32]}.json"
    here = file.parent / RECORD
    if (known := _known(file, here, cached)) is not None:
        return known
    with FileLock(_lock(cached)):
        if (known := _known(file, here, cached)) is not None:  # written by the process that had the lock
            return known
        before = _version(file)
        entry: dict[str, int | str] = {**before, "sha256": _read(file)}
        if _version(file) == before:
            _keep(here if os.access(file.parent, os.W_OK) else cached, file.name, entry)
        return str(entry["sha256"])


def _read(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _version(file: Path) -> dict[str, int]:
    """Return the properties that change when a file is written again or replaced."""
    status = file.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _known(file: Path, *records: Path) -> str | None:
    """Return the hash that a record has of this very file; None: there is none, or it is damaged."""
    version = _version(file)
    for record in records:
        with suppress(StorageError):
            match _entries(record).get(file.name):
                case {"sha256": str(found), **rest} if rest == version:
                    return found
    return None


def _entries(record: Path) -> dict[str, dict[str, int | str]]:
    folder = Storage.at(record.parent)
    return read_fields(folder, record.name, FORMAT, _HashRecord).files if folder.exists(record.name) else {}


def _keep(record: Path, name: str, entry: dict[str, int | str]) -> None:
    """Add to a record atomically; if the record cannot be written, the next process reads the file again."""
    try:
        others = _entries(record)
    except StorageError as error:
        log.warning("large files are hashed again: %s", error)
        others = {}
    with (
        suppress(OSError),
        finished_beside(record, (seal({"format": FORMAT, "files": {**others, name: entry}}),)) as temporary,
    ):
        temporary.replace(record)


def _lock(cached: Path) -> Path:
    """Return the lock of all processes of a node that read a folder; without a cache, in the temporary folder."""
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
    if os.access(cached.parent, os.W_OK):
        return cached.with_suffix(".lock")
    return Path(tempfile.gettempdir()) / f"raycl-{os.getuid()}-{cached.stem}.lock"
