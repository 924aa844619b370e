"""Batches: which rows make an optimizer step, and which part of them a worker sees.

The rows of step k are a pure function of (seed, k), so a run can stop and continue at any step, and they do not depend
on how many workers share them, so N workers equal one. Every worker gets equally many micro-batches, filled up with
examples of weight 0, because collective operations need equal counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.data.router_texts import RouterTexts
from raycl.data.sources.cache import Indices
from raycl.data.text_objectives import TextObjective
from raycl.data.tokens import TokenRows
from raycl.errors import ConfigError
from raycl.types import IGNORE, Batch, Task

WINDOW = 50
"""Batches of similar length are made from the rows of this many steps: more steps, less padding, less mixing."""


def check_batch(batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return micro-batches that each worker accumulates in a step.

    Raises:
        ConfigError: the batch cannot be dealt evenly; the message names the nearest sizes that can.
    """
    unit = micro_batch_size * world_size
    if batch_size % unit:
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        raise ConfigError(
            f"batch_size {batch_size} is not a multiple of micro_batch_size {micro_batch_size} x {world_size} workers "
            f"= {unit}: set batch_size to {f'{below} or {above}' if below else above}"
        )
    return batch_size // unit


@dataclass(frozen=True, eq=False)
class GlobalOrder:
    """The order of `count` rows over a whole phase; a new permutation each epoch.

    Attributes:
        max_steps: stop after this many steps even inside an epoch; None: after all epochs.
        lengths: length of each row, where steps are made of rows of similar length.
    """

    count: int
    batch_size: int
    epochs: int
    seed: int
    max_steps: int | None = None
    lengths: NDArray[np.int64] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in one pass; the last may have fewer rows."""
        return -(-self.count // self.batch_size)

    @property
    def steps(self) -> int:
        """Total number of optimizer steps."""
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def epoch(self, step: int) -> int:
        """Return the pass over the rows that optimizer step `step` belongs to, from 0."""
        return step // self.steps_per_epoch

    def rows(self, step: int) -> Indices:
        """Return the rows of optimizer step `step` (from 0), at most `batch_size`, without repetition."""
        assert 0 <= step < self.steps, f"step {step} is outside 0..{self.steps - 1}"
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        order = _permutation(self.count, self.seed, epoch)
        if self.lengths is not None:
            order = _grouped(self, epoch)
        return order[step_in_epoch * self.batch_size : (step_in_epoch + 1) * self.batch_size].copy()


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> Indices:
    """Return the order of one epoch; kept, since its steps ask for it one after another."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count).astype(np.int64)


