"""SAPT: one block per task, all of them heard by every text, as loudly as its attention says (section 4 of its paper).

"SAPT: A Shared Attention Framework for Parameter-Efficient Continual Learning of Large Language Models", ACL 2024.
A task learns its block (LoRA on query and value projections, or a soft prompt), its key, and goes on with the shared
projection; backbone, earlier blocks and earlier keys are frozen. The attention reads nothing but the source's raw
embeddings, in training, evaluation, generation and serving alike, and once per prompt. Reflection (ARM) keeps old
tasks' inputs attended to as they were. Encoder-only backbones, of which the paper has none, get label rows with every
block, mixed by the same weights, so that no task id is needed.
Where the authors' code differs from the paper, the settings say so (its attention's and reflection's too). Prompts are
learned by the run's AdamW like all else, theirs by Adafactor (appendix C).
What it does not know: engines, files other than pseudo inputs'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.adapters.head import MixedHead
from raycl.adapters.prompts import MixedPrompts
from raycl.backbone import Backbone, Output
from raycl.backbone.roles import linear_names
from raycl.data.loader import batch_of
from raycl.errors import ConfigError
from raycl.methods.base import Learned, Method, packed, phase_labels, under, unpacked
from raycl.methods.context import TaskRows
from raycl.methods.lora.lora import as_peft_draws
from raycl.methods.sapt.generator import Generator, check_generator
from raycl.methods.sapt.pseudo_replay import PseudoReplay
from raycl.methods.sapt.pseudo_samples import (
    PseudoSamples,
    counts_of,
    drawn_sources,
    read_file,
    read_texts,
    same_everywhere,
    sources_of,
    take_real,
)
from raycl.methods.sapt.reflection import Reflection, ReplayEntry
from raycl.methods.sapt.settings import SaptConfig
from raycl.methods.trained_adapters import end_training, is_trainable
from raycl.retrieval.attention import SHARED, Attention, hard_weights, max_pooled, mixture_of
from raycl.retrieval.selector import learn_selector
from raycl.types import AdapterState, Batch, Mixture, Phase, RouterState, Task

READ_AT_ONCE, LOOKED_AT = 64, 1000
"""Prompts embedded together where only their maxima are wanted; so many of a task, drawn, tell what all share."""

FAINTEST = 1e-30
"""The weight of a block whose labels must be heard: what the label head tells from nothing."""


class Sapt(Method):
    """Blocks under shared attention."""

    Config = SaptConfig
    own_adapters: ClassVar[bool] = True

    def __init__(self, config: SaptConfig, backbone: Backbone, seed: int) -> None:
        """Attach stack and attention.

        Raises:
            BackboneError: `targets` names no linear. ConfigError: settings that do not fit the backbone.
        """
        attention = config.attention.settled(backbone.head is not None, config.head_rule == "logit")
        config = config.model_copy(update={"attention": attention})
        super().__init__(config, backbone, seed)
        self.config: SaptConfig
        is_prompt = config.value == "prompt"
        paths = [] if is_prompt else linear_names(backbone.model, config.targets)
        self.stack: AdapterStack = AdapterStack(backbone.model, paths)
        self.stack.detach_loaded = config.stop_grad_old_blocks
        width = int(backbone.model.get_input_embeddings().weight.shape[1])
        if is_prompt:
            backbone.prefix = MixedPrompts(self.stack, width)
        self.attention = Attention(width, config.attention, seed, backbone.device)
        backbone.add_module("attention", self.attention)
        self.selector: Attention | None = None
        reflects = config.ablation == "none"
        self.reflection = Reflection(config.arm, config.arm.weight_on(backbone.capabilities) if reflects else 0.0)
        if backbone.head is not None:
            backbone.head = MixedHead(self.stack, int(backbone.model.config.hidden_size), config.head_rule)
        self._learned: dict[str, AdapterState] = {}
        self._rows: TaskRows | None = None
        self._task = ""
        self._heard: dict[str, tuple[Tensor, int]] = {}
        self._companions: PseudoReplay | None = None
        self._epoch = 0

    @property
    def _alone(self) -> bool:
        """Whether blocks are learned without attention."""
        return self.task_id_given or self.config.ablation == "shared_attention"

    @property
    def _writes(self) -> bool:
        """Whether generators are trained: not in the ablation that never reads their texts."""
        return self.config.arm.source == "generated" and self.config.ablation != "arm"

    @property
    def reads_batches(self) -> bool:
        """Evaluation says how each task's texts were attended to, and `separate` tells the task."""
        return True

    # ---- a task ----------------------------------------------------------------------------------------------

    def check(self, tasks: Sequence[Task]) -> None:
        """Every task's objective, and where its pseudo inputs are to come from.

        Raises:
            ConfigError: texts that this method cannot learn, or nobody who could write inputs. BackboneError: the
                backbone that should write them is not there. DataError: see `read_texts`.
        """
        _check_objectives(tasks, self.config)
        if self.config.arm.source == "generated" and not self.task_id_given:
            check_generator(self.config.generator, self.backbone)
        if self.config.arm.source == "file" and not self.task_id_given:
            for task in tasks:
                read_texts(self.config.arm.files or "", task.name)

    def show(self, rows: TaskRows) -> None:
        """Remember where the stage's rows are."""
        self._rows = rows

    def begin_task(self, phase: Phase, resumed: bool) -> None:
        """The task's block and key are live, and the shared projection; all else is frozen."""
        if not resumed:
            self._begin(phase.name, phase_labels(phase))
            first = not self._learned and not self._alone
            if first and self.config.attention.standardize and self._rows is not None:
                draw = torch.Generator().manual_seed(self.seed)
                tables = self._rows.tables("train")
                looked = [ids for table in tables for ids in drawn_sources(table, LOOKED_AT, draw)]
                self.attention.look_at(self._pooled(looked))
        self._heard = {}
        for name, parameter in self.backbone.named_parameters():
            attends = not self._alone and name.startswith("attention.")
            parameter.requires_grad_(attends or is_trainable(name, parameter))
        self.reflection.pooled = self._pooled_memories() if self.reflection.weight and not self._alone else {}
        self._companions = self._ride_along(phase) if self.config.ablation == "replay" and not self._alone else None

    def _ride_along(self, phase: Phase) -> PseudoReplay:
        assert self._rows is not None, "show comes before a stage begins"
        rows, entries = self.backbone.label_ids(), self.reflection.entries
        labels = [[rows[label] for label in self._learned[task].labels] for task in entries]
        samples = [memory.samples for memory in entries.values()]
        return PseudoReplay(samples, labels, self._rows.count("train"), self.seed + phase.index)

    def _begin(self, task: str, labels: list[str]) -> None:
        config, number = self.config, len(self._learned)
        torch.manual_seed(self.seed + number)
        scale = config.alpha / config.rank
        self.stack.begin_training({task: config.rank}, scale, as_peft_draws, config.dropout)
        self._task = task
        if isinstance(self.backbone.prefix, MixedPrompts):
            words = self.backbone.model.get_input_embeddings().weight.detach()
            rows = torch.randint(len(words), (1, config.prompt_length)).to(words.device)
            self.backbone.prefix.begin_training(words[rows].float())
        if isinstance(self.backbone.head, MixedHead):
            self.backbone.head.begin_training(labels)
        self.attention.begin(task, self.seed + 1 + number)

    def begin_step(self, step: int, seed: int, micro_batches: int) -> None:
        """As the reflection does."""
        self.reflection.begin_step(step, seed, micro_batches)
        if self._companions is not None and self._rows is not None:
            self._epoch = step // -(-self._companions.rows // self._rows.batch_size)

    def prepare_batch(self, batch: Batch) -> Batch:
        """With the samples that ride along, in the ablation +Replay."""
        if self._companions is None:
            return batch
        return self._companions.joined(batch, self._epoch, self.backbone.codec.pad_id)

    # ---- who speaks ------------------------------------------------------------------------------------------

    def route(self, batch: Batch) -> Mixture:
        """All blocks learned so far, by the attention of each example's source."""
        if self.task_id_given or (self._alone and self._task):
            return self._told(batch)
        config, chooser = self.config, self.attention if self._task else self.selector or self.attention
        pruning_threshold = 0.0 if self._asks_old_labels else config.attention.pruning_threshold
        with torch.no_grad():
            embedded = self.backbone.embedded(batch.source_ids)
            pooled_BD = max_pooled(embedded, batch.source_mask, config.attention.pool_pads)
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(self._task)):
            alpha_BT = chooser(pooled_BD).exp()
        if self._asks_old_labels:
            alpha_BT = alpha_BT.clamp(min=FAINTEST)
        hard = self._alone and not self._task
        if not self._task:
            self._hear(batch, hard_weights(alpha_BT) if hard else alpha_BT)
        return mixture_of(chooser.names, alpha_BT, pruning_threshold, hard, self._task)

    @property
    def _asks_old_labels(self) -> bool:
        """Whether label rows of some blocks are wanted however little those weigh: no other block knows the labels.

        A block that is chosen alone (the ablation without shared attention) has only its own to give.
        """
        return self._companions is not None or (self.backbone.head is not None and bool(self.backbone.allowed_labels))

    def _told(self, batch: Batch) -> Mixture:
        """Each example's own block alone (the upper reference)."""
        if self._task:
            return Mixture.same({self._task: 1.0}, len(batch))
        names = tuple(self._learned)
        columns = torch.tensor([names.index(task) if task in names else 0 for task in batch.tasks])
        return Mixture(names, torch.nn.functional.one_hot(columns, len(names)).float())

    def _hear(self, batch: Batch, alpha_BT: Tensor) -> None:
        """Add the batch to the mean weights of its tasks' evaluated texts."""
        for task, alpha_T in zip(batch.tasks, alpha_BT.detach().cpu(), strict=False):
            if task:
                total, count = self._heard.get(task, (torch.zeros_like(alpha_T), 0))
                self._heard[task] = (total + alpha_T, count + 1)

    def activate_trainable(self, examples: int) -> AbstractContextManager[None]:
        """The block in training speaks fully; attention takes part with a gradient of zero."""
        if not self._task or self._alone:
            return super().activate_trainable(examples)
        blank = torch.zeros(examples, self.attention.dimensions, device=self.backbone.device)
        weights = self.attention(blank).sum(1, keepdim=True) * 0.0 + 1.0
        return self.stack.activate(Mixture((self._task,), weights))

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """The reflection's term, the same for every micro-batch of a step."""
        return self.reflection.term(self.attention)

    # ---- the end of a task -----------------------------------------------------------------------------------

    def end_task(self, phase: Phase, tensors: Mapping[str, Tensor]) -> Learned:
        """Block and key become resident and never change again; the task's pseudo inputs and mean weights are kept."""
        states = end_training(self.backbone, self.stack, tensors)
        task, self._task = self._task, ""
        self.attention.end({**self.attention.tensors(), **self._key(), **under("attention.", tensors)})
        self._keep(states)
        if self.task_id_given:
            return Learned(dict(states))
        samples = same_everywhere(self._samples(phase), self.backbone.device)
        self.reflection.entries[task] = ReplayEntry(samples, self._mean_weights())
        if self.config.ablation in ("alignment", "shared_attention"):
            self._select()
        return Learned(dict(states), extras={task: {"pseudo": self.reflection.entries[task].samples.tensors()}})

    def _key(self) -> dict[str, Tensor]:
        """The key, where it was not trained."""
        assert self.attention.key is not None
        return {"key": self.attention.key}

    def _samples(self, phase: Phase) -> PseudoSamples:
        assert self._rows is not None, "show comes before the end of a stage"
        arm = self.config.arm
        if arm.source == "file":
            return read_file(self._rows, str(arm.files), arm.fraction)
        if arm.source == "generated":
            if not self._writes:
                return PseudoSamples([], [], [])
            generator = Generator(self.config.generator, self.backbone, self.stack, self.seed + phase.index)
            return generator.write(self._rows, arm.fraction)
        return take_real(self._rows, arm.fraction, self.seed + phase.index, self.config.ablation == "replay")

    def _select(self) -> None:
        """A separate selector for what the attention would do, learned anew from all memories."""
        targets = {task: memory.abar for task, memory in self.reflection.entries.items()}
        config, number = self.config, len(self._learned)
        found = learn_selector(
            self._pooled_memories(), targets, config.attention, config.selector, self.seed + 1000 * number
        )
        self.selector = found.to(self.backbone.device)

    def _pooled_memories(self) -> dict[str, Tensor]:
        return {task: self._pooled(kept.samples.sources) for task, kept in self.reflection.entries.items()}

    @torch.no_grad()
    def _mean_weights(self) -> Tensor:
        """`[i]`: over the dev split, or what `abar_split` says; over the training rows where there are none."""
        assert self._rows is not None
        if self._alone:
            return torch.eye(len(self._learned))[-1]
        wanted = self.config.arm.abar_split
        sources = sources_of(self._rows, wanted) or sources_of(self._rows, "train")
        alpha_BT: Tensor = self.attention(self._pooled(sources)).exp()
        return alpha_BT.mean(0).cpu()

    @torch.no_grad()
    def _pooled(self, sources: Sequence[Sequence[int]]) -> Tensor:
        """`[n, d]` on the model's device."""
        found = []
        for start in range(0, len(sources), READ_AT_ONCE):
            batch = batch_of(sources[start : start + READ_AT_ONCE], self.backbone.codec.pad_id)
            batch = batch.to(self.backbone.device)
            embedded = self.backbone.embedded(batch.source_ids)
            found.append(max_pooled(embedded, batch.source_mask, self.config.attention.pool_pads))
        return torch.cat(found)

    def _keep(self, states: Mapping[str, AdapterState]) -> None:
        self._learned |= states
        for name, state in states.items():
            self.stack.load(name, state)

    def router_state(self) -> RouterState:
        """Keys and projection; `task` where the task is told."""
        if self.task_id_given:
            return RouterState("task")
        chooser = self.selector or self.attention
        settings = {**chooser.settings(), "head_rule": self.config.head_rule, "hard": self._alone}
        return RouterState("attention", settings, chooser.tensors())

    def put_together(self, gather: Callable[[Any], Sequence[Any]]) -> None:
        """The sums of mean weights, over all workers' shares of the texts."""
        shares, self._heard = gather(self._heard), {}
        for task, (total, count) in (item for share in shares for item in share.items()):
            before, counted = self._heard.get(task, (torch.zeros_like(total), 0))
            self._heard[task] = (before + total, counted + count)

    def summary(self) -> dict[str, Any]:
        """Mean weights of each task's texts: when it was learned (`train`: abar), and as evaluated now (`test`)."""
        if self.task_id_given:
            return {}
        names = self.attention.names
        abar = {task: _rounded(memory.abar) for task, memory in self.reflection.entries.items()}
        recorded = {task: _rounded(total / count) for task, (total, count) in self._heard.items()}
        kept = {task: memory.samples for task, memory in self.reflection.entries.items()}
        return {"attention": {"keys": list(names), "train": abar, "test": recorded, **counts_of(kept)}}

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def learned_names(self) -> list[str]:
        """Block, key and projection; between tasks the projection."""
        if self._task:
            return super().learned_names()
        return [] if self._alone else [f"attention.{name}" for name in SHARED]

    def frozen_state(self) -> dict[str, Tensor]:
        """Blocks and keys of earlier tasks, and what is kept of them."""
        found = {f"attention/{name}": tensor for name, tensor in self.attention.tensors().items()}
        found |= self.reflection.tensors()
        if self.selector is not None:
            found |= {f"selector/{name}": tensor for name, tensor in self.selector.tensors().items()}
        return found | packed(self._learned)

    def state_dict(self) -> dict[str, Any]:
        """Label rows of each block, and which task is being learned."""
        head = self.backbone.head
        trainable = list(head.trainable_labels) if isinstance(head, MixedHead) else []
        learned = {name: list(state.labels) for name, state in self._learned.items()}
        own = {"task": self._task, "live_labels": trainable, "learned": learned, "attention": self.attention.settings()}
        selector = None if self.selector is None else self.selector.settings()
        return {**super().state_dict(), **own, "selector": selector}

    def load_state_dict(self, state: Mapping[str, Any], frozen_state: Mapping[str, Tensor]) -> None:
        """Earlier tasks as they were; the live block in shape."""
        super().load_state_dict(state, frozen_state)
        self.attention.take(state["attention"], under("attention/", frozen_state))
        self.reflection.take(state["learned"], frozen_state)
        if state["selector"] is not None:
            selector = Attention(self.attention.dimensions, self.config.attention, 0, self.backbone.device)
            selector.take(state["selector"], under("selector/", frozen_state))
            self.selector = selector.requires_grad_(False)
        self._keep(unpacked(state["learned"], frozen_state, self.config.alpha / self.config.rank))
        if state["task"]:
            self._begin(state["task"], state["live_labels"])


def _check_objectives(tasks: Sequence[Task], config: SaptConfig) -> None:
    """Next words have no prompt that could be attended to, and hidden words no answer that could be replayed."""
    for task in tasks:
        if task.objective == "clm" or (task.objective != "answer" and config.ablation == "replay"):
            what = "method.ablation=replay trains on answers" if config.ablation == "replay" else "sapt reads prompts"
            raise ConfigError(
                f"{what}, which stream.objective={task.objective} of task '{task.name}' does not have: expected "
                "objective answer (or mlm, without that ablation)"
            )


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
