"""ARM, SAPT's attentive reflection: keeps the attention weights of earlier tasks' inputs (SAPT, section 4.3).

After a task its mean weights are kept. While a later one is trained, pseudo-samples of every earlier one go through the
current projection and keys, and KL(kept || now) is added to the task loss. Which inputs a step draws depends on the
step alone: every micro-batch of every worker adds the same term, which the step counts exactly once, so that
accumulation and workers change nothing and nothing random is kept in a checkpoint. Only the projection runs: inputs are
pooled once a task, since embeddings are frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from raycl.config import PathOrUri, Section
from raycl.data.loader import batch_of, padded
from raycl.methods.context import Step
from raycl.methods.pseudo_samples.samples import PseudoSamples, kept_samples, kept_tensors
from raycl.methods.pseudo_samples.sources import Kind, check_files
from raycl.methods.replay.stored_rows import joined
from raycl.routing.attention import Attention, divergence
from raycl.types import IGNORE, Batch, Capabilities


class ReflectionConfig(Section):
    """ARM's settings (SAPT, section 4.3 and appendix C); where its released code differs, there is a setting."""

    folders: ClassVar[tuple[str, ...]] = ("files",)

    weight: float | None = Field(
        None, ge=0, description="lambda; null: 2 on decoders, 0.5 elsewhere (the paper: 0.1 on T5's long sequences)"
    )
    source: Kind = Field(
        "real",
        description="pseudo-samples. real: stored training inputs; generated: texts of a generator that is "
        "trained on each task (the paper's); file: <files>/<task>.jsonl",
    )
    fraction: float = Field(0.02, gt=0, le=1, description="pseudo-samples per training row; at least one per task")
    max_samples: int | None = Field(
        None, ge=1, description="pseudo-samples of a task at most, for they are inputs of users; null: no limit"
    )
    files: PathOrUri = Field(
        None,
        description="source=file: folder of <task>.jsonl, lines of {text: ...}, or of the authors' <task>/train.json",
    )
    batch: int = Field(16, ge=1, description="pseudo-samples of each earlier task per step")
    every: int = Field(1, ge=1, description="reflect in every n-th step (data_replay_freq of the scripts)")
    skip_steps: int = Field(0, ge=0, description="first steps of a task without reflection; as released: 1")
    kl_reduction: Literal["sum", "mean"] = Field("sum", description="reduction of the divergence over earlier tasks")
    kl_scale_with_accum: bool = Field(
        False,
        description="do not divide the divergence by the accumulation, while the task loss is divided, as released",
    )
    abar_split: Literal["dev", "test"] = Field(
        "dev",
        description="rows whose mean weights are the target; test: the paper's text; tasks without dev rows: the "
        "training rows",
    )

    def weight_on(self, capabilities: Capabilities) -> float:
        """Return lambda: unless given 2 on decoders (the paper's LLaMA), 0.5 elsewhere (its T5 on SuperNI)."""
        if self.weight is not None:
            return self.weight
        return 2.0 if capabilities.one_sequence else 0.5

    @model_validator(mode="after")
    def _files_fit(self) -> ReflectionConfig:
        check_files(self.source, self.files, "method.arm.source")
        return self


