"""A node-local cache of Arrow files: built once per node, whole or absent, read by memory map.

Why it exists: several workers of a node need the same rows; one of them converts, the others wait on a file lock
and then map the same pages. An entry is `<key>.arrow` with `<key>.json` written last: the JSON means committed.
What it does not know: what the rows mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import FileLock

Info = dict[str, Any]
"""JSON-able description of an entry."""


@dataclass(frozen=True)
class Entry:
    """A committed cache entry."""

    path: Path
    info: Info

    def table(self) -> pa.Table:
        """The columns, memory-mapped: only pages that are touched become resident."""
        with pa.memory_map(str(self.path)) as source:
            return pa.ipc.open_file(source).read_all()


def cache_folder(configured: str | None) -> Path:
    """The configured folder, else `$RAYCL_CACHE`, else `~/.cache/raycl`."""
    return Path(configured or os.environ.get("RAYCL_CACHE") or "~/.cache/raycl").expanduser().absolute()


def key_of(*parts: Any) -> str:
    """32 hex digits that change with any of `parts` (JSON-able values)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def entry(folder: Path, key: str, schema: pa.Schema, build: Callable[[pa.RecordBatchFileWriter], Info]) -> Entry:
    """The entry `key` of `folder`; `build` writes its batches and returns its info unless the entry exists.

    If `build` raises, nothing is left behind and the next caller tries again.
    """
    data, info = folder / f"{key}.arrow", folder / f"{key}.json"
    if not info.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{key}.lock"):
            if not info.is_file():
                _build(data, info, schema, build)
    return Entry(data, json.loads(info.read_text()))


def _build(data: Path, info: Path, schema: pa.Schema, build: Callable[[pa.RecordBatchFileWriter], Info]) -> None:
    temporary = data.with_name(f"{data.name}.{uuid.uuid4().hex}.tmp")
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            found = build(writer)
        os.replace(temporary, data)
    finally:
        temporary.unlink(missing_ok=True)
    write_atomically(info, json.dumps(found).encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file so that readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
