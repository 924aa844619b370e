"""A split as token ids, memory-mapped: what the loader, the evaluator and routers read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from raycl.data.sources.cache import CacheEntry, ChunkedRows, RowIndices
from raycl.types import Task

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")

TokenIds = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True)
class TokenColumns:
    """The ids and labels of n rows, from which batches are made.

    Attributes:
        source_ids: n arrays of prompt ids, with the model's special tokens.
        target_ids: n arrays of answer ids ending in end-of-sequence; empty arrays for encoder-only backbones.
        labels: `[n]` int32 index in the task's labels, -1 for free text.
    """

    source_ids: list[NDArray[np.int32]]
    target_ids: list[NDArray[np.int32]]
    labels: NDArray[np.int32]


@dataclass(frozen=True)
class Cut:
    """The tokens that were cut from the sources or the targets of a split.

    Attributes:
        limit: most tokens of a row. rows: rows that were longer.
        tokens: tokens above the limit of all rows. most: of the longest row.
    """

    limit: int
    rows: int
    tokens: int
    most: int


class TokenTable:
    """Tokenised rows of one split of one task; `rows` below are positions `0 .. len-1` in it.

    Pickles as the name of its cache entry, so it can only travel between processes of one node.
    """

    def __init__(self, task: Task, split: Split, entry: CacheEntry, part: NDArray[np.int64] | None = None) -> None:
        """Open the table of the entry's rows in `part`; None: all."""
        self.task = task
        self.split: Split = split
        self._entry = entry
        self._part = part

    def __reduce__(self) -> tuple[type[TokenTable], tuple[Task, Split, CacheEntry, NDArray[np.int64] | None]]:
        return TokenTable, (self.task, self.split, self._entry, self._part)

    def __len__(self) -> int:
        return int(self._entry.info["count"]) if self._part is None else len(self._part)

    def part(self, rows: NDArray[np.int64]) -> TokenTable:
        """Return a table of these rows alone; its counts of cut texts are still those of the full table."""
        return TokenTable(self.task, self.split, self._entry, self._positions(rows))

    def _positions(self, rows: RowIndices) -> NDArray[np.int64]:
        positions = np.asarray(rows, dtype=np.int64)
        return positions if self._part is None else self._part[positions]

    @property
    def truncated_sources(self) -> int:
        """The number of inputs that were cut to fit."""
        return self.cuts[0].rows

    @property
    def truncated_targets(self) -> int:
        """The number of answers that were cut to fit."""
        return self.cuts[1].rows

    @property
    def cuts(self) -> tuple[Cut, Cut]:
        """The tokens that were cut from sources and from targets."""
        return Cut(**self._entry.info["sources"]), Cut(**self._entry.info["targets"])

    @property
    def has_targets(self) -> bool:
        """Return whether answers are token ids (False: rows of a label head)."""
        return bool(self._entry.info["has_targets"])

    @cached_property
    def _rows(self) -> ChunkedRows:
        return ChunkedRows(self._entry.table())

    @cached_property
    def source_lengths(self) -> NDArray[np.int64]:
        """`[len]` prompt tokens of each row."""
        lengths = self._rows.list_lengths("source_ids")
        return lengths if self._part is None else lengths[self._part]

    def columns(self, rows: RowIndices) -> TokenColumns:
        """Return ids and labels of `rows`, in their order."""
        positions = self._positions(rows)
        return TokenColumns(
            self._rows.lists("source_ids", positions), self._rows.lists("target_ids", positions), self.labels(rows)
        )

    def common_start(self) -> list[int]:
        """Return the ids that all prompts begin with, at least one short of the shortest: a task's definition."""
        sources = self._rows.lists("source_ids", self._positions(np.arange(len(self))))
        shortest = min(map(len, sources), default=0)
        if shortest < 2:
            return []
        heads = np.stack([ids[: shortest - 1] for ids in sources])
        unlike = (heads != heads[0]).any(axis=0)
        prefix: list[int] = heads[0, : int(unlike.argmax()) if unlike.any() else None].tolist()
        return prefix

    def labels(self, rows: RowIndices) -> NDArray[np.int32]:
        """Return `[len(rows)]` index in `task.labels`, -1 for free text."""
        return self._rows.numbers("label", self._positions(rows))

    def texts(self, rows: RowIndices) -> list[str]:
        """Return input texts without the prompt, uncut."""
        return self._rows.values("text", self._positions(rows))

    def references(self, rows: RowIndices) -> list[tuple[str, ...]]:
        """Return the acceptable answers of each row; the first is the one that was tokenised."""
        return [tuple(names) for names in self._rows.values("references", self._positions(rows))]

    def row_numbers(self, rows: RowIndices) -> NDArray[np.int64]:
        """Return `[len(rows)]` 1-based number of each row in its source file."""
        return self._rows.numbers("row", self._positions(rows))


class HeldRows:
    """Rows held in memory that are in no file: samples of an earlier task whose texts are not kept."""

    def __init__(
        self, task: Task, sources: Sequence[TokenIds], targets: Sequence[TokenIds], labels: Sequence[int]
    ) -> None:
        """Hold the rows.

        Args:
            sources: prompt ids. targets: answer ids; empty lists where there is a label head.
            labels: index in the task's labels, -1 for free text.
        """
        self.task = task
        self._sources = [np.asarray(ids, dtype=np.int32) for ids in sources]
        self._targets = [np.asarray(ids, dtype=np.int32) for ids in targets]
        self._labels = np.array(labels, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def has_targets(self) -> bool:
        """Return whether answers are token ids (False: rows of a label head)."""
        return any(len(ids) for ids in self._targets)

    @property
    def source_lengths(self) -> NDArray[np.int64]:
        """`[len]` prompt tokens of each row."""
        return np.array([len(ids) for ids in self._sources], dtype=np.int64)

    def columns(self, rows: RowIndices) -> TokenColumns:
        """Return ids and labels of `rows`, in their order."""
        places = np.asarray(rows, dtype=np.int64)
        pick = places.tolist()
        return TokenColumns([self._sources[n] for n in pick], [self._targets[n] for n in pick], self._labels[places])

    def texts(self, rows: RowIndices) -> list[str]:
        """Return empty texts."""
        return [""] * len(rows)

    def row_numbers(self, rows: RowIndices) -> NDArray[np.int64]:
        """Return zeros, since the rows are in no file."""
        return np.zeros(len(rows), dtype=np.int64)


TokenRows = TokenTable | HeldRows
"""Tokenised rows of one task, numbered from 0, as a loader reads them."""


def drawn_rows(table: TokenTable, count: int, draw: torch.Generator) -> list[int]:
    """Return so many rows of a task, ascending."""
    places: list[int] = torch.randperm(len(table), generator=draw)[:count].sort().values.tolist()
    return places
