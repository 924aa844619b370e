"""SDFT: the model answers by itself, and learns what an averaged copy of it thinks of that answer beside an example.

    y ~ p(y | x);  loss = mean over answers of mean over tokens t of KL(q(. | x, c, y_<t) || p(. | x, y_<t))
    after each step: w_q <- w_q + ema (w_p - w_q)

p is the model in training, x a row's prompt, and y an answer that p writes to it. q is the model with averaged weights
w_q, which begin each task as those of p, and c is the row's own answer, which is named as an example right behind x. No
answer of a row is trained on by itself. Shenfeld, Damani, Hübotter and Agrawal 2026, "Self-Distillation Enables
Continual Learning" (arXiv 2601.19897, algorithm 1 and section 3); code: github.com/idanshen/Self-Distillation, and TRL
has it as `trl.experimental.sdft`, whose teacher is by default the model before training (`ema=0`), not an average.
Which divergence: the paper writes KL(p || q), with the sum over the whole vocabulary at each token as its gradient
estimator. Its authors say in their README of April 2026 that all results of the paper are of KL(q || p) at each token,
the default of their code and here (`divergence=0`). Values between 0 and 1 are their code's Jensen-Shannon divergence.
Other defaults are those of their code: one answer for each row, temperature 1, averages with 0.01 (the paper tried
0.01, 0.02 and 0.05), the words around the example. Their learning rate is 5e-5 for all weights.
Deviations:
- Their code leaves the first 3 tokens of each answer out of the loss, since the teacher may begin with words about the
  example. Answers here may be one word, so `skip` is 0 by default.
- What a model learns is the learner's to say: `lora` by default, `learner=finetune` as theirs.
- The averages are float32; theirs are bfloat16, as their weights are, in which small steps are lost.
- The example stands behind the text and before the words that a template puts behind it (`Answer:`); in a conversation
  of several turns, behind what the user said last. Their texts are one message, which begins with an empty line.
- Their code samples by vLLM and weighs each answer by how far its probabilities are from training's. Here the model
  in training writes, with the same attention to padding, so there is nothing to weigh.
- Dropout is that of the run in p's pass; writing and q have none. Theirs has none at all.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn.functional import kl_div

from raycl.backbone import Backbone, Output
from raycl.backbone.base import evaluating
from raycl.backbone.positions import attends_to_all
from raycl.data.loader import Collate, padded
from raycl.data.tokens import TokenTable
from raycl.errors import ConfigError
from raycl.methods.base import Learned, State, activate
from raycl.methods.context import TaskContext
from raycl.methods.held_weights import HeldWeights
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.metrics.per_example import normalize
from raycl.types import IGNORE, Batch, Phase, Task

TEACHER = "sdft/teacher"
"""Kind of the averaged weights in checkpoints."""

ANSWER = "{answer}"
"""Stands for a row's answer in the words around it."""

LOOKED_AT = 32
"""Rows of a task of labels by which `Sdft` measures whether the teacher follows examples, at most."""

log = logging.getLogger(__name__)


class SdftConfig(WrapperConfig):
    """Any learner, which learns from answers of its own as its averaged self judges them beside an example."""

    name: Literal["sdft"] = "sdft"
    ema: float = Field(
        0.01, ge=0, le=1, description="share of the way to the present weights that the teacher's go after each step"
    )
    divergence: float = Field(
        0.0,
        ge=0,
        le=1,
        description="0: KL(teacher, model), as in the authors' code; 1: KL(model, teacher), as in the paper's text; "
        "between: the Jensen-Shannon divergence with this share of the teacher in the mixture",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="tokens of an answer that the model writes at most; null: those of the task's answers"
    )
    skip: int = Field(0, ge=0, description="first tokens of each answer that carry no loss; 3 in the authors' code")
    example: str = Field(
        "\n\nThis is an example for a response to the question:\n{answer}\n\nNow answer with a response of your own, "
        "including the thinking process.\n",
        description="what the teacher reads behind a text, with {answer} in the place of the row's answer",
    )

    pre_trains: ClassVar[bool] = False

    @field_validator("example")
    @classmethod
    def _has_a_place(cls, example: str) -> str:
        if example.count(ANSWER) != 1:
            raise ValueError(f"the example '{example}' has {{answer}} {example.count(ANSWER)} times: expected once")
        return example

    def values_kept(self, tasks: int) -> int:
        """Return the teacher's."""
        return 1

    def extra_passes(self, epochs: int, steps: int) -> float:
        """Add the teacher's pass, which has no gradient; writing answers is not counted."""
        own: float = self.learner.extra_passes(epochs, steps)
        return own + 0.5


