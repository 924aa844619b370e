"""Is tokenised data held once per node? Two processes read the same token table whole, and the kernel is asked.

`Pss` of a mapping counts each page divided by the number of processes that share it: over all workers it sums to
the file's size if they share one copy, and to twice that if each of two has its own.
What it does not know: models, training.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from raycl.backbone import BackboneConfig, load_codec
from raycl.bench.figures import Figure
from raycl.data import builtin
from raycl.data.stream import StreamConfig, open_stream
from raycl.data.tokens import TokenTable

SMAPS = Path("/proc/self/smaps")
READERS = 2
CHUNK = 512
"""Rows that a reader holds at once."""


@dataclass(frozen=True)
class Memory:
    """What one process holds, in KiB: its part of the mapped token files, and private memory elsewhere."""

    mapped_pss: int
    private: int


def sharing(rows: int, folder: Path) -> list[Figure]:
    """Read a table of `rows` rows in two processes at once; `folder` holds it for that time.

    Returns:
        Shared memory and private growth, both as shares of the size of the token file.
    """
    table = _table(rows, folder)
    size = sum(path.stat().st_size for path in (folder / "cache" / "tokens").glob("*.arrow")) / 1024
    grown, pss = _measure(table)
    made_from = f"{rows:,} rows, file of {size / 1024:.1f} MiB"
    return [
        Figure(
            f"token file in the memory of {READERS} workers", pss / size, "x", 1.1, detail=f"sum of Pss, {made_from}"
        ),
        Figure(
            "private memory a worker adds to read it", grown / size, "x", detail=f"largest of {READERS}, {made_from}"
        ),
    ]


def _table(rows: int, folder: Path) -> TokenTable:
    """Rows of about a hundred tokens, tokenised into a cache of their own."""
    words = list(builtin.rows("topic", "train", 500, seed=0))
    with (folder / "rows.jsonl").open("w") as file:
        for number, (text, label) in enumerate(islice(cycle(words), rows)):
            longer = " ".join(
                [str(number), *(words[(number + offset) % len(words)][0] for offset in range(1, 4)), text]
            )
            file.write(json.dumps({"text": longer, "label": label}) + "\n")
    place = str(folder / "rows.jsonl")
    task = {"name": "rows", "train": place, "test": place, "labels": builtin.labels("topic")}
    stream = open_stream(
        StreamConfig.model_validate({"tasks": [task], "dev_rows": 1, "cache_dir": str(folder / "cache")}), seed=0
    )
    return stream.table(stream.tasks[0], "train", load_codec(BackboneConfig(), 128, 32))


def _measure(table: TokenTable) -> tuple[int, int]:
    """Largest private growth of a reader and the sum of all Pss, in KiB."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(READERS)
    ends = []
    for _ in range(READERS):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_read_all, args=(table, barrier, theirs), daemon=True)
        process.start()
        ends.append((process, mine))
    found = [mine.recv() for _, mine in ends]
    for process, _ in ends:
        process.join()
    return max(grown for grown, _ in found), sum(pss for _, pss in found)


def _read_all(table: TokenTable, barrier: Any, out: Connection) -> None:
    """A reader: every row once; nobody leaves before all have looked at their memory."""
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


def memory(smaps: str) -> Memory:
    """Sum up the text of a `/proc/PID/smaps`."""
    pss = private = 0
    for name, sizes in _mappings(smaps):
        if name.endswith(".arrow"):
            pss += sizes["Pss"]
        else:
            private += sizes["Private_Dirty"] + sizes["Private_Clean"]
    return Memory(pss, private)


def _mappings(smaps: str) -> Iterator[tuple[str, dict[str, int]]]:
    """File name (or empty) and sizes in KiB of every mapping."""
    for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)[1:]:
        head, _, body = block.partition("\n")
        fields = head.split(maxsplit=5)
        sizes = {key: int(size) for key, size in re.findall(r"^(\w+): +(\d+) kB$", body, flags=re.MULTILINE)}
        yield fields[5] if len(fields) > 5 else "", sizes
