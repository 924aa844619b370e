"""IDBR: features split into a task-generic and a task-specific space, each held to what it was before the task.

    L + order_weight CE(order of halves | g) + task_weight CE(task | s)
      + hold ( specific_weight MSE(s, s_before) + generic_weight MSE(g, g_before) )

g and s are two learned projections of the sentence state (`disentangled`), and the label head reads both. The order is
next-sentence prediction: each example brings its two halves along, in their own order or swapped (`halves`). In every
`every`-th step examples of all earlier tasks join, as many of each as there are new ones; only then is there the task's
term, and `hold` is `hold_replayed`. s_before and g_before are the features of a new or stored row when the task began;
the first task has none. After a task, the rows nearest to the centroids of k-means over its sentence states are stored.
Huang et al. 2021, "Continual Learning for Text Classification with Information Disentanglement Based Regularization",
section 3, eq. 1 to 8; code: SALT-NLP/IDBR at 7996e8b, whose weights are the defaults. All weights are trained.
Where it differs from that code:
- Every text is read as it is at test. The code puts a [SEP] in the middle of every text, at a random place in training,
  and marks what is behind it by token types; there the halves in their own order are the examples themselves, and all
  have a swapped twin. Here halves of either order are the twins, and there are no token types.
- Stored rows join the step of new ones. The code shuffles new and old rows together and cuts them into t + 1 mixed
  batches, t being the number of earlier tasks, each an optimizer step (train.py:487-514). So a task has 1 + t / every
  times as many updates there (1.4 in the fifth task, with every=10), and those with stored rows have 1 / (t + 1) of the
  rows that they have here.
- Every 250 steps the code scores validation rows of all tasks so far, 500 or 2,000 rows of each class that are held out
  of training, and a task ends with the weights of the best mean (train.py:539-547, 583). `eval.select=best_dev` scores
  dev rows of the task itself, at the end of epochs.
- The code's label head has the labels of all tasks from the start (model.py:42), so those that come later compete too;
  here labels seen so far compete. Label and task rows start at zero.
- k-means starts once, at random rows.
- The code's 1,000 steps of warm-up and Transformers' epsilon of AdamW, 1e-6, are settings of the run.
Two projections stand between backbone and label rows, which serving does not have, so nothing is published.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from raycl.backbone import Backbone, Output
from raycl.backbone.base import loss_count
from raycl.data.selection import generator
from raycl.data.sources.cache import Indices
from raycl.errors import ConfigError
from raycl.methods.base import Learned, Method, MethodConfig, State, phase_labels, under
from raycl.methods.context import TaskContext
from raycl.methods.pseudo_samples.samples import same_everywhere
from raycl.methods.replay.idbr.disentangled import DisentangledHead, TaskHead
from raycl.methods.replay.idbr.examples import halves_of, is_halves, is_real, nearest_to_centroids, orders
from raycl.methods.replay.stored_rows import FIRST, StoredRows, joined
from raycl.types import IGNORE, Batch, Phase

AT_ONCE = 32
"""Rows whose features are computed together."""


class IdbrConfig(MethodConfig):
    """IDBR: all weights are trained, and features in two spaces are held to what they were before each task."""

    name: Literal["idbr"] = "idbr"
    width: int = Field(128, ge=1, description="dimensions of each of the two spaces")
    share: float = Field(0.01, gt=0, le=1, description="share of each task's train rows that is stored; at least one")
    selection: Literal["kmeans", "random"] = Field(
        "kmeans", description="which rows are stored. kmeans: those nearest to centroids of sentence states"
    )
    every: int = Field(10, ge=1, description="stored rows join every n-th step, of each earlier task one per new row")
    order_weight: float = Field(1.0, ge=0, description="weight of the order of a text's halves")
    task_weight: float = Field(1.0, ge=0, description="weight of the task id, in steps with stored rows")
    generic_weight: float = Field(0.5, ge=0, description="weight of the generic space in what features are held to")
    specific_weight: float = Field(0.5, ge=0, description="weight of the specific space in it")
    hold: float = Field(0.5, ge=0, description="weight of features before the task, in steps without stored rows")
    hold_replayed: float = Field(5.0, ge=0, description="the same in steps with stored rows")

    task_learning_rate: float | None = Field(
        None, gt=0, description="learning rate of the head that predicts the task; null: train.learning_rate"
    )

    pre_trains: ClassVar[bool] = False
    kept_share = "share"
    rereads_rows: ClassVar[bool] = True
    unused_in_first_phase = ("every", "task_weight", "generic_weight", "specific_weight", "hold", "hold_replayed")

    @property
    def learning_rates(self) -> dict[str, float]:
        """The rate of the task head."""
        return {} if self.task_learning_rate is None else {"task_head.": self.task_learning_rate}


class Idbr(Method):
    """Disentangled features with stored rows.

    Attributes:
        stored: numbers of stored rows by task. tasks: all that were begun.
        before: `new` and `stored` -> `[n, 2 F]` features of those rows when the task began.
    """

    Config = IdbrConfig
    trains_backbone = True
    not_served = (
        "method 'idbr' puts two learned projections between the backbone and its label rows, which serving does not "
        "have; it is evaluated, and nothing of it is published"
    )

    def __init__(self, config: IdbrConfig, backbone: Backbone, seed: int) -> None:
        """Put the heads in place.

        Raises:
            ConfigError: a backbone without a label head.
        """
        super().__init__(config, backbone, seed)
        if backbone.capabilities.answers != "label":
            raise ConfigError(
                "method 'idbr' classifies sentence states, and the backbone writes its answers: expected an "
                "encoder-only backbone, or a method such as der++ or replay"
            )
        width = int(backbone.model.config.hidden_size)
        self.task_head: TaskHead = TaskHead(config.width, backbone.device)
        self.head: DisentangledHead = DisentangledHead(width, config.width, seed, backbone.device, self.task_head)
        backbone.head = self.head
        backbone.add_module("task_head", self.task_head)
        self.stored: dict[str, Indices] = {}
        self.tasks: list[str] = []
        self.before: dict[str, Tensor] = {}
        self._context: TaskContext | None = None
        self._rows: StoredRows | None = None
        self._owners = torch.zeros(0, dtype=torch.int64)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Train all parameters, and keep features before the task."""
        self._context = context
        self.backbone.learn_labels(phase_labels(phase))
        if phase.name not in self.tasks:
            self.tasks.append(phase.name)
        self.task_head.resize(len(self.tasks))
        for parameter in self.backbone.parameters():
            parameter.requires_grad_(parameter.numel() > 0)
        earlier = [(task, self.stored[task.name]) for task in context.earlier_tasks]
        self._rows = self._opened(earlier) if earlier else None
        self._owners = torch.repeat_interleave(torch.tensor([len(rows) for _, rows in earlier], dtype=torch.int64))
        if self._rows is not None and not context.resumed:
            new = self._opened([(table.task, np.arange(len(table))) for table in context.tables("train")])
            self.before = {"new": self._read(new)[0], "stored": self._read(self._rows)[0]}

    def _opened(self, entries: Sequence[tuple[Any, Indices]]) -> StoredRows:
        assert self._context is not None
        return StoredRows(entries, self._context, self.backbone, self.seed)

    @torch.no_grad()
    def _read(self, rows: StoredRows) -> tuple[Tensor, Tensor]:
        """Return `[n, 2 F]` features and `[n, D]` sentence states, on the CPU; the first worker's."""
        features, states = list[Tensor](), list[Tensor]()
        for batch in rows.batches(AT_ONCE, self.backbone):
            self.backbone.score_labels(batch)
            assert self.head.features is not None
            features.append(self.head.features.both().cpu())
            states.append(self.head.features.state.float().cpu())
        return same_everywhere((torch.cat(features), torch.cat(states)), self.backbone.device)

    @property
    def _replays(self) -> bool:
        """Return whether stored rows join the present step."""
        context = self._context
        return self._rows is not None and context is not None and (context.step.index + 1) % self.config.every == 0

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return new rows, stored ones of all earlier tasks where they are due, then the halves of both."""
        assert self._context is not None, "a step without a task"
        codec, seed = self.backbone.codec, self._context.step.seed
        if self._replays and (numbers := self._drawn(batch, seed)):
            assert self._rows is not None
            batch = joined(batch, self._rows.batch(numbers), codec.pad_id)
        halves = halves_of(batch, seed, codec.special_ids, codec.max_source_tokens, codec.pad_id)
        return joined(batch, halves, codec.pad_id) if len(halves) else batch

    def _drawn(self, batch: Batch, seed: int) -> list[int]:
        """Return numbers of stored rows: for each new row one of each earlier task."""
        assert self._rows is not None
        new, numbers, first = [row for row in batch.rows.tolist() if row >= 0], list[int](), 0
        for task, count in enumerate(self._rows.counts):
            draw = torch.Generator().manual_seed(seed + task)
            order = torch.randperm(count, generator=draw).tolist()
            numbers += [first + order[row % count] for row in new]
            first += count
        return numbers

    def penalty(self, batch: Batch, output: Output) -> Tensor:
        """Return all terms but the task loss; each example counts the same, whatever the micro-batch it is in."""
        features, config, count = self.head.features, self.config, loss_count(batch)
        assert features is not None, "a penalty follows a forward pass"
        self.head.features = None  # its graph ends with the micro-batch
        total = (features.order.float().sum() + features.task.float().sum()) * 0.0  # some steps do not use them
        if not count:
            return total
        real, halves = is_real(batch), is_halves(batch)
        generic, specific = features.generic.float(), features.specific.float()
        scores = features.order[halves].float()
        order = cross_entropy(scores, orders(batch), ignore_index=IGNORE, reduction="sum")
        total = total + 2 * config.order_weight * order  # a mean over halves, which are every second row
        if self._replays:
            tasks = self._task_of(batch.rows[real]).repeat(2)  # halves stand in the order of their texts
            scores = torch.cat([features.task[real], features.task[halves]]).float()
            total = total + config.task_weight * cross_entropy(scores, tasks, reduction="sum")
        if self.before:
            hold = config.hold_replayed if self._replays else config.hold
            total = total + 2 * hold * self._distance(batch.rows[real], generic[real], specific[real])
        penalty: Tensor = total / count
        return penalty

    def _distance(self, rows_R: Tensor, generic_RF: Tensor, specific_RF: Tensor) -> Tensor:
        """Return the weighted squared distance to features before the task, summed over rows."""
        rows, (new, stored) = rows_R.cpu(), (self.before["new"], self.before["stored"])
        is_new = (rows >= 0).unsqueeze(1)
        before = torch.where(is_new, new[rows.clamp(min=0)], stored[(FIRST - rows).clamp(min=0)])
        generic_before, specific_before = before.to(generic_RF.device).chunk(2, dim=1)
        generic = (generic_RF - generic_before).square().mean(1).sum()
        specific = (specific_RF - specific_before).square().mean(1).sum()
        distance: Tensor = self.config.generic_weight * generic + self.config.specific_weight * specific
        return distance

    def _task_of(self, rows_R: Tensor) -> Tensor:
        """Return `[R]`: which of all tasks so far each row belongs to."""
        rows = rows_R.cpu()
        stored = self._owners[(FIRST - rows).clamp(min=0)]
        tasks: Tensor = torch.where(rows >= 0, len(self.tasks) - 1, stored).to(rows_R.device)
        return tasks

    def end_task(self, context: TaskContext) -> Learned:
        """Store rows of the task; nothing is published."""
        for table in context.tables("train"):
            count = len(context.stored_rows(table.task, self.config.share))
            if self.config.selection == "kmeans":
                states = self._read(self._opened([(table.task, np.arange(len(table)))]))[1]
                rows = same_everywhere(nearest_to_centroids(states, count, self.seed), self.backbone.device)
            else:
                draw = generator(self.seed, table.task.name, "idbr")
                rows = np.sort(draw.permutation(len(table))[:count])
            self.stored[table.task.name] = rows
        self.before = {}
        return Learned(not_served=self.not_served)

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        rows = {f"stored/{task}/rows": torch.from_numpy(kept.astype(np.int64)) for task, kept in self.stored.items()}
        before = {f"before/{name}": value for name, value in self.before.items()}
        return {**values, "tasks": list(self.tasks), "stored": list(self.stored)}, tensors | rows | before

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(values, tensors)
        self.tasks = list(values["tasks"])
        self.task_head.resize(len(self.tasks))
        self.stored = {task: tensors[f"stored/{task}/rows"].numpy() for task in values["stored"]}
        self.before = dict(under("before/", tensors))
