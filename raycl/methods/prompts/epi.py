"""EPI: an adapter of its own for every task, and Gaussians of the tasks' classes that choose among them.

Wang et al. 2023, "Rehearsal-free Continual Language Learning via Efficient Parameter Isolation", ACL. A task trains a
prefix: keys and values that every attention layer reads with the text's, on a frozen backbone. When it ends, the mean
of each class and the mean of the classes' covariances are taken from the frozen backbone's hidden states of its
training texts. At test a text gets the adapter of the task that holds the class of least Mahalanobis distance
(`raycl.routing.class_gaussians`). Label heads are of a task's own labels. So each task needs a closed label set; the
answers themselves may be generated, as in SAPT's runs of EPI on T5 and LLaMA-2. Length and kinds (prefix, or a soft
prompt at the input) are those of the released code (run.py, scripts/5ds.sh); a LoRA is an option of ours. Where the
code differs: its prefix shares the softmax with the text, is drawn from N(0, 1) and has a dropout of 0.1; here the
prefix has a softmax of its own (`raycl.adapters.formula.attend`) and no dropout, keys are drawn from N(0, 1), and
values start at zero, so that the first answers are those of the backbone. The code's prompted pass also puts texts
through the embedding layer twice (model/epi.py: what line 188 gives goes in as `inputs_embeds`, to which positions and
layer norm are applied again), which is not copied, and its classifier has a dropout of 0.1 in front.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone
from raycl.bank.tensor_groups import TensorGroups
from raycl.data.loader import Collate, eval_batches
from raycl.errors import ConfigError, RunError
from raycl.methods.base import Learned, RoutedConfig, State, under
from raycl.methods.context import TaskContext
from raycl.methods.prompts.task_module import Module, ModulePerTask, ModuleSettings, PromptLength
from raycl.methods.queries import TextQueries
from raycl.routing.class_gaussians import COVARIANCE, MEANS, SAMPLE, ClassGaussians, ClassStatistics
from raycl.routing.statistics import sample_rows
from raycl.types import Batch, RouterState, Task

DEV_BATCH = 16
"""Dev texts that are read together."""


class EpiConfig(ModuleSettings, RoutedConfig):
    """EPI: an adapter for each task, chosen by the nearest class."""

    name: Literal["epi"] = "epi"
    value: Module = "prefix"
    prompt_length: PromptLength = 16
    ridge: float = Field(
        0.0,
        ge=0,
        description="share of the mean variance that is added to the diagonal of the shared covariance, for tasks of "
        "few texts; 0: nothing, and its pseudo-inverse (the authors')",
    )

    unused_for_single_task: ClassVar[tuple[str, ...]] = ("router_text", "ridge")
    pre_trains: ClassVar[bool] = False
    needs_texts: ClassVar[bool] = True  # evaluation reports the choices by task
    chooses_task: ClassVar[bool] = True
    own_statistics: ClassVar[bool] = True
    independent_tasks: ClassVar[bool] = True

    def extra_passes(self, epochs: int, steps: int) -> float:
        """Return the pass of the bare backbone over every row, for the means and the covariance of its classes."""
        return 0.5 / epochs


class Epi(ModulePerTask):
    """Isolated adapters, and classes that choose among them."""

    Config = EpiConfig

    def __init__(self, config: EpiConfig, backbone: Backbone, seed: int) -> None:
        """Attach the adapters' layers.

        Raises:
            BackboneError: `target_modules` matches no linear, or a prefix none that it could be at.
        """
        super().__init__(config, backbone, seed, config.form("probability"))
        self.join_task = self._joined
        self.gaussians: ClassGaussians = ClassGaussians(config.ridge)
        self._queries = TextQueries(backbone, self.stack)

    def check(self, tasks: Sequence[Task]) -> None:
        """Tasks are identified by their classes.

        Raises:
            ConfigError: a task has none.
        """
        for task in tasks:
            if task.objective == "answer" and task.labels is None and not self.task_id_given:
                raise ConfigError(
                    f"method 'epi' chooses a task by its classes, and task '{task.name}' has no closed label set: "
                    "expected tasks with labels, or another method, such as sapt"
                )

    def draw_keys(self, low: Tensor, outputs: int) -> None:
        torch.nn.init.normal_(low)  # as in the authors' code

    def end_task(self, context: TaskContext) -> Learned:
        """Freeze the adapter, and publish it with its classes' means and covariance, and queries of
        dev texts, with which out-of-distribution scores compare."""
        if not self.task_id_given:
            self.gaussians.add(self._task, *self._statistics(context).result(), self._held_out(context))
        return super().end_task(context)

    @torch.no_grad()
    def _held_out(self, context: TaskContext) -> Tensor:
        """Return queries of a few of the phase's dev texts, of which no statistics are made; all workers read them."""
        codec, device = self.backbone.codec, self.backbone.device
        parts = [table.part(sample_rows(len(table)).numpy()) for table in context.tables("dev")]
        collates = [Collate([part], codec.pad_id, router_texts=context.router_texts) for part in parts]
        batches = [batch for collate in collates for batch in eval_batches(collate, DEV_BATCH)]
        queries = [self._queries(batch.to(device)).float().cpu() for batch in batches]
        return torch.cat(queries) if queries else torch.zeros(0, self.gaussians.dimensions)

    def _statistics(self, context: TaskContext) -> ClassStatistics:
        """Return statistics of the phase's training texts, over all workers. Collective."""
        classes_N = classes_of(context)
        if not (classes_N >= 0).any():
            raise RunError(
                f"no training row of '{context.phase.name}' has a label of its task, so that method 'epi' knows no "
                "class of it: correct the labels, or leave the task out"
            )
        width = int(self.backbone.model.config.hidden_size)
        statistics = ClassStatistics(torch.bincount(classes_N[classes_N >= 0]), width, self.backbone.device)

        def read(batch: Batch) -> None:
            class_B = classes_N.to(batch.rows.device)[batch.rows.clamp(min=0)]
            counts_B = (batch.rows >= 0) & (class_B >= 0)
            statistics.add(self._queries(batch)[counts_B], class_B[counts_B])

        context.each_batch(read)
        context.sum(statistics.sums_CD)
        context.sum(statistics.products_DD)
        return statistics

    def _router(self) -> RouterState:
        """Return means and covariances; the task's own adapter where the task id is given."""
        if self.task_id_given:
            return RouterState("task")
        return RouterState("class_gaussians", self.gaussians.settings(), self.gaussians.tensors())

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the share of each task's evaluated texts that chose each adapter, in the order of learning."""
        if self.task_id_given:
            return {}
        chosen = {task: [round(share, 4) for share in shares.tolist()] for task, shares in observed.items()}
        return {"chosen": {"adapters": list(self.gaussians.names), "test": chosen}}

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        values["gaussians"] = self.gaussians.settings()
        return values, tensors | {f"router/{name}": tensor for name, tensor in self.gaussians.tensors().items()}

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.gaussians = self._restored(values, tensors)
        super().load_state_dict(values, tensors)

    def _joined(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Learned:
        self.gaussians.join(self._restored(values, tensors))
        return super()._joined(values, tensors)

    def _restored(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ClassGaussians:
        settings = {**values["gaussians"], "ridge": self.config.ridge}
        return ClassGaussians.of(settings, under("router/", tensors))

    @classmethod
    def _without(cls, values: dict[str, Any], left: TensorGroups, task: str, adapters: Collection[str]) -> State:
        """Remove the task's classes."""
        own = {f"router/{kind}/{name}" for kind in (MEANS, COVARIANCE, SAMPLE) for name in adapters}
        kept = [name for name in values["gaussians"]["tasks"] if name not in adapters]
        values = {**values, "gaussians": {**values["gaussians"], "tasks": kept}}
        return values, left.select(lambda name: name not in own)


def classes_of(context: TaskContext) -> Tensor:
    """Return `[N]`: class of each training row of a phase, -1 without one; each task has its own, those without rows
    none."""
    classes, first = [], 0
    for table in context.tables("train"):
        codes = torch.from_numpy(table.labels(range(len(table)))).long()
        classes.append(torch.where(codes >= 0, codes + first, -1))
        first += len(table.task.labels or ())
    classes_N = torch.cat(classes)
    numbers = torch.bincount(classes_N[classes_N >= 0]).bool().cumsum(0) - 1
    return torch.where(classes_N >= 0, numbers[classes_N], -1) if len(numbers) else classes_N
