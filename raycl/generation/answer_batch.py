"""Answers to a long sequence of prompts in one continuous batch: greedy, as evaluation takes them, or drawn.

In batches of fixed rows every row waits for the longest answer, and a test set of labels has few long ones. Here rows
leave at the end of their answers and the next prompts, of other tasks too, take their places. Prompts are read a few at
a time, which need little padding; the common beginning of a task's rows is read once where their mixture is the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from raycl.backbone import Backbone
from raycl.generation.continuous_batch import Activate, BatchRow, ContinuousBatch
from raycl.generation.dynamic_cache import DynamicKVCache, begin, read_on
from raycl.generation.prefix_cache import shares_prefixes
from raycl.generation.requests import Sampling, TokenConstraint
from raycl.generation.sampling import NOT_FINITE
from raycl.types import Batch, Mixture

READ_ROWS = 16
"""The least prompts that are read together; of 4, 8, 16 and 40, 16 took the least time on a CPU."""

LEAST_TOKENS = 8
"""Shorter common beginnings are read with their rows: reading them apart costs a forward pass."""


class Prompts(NamedTuple):
    """Rows that are read together, all of one task.

    Attributes:
        task: name of the task. batch: real rows only. mixture: mixture of the rows; None: none is active.
        max_tokens: most tokens of an answer.
        start: ids that every row begins with, which may be read once.
        allowed: the limit of the tokens of each row's answer, None for no limit; (): no row has any.
        stop: an answer ends with the token that completes one of these, which stays in it; (): none.
        temperature: temperature at which tokens are drawn; 0: the most likely token is taken.
        seeds: seed of each row's draws, which depend on nothing else; (): nothing is drawn.
    """

    task: str
    batch: Batch
    max_tokens: int
    mixture: Mixture | None = None
    start: Sequence[int] = ()
    allowed: Sequence[TokenConstraint | None] = ()
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    seeds: Sequence[int] = ()


class RowAnswer(NamedTuple):
    """The answer to one row of a task: its text without outer white space, and its tokens."""

    task: str
    row: int
    text: str
    ids: Sequence[int]


class _Row(BatchRow):
    def __init__(self, task: str, number: int, mixture: Mixture | None, sampling: Sampling, backbone: Backbone) -> None:
        super().__init__(mixture, sampling)
        self.task, self.number, self._ends, self._codec = task, number, backbone.end_ids, backbone.codec

    def push(self, token: int) -> bool:
        if token == NOT_FINITE:  # of a model that has diverged
            return False
        self.ids.append(token)
        if token in self._ends or len(self.ids) >= self.sampling.max_tokens:
            return False
        stops = self.sampling.stop
        return not stops or not any(map(self._codec.tokenizer.decode(self.ids).__contains__, stops))


class AnswerBatch(ContinuousBatch[_Row]):
    """Answers prompts in order, as many at a time as there is room for.

    Attributes:
        read_rows: most prompts that are read together.
    """

    def __init__(self, backbone: Backbone, activate: Activate, max_rows: int) -> None:
        """Start empty.

        Args:
            max_rows: most rows that are decoded together.
        """
        super().__init__(backbone, activate, max_rows)
        self.read_rows: int = max(1, min(max_rows, max(READ_ROWS, max_rows // 4)))
        self._start: _SharedPrompt | None = None

    @torch.no_grad()
    def answers(self, prompts: Iterable[Prompts]) -> Iterator[RowAnswer]:
        """Yield an answer to each row, as they end.

        Args:
            prompts: at most `read_rows` rows each; the next are taken when there is room, with no mixture active.
        """
        source = iter(prompts)
        try:
            is_more = True
            while is_more or self.rows:
                while is_more and len(self.rows) + self.read_rows <= self.max_rows:
                    self.deactivate()
                    next_prompts = next(source, None)
                    is_more = next_prompts is not None
                    if next_prompts is not None:
                        self.join(self._rows_of(next_prompts), self._read(next_prompts))
                ended = self.step()
                texts = self.backbone.codec.decode([row.ids for row in ended]) if ended else []
                for row, text in zip(ended, texts, strict=True):
                    yield RowAnswer(row.task, row.number, text, row.ids)
        finally:
            self.deactivate()

    def _rows_of(self, prompts: Prompts) -> list[_Row]:
        allowed, seeds = prompts.allowed or [None] * len(prompts.batch), prompts.seeds or [0] * len(prompts.batch)
        heat = prompts.temperature
        return [
            _Row(
                *(prompts.task, number, _one(prompts.mixture, index)),
                Sampling(prompts.max_tokens, heat, seed=seeds[index], allowed=allowed[index], stop=prompts.stop),
                self.backbone,
            )
            for index, number in enumerate(prompts.batch.rows.tolist())
        ]

    def _read(self, prompts: Prompts) -> DynamicKVCache:
        batch, mixture = prompts.batch, prompts.mixture
        lengths = batch.source_mask.sum(1).tolist()
        sources = [ids[:length] for ids, length in zip(batch.source_ids.tolist(), lengths, strict=True)]
        if not _shares_start(self.backbone, prompts):
            with self._activate(mixture):
                return begin(self.backbone, sources)
        first = _one(mixture, 0)
        if self._start is None or not self._start.is_of(prompts.start, first):
            with self._activate(first):
                self._start = _SharedPrompt(self.backbone, prompts.start, first)
        with self._activate(mixture):
            return self._start.followed_by([ids[len(prompts.start) :] for ids in sources])


def _one(mixture: Mixture | None, row: int) -> Mixture | None:
    return None if mixture is None else Mixture(mixture.names, mixture.weights[row : row + 1])


# ---- common beginnings -------------------------------------------------------------------------------------------


def _shares_start(backbone: Backbone, prompts: Prompts) -> bool:
    """Return whether rows can share their common beginning, such as a task's definition, and it saves time.

    Keys and values of a token depend on nothing behind it, so rows with the same mixture can share them.
    """
    if len(prompts.batch) < 2 or len(prompts.start) < LEAST_TOKENS or not shares_prefixes(backbone):
        return False
    mixture = prompts.mixture
    return mixture is None or bool((mixture.weights == mixture.weights[:1]).all())


class _SharedPrompt:
    """A common beginning and its keys and values, for decoder-only backbones."""

    def __init__(self, backbone: Backbone, start: Sequence[int], mixture: Mixture | None) -> None:
        """Read the beginning, with special tokens; its mixture of one row must be active."""
        self._backbone, self._start, self._mixture = backbone, list(start), mixture
        self._state = begin(backbone, [self._start])

    def is_of(self, start: Sequence[int], mixture: Mixture | None) -> bool:
        """Return whether the beginning has these ids under this mixture of one row."""
        if mixture is None or self._mixture is None:
            return self._start == list(start) and mixture is self._mixture
        same = mixture.names == self._mixture.names and torch.equal(mixture.weights, self._mixture.weights)
        return same and self._start == list(start)

    def followed_by(self, rests: Sequence[Sequence[int]]) -> DynamicKVCache:
        """Read the rest of each prompt, at least one token; the mixture of all rows must be active."""
        each = (len(rests), -1, -1, -1)
        layers = [(keys.expand(each), values.expand(each)) for keys, values in self._state.layers]
        return read_on(self._backbone, layers, self._state.mask.expand(len(rests), -1), rests)
