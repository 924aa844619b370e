"""The data of a phase on one worker: its batches, passes over them, and gradients on chosen rows."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from raycl.backbone.base import loss_count
from raycl.data.loader import Collate, GlobalOrder, Loader
from raycl.data.sources.cache import Indices
from raycl.data.tokens import Split, TokenRows
from raycl.methods.base import activate_batch
from raycl.methods.context import Quantity, TaskContext
from raycl.training.definition.task_order import epochs_of
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Phase, Task

log: logging.Logger = logging.getLogger("raycl")

SPLITS: tuple[Split, ...] = ("train", "dev")
"""Splits whose texts are encoded for the method."""


class PhaseData(TaskContext):
    """The context of a phase that is trained, on one worker, and the loader of the phase."""

    is_trained = True

    def __init__(
        self,
        context: TrainingContext,
        phase: Phase,
        world: DistributedContext,
        resumed: bool = False,
        trial: Callable[["PhaseData", int], Tensor | None] | None = None,
    ) -> None:
        """Make the context.

        Args:
            trial: what `trial_losses` calls; None: nothing can be trained.
        """
        super().__init__(phase, context.train.batch_size, context.stream, context.backbone.codec, resumed)
        self.context = context
        self.world = world
        self._trial = trial
        self.routed_text = context.method.config.routed_text
        before = () if context.schedule.one_model_per_task else context.phases[: phase.index]
        self.earlier_tasks = tuple(task for done in before for task in done.tasks)

    def encode(self) -> None:
        """Embed the texts of the phase, or in the first one those of all phases if the method fits ahead.

        Every text is encoded once, shared by the workers; the encoder keeps the embeddings for routing. Collective.
        """
        context, encoder, world = self.context, self.context.method.encoder, self.world
        if encoder is None:
            return
        self.phases = (self.phase,)
        if context.method.config.fits_ahead:
            self.phases = context.phases if self.phase.index == 0 else ()
        for phase in self.phases or (self.phase,):
            began, count = time.perf_counter(), 0
            for split in SPLITS:
                tasks = [task for task in phase.tasks if len(context.stream.rows(task, split))]
                tables = [context.stream.table(task, split, context.backbone.codec) for task in tasks]
                rows = [(table.task, text) for table in tables for text in table.texts(range(len(table)))]
                texts = [context.router_texts.words(task, text) for task, text in rows]
                of_phase = self.queries.setdefault(phase.index, {})
                of_phase[split] = encoder.embed_all(texts, (world.rank, world.size), world.gather)
                count += len(texts)
            if world.is_first:
                log.info("    %d texts encoded in %.1f s", count, time.perf_counter() - began)

    def sum(self, tensor: Tensor) -> Tensor:
        return self.world.sum(tensor)

    def loader(self) -> Loader:
        """Return batches of the phase's rows and those that the method added, shuffled together in every epoch."""
        return self._loader([*self.tables("train"), *self.added])

    def _loader(self, tables: Sequence[TokenRows]) -> Loader:
        order = order_of(self.context, self.phase, sum(map(len, tables)))
        if self.context.train.group_by_length:
            order = replace(order, lengths=np.concatenate([table.source_lengths for table in tables]))
        micro = self.context.train.examples_per_pass(self.world.size)
        return Loader(self._joined(tables), order, micro, self.world.rank, self.world.size)

    def forward_pass(self, before: Callable[[Batch], None], examples: int | None = None) -> None:
        self.compute_each(self._loader(self.tables("train")), self.context.backbone, examples, before)

    def mean_loss(self, examples: int | None = None) -> float:
        total, count = torch.zeros((), dtype=torch.float64, device=self.world.device), 0

        def add(batch: Batch) -> None:
            nonlocal count
            total.add_(self.context.backbone(batch).loss_sum)
            count += loss_count(batch)

        self.compute_each(self._loader(self.tables("train")), add, examples)
        return float(self.world.sum(total)) / max(self.world.total(count)[0], 1.0)

    def losses_of(self, loader: Loader, steps: Iterable[int]) -> Tensor:
        """Return `[M]` float64 on the CPU: the mean loss of each step's rows, without training. Collective.

        Labels compete as in training, and nothing is dropped.
        """
        method, backbone, means = self.context.method, self.context.backbone, []
        count, loss = (loss_count, None) if method.objective is None else (method.objective.count, method.objective)
        backbone.train()
        backbone.model.eval()
        for step in steps:
            total, counted = torch.zeros((), dtype=torch.float64, device=self.world.device), 0.0
            for batch in loader.micro_batches(step):
                batch, counted = batch.to(self.world.device), counted + count(batch)
                with torch.no_grad(), activate_batch(method, batch):
                    output = backbone(batch)
                    total += output.loss_sum if loss is None else loss(batch, output)
            means.append(float(self.world.sum(total)) / max(self.world.total(counted)[0], 1.0))
        return torch.tensor(means, dtype=torch.float64)

    def trial_losses(self, steps: int) -> Tensor | None:
        return super().trial_losses(steps) if self._trial is None else self._trial(self, steps)

    def gate_gradients(
        self, gates: Sequence[Tensor], loss: Callable[[Batch], Tensor], examples: int | None = None
    ) -> list[Tensor]:
        sums = [torch.zeros_like(gate) for gate in gates]

        def add(batch: Batch) -> None:
            with torch.enable_grad():
                parts = torch.autograd.grad(loss(batch), list(gates), allow_unused=True)
            for total, part in zip(sums, parts, strict=True):
                if part is not None:
                    total.add_(part)

        self.compute_each(self._loader(self.tables("train")), add, examples)
        return [self.world.sum(total) for total in sums]

    def each_batch(self, read: Callable[[Batch], None]) -> None:
        collate = self._joined(self.tables("train"))
        rows = collate.by_length(np.arange(collate.count))
        for batch in self._shared(collate, rows, self.context.evaluation.batch_size):
            read(batch)

    def compute_each(
        self,
        loader: Loader,
        forward: Callable[[Batch], object],
        examples: int | None = None,
        before: Callable[[Batch], None] | None = None,
    ) -> None:
        """Pass the first rows of the first epoch through `forward`, under the method's mixture, without gradients.

        Args:
            before: is called with each batch outside of the mixture.
        """
        context, order = self.context, loader.order
        rows = order.count if examples is None else min(examples, order.count)
        steps = min(order.steps, order.steps_per_epoch, -(-rows // context.train.batch_size))
        context.backbone.eval()
        for step in range(steps):
            for batch in loader.micro_batches(step):
                now = batch.to(self.world.device)
                if before is not None:
                    before(now)
                with torch.no_grad(), activate_batch(context.method, now):
                    forward(now)

    def gradients(self, rows: Sequence[tuple[Task, Indices]]) -> dict[str, Tensor]:
        context, world, collate, trained = self.context, self.world, self._collate(rows), self.trained()
        sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in trained.items()}
        count = 0
        for batch in self._shared(collate, np.arange(collate.count), context.train.examples_per_pass(world.size)):
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
        self, rows: Sequence[tuple[Task, Indices]], of: Quantity = "loss"
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        backbone, method, world = self.context.backbone, self.context.method, self.world
        collate, trained = self._collate(rows), self.trained()
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
        stream, codec = self.context.stream, self.context.backbone.codec
        return self._joined([stream.table(task, "train", codec).part(chosen) for task, chosen in rows])

    def _joined(self, tables: Sequence[TokenRows]) -> Collate:
        """Return what makes batches of these rows; texts that are learned themselves are hidden as in training."""
        context, backbone = self.context, self.context.backbone
        seed = stable_seed(context.info.seed, "exercise", self.phase.index)
        labels = backbone.label_ids() if backbone.codec.needs_labels else None
        objective = context.stream.text_objective(backbone.codec, seed)
        return Collate(
            tables, backbone.codec.pad_id, labels, context.method.config.needs_texts, objective, context.router_texts
        )

    def _shared(self, collate: Collate, rows: Indices, size: int) -> Iterator[Batch]:
        """Yield this worker's share of rows in batches of `size`, equally many on every worker."""
        mine = rows[self.world.rank :: self.world.size]
        for start in range(0, -(-len(rows) // self.world.size), size):
            yield collate(mine[start : start + size], size).to(self.world.device)

    def trained(self) -> dict[str, Parameter]:
        own = self.context.backbone.named_parameters()
        return {name: parameter for name, parameter in own if parameter.requires_grad and parameter.numel()}


def stable_seed(*words: int | str) -> int:
    """Return a 62-bit seed that these words always give, on every worker and machine."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, words)).encode()).digest()[:8], "big") >> 2


def order_of(context: TrainingContext, phase: Phase, rows: int | None = None) -> GlobalOrder:
    """Return the order in which so many rows of a phase are trained, which depends on the config alone; None: those of
    its own tasks."""
    if rows is None:
        rows = sum(len(context.stream.rows(task, "train")) for task in phase.tasks)
    train, seed = context.train, stable_seed(context.info.seed, "order", phase.index)
    epochs = epochs_of(train, context.stream, phase, context.backbone.codec)
    return GlobalOrder(rows, train.batch_size, epochs, seed, train.max_steps)
