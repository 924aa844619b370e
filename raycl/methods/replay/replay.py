"""Replay: a few training rows or pseudo-samples of every earlier task are trained on again in each later one.

SAPT (appendix C) and MIGU (section 4.1) store 2 % of each task's training data, drawn once per task ("Replay" with
`learner=finetune`, "LoRAReplay" with `learner=lora`). What is kept and the rows of the new task are one data set,
shuffled together in every epoch.
With `source=generated` no row is stored: a generator writes inputs after each task, as SAPT's does, and the model that
has just learned the task answers them. With `source=file` they are given. Both are kept with the run's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from raycl.backbone import Backbone
from raycl.config import PathOrUri, Tree
from raycl.data.tokens import HeldRows
from raycl.errors import ConfigError
from raycl.methods.base import Learned, State
from raycl.methods.context import TaskContext
from raycl.methods.pseudo_samples.generator import GeneratorConfig
from raycl.methods.pseudo_samples.samples import PseudoSamples, Volume, counts_of, kept_samples, kept_tensors
from raycl.methods.pseudo_samples.sources import Kind, SampleSource, check_files
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.types import Phase, Task

KEPT = "replayed"
"""Kind of tensors of pseudo-samples in checkpoints."""


class ReplayConfig(WrapperConfig):
    """Any learner, with stored rows or pseudo-samples of earlier tasks among the training data."""

    folders: ClassVar[tuple[str, ...]] = ("files",)

    name: Literal["replay"] = "replay"
    share: float = Field(
        0.02, gt=0, le=1, description="what is replayed of each task, as a share of its train rows; at least one"
    )
    source: Kind = Field(
        "real",
        description="real: stored training rows; generated: inputs of a generator that is trained on each task, "
        "answered by the model that has learned it; file: <files>/<task>.jsonl",
    )
    files: PathOrUri = Field(
        None,
        description="source=file: folder of <task>.jsonl, lines of {text: ..., label: ...}, or of SAPT's authors' "
        "<task>/train.json; the model answers where the answer is left out",
    )
    generator: GeneratorConfig = GeneratorConfig()

    kept_share = "share"
    keeps_data: ClassVar[bool] = True

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings of the generator where nothing is generated."""
        if self.source != "generated":
            yield "generator", f"source={self.source}"

    @property
    def generates_samples(self) -> bool:
        return self.source == "generated" or super().generates_samples

    @property
    def sample_generator(self) -> GeneratorConfig:
        return self.generator

    @property
    def rereads_rows(self) -> bool:
        return self.source == "real"

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        """Return the settings that matter; in the first phase nothing is replayed, and stored rows are only numbers."""
        settings = super().cache_key(index, tasks, learns_texts)
        if index == 0 and self.source == "real":
            del settings["share"]
        return settings

    @model_validator(mode="after")
    def _files_fit(self) -> ReplayConfig:
        check_files(self.source, self.files, "method.source")
        return self


class Replay(Wrapper):
    """Any learner that trains one model for all labels, on old and new rows together.

    Its adapters have seen rows of all tasks so far, and are published as such.

    Attributes:
        samples: pseudo-samples by task (sources other than `real`).
    """

    Config = ReplayConfig
    needs_shared = "adapters"

    def __init__(self, config: ReplayConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        if config.source != "real" and config.routed_text == "input":
            raise ConfigError(
                f"method.source={config.source} keeps samples as whole prompts, and method.learner.router_text=input "
                "routes texts without their prompts: expected router_text=prompt, or source=real"
            )
        self.samples: dict[str, PseudoSamples] = {}
        self.source: SampleSource | None = None
        if config.source != "real":
            volume = Volume(config.share)
            self.source = SampleSource(config.source, "method.source", config.files, volume, config.generator, True)

    def check(self, tasks: Sequence[Task]) -> None:
        """Check the learner's tasks, and the source of pseudo-samples.

        Raises:
            ConfigError: texts that are learned without answers, or see `SampleSource.check`.
        """
        super().check(tasks)
        if self.source is None:
            return
        for task in tasks:
            if task.objective != "answer":
                raise ConfigError(
                    f"method.source={self.source.kind} replays inputs with answers, which stream.objective="
                    f"{task.objective} of task '{task.name}' does not have: expected objective answer, or "
                    "method.source=real"
                )
        self.source.check(tasks, self.learner)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Add the kept rows or samples of all earlier tasks to the phase's rows."""
        for task in context.earlier_tasks:
            if self.source is None:
                context.add_rows(task, context.stored_rows(task, self.config.share))
            elif kept := self.samples.get(task.name):
                context.add_samples(HeldRows(task, kept.sources, kept.targets, kept.labels))
        self.learner.begin_task(phase, context)

    def end_task(self, context: TaskContext) -> Learned | None:
        """Return the learner's; pseudo-samples of the task are kept, unless rows are."""
        learned = self.learner.end_task(context)
        if self.source is not None:
            (task,) = context.phase.tasks
            self.samples[task.name] = self.source.samples(context, self.learner, self.seed + context.phase.index)
        return learned

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the learner's, and how many pseudo-samples are kept of each task."""
        summary = self.learner.summary(observed)
        return summary if self.source is None else {**summary, "replay": counts_of(self.samples)}

    def state_dict(self) -> State:
        values, tensors = self.learner.state_dict()
        if self.source is None:
            return values, tensors
        return {**values, KEPT: list(self.samples)}, tensors | kept_tensors(KEPT, self.samples)

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore the learner, and pseudo-samples but for those that were removed from the bank."""
        self.samples = kept_samples(KEPT, values.get(KEPT, ()), tensors)
        self.learner.load_state_dict(values, tensors)