@dataclass(frozen=True)
class Distillation:
    """The divergence of the model from its teacher over the tokens of each answer, in place of the cross-entropy.

    Attributes:
        teacher: gives the teacher's outputs for a batch. divergence: see `SdftConfig`.
        skip: first tokens of each answer that carry no loss.
    """

    teacher: Callable[[Batch], Output]
    divergence: float = 0.0
    skip: int = 0

    def count(self, batch: Batch) -> int:
        """Return the number of answers."""
        return int((batch.target_ids != IGNORE).any(1).sum())

    def __call__(self, batch: Batch, output: Output) -> Tensor:
        """Return the sum over answers of the mean divergence over their tokens."""
        at, theirs = output.positions(), self.teacher(batch)
        rows_P, there = output.rows[at], theirs.positions()
        tokens_B = torch.bincount(rows_P, minlength=len(batch))
        places_P = torch.arange(len(rows_P), device=rows_P.device) - (tokens_B.cumsum(0) - tokens_B)[rows_P]
        carries_P = places_P >= self.skip
        counts_B = (tokens_B - self.skip).clamp(min=1)
        distances_P = distances(output.logits[at], theirs.logits[there], self.divergence)
        return (distances_P * carries_P / counts_B[rows_P]).sum()


def distances(logits_PV: Tensor, teacher_PV: Tensor, divergence: float) -> Tensor:
    """Return `[P]` float32: the divergence of a model from its teacher at each position.

    Args:
        divergence: 0: KL(teacher, model); 1: KL(model, teacher); a between: a KL(teacher, m) + (1 - a) KL(model, m) of
            the mixture m = a teacher + (1 - a) model.
    """
    own_PV, theirs_PV = (logits.float().log_softmax(-1) for logits in (logits_PV, teacher_PV))
    if divergence == 0:
        return _kl(theirs_PV, own_PV)
    if divergence == 1:
        return _kl(own_PV, theirs_PV)
    share = torch.tensor(divergence, device=own_PV.device)
    mixture_PV = torch.logaddexp(theirs_PV + share.log(), own_PV + (-share).log1p())
    return divergence * _kl(theirs_PV, mixture_PV) + (1 - divergence) * _kl(own_PV, mixture_PV)


def _kl(of_PV: Tensor, to_PV: Tensor) -> Tensor:
    """Return `[P]`: KL(of, to) of log probabilities."""
    return kl_div(to_PV, of_PV, reduction="none", log_target=True).sum(-1)


