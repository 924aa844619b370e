"""Local files that are whole before they have their name."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Buffer = Any
"""Bytes, or any other object with the buffer protocol."""

UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.tmp$")
"""Names of files that are being written, or whose writer died; no listing includes them."""


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """The name of a file next to `path` that is being written; it is gone afterwards unless it was moved."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def finished_beside(path: Path, parts: Iterable[Buffer]) -> Iterator[Path]:
    """A complete file next to `path`, on disk before it is yielded and gone afterwards unless it was moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path) as temporary:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
                del part  # its memory may be freed before the next one is made
            file.flush()
            os.fsync(file.fileno())
        yield temporary
