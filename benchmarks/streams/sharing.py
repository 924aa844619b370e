"""Is tokenised data held once per node? Two processes read the same whole token table; memory is as the kernel reports.

`Pss` of a mapping counts each page divided by the number of processes that share it: over all workers it sums to the
file's size if they share one copy, and to twice that if each of two has its own.
"""

from __future__ import annotations

import json
import multiprocessing
from itertools import cycle, islice
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.streams.reader import read_all
from raycl.backbone import BackboneConfig, load_codec
from raycl.data.benchmarks import builtin
from raycl.data.stream import StreamConfig, open_stream
from raycl.data.tokens import TokenTable

READERS = 2


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
        Figure("private memory that reading adds", grown / size, "x", 0.5, detail=f"larger of {READERS}, {made_from}"),
    ]


def _table(rows: int, folder: Path) -> TokenTable:
    """Return rows of about a hundred tokens, tokenised into a cache of their own."""
    words = list(builtin.rows("topic", "train", 500, seed=0))
    with (folder / "rows.jsonl").open("w") as file:
        for number, (text, label) in enumerate(islice(cycle(words), rows)):
            longer = " ".join(
                [str(number), *(words[(number + offset) % len(words)][0] for offset in range(1, 4)), text]
            )
            file.write(json.dumps({"text": longer, "label": label}) + "\n")
    path = str(folder / "rows.jsonl")
    task = {"name": "rows", "train": path, "test": path, "labels": builtin.labels("topic")}
    stream = open_stream(
        StreamConfig.model_validate({"tasks": [task], "dev_rows": 1, "cache_dir": str(folder / "cache")}), seed=0
    )
    return stream.table(stream.tasks[0], "train", load_codec(BackboneConfig(), 128, 32))


def _measure(table: TokenTable) -> tuple[int, int]:
    """Return the largest private growth of a reader and the sum of all Pss, in KiB."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(READERS)
    ends = []
    for _ in range(READERS):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=read_all, args=(table, barrier, theirs), daemon=True)
        process.start()
        theirs.close()  # so that `recv` below fails, and does not wait without end, if the reader dies
        ends.append((process, mine))
    received = [mine.recv() for _, mine in ends]
    for process, _ in ends:
        process.join()
    return max(grown for grown, _ in received), sum(pss for _, pss in received)
