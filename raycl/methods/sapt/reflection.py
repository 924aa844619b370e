"""ARM, SAPT's attentive reflection: keeps the attention weights of earlier tasks' inputs (SAPT, section 4.3).

After a task its mean weights are kept. While a later one is trained, pseudo-samples of every earlier one go through the
current projection and keys, and KL(kept || now) is added to the task loss. Which inputs a step draws depends on the
step alone: every micro-batch of every worker adds the same term, which the step counts exactly once, so that
accumulation and workers change nothing and nothing random is kept in a checkpoint. Only the projection runs: inputs are
pooled once a task, since embeddings are frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from raycl.config import PathOrUri, Section
from raycl.methods.base import under
from raycl.methods.context import Step
from raycl.methods.pseudo_samples.samples import PseudoSamples
from raycl.methods.pseudo_samples.sources import Kind, check_files
from raycl.methods.replay.buffer import ReplayBuffer
from raycl.routing.attention import Attention, divergence
from raycl.types import Capabilities


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


@dataclass(frozen=True)
class ReplayEntry:
    """The replay entry of a task.

    Attributes:
        samples: its pseudo samples.
        abar: `[i]` mean weights over the keys there were then, in the order of learning.
    """

    samples: PseudoSamples
    abar: Tensor


class Reflection(ReplayBuffer[ReplayEntry]):
    """The replay buffer of all tasks so far, and the term that it adds.

    Attributes:
        weight: lambda.
        pooled: task -> `[n, d]` its pseudo-samples, pooled, on the model's device.
    """

    def __init__(self, config: ReflectionConfig, weight: float) -> None:
        super().__init__()
        self.config, self.weight = config, weight
        self.pooled: dict[str, Tensor] = {}

    def is_due(self, step: Step) -> bool:
        """Return whether a step reflects."""
        config = self.config
        late = step.index >= config.skip_steps and step.index % config.every == 0
        return late and self.weight > 0 and bool(self.pooled)

    def draw(self, step: Step) -> dict[str, Tensor]:
        """Return the task -> places of the pseudo-samples that a step draws, without repetition."""
        draw = torch.Generator().manual_seed(step.seed)
        return {
            task: torch.randperm(len(pooled), generator=draw)[: self.config.batch]
            for task, pooled in self.pooled.items()
        }

    def term(self, attention: Attention, step: Step) -> Tensor | None:
        """Return `lambda * sum_i mean KL(abar_i || alpha)` of a step; None if there is none."""
        if not self.is_due(step):
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
        abar = self.entries[task].abar
        return torch.nn.functional.pad(abar, (0, keys - len(abar)))[None]

    # ---- keeping ---------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return `abar/<task>`, `pseudo/<task>/<what>`."""
        tensors: dict[str, Tensor] = {}
        for task, entry in self:
            tensors[f"abar/{task}"] = entry.abar
            tensors |= {f"pseudo/{task}/{name}": tensor for name, tensor in entry.samples.tensors().items()}
        return tensors

    def take(self, tasks: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
        """Restore from what `tensors` gave of these tasks.

        Nothing is kept of tasks whose task id is given, nor of those whose samples were removed.
        """
        self.entries = {
            task: ReplayEntry(PseudoSamples.of(under(f"pseudo/{task}/", tensors)), tensors[f"abar/{task}"])
            for task in tasks
            if f"abar/{task}" in tensors and f"pseudo/{task}/source_ids" in tensors
        }
