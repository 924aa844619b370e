"""Evaluation after a phase: a row of the accuracy matrix, and at the end the tasks that were never trained.

Every task's examples are spread over the workers.

What it does not know: what was trained, and where the row is recorded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from raycl.data.conversation import last_contents
from raycl.data.loader import eval_batches
from raycl.data.tokens import Split, TokenTable
from raycl.eval.evaluator import evaluate
from raycl.eval.language import score_texts
from raycl.eval.metrics import NEED_SOURCES
from raycl.generation.answers import predict
from raycl.methods.base import activate
from raycl.storage import Storage
from raycl.training.distributed import DistributedContext
from raycl.training.training_context import TrainingContext
from raycl.types import Batch, Mixture, Phase, Score, Task

log = logging.getLogger("raycl")

OBJECTIVE_SEED = 0
"""Hides the same words of a text in every evaluation of every run, so that scores can be compared."""


UNSEEN, UNTRAINED = "unseen", "untrained"
"""Folders of the answers to tasks that were never trained, and of the backbone before any training."""

Before = Callable[[str], None]
"""Called on every worker before a task is evaluated, with its name; what it raises ends the evaluation."""


def _no_check(task: str) -> None:
    """Nothing to do before a task."""


class Observations:
    """Routing weights of evaluated texts before pruning, added up by task on this worker."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def add(self, tasks: Sequence[str], mixture: Mixture | None) -> None:
        """The weights of a batch; texts without a task are fill-ups or of unseen tasks."""
        if mixture is None or mixture.unpruned is None:
            return
        for task, weights_N in zip(tasks, mixture.unpruned.weights.detach().cpu(), strict=False):
            if task:
                total, count = self._sums.get(task, (torch.zeros_like(weights_N), 0))
                self._sums[task] = (total + weights_N, count + 1)

    def means(self, gather: Callable[[Any], Sequence[Any]]) -> dict[str, Tensor]:
        """Task -> mean weights `[N]` over the texts of all workers. Collective."""
        found: dict[str, tuple[Tensor, int]] = {}
        for task, (total, count) in (item for share in gather(self._sums) for item in share.items()):
            before, counted = found.get(task, (torch.zeros_like(total), 0))
            found[task] = (before + total, counted + count)
        return {task: total / count for task, (total, count) in found.items()}


@dataclass(frozen=True)
class _Pass:
    """An evaluation of some tasks.

    Attributes:
        storage: where the answers are kept; None: nothing is logged or written.
        folder: of the answers. observations: gets the routing weights of all texts.
        split: None: as configured. is_bare: by the backbone alone, without adapters.
    """

    world: DistributedContext
    storage: Storage | None = None
    folder: str = ""
    observations: Observations = field(default_factory=Observations)
    before: Before = _no_check
    split: Split | None = None
    is_bare: bool = False


def evaluate_row(
    context: TrainingContext,
    phase: Phase,
    world: DistributedContext,
    storage: Storage,
    observations: Observations,
    before: Before = _no_check,
) -> dict[str, Score]:
    """Task name -> score after `phase`. Collective; rank 0 logs each score and keeps the answers.

    Args:
        observations: gets the routing weights of all texts.
    """
    context.backbone.eval()
    row = _Pass(world, storage, f"{phase.index:03d}-{phase.name}", observations, before)
    return {
        task.name: _score(context, task, row)
        for task in evaluated_tasks(context, phase)
        if context.stream.has_data(task)
    }


def evaluate_unseen(
    context: TrainingContext, world: DistributedContext, storage: Storage, before: Before = _no_check
) -> dict[str, Score]:
    """Task name -> score of tasks that were never trained, zero-shot; otherwise as `evaluate_row`.

    The task id of such a task is not given to the router: a batch does not carry its name.
    """
    context.backbone.eval()
    if context.stream.unseen and world.is_first:
        log.info("    never trained:")
    row = _Pass(world, storage, UNSEEN, before=before)
    return {task.name: _score(context, task, row) for task in context.stream.unseen}


def evaluate_untrained(
    context: TrainingContext,
    known: Collection[str],
    world: DistributedContext,
    storage: Storage,
    before: Before = _no_check,
) -> dict[str, Score]:
    """Task name -> score by the backbone before any training, unseen tasks included; as `evaluate_row`.

    Args:
        known: tasks whose scores an earlier attempt has measured.
    """
    context.backbone.eval()
    tasks = [*(task for task in context.stream.tasks if context.stream.has_data(task)), *context.stream.unseen]
    missing = [task for task in tasks if task.name not in known]
    if missing and world.is_first:
        log.info("    before any training:")
    row = _Pass(world, storage, UNTRAINED, before=before, is_bare=True)
    return {task.name: _score(context, task, row) for task in missing}


