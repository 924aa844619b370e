"""The continuous batch: rows join while others are decoded, each has its own mixture and leaves at its end.

Evaluation takes whole answers to a long sequence of prompts (`answer_batch`); serving sends each row's text while it is
decoded (`raycl.serve.engine.request_batch`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from raycl.backbone import Backbone
from raycl.generation import dynamic_cache
from raycl.generation.dynamic_cache import DynamicKVCache
from raycl.generation.requests import Sampling, TokenLogprobs
from raycl.generation.sampling import NOT_FINITE, adjusted, logprobs_of, pick
from raycl.generation.static_cache import StaticKVCache
from raycl.types import Mixture

Activate = Callable[[Mixture | None], AbstractContextManager[Any]]
"""Activates the mixture of some rows; None: the bare backbone."""

ActivateStatic = Callable[[Mixture, Tensor], AbstractContextManager[int]]
"""Activates a mixture, with weights at the slots of its rows, at addresses that stay while the number stays."""


class BatchRow(ABC):
    """A sequence of the running batch.

    Attributes:
        mixture: None: the bare backbone, for all rows of a batch or for none.
        sampling: how its tokens are drawn. ids: tokens so far.
        prompt_ids: tokens before these in one sequence with them.
        logprobs: of tokens that have been chosen, where they are wanted; `push` takes them.
        constraint: limit of its tokens; None: all.
    """

    def __init__(self, mixture: Mixture | None, sampling: Sampling, prompt_ids: Sequence[int] = ()) -> None:
        self.mixture, self.sampling, self.prompt_ids = mixture, sampling, prompt_ids
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.constraint = None if sampling.allowed is None else sampling.allowed.started()
        self.draws = torch.Generator().manual_seed(sampling.seed)

    @abstractmethod
    def push(self, token: int) -> bool:
        """Add the next token (or `NOT_FINITE`), and return whether the sequence continues."""


RowT = TypeVar("RowT", bound=BatchRow)


class ContinuousBatch(Generic[RowT]):
    """Rows that are decoded together.

    Attributes:
        rows: those that are decoded now.
        tokens: generated so far. steps: forward passes of one token so far.
    """

    def __init__(
        self, backbone: Backbone, activate: Activate, max_rows: int, activate_static: ActivateStatic | None = None
    ) -> None:
        """Start empty.

        Args:
            max_rows: most rows that are decoded together.
            activate_static: decode at fixed addresses (`raycl.generation.static_cache`); None: in caches that grow.
        """
        self.backbone = backbone
        self.max_rows = max_rows
        self.rows: list[RowT] = []
        self.tokens: int = 0
        self.steps: int = 0
        self._activate, self._activate_static = activate, activate_static
        self._static = None if activate_static is None else StaticKVCache(backbone, max_rows)
        self._graph_key = 0
        self._state: DynamicKVCache | StaticKVCache | None = None
        self._active, self._is_active = ExitStack(), False

    @property
    def captures(self) -> int:
        """The number of steps captured as CUDA graphs so far."""
        return 0 if self._static is None else self._static.captures

    def join(self, rows: Sequence[RowT], read: DynamicKVCache) -> None:
        """Add rows whose prompts have been read."""
        before = self._state if self._static is None else self._static
        self._state = read if before is None else before.joined(read)
        self.rows += rows

    def step(self) -> list[RowT]:
        """Decode one token for every row, and return the rows that end with it, which have left."""
        if self._state is None:
            return []
        settings = [row.sampling for row in self.rows]
        prompts, answers = [row.prompt_ids for row in self.rows], [row.ids for row in self.rows]
        logits_BV = adjusted(self._state.logits, settings, prompts, answers, [row.constraint for row in self.rows])
        tokens = pick(logits_BV, settings, [row.draws for row in self.rows])
        self.tokens += len(tokens)
        for number, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            if row.sampling.logprobs is not None and token != NOT_FINITE:
                row.logprobs += logprobs_of(self._state.logits[number, None], [token], row.sampling.logprobs)
        pairs = enumerate(zip(self.rows, tokens, strict=True))
        going = [number for number, (row, token) in pairs if row.push(token)]
        ended = self.keep(going)
        if self._state is None:
            return ended
        if not self._is_active:
            self._activate_rows()
        chosen = torch.tensor([tokens[number] for number in going], device=self.backbone.device)
        if isinstance(self._state, StaticKVCache):
            self._state.step(chosen, self._graph_key)
        else:
            self._state = dynamic_cache.step(self.backbone, self._state, chosen)
        self.steps += 1
        return ended

    def keep(self, going: Sequence[int]) -> list[RowT]:
        """Keep only the rows with these numbers, and return the others."""
        if len(going) == len(self.rows):
            return []
        self.deactivate()
        gone = [self.rows[number] for number in sorted(set(range(len(self.rows))) - set(going))]
        self.rows = [self.rows[number] for number in going]
        if self._static is not None and self._state is not None:
            self._static.kept(going)
        elif going and self._state is not None:
            self._state = self._state.kept(going)
        self._state = self._state if going else None
        return gone

    def deactivate(self) -> None:
        """Deactivate the mixture; the next step activates it again."""
        self._active.close()
        self._is_active = False

    def _activate_rows(self) -> None:
        mixtures = [row.mixture for row in self.rows if row.mixture is not None]
        assert len(mixtures) in (0, len(self.rows)), "the backbone is bare for all rows or for none"
        mixture = Mixture.stacked(mixtures) if mixtures else None
        if isinstance(self._state, StaticKVCache):
            assert mixture is not None and self._activate_static is not None, "slots have weights"
            activated = self._activate_static(mixture, self._state.placed(mixture.weights))
            self._graph_key = self._active.enter_context(activated)
        else:
            self._active.enter_context(self._activate(mixture))
        self._is_active = True