@lru_cache(maxsize=2)
def _grouped(order: GlobalOrder, epoch: int) -> Indices:
    """Return rows sorted by length within windows, in batches in a random order; a short last batch stays last."""
    assert order.lengths is not None and len(order.lengths) == order.count, "every row has a length"
    rows, size, window = _permutation(order.count, order.seed, epoch), order.batch_size, WINDOW * order.batch_size
    full_batches, rest = np.split(rows, [len(rows) // size * size])
    windows = [
        part[np.lexsort((part, order.lengths[part]))]
        for part in np.split(full_batches, range(window, len(full_batches), window))
    ]
    draw = np.random.Generator(np.random.PCG64([order.seed, epoch, 1]))
    batches = draw.permutation(np.concatenate(windows).reshape(-1, size))
    return np.concatenate([batches.reshape(-1), rest])


class Loader:
    """One worker's micro-batches of each optimizer step.

    Attributes:
        order: order of all rows. accumulation: micro-batches of a step.
    """

    def __init__(
        self, collate: Collate, order: GlobalOrder, micro_batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        """Create the loader of a worker.

        Args:
            collate: makes batches of the rows that `order` puts in an order.

        Raises:
            ConfigError: see `check_batch`.
        """
        self.accumulation: int = check_batch(order.batch_size, micro_batch_size, world_size)
        assert order.count == collate.count, "the order must cover exactly the rows of the tables"
        self.order = order
        self._collate = collate
        self._rank, self._world, self._micro = rank, world_size, micro_batch_size

    def named(self, rows: Sequence[int]) -> list[str]:
        """Return `row 3 of task 'topic'` for each of these rows (`Batch.rows`), by its number in its file."""
        return self._collate.named(rows)

    def micro_batches(self, step: int) -> list[Batch]:
        """Yield this worker's share of optimizer step `step`: always `accumulation` micro-batches.

        `Batch.rows` counts through the concatenated tables.
        """
        mine = self._collate.by_length(self.order.rows(step))[self._rank :: self._world]
        starts, epoch = range(0, self.accumulation * self._micro, self._micro), self.order.epoch(step)
        return [self._collate(mine[start : start + self._micro], self._micro, epoch) for start in starts]


def eval_batches(collate: Collate, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """Yield one worker's share of all rows, sorted by length; every worker yields equally many batches.

    The real rows of all workers together are each row once.
    """
    mine = collate.by_length(np.arange(collate.count))[rank::world_size]
    most = -(-collate.count // world_size)
    for start in range(0, most, batch_size):
        yield collate(mine[start : start + batch_size], min(batch_size, most - start))


class Collate:
    """Rows of concatenated tables become one right-padded batch."""

    def __init__(
        self,
        tables: Sequence[TokenRows],
        pad_id: int,
        label_ids: Mapping[str, int] | None = None,
        texts: bool = False,
        text_objective: TextObjective | None = None,
        router_texts: RouterTexts | None = None,
    ) -> None:
        """Create what makes batches of these tables.

        Args:
            label_ids: label text -> row of the label head; None where there is no head.
            texts: batches carry their input texts.
            text_objective: returns source and target of a text that is learned itself.
            router_texts: gives what the method's router reads of each row; None: nothing but the prompts.
        """
        self._tables = tables
        self._router_texts = router_texts
        self._label_ids = label_ids
        self._pad_id = pad_id
        self._with_texts = texts
        self._text_objective = text_objective
        self._starts = np.concatenate([[0], np.cumsum([len(table) for table in tables], dtype=np.int64)])
        self._lengths = np.concatenate([table.source_lengths for table in tables])
        self._has_targets = any(table.has_targets for table in tables)

    @property
    def count(self) -> int:
        """The number of rows in all tables together."""
        return int(self._starts[-1])

    def by_length(self, rows: Indices) -> Indices:
        """Return `rows` with the shortest prompt first; rows of one length stay in ascending order of row."""
        return rows[np.lexsort((rows, self._lengths[rows]))]

    def __call__(self, rows: Indices, size: int, epoch: int = 0) -> Batch:
        """Return a batch of `size` examples: `rows`, then fill-ups of weight 0.

        A fill-up's source is one visible padding token, so that no attention row is empty.
        """
        blanks = size - len(rows)
        sources: list[NDArray[np.int32]] = []
        targets: list[NDArray[np.int32]] = []
        labels: list[int] = []
        for row in rows.tolist():
            source, target, label = self._example(row)
            if self._text_objective is not None:
                source, target = self._text_objective(source, row, epoch)
            sources.append(source)
            targets.append(target)
            labels.append(label)
        sources += [np.array([self._pad_id], dtype=np.int32)] * blanks
        targets += [np.zeros(0, dtype=np.int32)] * blanks
        return Batch(
            source_ids=padded(sources, self._pad_id, 1),
            source_mask=padded([np.ones(len(source), dtype=np.int32) for source in sources], 0, 1),
            target_ids=padded(targets, IGNORE, 1 if self._has_targets else 0),
            label_ids=torch.tensor(labels + [IGNORE] * blanks, dtype=torch.int64),
            weight=torch.tensor([1.0] * len(rows) + [0.0] * blanks, dtype=torch.float32),
            rows=torch.tensor([*rows.tolist(), *[-1] * blanks], dtype=torch.int64),
            **self._words(rows, blanks),
            **self._inputs(rows, sources),
        )

    def _words(self, rows: Indices, blanks: int) -> dict[str, Any]:
        if not self._with_texts:
            return {}
        reads, pairs = self._router_texts, self._tasks_and_texts(rows)
        texts = [text if reads is None else reads.words(task, text) for task, text in pairs]
        tasks = [task.name for task, _ in pairs]
        return {"texts": (*texts, *[""] * blanks), "tasks": (*tasks, *[""] * blanks)}

    def _inputs(self, rows: Indices, prompts: list[NDArray[np.int32]]) -> dict[str, Any]:
        """Return the ids that a router reads by the backbone in place of prompts, which are given with fill-ups."""
        reads = self._router_texts
        if reads is None or not any(reads.reads_own_ids(table.task) for table in self._tables):
            return {}
        ids = reads.row_ids(self._tasks_and_texts(rows), prompts)
        if ids is None:
            return {}
        ids += [[self._pad_id]] * (len(prompts) - len(rows))
        masks = [[1] * len(row_ids) for row_ids in ids]
        return {"input_ids": padded(ids, self._pad_id, 1), "input_mask": padded(masks, 0, 1)}

    def _tasks_and_texts(self, rows: Indices) -> list[tuple[Task, str]]:
        return [(table.task, table.texts([place])[0]) for table, place in map(self._place, rows.tolist())]

    def named(self, rows: Sequence[int]) -> list[str]:
        places = map(self._place, rows)
        numbered = [(int(table.row_numbers([place])[0]), table.task.name) for table, place in places]
        return [f"{f'row {number}' if number else 'a sample'} of task '{task}'" for number, task in numbered]

    def _place(self, row: int) -> tuple[TokenRows, int]:
        """Return the table of a row, and its place there."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._tables[number], row - int(self._starts[number])

    def _example(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        table, place = self._place(row)
        columns = table.columns([place])
        return columns.source_ids[0], columns.target_ids[0], self._label_id(table, int(columns.labels[0]))

    def _label_id(self, table: TokenRows, code: int) -> int:
        if self._label_ids is None or table.task.labels is None or code < 0:
            return IGNORE
        label = table.task.labels[code]
        assert label in self._label_ids, f"the label head has no row for '{label}' of task '{table.task.name}'"
        return self._label_ids[label]


def batch_of(sources: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """Return a batch of prompts without answers, as ids with their special tokens."""
    return Batch(
        source_ids=padded(sources, pad_id, 1),
        source_mask=padded([[1] * len(source) for source in sources], 0, 1),
        target_ids=torch.zeros(len(sources), 0, dtype=torch.int64),
        label_ids=torch.full((len(sources),), IGNORE, dtype=torch.int64),
        weight=torch.ones(len(sources)),
        rows=torch.arange(len(sources)),
    )


def batches_of(sources: Sequence[Sequence[int]], size: int, pad_id: int, device: torch.device) -> Iterator[Batch]:
    """Yield `batch_of` so many prompts at a time, on a device."""
    for start in range(0, len(sources), size):
        yield batch_of(sources[start : start + size], pad_id).to(device)


BATCH_TOKENS = 80
"""Time of a batch on a CPU beside that of its tokens, in tokens (MiniLM: 40 to 160 are equally fast)."""


def parts_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return rows, each once, in batches of similar lengths, so that a CPU computes little padding.

    Of all divisions it has the fewest padded tokens, with `BATCH_TOKENS` more for each batch.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    tokens, begins = [0], [0]  # of the batches of the first rows: their tokens, and where the last one begins
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        most, begin = min((tokens[begin] + (end - begin) * longest, begin) for begin in range(end))
        tokens.append(most + BATCH_TOKENS)
        begins.append(begin)
    parts, end = [], len(order)
    while end:
        parts.append(order[begins[end] : end])
        end = begins[end]
    return parts[::-1]


def padded(rows: Sequence[Sequence[int] | NDArray[np.int32]], value: int, least: int = 0) -> Tensor:
    """Return `[len(rows), longest]` int64, at least `least` wide, padded on the right with `value`."""
    width = max([least, *map(len, rows)])
    table = np.full((len(rows), width), value, dtype=np.int64)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return torch.from_numpy(table)