def dev_score(context: TrainingContext, task: Task, world: DistributedContext) -> float:
    """Score of the task's dev rows by the model in training. Collective; nothing is logged or written."""
    return _score(context, task, _Pass(world, split="dev")).value


def evaluated_tasks(context: TrainingContext, phase: Phase) -> list[Task]:
    """The phase's own tasks (one model per task), every task seen, or all."""
    if context.schedule.one_model_per_task:
        return list(phase.tasks)
    if context.evaluation.tasks == "all":
        return list(context.stream.tasks)
    return [task for seen in context.phases[: phase.index + 1] for task in seen.tasks]


def _score(context: TrainingContext, task: Task, row: _Pass) -> Score:
    """One cell."""
    row.before(task.name)
    world, settings, codec = row.world, context.evaluation, context.backbone.codec
    table = context.stream.table(task, row.split or settings.split, codec)
    encoder = context.method.encoder
    if encoder is not None and not row.is_bare:
        encoder.embed_all(table.texts(range(len(table))), (world.rank, world.size), world.gather)
    reads = context.method.needs_texts
    text_objective = context.stream.text_objective(codec, OBJECTIVE_SEED)
    sizes = (world.rank, world.size, settings.batch_size)
    batches = eval_batches(table, None, *sizes, codec.pad_id, reads, text_objective)
    if task in context.stream.unseen:
        batches = map(_without_task, batches)
    if text_objective is not None:
        return _text_score(context, task, table, batches, row)
    limit = settings.max_new_tokens or codec.max_target_tokens
    references = table.references(range(len(table)))
    others = {label for other in context.stream.tasks if other is not task for label in other.labels or ()}
    with _allow_labels(context, task):
        answers, cell = evaluate(
            task,
            batches,
            lambda batch: _answers(context, batch.to(world.device), limit, row),
            references,
            others,
            world.gather,
            sources=last_contents(table.texts(range(len(table)))) if task.metric in NEED_SOURCES else (),
            off_task_is_wrong=settings.off_task == "wrong",
        )
    cell.extra |= {"truncated_sources": float(table.truncated_sources)}
    if world.is_first and row.storage is not None:
        off = f", {cell.extra['off_task']:g} off task" if cell.extra.get("off_task") else ""
        log.info("    %-36s %5.1f  (%d examples%s)", task.name, cell.value, cell.count, off)
        if settings.save_predictions:
            name = f"predictions/{row.folder}/{task.name}.jsonl"
            row.storage.write(name, _jsonl(table.texts(range(len(table))), references, answers))
    return cell


def _text_score(
    context: TrainingContext,
    task: Task,
    table: TokenTable,
    batches: Iterable[Batch],
    row: _Pass,
) -> Score:
    """Where texts themselves are learned."""

    def read(batch: Batch) -> Tensor:
        batch = batch.to(row.world.device)
        with _routed(context, batch, row):
            return context.backbone.read(batch).cpu()

    cell = score_texts(batches, read, len(table), row.world.gather)
    cell.extra |= {"truncated_sources": float(table.truncated_sources)}
    if row.world.is_first and row.storage is not None:
        values = (task.name, cell.value, cell.extra["perplexity"], cell.extra["tokens"])
        log.info("    %-36s %5.1f  (perplexity %.4g, %d tokens)", *values)
    return cell


def _without_task(batch: Batch) -> Batch:
    """The batch as of no task, for tasks that the method cannot know."""
    return replace(batch, tasks=("",) * len(batch.tasks))


@contextmanager
def _allow_labels(context: TrainingContext, task: Task) -> Iterator[None]:
    """Restrict answers to the task's own labels, if `eval.labels` is `task`."""
    context.backbone.allowed_labels = tuple(task.labels or ()) if context.evaluation.labels == "task" else ()
    try:
        yield
    finally:
        context.backbone.allowed_labels = ()


def _answers(context: TrainingContext, batch: Batch, limit: int, row: _Pass) -> list[str]:
    with _routed(context, batch, row):
        return predict(context.backbone, batch, limit)


def _routed(context: TrainingContext, batch: Batch, row: _Pass) -> AbstractContextManager[None]:
    """The batch's mixture is active, and its weights are observed; none, for the bare backbone."""
    method = context.method
    mixture = None if method.stack is None or row.is_bare else method.route(batch)
    row.observations.add(batch.tasks, mixture)
    return activate(method, mixture)


def _jsonl(texts: Sequence[str], references: Sequence[Sequence[str]], answers: Sequence[str]) -> bytes:
    rows = zip(texts, references, answers, strict=True)
    lines = [json.dumps({"text": text, "references": list(refs), "answer": answer}) for text, refs, answer in rows]
    return ("\n".join(lines) + "\n").encode()
