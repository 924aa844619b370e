"""The data of a phase on one worker: its batches, passes over them, and gradients on chosen rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from raycl.backbone.base import loss_count
from raycl.data.loader import Collate, GlobalOrder, Loader
from raycl.data.sources.cache import Indices
from raycl.data.text_objectives import TextObjective
from raycl.data.tokens import TokenRows
from raycl.methods.base import activate_batch
from raycl.methods.context import Quantity, TaskContext
from raycl.training.definition.seeds import micro_batch_size, stable_seed
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Phase, Task


class PhaseData:
    """The worker's side of a task context (`raycl.methods.context.PhaseWorker`), and the loader of the phase."""

    def __init__(self, context: TrainingContext, phase: Phase, world: DistributedContext) -> None:
        self.context, self.phase, self.world = context, phase, world

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all workers, in place."""
        return self.world.sum(tensor)

    def loader(self, task_context: TaskContext) -> tuple[Loader, GlobalOrder]:
        """Return batches of the phase's rows and those that the method added, shuffled together in every epoch."""
        context, train, codec, world = self.context, self.context.train, self.context.backbone.codec, self.world
        tables: list[TokenRows] = [context.stream.table(task, "train", codec) for task in self.phase.tasks]
        tables += task_context.added
        order = order_of(context, self.phase, sum(map(len, tables)))
        if train.group_by_length:
            order = replace(order, lengths=np.concatenate([table.source_lengths for table in tables]))
        micro = micro_batch_size(train.batch_size, train.micro_batch_size, world.size)
        sizes = (world.rank, world.size, micro, train.batch_size)
        needs_texts = context.method.needs_texts
        loader = Loader(tables, self._label_ids(), order, *sizes, codec.pad_id, needs_texts, self._text_objective())
        return loader, order

    def forward_pass(self, before: Callable[[Batch], None], examples: int | None = None) -> None:
        """Run the phase's training rows through the model, without gradients; see `TaskContext.forward_pass`."""
        self.each_batch(*self._own_rows(), before, self.context.backbone, examples)

    def mean_loss(self, examples: int | None = None) -> float:
        """Return the mean task loss on the phase's first training rows; see `TaskContext.mean_loss`."""
        total, count = torch.zeros((), dtype=torch.float64, device=self.world.device), 0

        def add(batch: Batch) -> None:
            nonlocal count
            total.add_(self.context.backbone(batch).loss_sum)
            count += loss_count(batch)

        self.each_batch(*self._own_rows(), nothing, add, examples)
        return float(self.world.sum(total)) / max(self.world.total(count)[0], 1.0)

    def gate_gradients(
        self, gates: Sequence[Tensor], loss: Callable[[Batch], Tensor], examples: int | None = None
    ) -> list[Tensor]:
        """Return gradients with regard to gates; see `TaskContext.gate_gradients`."""
        sums = [torch.zeros_like(gate) for gate in gates]

        def add(batch: Batch) -> None:
            with torch.enable_grad():
                parts = torch.autograd.grad(loss(batch), list(gates), allow_unused=True)
            for total, part in zip(sums, parts, strict=True):
                if part is not None:
                    total.add_(part)

        self.each_batch(*self._own_rows(), nothing, add, examples)
        return [self.world.sum(total) for total in sums]

    def _own_rows(self) -> tuple[Loader, GlobalOrder]:
        """Return rows of the phase's tasks alone."""
        return self.loader(TaskContext(self.phase, 0, self.context.stream, self.context.backbone.codec))

    def visit(self, read: Callable[[Batch], None]) -> None:
        """Give the phase's training rows to `read`; see `TaskContext.each_batch`."""
        context, codec, world = self.context, self.context.backbone.codec, self.world
        tables = [context.stream.table(task, "train", codec) for task in self.phase.tasks]
        collate = Collate(tables, self._label_ids(), codec.pad_id, context.method.needs_texts, self._text_objective())
        mine = collate.by_length(np.arange(collate.count))[world.rank :: world.size]
        size = context.evaluation.batch_size
        for start in range(0, -(-collate.count // world.size), size):
            read(collate(mine[start : start + size], size).to(world.device))

    def each_batch(
        self,
        loader: Loader,
        order: GlobalOrder,
        before: Callable[[Batch], None],
        forward: Callable[[Batch], object],
        examples: int | None = None,
    ) -> None:
        """Pass the first rows of the first epoch through `forward`, under the method's mixture, without gradients."""
        context = self.context
        rows = order.count if examples is None else min(examples, order.count)
        steps = min(order.steps, order.steps_per_epoch, -(-rows // context.train.batch_size))
        context.backbone.eval()
        for step in range(steps):
            for batch in loader.micro_batches(step):
                now = batch.to(self.world.device)
                before(now)
                with torch.no_grad(), activate_batch(context.method, now):
                    forward(now)

    def gradients(self, rows: Sequence[tuple[Task, Indices]]) -> dict[str, Tensor]:
        """Return gradients of the mean task loss on these rows; see `TaskContext.gradients`."""
        context, world, collate, trained = self.context, self.world, self._collate(rows), self._trained()
        mine = np.arange(collate.count)[world.rank :: world.size]
        size = micro_batch_size(context.train.batch_size, context.train.micro_batch_size, world.size)
        sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in trained.items()}
        count = 0
        for start in range(0, -(-collate.count // world.size), size):
            batch = collate(mine[start : start + size], size).to(world.device)
            count += loss_count(batch)
            with activate_batch(context.method, batch):
                loss = context.backbone(batch).loss_sum
                parts = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            for name, part in zip(trained, parts, strict=True):
                if part is not None:
                    sums[name] += part
        total = max(world.total(count)[0], 1.0)
        return {name: world.sum(gradient) / total for name, gradient in sums.items()}

    def row_gradients(
        self, rows: Sequence[tuple[Task, Indices]], of: Quantity
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield gradients on each of this worker's rows alone; see `TaskContext.row_gradients`."""
        backbone, method, world = self.context.backbone, self.context.method, self.world
        collate, trained = self._collate(rows), self._trained()
        backbone.train()  # labels compete as in training
        backbone.model.eval()  # and nothing is dropped
        for row in range(world.rank, collate.count, world.size):
            batch = collate(np.array([row]), 1).to(world.device)
            with activate_batch(method, batch):
                if of == "loss":
                    value = backbone(batch).loss_sum / max(loss_count(batch), 1)
                else:
                    value = backbone.true_logits(batch)
                parts = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
            pairs = zip(trained.items(), parts, strict=True)
            yield row, {name: torch.zeros_like(p).float() if g is None else g.float() for (name, p), g in pairs}

    def _collate(self, rows: Sequence[tuple[Task, Indices]]) -> Collate:
        """Return what makes batches of training rows of any tasks."""
        context, codec = self.context, self.context.backbone.codec
        tables = [context.stream.table(task, "train", codec).part(chosen) for task, chosen in rows]
        return Collate(tables, self._label_ids(), codec.pad_id, context.method.needs_texts, self._text_objective())

    def _trained(self) -> dict[str, Parameter]:
        """Return parameters that are trained and hold anything."""
        own = self.context.backbone.named_parameters()
        return {name: parameter for name, parameter in own if parameter.requires_grad and parameter.numel()}

    def _text_objective(self) -> TextObjective | None:
        """Return what makes batches of texts that are learned themselves."""
        context = self.context
        seed = stable_seed(context.info.seed, "exercise", self.phase.index)
        return context.stream.text_objective(context.backbone.codec, seed)

    def _label_ids(self) -> dict[str, int] | None:
        backbone = self.context.backbone
        return backbone.label_ids() if backbone.codec.needs_labels else None


def nothing(batch: Batch) -> None:
    """Do nothing before a batch."""


def order_of(context: TrainingContext, phase: Phase, rows: int) -> GlobalOrder:
    """Return the order in which so many rows of a phase are trained, which depends on the config alone."""
    train, seed = context.train, stable_seed(context.info.seed, "order", phase.index)
    return GlobalOrder(rows, train.batch_size, train.epochs_of(phase.name), seed, train.max_steps)


def rows_of(context: TrainingContext, phase: Phase) -> int:
    """Return the training rows of a phase's own tasks."""
    return sum(len(context.stream.rows(task, "train")) for task in phase.tasks)
