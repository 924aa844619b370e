"""IDBR: features split into a task-generic and a task-specific space, each held to what it was before the task.

    L + order_weight CE(order of halves | g) + task_weight CE(task | s)
      + hold ( specific_weight MSE(s, s_before) + generic_weight MSE(g, g_before) )

g and s are two learned projections of the sentence state, and the label head reads both. The order is
next-sentence prediction: each example brings its two halves along, in their own order or swapped. In every
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

Heads, with h `[B, D]`, g and s `[B, F]`:

    g = tanh(W_g h + b_g)    s = tanh(W_s h + b_s)    scores = W [g; s] + b    order = O g + o    task = T s + t

Label and task rows grow and start at zero; projections and the order's rows start as torch's linear layers do, drawn by
the seed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from raycl.backbone import Backbone, Output
from raycl.backbone.base import loss_count
from raycl.backbone.encoder import NamedRows, grown
from raycl.data.loader import batch_of
from raycl.data.selection import generator
from raycl.data.sources.cache import Indices
from raycl.errors import ConfigError
from raycl.methods.base import Learned, Method, MethodConfig, State, phase_labels, under
from raycl.methods.context import TaskContext
from raycl.methods.pseudo_samples.samples import same_everywhere
from raycl.methods.replay.stored_rows import FIRST, StoredRows, dealt, joined
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
        numbers, first = list[int](), 0
        for task, count in enumerate(self._rows.counts):
            numbers += [first + number for number in dealt(batch, count, seed + task)]
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


@dataclass(frozen=True)
class Features:
    """The features of one forward pass.

    Attributes:
        state: `[B, D]`, what was projected. generic, specific: `[B, F]`.
        order: `[B, 2]`, scores of the order of halves. task: `[B, T]`, of the tasks.
    """

    state: Tensor
    generic: Tensor
    specific: Tensor
    order: Tensor
    task: Tensor

    def both(self) -> Tensor:
        """Return `[B, 2 F]` float32."""
        return torch.cat([self.generic, self.specific], dim=1).float()


class DisentangledHead(NamedRows):
    """A label head with named rows over two projections.

    Attributes:
        labels: row order, by first appearance.
        weight: `[C, 2 F]`. bias: `[C]`.
        features: features of the last forward pass; None before. All scores are computed in it, since engines that
            share weights out have them whole there.
    """

    def __init__(self, states: int, width: int, seed: int, device: torch.device, task_head: TaskHead) -> None:
        """Create heads on D `states` with F (`width`) features; `task_head` is the backbone's own module."""
        super().__init__()
        self.labels: list[str] = []
        self.features: Features | None = None
        self._seed = seed
        self._task_head = (task_head,)  # in a tuple: not a module of this one
        self.generic: nn.Linear = _linear(states, width, device)
        self.specific: nn.Linear = _linear(states, width, device)
        self.order: nn.Linear = _linear(width, 2, device)
        self.weight = nn.Parameter(torch.zeros(0, 2 * width, device=device))
        self.bias = nn.Parameter(torch.zeros(0, device=device))
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        draw = torch.Generator().manual_seed(self._seed)
        for layer in (self.generic, self.specific, self.order):
            bound = layer.in_features**-0.5
            for parameter in (layer.weight, layer.bias):
                parameter.copy_((torch.rand(parameter.shape, generator=draw) * 2 - 1) * bound)

    def clear(self) -> None:
        """Forget every label, and draw the projections anew (a new model begins)."""
        super().clear()
        self._draw()

    def forward(self, pooled_BD: Tensor) -> Tensor:
        """Return scores `[B, C]` over all labels seen so far."""
        generic_BF, specific_BF = self.generic(pooled_BD).tanh(), self.specific(pooled_BD).tanh()
        order_B2, task_BT = self.order(generic_BF), self._task_head[0](specific_BF)
        self.features = Features(pooled_BD, generic_BF, specific_BF, order_B2, task_BT)
        return linear(torch.cat([generic_BF, specific_BF], dim=1), self.weight, self.bias)


class TaskHead(nn.Module):
    """Scores over the tasks seen so far; a module of its own, since it has a learning rate of its own."""

    def __init__(self, width: int, device: torch.device) -> None:
        """Create a head on F (`width`) features."""
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.zeros(0, width, device=device))
        self.bias: nn.Parameter = nn.Parameter(torch.zeros(0, device=device))

    def resize(self, tasks: int) -> None:
        """Resize to one row per task: zero rows are appended, or the last ones dropped."""
        more = max(tasks - len(self.bias), 0)
        self.weight = grown(self.weight, more, tasks)
        self.bias = grown(self.bias, more, tasks)

    def forward(self, specific_BF: Tensor) -> Tensor:
        """Map `[B, F]` to `[B, T]`."""
        return linear(specific_BF, self.weight, self.bias)


def _linear(inputs: int, outputs: int, device: torch.device) -> nn.Linear:
    """Return a linear without values, since each kind of device would draw other numbers."""
    return nn.Linear(inputs, outputs, device="meta").to_empty(device=device)


HALVES = -(1 << 40)
"""Position in a batch of halves in their own order; one below it: swapped; two below: a text too short to be cut."""


