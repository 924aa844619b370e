"""Greedy answers to a long sequence of prompts, as evaluation takes them, in one continuous batch.

In batches of fixed rows every row waits for the longest answer, and a test set of labels has few long ones. Here rows
leave at the end of their answers and the next prompts, of other tasks too, take their places. Prompts are read a few at
a time, which need little padding; the common beginning of a task's rows is read once where their mixture is the same
(`raycl.generation.shared_prompt`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from raycl.backbone import Backbone
from raycl.generation import dynamic_cache
from raycl.generation.allowed_tokens import AllowedTokens
from raycl.generation.dynamic_cache import DynamicKVCache
from raycl.generation.shared_prompt import SharedPrompt
from raycl.types import Batch, Mixture

Activate = Callable[[Mixture | None], AbstractContextManager[None]]
"""Activates the mixture of some rows."""

READ_ROWS = 16
"""The least prompts that are read together; of 4, 8, 16 and 40, 16 took the least time on a CPU."""

RELATIVE = ("longt5", "mt5", "t5", "umt5")
"""Encoder-decoder models whose decoder counts positions from the newest one, so rows of unlike length fit together."""

HARMLESS = frozenset(
    (
        *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens"),
        *("do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_return_sequences"),
        *("early_stopping", "length_penalty", "use_cache", "cache_implementation", "output_attentions"),
        *("output_hidden_states", "return_dict_in_generate", "transformers_version", "_from_model_config"),
    )
)
"""Settings of `generate` that do not change the most likely token."""


def rows_read_together(max_rows: int) -> int:
    """Return the number of prompts of one pass, where this many rows are decoded together."""
    return max(1, min(max_rows, max(READ_ROWS, max_rows // 4)))


def answers_continuously(backbone: Backbone) -> bool:
    """Return whether `AnswerBatch` gives the answers of `generate`, with the model's own generation settings.

    Where workers share the weights they must run equally many passes, and here each decodes at its own pace.
    """
    capabilities, model = backbone.capabilities, backbone.model
    if capabilities.answers != "text" or backbone.synchronized:
        return False
    if set(model.generation_config.to_diff_dict()) - HARMLESS:
        return False  # for example forced tokens or a penalty on repetitions
    if capabilities.separate_encoder:
        return model.config.model_type in RELATIVE
    return dynamic_cache.attends_to_all(model.config)


class Prompts(NamedTuple):
    """Rows that are read together, all of one task.

    Attributes:
        task: name of the task. batch: real rows only. mixture: mixture of the rows; None: none is active.
        max_tokens: most tokens of an answer.
        start: ids that every row begins with, which may be read once.
        allowed: ids of the only answers; (): all.
    """

    task: str
    batch: Batch
    max_tokens: int
    mixture: Mixture | None = None
    start: Sequence[int] = ()
    allowed: tuple[tuple[int, ...], ...] = ()


class RowAnswer(NamedTuple):
    """The answer to one row of a task."""

    task: str
    row: int
    text: str


@dataclass
class _Row:
    task: str
    number: int
    max_tokens: int
    mixture: Mixture | None
    allowed: AllowedTokens | None
    ids: list[int] = field(default_factory=list)


class AnswerBatch:
    """Rows that are decoded together.

    Attributes:
        steps: forward passes of one token so far. decoded: tokens so far.
    """

    def __init__(self, backbone: Backbone, activate: Activate, max_rows: int) -> None:
        """Start empty.

        Args:
            max_rows: most rows that are decoded together.
        """
        self._backbone, self._activate = backbone, activate
        self._max_rows = max_rows
        self.read_rows = rows_read_together(max_rows)
        self.steps = self.decoded = 0
        self._rows: list[_Row] = []
        self._state: DynamicKVCache | None = None
        self._open, self._is_open = ExitStack(), False
        self._constraints: dict[tuple[tuple[int, ...], ...], AllowedTokens] = {}
        self._start: SharedPrompt | None = None
        self._ends = _end_ids(backbone)

    @torch.no_grad()
    def answers(self, prompts: Iterable[Prompts]) -> Iterator[RowAnswer]:
        """Yield an answer to each row, as they end.

        Args:
            prompts: at most `read_rows` rows each; the next are taken when there is room, with no mixture active.
        """
        source = iter(prompts)
        try:
            is_more = True
            while is_more or self._rows:
                while is_more and len(self._rows) + self.read_rows <= self._max_rows:
                    self._deactivate()
                    next_prompts = next(source, None)
                    is_more = next_prompts is not None
                    if next_prompts is not None:
                        self._join(next_prompts)
                yield from self._step()
        finally:
            self._deactivate()

    def _join(self, prompts: Prompts) -> None:
        """Read prompts, and add them to the batch."""
        state = self._read(prompts)
        self._state = state if self._state is None else self._state.joined(state)
        allowed = self._constraint(prompts.allowed)
        for index, number in enumerate(prompts.batch.rows.tolist()):
            mixture = prompts.mixture
            row_mixture = None if mixture is None else Mixture(mixture.names, mixture.weights[index : index + 1])
            self._rows.append(_Row(prompts.task, number, prompts.max_tokens, row_mixture, allowed))

    def _read(self, prompts: Prompts) -> DynamicKVCache:
        batch, mixture = prompts.batch, prompts.mixture
        lengths = batch.source_mask.sum(1).tolist()
        sources = [ids[:length] for ids, length in zip(batch.source_ids.tolist(), lengths, strict=True)]
        if not SharedPrompt.helps(self._backbone, prompts.start, mixture, len(batch)):
            with self._activate(mixture):
                return dynamic_cache.begin(self._backbone, sources)
        row_mixture = None if mixture is None else Mixture(mixture.names, mixture.weights[:1])
        if self._start is None or not self._start.is_of(prompts.start, row_mixture):
            with self._activate(row_mixture):
                self._start = SharedPrompt(self._backbone, prompts.start, row_mixture)
        with self._activate(mixture):
            return self._start.followed_by([ids[len(prompts.start) :] for ids in sources])

    def _constraint(self, allowed: tuple[tuple[int, ...], ...]) -> AllowedTokens | None:
        if allowed and allowed not in self._constraints:
            self._constraints[allowed] = AllowedTokens(allowed, self._backbone.codec.eos_id)
        return self._constraints.get(allowed)

    def _step(self) -> Iterator[RowAnswer]:
        """Decode one token for every row, and return the answers that end with it."""
        if self._state is None:
            return
        tokens = self._next(self._state.logits)
        self.decoded += len(self._rows)
        going = []
        for index, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            row.ids.append(token)
            if token not in self._ends and len(row.ids) < row.max_tokens:
                going.append(index)
        ended = self._keep(going)
        if self._state is not None:
            self._activate_rows()
            chosen = torch.tensor([tokens[index] for index in going], device=self._backbone.device)
            self._state = dynamic_cache.step(self._backbone, self._state, chosen)
            self.steps += 1
        texts = self._backbone.codec.decode([row.ids for row in ended]) if ended else []
        for row, text in zip(ended, texts, strict=True):
            yield RowAnswer(row.task, row.number, text)

    def _next(self, logits_BV: Tensor) -> list[int]:
        """Return the most likely token of each row, among those allowed."""
        limited = [index for index, row in enumerate(self._rows) if row.allowed is not None]
        if limited:
            barred_MV = torch.ones(len(limited), logits_BV.shape[1], dtype=torch.bool)
            for number, index in enumerate(limited):
                row = self._rows[index]
                assert row.allowed is not None
                barred_MV[number, row.allowed.after(row.ids)] = False
            logits_BV = logits_BV.clone()
            logits_BV[limited] = logits_BV[limited].masked_fill(barred_MV.to(logits_BV.device), -torch.inf)
        tokens: list[int] = logits_BV.argmax(-1).tolist()
        return tokens

    def _keep(self, going: Sequence[int]) -> list[_Row]:
        """Keep only these rows; returns the others."""
        if len(going) == len(self._rows):
            return []
        self._deactivate()
        going_on = set(going)
        ended = [row for index, row in enumerate(self._rows) if index not in going_on]
        self._rows = [self._rows[index] for index in going]
        self._state = self._state.kept(going) if going and self._state is not None else None
        return ended

    def _activate_rows(self) -> None:
        """Activate the mixture of all rows."""
        if self._is_open:
            return
        mixtures = [row.mixture for row in self._rows if row.mixture is not None]
        assert len(mixtures) in (0, len(self._rows)), "the backbone is bare for all rows or for none"
        self._open.enter_context(self._activate(Mixture.stacked(mixtures) if mixtures else None))
        self._is_open = True

    def _deactivate(self) -> None:
        self._open.close()
        self._is_open = False


def _end_ids(backbone: Backbone) -> frozenset[int]:
    """Return tokens that end an answer, as `generate` takes them."""
    end_ids = backbone.model.generation_config.eos_token_id if backbone.capabilities.separate_encoder else None
    if end_ids is None:
        return frozenset([backbone.codec.eos_id])
    return frozenset(end_ids if isinstance(end_ids, list) else [int(end_ids)])