class Reflection:
    """The replay buffer of all tasks so far, and the term that it adds.

    Attributes:
        weight: lambda.
        samples: task -> its pseudo-samples.
        abar: task -> `[i]` mean weights over the keys there were then, in the order of learning.
        pooled: task -> `[n, d]` its pseudo-samples, pooled, on the model's device.
    """

    def __init__(self, config: ReflectionConfig, weight: float) -> None:
        self.config = config
        self.weight = weight
        self.samples: dict[str, PseudoSamples] = {}
        self.abar: dict[str, Tensor] = {}
        self.pooled: dict[str, Tensor] = {}

    def draw(self, step: Step) -> dict[str, Tensor]:
        """Return the task -> places of the pseudo-samples that a step draws, without repetition."""
        draw = torch.Generator().manual_seed(step.seed)
        return {
            task: torch.randperm(len(pooled), generator=draw)[: self.config.batch]
            for task, pooled in self.pooled.items()
        }

    def term(self, attention: Attention, step: Step) -> Tensor | None:
        """Return `lambda * sum_i mean KL(abar_i || alpha)` of a step; None if there is none."""
        is_due = step.index >= self.config.skip_steps and step.index % self.config.every == 0
        if not is_due or not self.weight or not self.pooled:
            return None
        drawn = self.draw(step)
        rows = torch.cat([self.pooled[task][places.to(self.pooled[task].device)] for task, places in drawn.items()])
        names = attention.names
        target = torch.cat([self.target(task, len(names)).expand(len(places), -1) for task, places in drawn.items()])
        share = torch.cat([torch.full((len(places),), 1.0 / len(places)) for places in drawn.values()])
        total = (divergence(target.to(rows.device), attention(rows)) * share.to(rows.device)).sum()
        if self.config.kl_reduction == "mean":
            total = total / len(drawn)
        return total * (self.weight * (step.micro_batches if self.config.kl_scale_with_accum else 1))

    def target(self, task: str, keys: int) -> Tensor:
        """Return `[1, keys]`: the kept mean weights, 0 for keys that came later."""
        abar = self.abar[task]
        return torch.nn.functional.pad(abar, (0, keys - len(abar)))[None]

    def tensors(self) -> dict[str, Tensor]:
        """Return `abar/<task>`, `pseudo/<task>/<what>`."""
        return {f"abar/{task}": abar for task, abar in self.abar.items()} | kept_tensors("pseudo", self.samples)

    def take(self, tasks: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
        """Restore from what `tensors` gave of these tasks.

        Nothing is kept of tasks whose task id is given, nor of those whose samples were removed.
        """
        self.samples = kept_samples("pseudo", [task for task in tasks if f"abar/{task}" in tensors], tensors)
        self.abar = {task: tensors[f"abar/{task}"] for task in self.samples}


SampleIndex = tuple[int, int]
"""Index of the replay buffer entry, and of the sample in it."""


class PseudoReplay:
    """Samples of all earlier tasks as ordinary training data: each is added to the batch of a training row (+Replay).

    In every epoch each sample of every earlier task is trained on exactly once, in the batch of a row drawn for the
    epoch. The assignment depends on rows and epoch alone: accumulation and workers change nothing.
    """

    def __init__(self, samples: Sequence[PseudoSamples], labels: Sequence[Sequence[int]], rows: int, seed: int) -> None:
        """Set up the assignment.

        Args:
            labels: row of the label head of every label of each entry, in its order.
            rows: training rows of the current phase.
        """
        self.samples = samples
        self.labels = labels
        self.rows = rows
        self.seed = seed
        self._indices = [(entry, number) for entry, held in enumerate(samples) for number in range(len(held))]
        self._assigned = lru_cache(maxsize=1)(self._assign)

    def _assign(self, epoch: int) -> dict[int, list[SampleIndex]]:
        """Return the row -> samples that are added to its batch in this epoch."""
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        assigned: dict[int, list[SampleIndex]] = {}
        for number, index in enumerate(self._indices):
            assigned.setdefault(order[number % self.rows], []).append(index)
        return assigned

    def joined(self, batch: Batch, epoch: int, pad_id: int) -> Batch:
        """Return the batch, followed by the samples that are assigned to its rows."""
        assigned = self._assigned(epoch)
        mine = [index for row in batch.rows.tolist() for index in assigned.get(row, ())]
        if not mine:
            return batch
        sources = [self.samples[entry].sources[number] for entry, number in mine]
        targets = [self.samples[entry].targets[number] for entry, number in mine]
        rows = [self._label(entry, self.samples[entry].labels[number]) for entry, number in mine]
        blank = ("",) * len(mine)
        lower = replace(
            batch_of(sources, pad_id),
            target_ids=padded(targets, IGNORE),
            label_ids=torch.tensor(rows, dtype=torch.int64),
            rows=torch.full((len(mine),), -1),
            texts=blank,
            tasks=blank,
        )
        return joined(batch, lower, pad_id)

    def _label(self, entry: int, label: int) -> int:
        known = self.labels[entry]
        return known[label] if known and label >= 0 else IGNORE
