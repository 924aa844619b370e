"""The rows of one stage's tasks, for methods that look at more of them than the batch at hand.

Why it exists: SAPT averages over a task's dev split and keeps a few of its inputs; neither comes by in a batch.
What it does not know: other stages' tasks, which a method must not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from raycl.data.prepare import fit_sources
from raycl.data.stream import Stream
from raycl.data.tokens import Split, TokenTable
from raycl.types import Phase, Task, TextCodec


@dataclass(frozen=True)
class TaskRows:
    """The rows of a stage.

    Attributes:
        batch_size: examples of an optimizer step, over all workers.
    """

    phase: Phase
    batch_size: int
    _stream: Stream = field(repr=False)
    _codec: TextCodec = field(repr=False)

    def tables(self, split: Split) -> list[TokenTable]:
        """The token table of each of the stage's tasks that has rows in `split`."""
        tasks = [task for task in self.phase.tasks if len(self._stream.rows(task, split))]
        return [self._stream.table(task, split, self._codec) for task in tasks]

    def count(self, split: Split) -> int:
        """Rows of all its tasks."""
        return sum(map(len, self.tables(split)))

    def prompts(self, task: Task, texts: Sequence[str]) -> list[list[int]]:
        """Prompt ids of texts with the task's template, cut as its own rows are."""
        limit = min(self._stream.token_limits[0], self._codec.max_source_tokens)
        return fit_sources(texts, self._stream.prompt(task, self._codec), self._codec, limit)[0]
