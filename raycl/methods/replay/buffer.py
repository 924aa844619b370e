"""Replay buffers: what is kept of earlier tasks, task by task, in the order of learning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from raycl.data.sources.cache import Indices
from raycl.methods.context import TaskContext
from raycl.types import Task

EntryT = TypeVar("EntryT")


class ReplayBuffer(Generic[EntryT]):
    """One entry for each earlier task.

    Attributes:
        entries: task -> what is kept of it.
    """

    def __init__(self) -> None:
        self.entries: dict[str, EntryT] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[tuple[str, EntryT]]:
        return iter(self.entries.items())

    def add(self, task: str, entry: EntryT) -> None:
        """Keep an entry of a task, in the place of the one that it has."""
        self.entries[task] = entry


class RowBuffer(ReplayBuffer[Indices]):
    """A share of each task's training rows, drawn once per task by the run's seed.

    Rows are kept as numbers; their texts stay in the stream's files. So the same buffer can be filled again at any
    time, and checkpoints hold nothing of it.
    """

    def __init__(self, share: float = 1.0, limit: int | None = None) -> None:
        """Store nothing yet.

        Args:
            share: share of each task's training rows; at least one row.
            limit: so many rows of each task at most.
        """
        super().__init__()
        self.share, self.limit = share, limit
        self.tasks: dict[str, Task] = {}

    def fill(self, context: TaskContext) -> None:
        """Keep rows of all tasks of earlier phases."""
        self.entries, self.tasks = {}, {}
        for task in context.earlier_tasks:
            self.tasks[task.name] = task
            self.add(task.name, context.stored_rows(task, self.share, self.limit))