class Sdft(Wrapper):
    """Any learner that trains one model, on its own answers, towards its averaged self that reads an example.

    Attributes:
        teacher: the averaged weights.
    """

    Config = SdftConfig
    needs_shared = "adapters"
    replaces_parameters: ClassVar[bool] = True

    def __init__(self, config: SdftConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.teacher = HeldWeights(backbone, self.learner, torch.float32)
        self.objective = Distillation(self.judged, config.divergence, config.skip)
        self._context: TaskContext | None = None
        self._tables: list[TokenTable] = []
        self._max_tokens = 0
        self._followed = 0
        self._repeated: dict[str, float] = {}

    def check(self, tasks: Sequence[Task]) -> None:
        """Check that the backbone reads an example in its prompt, and that rows have answers.

        Raises:
            ConfigError: one of these does not hold, or its answers cannot be drawn in a running batch.
        """
        super().check(tasks)
        backbone = self.backbone
        if not backbone.capabilities.one_sequence:
            raise ConfigError(
                "method 'sdft' learns from a model that reads an example in its prompt, which encoder-only and "
                f"encoder-decoder models as this backbone ({backbone.codec.kind}) are not trained to follow: expected "
                "a decoder-only backbone, or another method, such as lwf"
            )
        if not attends_to_all(backbone.model.config):
            raise ConfigError(
                f"method 'sdft' draws answers in a running batch, and {type(backbone.model).__name__} has layers that "
                "do not attend to all earlier positions: expected a backbone without sliding windows and recurrent "
                "layers, or another method, such as lwf"
            )

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Make the present model the teacher.

        Raises:
            ConfigError: a task's prompts with an example and an answer do not fit into the backbone.
        """
        self.learner.begin_task(phase, context)
        self._context, self._tables = context, context.tables("train")
        self._max_tokens = max(map(self._most_written, phase.tasks))
        for task in context.stream.tasks:
            self._check_positions(task, context)
        if not context.resumed:
            self._followed = 0
            self.teacher.hold()
            # good answers to tasks without labels are seldom those of the rows, word by word
            labelled = [table for table in self._tables if table.task.labels is not None]
            self._repeated = {table.task.name: self._share_repeated(table) for table in labelled}

    def _share_repeated(self, table: TokenTable) -> float:
        """Return the share of a task's first rows whose answers the model writes when it reads them as examples."""
        rows = range(min(len(table), LOOKED_AT))
        codec = self.backbone.codec
        batch = Collate([table], codec.pad_id)(np.array(rows), len(rows))
        read = self._read(batch, self._with_examples(table, rows))
        written = codec.decode(self._answers(read, self._most_written(table.task), temperature=0.0))
        pairs = zip(written, table.references(rows), strict=True)
        count = sum(normalize(answer) in map(normalize, references) for answer, references in pairs)
        if 2 * count < len(rows):
            log.warning(
                "    method 'sdft': the model wrote the answer that it read as an example for %d of %d rows of task "
                "'%s', so it has little to learn from itself: try other words in method.example, or a model that "
                "follows examples",
                *(count, len(rows), table.task.name),
            )
        return count / len(rows)

    def _most_written(self, task: Task) -> int:
        """Return the most tokens that the model writes of an answer to a task."""
        assert self._context is not None, "a phase has begun"
        return self.config.max_tokens or self._context.target_limit(task)

    def _check_positions(self, task: Task, context: TaskContext) -> None:
        codec, limit = self.backbone.codec, self.backbone.max_positions
        words = len(codec.encode_source([self.config.example.replace(ANSWER, "")])[0])
        read, written = context.source_limit(task) + words + context.target_limit(task), self._most_written(task)
        if limit is not None and read + written > limit:
            raise ConfigError(
                f"method 'sdft' reads up to {read} tokens of a prompt of task '{task.name}' with an example, and up to "
                f"{written} of an answer, which is more than the {limit} positions of the backbone: lower "
                "stream.max_source_tokens, stream.max_target_tokens or method.max_tokens"
            )

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the batch with answers that the model writes in the place of the rows' own."""
        batch, context = self.learner.prepare_batch(batch), self._context
        assert context is not None, "a phase has begun"
        if context.step.index != self._followed:  # before the first batch of a step, the last one's update is known
            self.teacher.follow(self.config.ema)
            self._followed = context.step.index
        return replace(batch, target_ids=padded(self._drawn(batch, context.step.seed), IGNORE, 1))

    def _drawn(self, batch: Batch, seed: int) -> list[list[int]]:
        """Return the ids of an answer to each example, with the end where it comes in time; none for fill-ups.

        A row's draws depend on the step and the row alone, so that neither accumulation nor workers change them.
        """
        real = int((batch.rows >= 0).sum())
        seeds = [seed + row for row in batch.rows[:real].tolist()]
        drawn = self._answers(batch.first(real), self._max_tokens, 1.0, seeds) if real else []
        return drawn + [[] for _ in range(len(batch) - real)]

    def _answers(self, batch: Batch, max_tokens: int, temperature: float, seeds: Sequence[int] = ()) -> list[list[int]]:
        """Return the ids that the model writes to each prompt, with the end where it comes in time."""
        # imported here, since commands that only read configs would wait for transformers
        from raycl.generation.answer_batch import AnswerBatch, Prompts

        backbone, read = self.backbone, batch.to(self.backbone.device)
        numbers, answers = batch.rows.tolist(), [list[int]() for _ in range(len(batch))]
        writer = AnswerBatch(backbone, partial(activate, self.learner), len(batch))
        writer.read_rows = len(batch)
        with evaluating(backbone), backbone.inference(), torch.no_grad():
            prompts = Prompts("", read, max_tokens, self.route(read), temperature=temperature, seeds=seeds)
            for answer in writer.answers([prompts]):
                # a model that has diverged writes nothing, which the pass over the batch finds
                answers[numbers.index(answer.row)] = list(answer.ids) or [backbone.codec.eos_id]
        return answers

    def judged(self, batch: Batch) -> Output:
        """Return the teacher's outputs for answers to rows of the phase, each of which it reads as an example."""
        sources = [[self.backbone.codec.pad_id] for _ in range(len(batch))]
        for table, places, rows in self._by_table(batch.rows.tolist()):
            for place, ids in zip(places, self._with_examples(table, rows), strict=True):
                sources[place] = ids
        return self.teacher.output(self._read(batch, sources))

    def _read(self, batch: Batch, sources: Sequence[Sequence[int]]) -> Batch:
        """Return the batch with other prompts."""
        ids, mask = padded(sources, self.backbone.codec.pad_id, 1), padded([[1] * len(ids) for ids in sources], 0, 1)
        device = batch.source_ids.device
        return replace(batch, source_ids=ids.to(device), source_mask=mask.to(device))

    def _by_table(self, rows: Sequence[int]) -> Iterator[tuple[TokenTable, list[int], list[int]]]:
        """Yield each table of the phase with the places of its rows in a batch, and the rows."""
        first = 0
        for table in self._tables:
            places = [place for place, row in enumerate(rows) if first <= row < first + len(table)]
            if places:
                yield table, places, [rows[place] - first for place in places]
            first += len(table)

    def _with_examples(self, table: TokenTable, rows: Sequence[int]) -> list[list[int]]:
        """Return the prompt ids of rows with their own answers as examples."""
        assert self._context is not None, "a phase has begun"
        limit, clip = self._context.target_limit(table.task), self.backbone.codec.clip
        examples = [
            self.config.example.replace(ANSWER, clip(references[0], limit)) for references in table.references(rows)
        ]
        return self._context.remarked_prompts(table.task, table.texts(rows), examples)

    def end_task(self, context: TaskContext) -> Learned | None:
        """Drop the teacher."""
        self.teacher.clear()
        return self.learner.end_task(context)

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Add the share of first rows of tasks of labels whose answers the model wrote when it read them."""
        return self.learner.summary(observed) | {"examples_repeated": self._repeated}

    def state_dict(self) -> State:
        values, tensors = self.learner.state_dict()
        return {
            **values,
            "sdft": {"followed": self._followed, "repeated": self._repeated},
        }, tensors | self.teacher.tensors(TEACHER)

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.learner.load_state_dict(values, tensors)
        self._followed, self._repeated = values["sdft"]["followed"], values["sdft"]["repeated"]
        self.teacher.restore(TEACHER, tensors)
