"""DEMix in adapters: a bottleneck adapter for each task, which begins as the earlier one that fits its texts best.

    start = argmin over earlier adapters of the mean task loss on a sample of the new task's training rows

That is the lowest perplexity where texts or generated answers are learned. Earlier adapters stay as they are, and the
task id is given at test. Gururangan et al. 2022, "DEMix Layers: Disentangling Domains for Modular Language Modeling",
section 2 (an expert for each domain) and 5.1 (a new expert begins as the nearest one); the paper's experts are whole
feed-forward blocks, mixed at test by the perplexity of each on the text so far. In adapters, for the domain's own task:
ContinualLM (networks/baselines/demix.py, which measures on 10,000 rows and stops before it copies any weight; reduction
16, so 48 units in RoBERTa-base). Its adapters have four linears with biases, 768-48-48 and 48-768-768, with a GELU
behind each and a ReLU between the halves (networks/adapters/modeling.py, networks/plugin/plugin.py): 8.0M weights a
task, 0.9M here. It also trains the language head's dense layer, norm and bias, which all tasks share; here the language
head is frozen.
An encoder-only backbone answers with label heads, and an earlier adapter has no score for labels that are new: its loss
is infinite. Of equal losses the newest adapter's counts, so that where no label is shared each task begins with the
adapter of the task before it.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from raycl.backbone import Backbone
from raycl.config import Tree
from raycl.methods.base import MethodConfig, phase_labels
from raycl.methods.context import TaskContext
from raycl.methods.lora_settings import as_peft_draws
from raycl.methods.per_task_adapter import AdapterForm, BottleneckSettings, PerTaskAdapter
from raycl.types import Batch, Mixture, Phase


class DemixConfig(BottleneckSettings):
    """DEMix: an adapter for each task, which begins as the earlier one with the lowest loss on its rows."""

    name: Literal["demix"] = "demix"
    sample: int = Field(1000, ge=1, description="training rows on which earlier adapters are compared")

    unused_for_single_task: ClassVar[tuple[str, ...]] = ("sample",)

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        """Return the settings that matter: the first task has nothing to begin as, the second no choice."""
        settings = super().cache_key(index, tasks, learns_texts)
        if index < 2:
            del settings["sample"]
        return settings


class Demix(PerTaskAdapter):
    """Bottleneck adapters that begin as one another.

    Attributes:
        starts: task -> the adapter that its own began as.
    """

    Config: ClassVar[type[MethodConfig]] = DemixConfig
    starts_anew: ClassVar[bool] = True

    def __init__(self, config: DemixConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed, AdapterForm(config.target_modules, 1.0, "probability", "relu"))
        self._compared = ""

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Begin the new adapter at the nearest adapter's weights."""
        if not context.resumed and self._learned and not self.task_id_given and phase.name not in self._previous:
            self.starts[phase.name] = self._nearest(phase, context)
            self._previous = {phase.name: self._learned[self.starts[phase.name]]}
        super().begin_task(phase, context)

    def _create(self, task: str) -> None:
        self.stack.begin_training({task: self.config.bottleneck_size}, 1.0, as_peft_draws, self.config.dropout)

    def _nearest(self, phase: Phase, context: TaskContext) -> str:
        """Return the earlier adapter with the lowest loss on the phase's rows, the newest of equal ones. Collective."""
        newest_first = list(reversed(self._learned))
        if len(newest_first) == 1:
            return newest_first[0]
        self.backbone.learn_labels(phase_labels(phase))
        losses: dict[str, float] = {}
        for name in newest_first:
            self._compared = name
            result = context.mean_loss(self.config.sample)
            losses[name] = math.inf if math.isnan(result) else result
        self._compared = ""
        return min(newest_first, key=losses.__getitem__)

    def route(self, batch: Batch) -> Mixture:
        """Return the adapter of each text's task; while adapters are compared, the one in question."""
        return Mixture.same({self._compared: 1.0}, len(batch)) if self._compared else super().route(batch)
