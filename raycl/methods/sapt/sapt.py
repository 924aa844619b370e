"""SAPT: attention over all task adapters, which trains and selects them together (section 4 of its paper).

"SAPT: A Shared Attention Framework for Parameter-Efficient Continual Learning of Large Language Models", ACL 2024. A
task trains its adapter (LoRA on query and value projections, or a soft prompt), its key, and the shared projection;
backbone, earlier adapters and earlier keys are frozen. The attention reads nothing but the source's raw embeddings, in
training, evaluation, generation and serving, and once per prompt. Reflection (ARM) keeps old tasks' inputs attended to
as they were. Encoder-only backbones, of which the paper has none, get label rows with every adapter, mixed by the same
weights, so that no task id is needed. Where the authors' code differs from the paper, there are settings (its
attention's and reflection's too). Prompts are learned by the run's AdamW like all else, theirs by Adafactor (appendix
C).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raycl.adapters.soft_prompts import PromptForm
from raycl.backbone import Backbone, Output
from raycl.bank.tensor_groups import TensorGroups
from raycl.data.loader import batches_of
from raycl.data.tokens import drawn_rows
from raycl.errors import BankError, ConfigError, RunError
from raycl.methods.base import Learned, State, under
from raycl.methods.context import TaskContext
from raycl.methods.per_task_adapter import AdapterForm, PerTaskAdapter
from raycl.methods.pseudo_samples.samples import PseudoSamples, Volume, counts_of
from raycl.methods.pseudo_samples.sources import SampleSource
from raycl.methods.queries import SAMPLED, bare_queries
from raycl.methods.sapt.reflection import PseudoReplay, Reflection
from raycl.methods.sapt.settings import ABLATIONS, Ablation, SaptConfig
from raycl.methods.trained_adapters import is_trainable
from raycl.routing.attention import LEAST_WEIGHT, Attention, learn_selector, max_pooled, mixture_of
from raycl.routing.statistics import BareTexts
from raycl.types import Batch, Mixture, Phase, RouterState, Task

READ_AT_ONCE = 64
"""Prompts embedded together where only their maxima are wanted."""


class Sapt(PerTaskAdapter):
    """Task adapters under shared attention.

    Attributes:
        continued: the task whose adapter is in training beside the new one; empty: none.
        trained_on: learned task -> the earlier task whose adapter it has trained too.
    """

    Config = SaptConfig
    shared_parameters = tuple(f"attention.{name}" for name in ("down", "up", "norm_weight", "norm_bias"))

    def __init__(self, config: SaptConfig, backbone: Backbone, seed: int) -> None:
        """Attach stack and attention.

        Raises:
            BackboneError: `target_modules` matches no linear. ConfigError: settings that do not fit the backbone.
        """
        attention = config.attention.settled(backbone.head is not None, config.head_rule == "logit")
        config = config.model_copy(update={"attention": attention})
        form = AdapterForm((), config.scaling, config.head_rule, prompts="sum")
        if config.value == "lora":
            form = replace(form, targets=config.target_modules, parameters=config.target_parameters, prompts=None)
        super().__init__(config, backbone, seed, form)
        self.config: SaptConfig
        self.stack.detach_loaded = config.stop_grad_old_blocks
        width = int(backbone.model.get_input_embeddings().weight.shape[1])
        self.attention: Attention = Attention(width, config.attention, seed, backbone.device)
        self.router_module = self.attention
        backbone.add_module("attention", self.attention)
        self.selector: Attention | None = None
        self.ablation: Ablation = ABLATIONS[config.ablation]
        weight = config.arm.weight_on(backbone.capabilities) if self.ablation.reflects else 0.0
        self.reflection: Reflection = Reflection(config.arm, weight)
        self._replay: PseudoReplay | None = None
        self.context: TaskContext | None = None
        self.continued: str = ""
        self.trained_on: dict[str, str] = {}

    @property
    def _is_alone(self) -> bool:
        return self.task_id_given or not self.ablation.shares

    def check(self, tasks: Sequence[Task]) -> None:
        """Check every task's objective, and the source of its pseudo-samples.

        Raises:
            ConfigError: texts that this method cannot learn, or an adapter with label rows that would be trained for
                other labels. RayclError: see `SampleSource.check`.
        """
        _check_objectives(tasks, self.config)
        if self.config.train_nearest and self.backbone.head is not None:
            raise ConfigError(
                "method.train_nearest trains the adapter of an earlier task, whose label rows of an encoder-only "
                "backbone have other labels: expected train_nearest=false, or a backbone that writes its answers"
            )
        if not self.task_id_given:
            self._source.check(tasks, self)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Train the task's adapter and key, and the shared projection; freeze all else."""
        self.context = context
        removed = [task for task in self._learned if task not in self.reflection.samples]
        if removed and self.ablation.selects and not self.task_id_given:
            raise RunError(
                f"method.ablation={self.config.ablation} trains a selector on pseudo-samples of every task, and those "
                f"of {', '.join(removed)} were removed: expected ablation none, or a bank that keeps its samples"
            )
        is_first = not self._learned and not context.resumed
        reads_nearest = self.config.start_from == "nearest" or self.config.train_nearest
        if reads_nearest and not context.resumed and self._learned:
            means = {task: mean for task, mean in self.bare.means().items() if task in self._learned}
            mean_D = BareTexts.mean_of(bare_queries(context, self.backbone, self.seed))
            self._find_start(phase.name, mean_D, means, self.config.start_threshold)
            if self.config.train_nearest:
                self.continued = self.starts.pop(phase.name, "")
        super().begin_task(phase, context)
        if is_first and not self._is_alone and self.config.attention.standardize:
            draw = torch.Generator().manual_seed(self.seed)
            drawn = [
                context.router_texts.ids(table, drawn_rows(table, SAMPLED, draw)) for table in context.tables("train")
            ]
            self.attention.look_at(self._pooled([ids for of_table in drawn for ids in of_table]))
        self.reflection.pooled = self._pooled_samples() if self.reflection.weight and not self._is_alone else {}
        self._replay = self._pseudo_replay(context) if self.ablation.replays and not self._is_alone else None
        self._start(context, self.config.start_trial_steps)

    def allocate(self, phase: Phase) -> None:
        """Create the parameters of `begin_task`; a task that may train another one's adapter too is planned with it."""
        super().allocate(phase)
        if self.config.train_nearest and phase.index:
            self.config.begin_training(self.stack, [phase.name, "nearest"])

    def _pseudo_replay(self, context: TaskContext) -> PseudoReplay:
        rows, samples = self.backbone.label_ids(), self.reflection.samples
        labels = [[rows[label] for label in self._learned[task].labels] for task in samples]
        return PseudoReplay(list(samples.values()), labels, context.count("train"), self.seed + context.phase.index)

    def _create(self, task: str) -> None:
        config, continued = self.config, [self.continued] if self.continued else []
        for name in continued:
            self.stack.drop(name)
        config.begin_training(self.stack, [task, *continued], config.r_by_task.get(task))
        self.stack.fill({name: self._learned[name] for name in continued})
        if config.value == "prompt":
            length = config.prompt_length_by_task.get(task, config.prompt_length)
            self._begin_prompts(1, length, PromptForm(config.prompt_form))
        self.attention.begin(task, self.seed + 1 + len(self._learned))

    def _is_trained(self, name: str, parameter: Tensor) -> bool:
        return (not self._is_alone and name.startswith("attention.")) or is_trainable(name, parameter)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Add pseudo-samples to the batch's rows in the ablation +Replay."""
        if self._replay is None or self.context is None:
            return batch
        steps_per_epoch = -(-self._replay.rows // self.context.batch_size)
        epoch = self.context.step.index // steps_per_epoch
        return self._replay.joined(batch, epoch, self.backbone.codec.pad_id)

    def route(self, batch: Batch) -> Mixture:
        """Return all adapters so far, by the attention of each example's source; without attention the task's own."""
        if self._is_alone:
            return super().route(batch)
        config = self.config.attention
        with torch.no_grad():
            ids_BL, mask_BL = batch.routed
            pooled_BD = max_pooled(self.backbone.embedded(ids_BL), mask_BL, config.pool_pads)
        alpha_BT = self.attention(pooled_BD).exp()
        needs_all_labels = self._replay is not None or (self.backbone.head is not None and self.backbone.allowed_labels)
        if needs_all_labels:  # however small an adapter's weight, since no other one has its labels
            return mixture_of(self.attention.names, alpha_BT.clamp(min=LEAST_WEIGHT), always=self._task)
        return mixture_of(self.attention.names, alpha_BT, config.pruning_threshold, always=self._task)

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return attentive reflection's term, the same for every micro-batch of a step."""
        return None if self.context is None else self.reflection.term(self.attention, self.context.step)

    def end_task(self, context: TaskContext) -> Learned:
        """Adapter and key are frozen; pseudo-samples and mean weights are kept."""
        task = self._task
        key = {"key": self.attention.key} if self.attention.key is not None else {}
        trained = under("attention.", context.parameters)
        states = self._freeze(context)
        self.attention.end({**self.attention.tensors(), **key, **trained})
        if self.continued:
            self.trained_on[task], self.continued = self.continued, ""
        if self.task_id_given:
            return self._published(context, states)
        samples = self.reflection.samples[task] = self._samples(context)
        self.reflection.abar[task] = self._mean_weights(context)
        if self.ablation.selects:
            self._train_selector()
        return replace(self._published(context, states), extras={task: {"pseudo": samples.tensors()}})

    def _samples(self, context: TaskContext) -> PseudoSamples:
        if self._source.kind == "generated" and not self.ablation.reads_samples:
            return PseudoSamples([], [], [])
        return self._source.samples(context, self, self.seed + context.phase.index)

    @property
    def _source(self) -> SampleSource:
        arm, volume = self.config.arm, Volume(self.config.arm.fraction, self.config.arm.max_samples)
        generator, replays = self.config.generator, self.ablation.replays
        return SampleSource(arm.source, "method.arm.source", arm.files, volume, generator, replays)

    def _train_selector(self) -> None:
        """Train a separate selector from scratch, on the recorded mean weights of all tasks."""
        config, seed = self.config, self.seed + 1000 * len(self._learned)
        pooled = self._pooled_samples()
        selector = learn_selector(pooled, self.reflection.abar, config.attention, config.selector, seed)
        self.selector = selector.to(self.backbone.device)

    def _pooled_samples(self) -> dict[str, Tensor]:
        return {task: self._pooled(samples.sources) for task, samples in self.reflection.samples.items()}

    @torch.no_grad()
    def _mean_weights(self, context: TaskContext) -> Tensor:
        """Return `[i]`: over the split `abar_split` (dev by default); over the training rows where there are none."""
        if self._is_alone:
            return torch.eye(len(self._learned))[-1]
        sources = context.routed_ids(self.config.arm.abar_split) or context.routed_ids("train")
        alpha_BT: Tensor = self.attention(self._pooled(sources)).exp()
        return alpha_BT.mean(0).cpu()

    @torch.no_grad()
    def _pooled(self, sources: Sequence[Sequence[int]]) -> Tensor:
        """Return `[n, d]` on the model's device (`max_pooled`)."""
        pads, pad_id = self.config.attention.pool_pads, self.backbone.codec.pad_id
        batches = batches_of(sources, READ_AT_ONCE, pad_id, self.backbone.device)
        return torch.cat(
            [max_pooled(self.backbone.embedded(batch.source_ids), batch.source_mask, pads) for batch in batches]
        )

    def _router(self) -> RouterState:
        """Return keys and projection; the task's own adapter where the task id is given."""
        if self.task_id_given:
            return RouterState("task")
        chooser = self.selector or self.attention
        settings = {**chooser.settings(), "head_rule": self.config.head_rule, "hard": self._is_alone}
        return RouterState("attention", settings, chooser.tensors())

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the mean weights of each task's texts: when it was learned (`train`: abar), and as evaluated now
        (`test`)."""
        if self.task_id_given:
            return {}
        trained = {"trained_on": dict(self.trained_on)} if self.trained_on else {}
        abar = {task: _rounded(abar) for task, abar in self.reflection.abar.items()}
        test = {task: _rounded(weights) for task, weights in observed.items()}
        counts = counts_of(self.reflection.samples)
        weights = {"keys": list(self.attention.names), "train": abar, "test": test, **counts}
        return super().summary(observed) | trained | {"attention": weights}

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        values |= {"attention": self.attention.settings(), "selector": None}
        values |= {"continued": self.continued, "trained_on": self.trained_on}
        tensors |= {f"attention/{name}": tensor for name, tensor in self.attention.tensors().items()}
        tensors |= self.reflection.tensors()
        if self.selector is not None:
            values["selector"] = self.selector.settings()
            tensors |= {f"selector/{name}": tensor for name, tensor in self.selector.tensors().items()}
        return values, tensors

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        attention = under("attention/", tensors)
        self.attention.take(values["attention"], attention)
        self.reflection.take(dict(values["learned"]), tensors)
        if values["selector"] is not None:
            selector = Attention(self.attention.dimensions, self.config.attention, 0, self.backbone.device)
            selector.take(values["selector"], under("selector/", tensors))
            self.selector = selector.requires_grad_(False)
        self.continued, self.trained_on = values.get("continued", ""), dict(values.get("trained_on", {}))
        super().load_state_dict(values, tensors)

    @classmethod
    def _without(cls, values: dict[str, Any], left: TensorGroups, task: str, adapters: Collection[str]) -> State:
        """Remove the task's key and pseudo-samples; the rest shares the mean weights of other tasks.

        Raises:
            BankError: the task has trained the adapter of another one.
        """
        earlier = values.get("trained_on", {})
        if trained := earlier.get(task):
            raise BankError(
                f"task '{task}' has trained the adapter of {trained} too (method.train_nearest), from which it cannot "
                "be taken out: expected a task that has trained its own alone, or train a run without it"
            )
        values = {**values, "trained_on": {name: of for name, of in earlier.items() if of != task}}
        keys = list(values["attention"]["tasks"])
        own = (f"abar/{task}", f"attention/key/{task}", f"selector/key/{task}")
        left = left.select(lambda name: name not in own and not name.startswith(f"pseudo/{task}/"))
        for name, abar in under("abar/", left).items():
            if task in keys[: len(abar)]:
                abar = torch.cat([abar[: keys.index(task)], abar[keys.index(task) + 1 :]])
                left |= {f"abar/{name}": abar / abar.sum().clamp_min(torch.finfo(abar.dtype).tiny)}
        kept = [name for name in keys if name != task]
        changed = {kind: values[kind] and {**values[kind], "tasks": kept} for kind in ("attention", "selector")}
        return {**values, **changed}, left


def _check_objectives(tasks: Sequence[Task], config: SaptConfig) -> None:
    """Next words have no prompt that could be attended to, and hidden words no answer that could be replayed."""
    replays = ABLATIONS[config.ablation].replays
    what = "method.ablation=replay trains on answers" if replays else "sapt reads prompts"
    for task in tasks:
        if task.objective == "clm" or (task.objective != "answer" and replays):
            raise ConfigError(
                f"{what}, which stream.objective={task.objective} of task '{task.name}' does not have: expected "
                "objective answer (or mlm, without that ablation)"
            )


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
