"""Texts that a model learns to write as solver and generator in one, and its pseudo-samples (LFPT5).

Behind the generation prompt of a task, `__gen__ <task>`, it writes an input and its answer: `input __ans__ answer`.
Both marks are ordinary words of the tokenizer, since no vocabulary grows here; LFPT5's code adds a token for the
separator and one for each task, whose embeddings stay as they are. The repetition penalty leaves the tokens of a
separator of several out, which repeat each other. Inputs stand without instruction and template, which are put around
what was written as around real data. A long input is cut; their code cuts the end, which is the answer.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from raycl.backbone import Backbone
from raycl.backbone.base import evaluating, seed_all
from raycl.backbone.codec import HFCodec
from raycl.data.loader import batch_of, padded
from raycl.errors import ConfigError
from raycl.types import IGNORE, Batch, Task

log: logging.Logger = logging.getLogger("raycl")

START = "__gen__"
"""The text before a task's name."""

AT_ONCE = 64
"""Samples that are drawn together, at most."""

Pair = tuple[list[int], list[int]]
"""Ids of a prompt and of what is to be written behind it."""


@dataclass(frozen=True)
class SampleFormat:
    """Samples as token ids.

    Attributes:
        max_tokens: limit of input, separator and answer together, end-of-sequence included.
        mark: text between input and answer.
    """

    codec: HFCodec
    max_tokens: int
    mark: str = "__ans__"

    def check(self) -> None:
        """Check that the separator can be written.

        Raises:
            ConfigError: the tokenizer drops it.
        """
        if not self.separator:
            raise ConfigError(
                f"the tokenizer of this backbone has no tokens for method.separator='{self.mark}', which stands "
                "between input and answer of generated pseudo-samples: choose another one, or source=real"
            )

    @property
    def separator(self) -> list[int]:
        return self._ids(self.mark)

    def pair(self, task: str, text: str, answer: str) -> Pair:
        """Return what the model reads and writes for a labelled input."""
        tail = [*self.separator, *self.codec.encode_target([answer])[0]]
        room = max(0, self.max_tokens - len(tail))
        return self.start(task), [*self._ids(text)[:room], *tail]

    def start(self, task: str) -> list[int]:
        """Return ids of the generation prompt of a task."""
        return self.codec.encode_source([f"{START} {task}"])[0]

    def parted(self, ids: Sequence[int]) -> tuple[str, str] | None:
        """Input and answer of what was written; None unless it is two texts around one separator."""
        mark, written = self.separator, list(ids)
        starts = [index for index in range(len(written)) if written[index : index + len(mark)] == mark]
        if len(starts) != 1:
            return None
        before, behind = written[: starts[0]], written[starts[0] + len(mark) :]
        text, answer = self.codec.decode([before])[0], self.codec.decode([behind])[0]
        return (text, answer) if text and answer else None

    def _ids(self, text: str) -> list[int]:
        return self.codec.encode_target([text])[0][:-1]


@dataclass(frozen=True)
class Sampler:
    """Draws samples from a model.

    Attributes:
        activated: activates what the model writes with, for so many rows.
        draws: samples drawn for a task at most, and at least as many as are wanted.
    """

    backbone: Backbone
    form: SampleFormat
    top_k: int
    repetition_penalty: float
    activated: Callable[[int], AbstractContextManager[None]]
    draws: int

    @torch.no_grad()
    def samples(self, task: Task, count: int, seed: int) -> list[tuple[str, str]]:
        """Return `count` inputs of a task with answers, those of its label set where it has one; fewer if it writes
        fewer.

        Samples are drawn until enough of them are such.
        """
        backbone, samples = self.backbone, list[tuple[str, str]]()
        drawn, limit = 0, max(count, self.draws)
        seed_all(seed, backbone.device)
        with evaluating(backbone):
            while len(samples) < count and drawn < limit:
                rows = min(AT_ONCE, limit - drawn, max(count - len(samples), drawn))
                pairs = map(self.form.parted, self._drawn(task.name, rows))
                samples += [pair for pair in pairs if pair and (task.labels is None or pair[1] in task.labels)]
                drawn += rows
        if len(samples) < count:
            log.warning(
                "    of %d pseudo-samples of task '%s' %d were written, in %d draws: others had no separator or no "
                "label of the task (draw more with method.draws; prompts that are trained longer write better)",
                *(count, task.name, len(samples), drawn),
            )
        return samples[:count]

    def _drawn(self, task: str, rows: int) -> list[list[int]]:
        """Return ids of what is written behind a task's generation prompt, without special tokens."""
        from transformers import LogitsProcessorList

        backbone, codec = self.backbone, self.backbone.codec
        penalty = RepetitionPenalty(self.repetition_penalty, self.form.separator)
        batch = batch_of([self.form.start(task)] * rows, codec.pad_id).to(backbone.device)
        with self.activated(rows), backbone.precision():
            inputs = backbone.generation_inputs(batch)
            ids = backbone.model.generate(
                **inputs.arguments,
                max_new_tokens=self.form.max_tokens,
                do_sample=True,
                num_beams=1,
                top_k=self.top_k,
                logits_processor=LogitsProcessorList([penalty]),
                remove_invalid_values=True,
            )
        return [_until_end(row[inputs.prompt_columns :], backbone.end_ids) for row in ids.tolist()]


class RepetitionPenalty:
    """A penalty on tokens that were written before, except for those of a separator."""

    def __init__(self, penalty: float, separator: Sequence[int]) -> None:
        from transformers import RepetitionPenaltyLogitsProcessor

        self._free = sorted(set(separator)) if len(separator) > 1 else []
        self._penalize = RepetitionPenaltyLogitsProcessor(penalty)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `[B, V]` scores of the next token, from ids `[B, L]` so far and scores `[B, V]`."""
        kept = scores[:, self._free].clone()
        penalized: Tensor = self._penalize(input_ids, scores)
        penalized[:, self._free] = kept
        return penalized


def _until_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    return ids[: next((position for position, token in enumerate(ids) if token in ends), len(ids))]


def batch_of_pairs(pairs: Sequence[Pair | None], pad_id: int) -> Batch:
    """Return prompts with what is to be written behind them; None: an example without loss."""
    rows = [pair or ([pad_id], []) for pair in pairs]
    batch = batch_of([source for source, _ in rows], pad_id)
    batch.target_ids = padded([target for _, target in rows], IGNORE, 1)
    batch.weight = torch.tensor([float(pair is not None) for pair in pairs])
    return batch


def mean_losses(logits_MV: Tensor, labels_M: Tensor, rows_M: Tensor, examples: int) -> Tensor:
    """Return `[B]` mean cross-entropy of each example's tokens; 0 for examples without any."""
    loss_M = torch.nn.functional.cross_entropy(logits_MV.float(), labels_M, ignore_index=IGNORE, reduction="none")
    zeros_B = loss_M.new_zeros(examples)
    counts_B = zeros_B.index_add(0, rows_M, (labels_M != IGNORE).to(loss_M))
    return zeros_B.index_add(0, rows_M, loss_M) / counts_B.clamp(min=1)
