"""A process that reads a whole token table and reports its memory afterwards.

Apart from `sharing`, so that the readers start without loading what makes tables.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from raycl.data.tokens import TokenTable

SMAPS = Path("/proc/self/smaps")
CHUNK = 512
"""Rows that a reader holds at once."""


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of one process, in KiB: its part of the mapped token files, and private memory elsewhere."""

    mapped_pss: int
    private: int


def read_all(table: TokenTable, barrier: Any, out: Connection) -> None:
    """Read every row once; no reader ends before all have measured their memory."""
    _touch(table, range(min(CHUNK, len(table))))
    before = memory(SMAPS.read_text())
    for start in range(0, len(table), CHUNK):
        rows = range(start, min(start + CHUNK, len(table)))
        _touch(table, rows)
    gc.collect()
    barrier.wait()
    after = memory(SMAPS.read_text())
    barrier.wait()
    out.send((after.private - before.private, after.mapped_pss))


def _touch(table: TokenTable, rows: range) -> int:
    """Read every value of `rows`; ids are views into the file, whose pages come only when they are read."""
    columns = table.columns(rows)
    ids = sum(int(ids.sum()) for ids in (*columns.source_ids, *columns.target_ids))
    words = sum(map(len, (*table.texts(rows), *table.references(rows))))
    return ids + words + int(table.row_numbers(rows).sum())


def memory(smaps: str) -> ProcessMemory:
    """Sum up the text of a `/proc/PID/smaps`."""
    pss = private = 0
    for name, sizes in _mappings(smaps):
        if name.endswith(".arrow"):
            pss += sizes["Pss"]
        else:
            private += sizes["Private_Dirty"] + sizes["Private_Clean"]
    return ProcessMemory(pss, private)


def _mappings(smaps: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the file name (or empty) and the sizes in KiB of every mapping."""
    for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)[1:]:
        head, _, body = block.partition("\n")
        fields = head.split(maxsplit=5)
        sizes = {key: int(size) for key, size in re.findall(r"^(\w+): +(\d+) kB$", body, flags=re.MULTILINE)}
        yield fields[5] if len(fields) > 5 else "", sizes
