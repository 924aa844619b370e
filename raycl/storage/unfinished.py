"""Local files that get their name when they are complete."""

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
    """Yield the name of a file next to `path` to write to; it is removed afterwards unless it was moved."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def finished_beside(path: Path, parts: Iterable[Buffer]) -> Iterator[Path]:
    """Yield a complete file next to `path`, flushed to disk; it is removed afterwards unless it was moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path) as temporary:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
                del part  # its memory may be freed before the next part is produced
            file.flush()
            os.fsync(file.fileno())
        yield temporary