def is_halves(batch: Batch) -> Tensor:
    """Return `[B]` bool."""
    return batch.rows <= HALVES


def is_real(batch: Batch) -> Tensor:
    """Return `[B]` bool: rows of the current task and stored ones, neither halves nor fill-ups."""
    return ((batch.rows >= 0) | (batch.rows <= FIRST)) & (batch.rows > HALVES)


def orders(batch: Batch) -> Tensor:
    """Return `[H]` of all halves in a batch: 0 their own order, 1 swapped, IGNORE too short."""
    order_H = HALVES - batch.rows[is_halves(batch)]
    return order_H.masked_fill(order_H > 1, IGNORE)


def halves_of(batch: Batch, seed: int, special_ids: Collection[int], limit: int, pad_id: int) -> Batch:
    """Return the halves of each real example, in the order of the batch, with its label.

        [CLS] x1 [SEP] x2 [SEP]    or    [CLS] x2 [SEP] x1 [SEP]

    The cut is drawn, and the order is swapped with probability 1/2, both by the seed and the example's position alone.
    What surrounds a text (special tokens) stays as the tokenizer put it; what ends it stands between the halves too.

    Args:
        limit: most tokens of an example; a text loses its last ones where the mark between the halves needs room.
    """
    places = is_real(batch).nonzero().squeeze(1).tolist()
    sources, rows = list[list[int]](), list[int]()
    for row in places:
        ids = batch.source_ids[row][batch.source_mask[row] > 0].tolist()
        halves, order = _cut(ids, seed, int(batch.rows[row]), special_ids, limit)
        sources.append(halves)
        rows.append(HALVES - order)
    return replace(
        batch_of(sources, pad_id),
        target_ids=batch.target_ids[places],
        label_ids=batch.label_ids[places],
        weight=batch.weight[places],
        rows=torch.tensor(rows, dtype=torch.int64),
        texts=tuple(batch.texts[row] for row in places) if batch.texts else (),
        tasks=tuple(batch.tasks[row] for row in places) if batch.tasks else (),
    )


def _cut(ids: Sequence[int], seed: int, row: int, special_ids: Collection[int], limit: int) -> tuple[list[int], int]:
    """Return a text's halves with what surrounds it, and 0: in their own order, 1: swapped, 2: too short to be cut."""
    words = [index for index, token in enumerate(ids) if token not in special_ids]
    if len(words) < 2:
        return list(ids), 2
    start, end = list(ids[: words[0]]), list(ids[words[-1] + 1 :])
    body = list(ids[words[0] : words[-1] + 1])[: max(2, limit - len(start) - 2 * len(end))]
    draw = np.random.Generator(np.random.PCG64([seed, row + (1 << 33)]))
    cut, swapped = int(draw.integers(1, len(body))), int(draw.integers(2))
    first, second = (body[cut:], body[:cut]) if swapped else (body[:cut], body[cut:])
    return [*start, *first, *end, *second, *end], swapped


ROUNDS = 25
"""The most rounds of k-means, from rows drawn by the seed (IDBR's code: scikit-learn's start and 300 rounds, 10
times)."""

DISTANCES_AT_ONCE = 4096
"""Rows whose distances are held together."""


def nearest_to_centroids(x_NC: Tensor, count: int, seed: int) -> Indices:
    """Return ascending numbers of at most `count` rows, the nearest one of each cluster; of equals the first.

    They are unlike each other and stand for the others.
    """
    if count >= len(x_NC):
        return np.arange(len(x_NC))
    draw = torch.Generator().manual_seed(seed)
    centroids_KC = x_NC[torch.randperm(len(x_NC), generator=draw)[:count].sort().values].clone()
    cluster_N = torch.full((len(x_NC),), -1)
    for _ in range(ROUNDS):
        before, (cluster_N, _) = cluster_N, _nearest(x_NC, centroids_KC)
        if torch.equal(before, cluster_N):
            break
        size_K = torch.bincount(cluster_N, minlength=count)
        sums_KC = torch.zeros_like(centroids_KC).index_add_(0, cluster_N, x_NC)
        means_KC = sums_KC / size_K.clamp(min=1).unsqueeze(1)
        centroids_KC = torch.where((size_K > 0).unsqueeze(1), means_KC, centroids_KC)
    cluster_N, distance_N = _nearest(x_NC, centroids_KC)
    farthest_K = torch.zeros(len(centroids_KC), dtype=distance_N.dtype, device=distance_N.device)
    farthest_K = farthest_K.scatter_reduce(0, cluster_N, distance_N, "amax").clamp(min=torch.finfo(x_NC.dtype).tiny)
    nearness_N = (distance_N / farthest_K[cluster_N]).round(decimals=4)
    order = torch.argsort(nearness_N, stable=True)  # rounded: both rows of a cluster of two are as near to their mean
    chosen: dict[int, int] = {}
    for row in order.tolist():
        chosen.setdefault(int(cluster_N[row]), row)
    return np.array(sorted(chosen.values()), dtype=np.int64)


def _nearest(x_NC: Tensor, centroids_KC: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[N]` the nearest centroid of each row, and its distance."""
    parts = [torch.cdist(rows, centroids_KC).min(1) for rows in torch.split(x_NC, DISTANCES_AT_ONCE)]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
