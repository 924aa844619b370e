"""LFPT5: one soft prompt, trained through all tasks as the solver of each and as the generator of its samples.

    L = L_task + l_lm L_gen + l_kd sum over answer tokens of pseudo-samples of KL(p_previous || p)

Qin and Joty 2022, "LFPT5: A Unified Framework for Lifelong Few-shot Language Learning Based on Prompt Tuning of T5",
ICLR (section 3). The backbone is frozen, and the prompt stands behind the input embeddings, in front of the answer. The
paper's is T5 1.1 that was trained on as a language model: before that, T5 writes its sentinels rather than texts.
L_gen is the loss of writing a row's input and answer behind the generation prompt of its task
(`raycl.methods.pseudo_samples.self_generated`). Before a new task the model writes pseudo-samples of all earlier ones,
which are trained on beside the task's rows; p_previous is an answer token's distribution under the prompt of then.
Defaults are those of the authors' code (github.com/qcwthu/Lifelong-Fewshot-Language-Learning, Classification/), and
SAPT's 2 % of pseudo-samples; theirs are 2 of each class. Deviations:
- Losses are means over the answer tokens of the whole step, so that neither accumulation nor workers change them: an
  example's L_gen counts by its answer tokens. Theirs sums the divergence over a micro-batch and its padding, and
  weighs the other two by 1 - l_kd.
- The prompt stands behind a text's last token; theirs behind its padding, which counts in T5's relative positions.
- It starts as words of the vocabulary drawn at random; theirs are the task's name and labels, then frequent words.
- Of what is drawn, the first usable samples are kept, whatever their label; theirs draws 3, 36 and 48 samples in its
  three runs for each test row of an earlier task (1,500 for amazon in the first, 50,400 for dbpedia in the second) and
  keeps 2 of every class at random. It keeps 2 more as dev rows, and chooses epochs by dev rows from epoch 257 on alone.
- With `source=real` stored rows stand in the place of what it writes (not in the paper).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from raycl.adapters import AdapterStack
from raycl.adapters.soft_prompts import MixedPrompts
from raycl.backbone import Backbone, Output
from raycl.data.tokens import HeldRows, TokenRows, TokenTable
from raycl.errors import ConfigError
from raycl.methods.base import Learned, Method, MethodConfig, State
from raycl.methods.context import TaskContext
from raycl.methods.pseudo_samples.samples import (
    PseudoSamples,
    Volume,
    counts_of,
    kept_samples,
    kept_tensors,
    same_everywhere,
)
from raycl.methods.pseudo_samples.self_generated import Pair, SampleFormat, Sampler, batch_of_pairs, mean_losses
from raycl.methods.single_adapter import drawn_prompts
from raycl.types import IGNORE, TENSORS, AdapterState, Batch, Mixture, Phase, RouterState, Task

PROMPT = "prompt"
"""Name of the one adapter."""

SAMPLES, WRITTEN = "samples", "written"
"""Kinds of tensors in checkpoints: pseudo-samples as rows of their task, and as what was written."""


class Lfpt5Config(MethodConfig):
    """LFPT5: one soft prompt that solves tasks and writes samples of earlier ones."""

    name: Literal["lfpt5"] = "lfpt5"
    prompt_length: int = Field(300, ge=1, description="positions of the soft prompt")
    lm_weight: float = Field(0.25, ge=0, description="l_lm, weight of the loss of writing rows with their answers")
    kd_weight: float = Field(
        0.01, ge=0, description="l_kd, weight of the divergence from the previous prompt's answers to pseudo-samples"
    )
    source: Literal["generated", "real"] = Field(
        "generated", description="pseudo-samples. generated: what the prompt writes (the paper's); real: stored rows"
    )
    share: float = Field(
        0.02, gt=0, le=1, description="pseudo-samples of each earlier task, as a share of its train rows; at least one"
    )
    max_tokens: int = Field(256, ge=8, description="tokens of an input with its answer, as it is written, at most")
    separator: str = Field(
        "__ans__",
        min_length=1,
        description="stands between input and answer in what is written; the authors' is one token, for which name one "
        "of the tokenizer that texts lack, such as |",
    )
    draws: int = Field(
        1000, ge=1, description="samples drawn for each earlier task at most, until enough of them can be used"
    )
    top_k: int = Field(64, ge=1, description="each token is drawn from so many likeliest ones")
    repetition_penalty: float = Field(
        2.5,
        gt=0,
        description="logits of tokens that were generated before, but for the separator's, are divided by this, "
        "and negative ones multiplied",
    )

    unused_for_single_task: ClassVar[tuple[str, ...]] = (
        *("source", "share", "kd_weight", "draws", "top_k", "repetition_penalty"),
    )
    pre_trains: ClassVar[bool] = False
    kept_share = "share"
    keeps_data: ClassVar[bool] = True
    unused_in_first_phase = ("kd_weight",)

    def extra_passes(self, epochs: int, steps: int) -> float:
        """Return the passes that write each row's input and answer; drawing pseudo-samples is not counted."""
        return 1.0 if self.lm_weight else 0.0

    def prompt_positions(self, tasks: int) -> int:
        return self.prompt_length

    @property
    def generates_samples(self) -> bool:
        return self.source == "generated"

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings of writing, where nothing is written."""
        if self.source == "real":
            yield from ((name, "source=real") for name in ("draws", "top_k", "repetition_penalty"))

    @property
    def rereads_rows(self) -> bool:
        return self.source == "real"


class FixedPrompt(nn.Module):
    """A prompt that stands beside every text as it is.

    Attributes:
        values: `[P, D]`.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return embeddings `[rows, P, D]` and mask `[rows, P]`."""
        values_PD = self.values.to(device)
        return values_PD.expand(rows, -1, -1), torch.ones(rows, len(values_PD), dtype=torch.long, device=device)


class Lfpt5(Method):
    """One prompt for all tasks, and the pseudo-samples that it wrote before the present one.

    Attributes:
        counts: learned task -> number of its pseudo-samples. previous: `[P, D]`, the prompt before the present task.
        samples: earlier task -> pseudo-samples. written: the same as pairs of generation prompt and what was written.
    """

    Config = Lfpt5Config

    def __init__(self, config: Lfpt5Config, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.stack: AdapterStack = AdapterStack(backbone.model, [])
        self.stack.begin_training({PROMPT: 0}, 1.0)
        self.prompts: MixedPrompts = drawn_prompts(backbone, self.stack, config.prompt_length, seed)
        backbone.suffix = self.prompts
        self.form: SampleFormat = SampleFormat(backbone.codec, config.max_tokens, config.separator)
        self.counts: dict[str, int] = {}
        self.previous: Tensor | None = None
        self.samples: dict[str, PseudoSamples] = {}
        self.written: dict[str, PseudoSamples] = {}
        self._own: list[TokenTable] = []
        self._added: list[TokenRows] = []
        self._earlier: dict[int, str] = {}

    def check(self, tasks: Sequence[Task]) -> None:
        """Check that the backbone can write.

        Raises:
            ConfigError: it is encoder-only, or has too few positions.
        """
        backbone, config = self.backbone, self.config
        if backbone.capabilities.answers == "label":
            raise ConfigError(
                "method 'lfpt5' writes its own pseudo-samples, and an encoder-only backbone writes no texts: expected "
                "an encoder-decoder or decoder-only backbone, or another method, such as replay"
            )
        self.form.check()
        read = config.prompt_length + max(len(self.form.start(task.name)) for task in tasks)
        apart = backbone.capabilities.separate_encoder
        wanted, limit = max(read, config.max_tokens) if apart else read + config.max_tokens, backbone.max_positions
        if limit is not None and wanted > limit:
            raise ConfigError(
                f"method 'lfpt5' reads {read} positions and writes up to method.max_tokens={config.max_tokens}, which "
                f"is more than the {limit} positions of the backbone: lower method.prompt_length or method.max_tokens"
            )

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Pseudo-samples of earlier tasks are written, and join the phase's rows; the same prompt is trained."""
        if not context.resumed:
            self._write(context)
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(name == "suffix.trainable")
        self._own, self._added, self._earlier = context.tables("train"), context.added, {}
        for task in context.earlier_tasks if self.previous is not None else ():
            number = len(context.added)
            if self.config.source == "real":
                context.add_rows(task, context.stored_rows(task, self.config.share))
            elif len(kept := self.samples[task.name]):
                context.add_samples(HeldRows(task, kept.sources, kept.targets, kept.labels))
            if len(context.added) > number:
                self._earlier[number] = task.name

    def _write(self, context: TaskContext) -> None:
        """Write pseudo-samples with the present prompt, which is kept."""
        self.previous, self.samples, self.written = None, {}, {}
        earlier = [task for task in context.earlier_tasks if task.name in self.counts]
        if self.task_id_given or not earlier:
            return
        assert self.prompts.trainable is not None, "the prompt is always in training"
        self.previous = self.prompts.trainable.detach()[0].clone()
        if self.config.source == "real":
            return
        config, device = self.config, self.backbone.device
        sampler = Sampler(
            self.backbone, self.form, config.top_k, config.repetition_penalty, self._activated, config.draws
        )
        for number, task in enumerate(earlier):
            seed = self.seed + 1000 * context.phase.index + number
            pairs = sampler.samples(task, self.counts[task.name], seed)
            answers, labels = [answer for _, answer in pairs], list(task.labels or ())
            codes = [labels.index(answer) if answer in labels else -1 for answer in answers]
            sources = context.prompts(task, [text for text, _ in pairs]) if pairs else []
            targets = context.targets(task, answers) if pairs else []
            self.samples[task.name] = same_everywhere(PseudoSamples(sources, targets, codes), device)
            taught = [self.form.pair(task.name, *pair) for pair in pairs]
            written = PseudoSamples([source for source, _ in taught], [two for _, two in taught], codes)
            self.written[task.name] = same_everywhere(written, device)

    def _activated(self, rows: int) -> AbstractContextManager[None]:
        return self.stack.activate(Mixture.same({PROMPT: 1.0}, rows))

    def route(self, batch: Batch) -> Mixture:
        return Mixture.same({PROMPT: 1.0}, len(batch))

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return `l_lm L_gen + l_kd KL`; of which parts run depends on settings and phase alone, never on the batch."""
        counts_B = (batch.target_ids != IGNORE).sum(1)
        terms = []
        if self.config.lm_weight:
            terms.append(self.config.lm_weight * self._generation_loss(batch, counts_B))
        if self.config.kd_weight and self._earlier:
            terms.append(self.config.kd_weight * self._divergence(batch, output, counts_B))
        return sum(terms[1:], terms[0]) if terms else None

    def _generation_loss(self, batch: Batch, counts_B: Tensor) -> Tensor:
        """Return the mean over the answer tokens of the batch of the loss of writing their example."""
        pairs = [self._pair(row) for row in batch.rows.tolist()]
        guesses = self.backbone.guesses(batch_of_pairs(pairs, self.backbone.codec.pad_id).to(counts_B.device))
        mean_B = mean_losses(guesses.logits, guesses.labels, guesses.rows, len(batch))
        return (mean_B * counts_B).sum() / counts_B.sum().clamp(min=1)

    def _pair(self, row: int) -> Pair | None:
        """Return what is written for a row of the phase, own or added; None for fill-ups."""
        for number, rows in enumerate([*self._own, *self._added] if row >= 0 else ()):
            if row >= len(rows):
                row -= len(rows)
                continue
            if isinstance(rows, TokenTable):
                return self.form.pair(rows.task.name, rows.texts([row])[0], rows.references([row])[0][0])
            name = self._earlier.get(number - len(self._own), "")
            return (self.written[name].sources[row], self.written[name].targets[row]) if name else None
        return None

    def _divergence(self, batch: Batch, output: Output, counts_B: Tensor) -> Tensor:
        """Return the sum over the answer tokens of pseudo-samples of `KL(previous || now)`, by the number of all answer
        tokens."""
        is_sample_B = self._are_samples(batch.rows)
        chosen = is_sample_B.nonzero().flatten() if bool(is_sample_B.any()) else is_sample_B.new_zeros(1).long()
        samples = replace(batch, **{name: getattr(batch, name)[chosen] for name in TENSORS}, texts=(), tasks=())
        before_KV = self._logits_before(samples)
        if not bool((counts_B * is_sample_B).any()):
            return output.logits.new_zeros(())
        is_sample_M = is_sample_B.repeat_interleave(counts_B)
        now_KV = output.logits[is_sample_M].float().log_softmax(-1)
        before_KV = before_KV.float().log_softmax(-1)
        return (before_KV.exp() * (before_KV - now_KV)).sum() / counts_B.sum()

    def _are_samples(self, rows_B: Tensor) -> Tensor:
        """Return `[B]` bool: which rows are of earlier tasks."""
        first = sum(map(len, self._own))
        found_B = torch.zeros_like(rows_B, dtype=torch.bool)
        for number, rows in enumerate(self._added):
            if number in self._earlier:
                found_B |= (rows_B >= first) & (rows_B < first + len(rows))
            first += len(rows)
        return found_B

    @torch.no_grad()
    def _logits_before(self, batch: Batch) -> Tensor:
        """Return logits at the answers' positions under the previous prompt."""
        assert self.previous is not None, "there is none before the first task"
        own, self.backbone.suffix = self.backbone.suffix, FixedPrompt(self.previous)
        try:
            return self.backbone.guesses(batch).logits
        finally:
            self.backbone.suffix = own

    def end_task(self, context: TaskContext) -> Learned:
        """Return the prompt; how many pseudo-samples the task's rows make is kept."""
        volume = Volume(self.config.share)
        self.counts |= {table.task.name: volume.of(len(table)) for table in context.tables("train")}
        state = AdapterState(prompt=context.parameters["suffix.trainable"][0].clone())
        return Learned({PROMPT: state}, router=RouterState("single", {"prompt_place": "after"}))

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return how many pseudo-samples of each earlier task were trained on."""
        return {"replay": counts_of(self.samples)} if self.samples else {}

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        values |= {"counts": list(self.counts.items()), SAMPLES: list(self.samples)}
        tensors |= {} if self.previous is None else {"previous": self.previous.cpu()}
        return values, tensors | kept_tensors(SAMPLES, self.samples) | kept_tensors(WRITTEN, self.written)

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(values, tensors)
        self.counts = {task: int(count) for task, count in values["counts"]}
        self.previous = tensors["previous"].to(self.backbone.device) if "previous" in tensors else None
        self.samples, self.written = (kept_samples(kind, values[SAMPLES], tensors) for kind in (SAMPLES, WRITTEN))
