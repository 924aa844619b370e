"""A split as token ids, memory-mapped: what the loader, the evaluator and routers read.

What it does not know: how the ids were made (`prepare`), batches (`loader`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raycl.data.cache import Entry
from raycl.data.chunks import ChunkedRows, RowIndices
from raycl.types import Task

Split = Literal["train", "dev", "test"]


@dataclass(frozen=True)
class TokenColumns:
    """What a batch is made of, for n rows.

    Attributes:
        source_ids: n arrays of prompt ids, with the model's special tokens.
        target_ids: n arrays of answer ids ending in end-of-sequence; empty arrays for encoder-only backbones.
        labels: `[n]` int32 index in the task's labels, -1 for free text.
    """

    source_ids: list[NDArray[np.int32]]
    target_ids: list[NDArray[np.int32]]
    labels: NDArray[np.int32]


class TokenTable:
    """Tokenised rows of one split of one task; `rows` below are positions `0 .. len-1` in it.

    Pickles as the name of its cache entry, so it can only travel between processes of one node.
    """

    def __init__(self, task: Task, split: Split, entry: Entry) -> None:
        self.task = task
        self.split: Split = split
        self._entry = entry

    def __reduce__(self) -> tuple[type[TokenTable], tuple[Task, Split, Entry]]:
        return TokenTable, (self.task, self.split, self._entry)

    def __len__(self) -> int:
        return int(self._entry.facts["count"])

    @property
    def truncated_sources(self) -> int:
        """How many inputs were cut to fit."""
        return int(self._entry.facts["truncated_sources"])

    @property
    def truncated_targets(self) -> int:
        """How many answers were cut to fit."""
        return int(self._entry.facts["truncated_targets"])

    @property
    def has_targets(self) -> bool:
        """Whether answers are token ids (False: rows of a label head)."""
        return bool(self._entry.facts["has_targets"])

    @cached_property
    def _rows(self) -> ChunkedRows:
        return ChunkedRows(self._entry.table())

    @cached_property
    def source_lengths(self) -> NDArray[np.int64]:
        """`[len]` prompt tokens of each row."""
        return self._rows.list_lengths("source_ids")

    def columns(self, rows: RowIndices) -> TokenColumns:
        """Ids and labels of `rows`, in their order."""
        return TokenColumns(
            self._rows.lists("source_ids", rows), self._rows.lists("target_ids", rows), self.labels(rows)
        )

    def labels(self, rows: RowIndices) -> NDArray[np.int32]:
        """`[len(rows)]` index in `task.labels`, -1 for free text."""
        return self._rows.numbers("label", rows)

    def texts(self, rows: RowIndices) -> list[str]:
        """Input texts without the prompt, whole."""
        return self._rows.values("text", rows)

    def references(self, rows: RowIndices) -> list[tuple[str, ...]]:
        """Acceptable answers of each row; the first is the one that was tokenised."""
        return [tuple(names) for names in self._rows.values("references", rows)]

    def row_numbers(self, rows: RowIndices) -> NDArray[np.int64]:
        """`[len(rows)]` 1-based number of each row in its source file."""
        return self._rows.numbers("row", rows)
