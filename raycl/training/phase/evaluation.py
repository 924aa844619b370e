"""Evaluation after a phase: a row of the accuracy matrix, and at the end the tasks that were never trained.

Every task's examples are spread over the workers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raycl.data.loader import eval_batches
from raycl.data.tokens import Split
from raycl.generation.answer_batch import AnswerBatch, Prompts
from raycl.generation.batch_answers import answers_continuously, predict
from raycl.generation.requests import AllowedTokens
from raycl.methods.base import activate
from raycl.metrics.text_scores import score_texts
from raycl.scoring.scored_task import Predictions, ScoredTask, line_of, merge, predict_share
from raycl.storage import Storage
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.adaptation import answer_each
from raycl.training.phase.routing import PublishedRouter, TextAlone
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Mixture, Phase, Score, Task

log = logging.getLogger("raycl")

OBJECTIVE_SEED = 0
"""Hides the same words of a text in every evaluation of every run, so that scores can be compared."""


UNSEEN, UNTRAINED = "unseen", "untrained"
"""Folders of the answers to tasks that were never trained, and of the backbone before any training."""

Before = Callable[[str], None]
"""Called on every worker before a task is evaluated, with its name; what it raises ends the evaluation."""


def _no_check(task: str) -> None:
    """Do nothing before a task."""


class Observations:
    """Routing weights of evaluated texts before pruning, added up by task on this worker."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def add(self, tasks: Sequence[str], mixture: Mixture | None) -> None:
        """Add the weights of a batch; texts without a task are fill-ups or of unseen tasks."""
        if mixture is None or mixture.unpruned is None:
            return
        for task, weights_N in zip(tasks, mixture.unpruned.weights.detach().cpu(), strict=False):
            if task:
                total, count = self._sums.get(task, (torch.zeros_like(weights_N), 0))
                self._sums[task] = (total + weights_N, count + 1)

    def means(self, gather: Callable[[Any], Sequence[Any]]) -> dict[str, Tensor]:
        """Return the task -> mean weights `[N]` over the texts of all workers. Collective."""
        means: dict[str, tuple[Tensor, int]] = {}
        for task, (total, count) in (item for share in gather(self._sums) for item in share.items()):
            before, counted = means.get(task, (torch.zeros_like(total), 0))
            means[task] = (before + total, counted + count)
        return {task: total / count for task, (total, count) in means.items()}


@dataclass(frozen=True)
class _Pass:
    """An evaluation of some tasks.

    Attributes:
        storage: store of the answers; None: nothing is logged or written.
        folder: folder of the answers. observations: gets the routing weights of all texts.
        split: the split; None: as configured. is_bare: answer by the backbone alone, without adapters.
        router: None: the model has no adapters, or is in training, where the method routes.
        alone: reads texts without their tasks' instructions; None: each is read in its own task's prompt.
    """

    world: DistributedContext
    storage: Storage | None = None
    folder: str = ""
    observations: Observations = field(default_factory=Observations)
    before: Before = _no_check
    split: Split | None = None
    is_bare: bool = False
    router: PublishedRouter | None = None
    alone: TextAlone | None = None


def evaluate_row(
    context: TrainingContext,
    phase: Phase,
    world: DistributedContext,
    storage: Storage,
    router: PublishedRouter | None,
    observations: Observations,
    before: Before = _no_check,
    alone: TextAlone | None = None,
    folder: str = "",
) -> dict[str, Score]:
    """Return the task name -> score after `phase`. Collective; rank 0 logs each score and keeps the answers.

    Args:
        router: router of the phase; None: the model has no adapters.
        observations: gets the routing weights of all texts.
        alone: reads texts without their tasks' instructions; None: each is read in its own task's prompt.
        folder: folder of the answers; "": the phase's.
    """
    context.backbone.eval()
    folder = folder or f"{phase.index:03d}-{phase.name}"
    row = _Pass(world, storage, folder, observations, before, router=router, alone=alone)
    return _scores(context, tasks_with_data(context, phase), row)


def evaluate_unseen(
    context: TrainingContext,
    world: DistributedContext,
    storage: Storage,
    router: PublishedRouter | None,
    before: Before = _no_check,
    alone: TextAlone | None = None,
) -> dict[str, Score]:
    """Return the task name -> score of tasks that were never trained, zero-shot; otherwise as `evaluate_row`.

    The task id of such a task is not given to the router: a batch does not carry its name.
    """
    context.backbone.eval()
    if context.stream.unseen and world.is_first:
        log.info("    never trained:")
    row = _Pass(world, storage, UNSEEN, before=before, router=router, alone=alone)
    return _scores(context, context.stream.unseen, row)


def evaluate_untrained(
    context: TrainingContext,
    known: Collection[str],
    world: DistributedContext,
    storage: Storage,
    before: Before = _no_check,
) -> dict[str, Score]:
    """Return the task name -> score by the backbone before any training, unseen tasks included; as `evaluate_row`.

    Args:
        known: tasks whose scores an earlier attempt has measured.
    """
    context.backbone.eval()
    tasks = [*(task for task in context.stream.tasks if context.stream.has_data(task)), *context.stream.unseen]
    missing = [task for task in tasks if task.name not in known]
    if missing and world.is_first:
        log.info("    before any training:")
    row = _Pass(world, storage, UNTRAINED, before=before, is_bare=True)
    return _scores(context, missing, row)


def dev_score(context: TrainingContext, task: Task, world: DistributedContext) -> float:
    """Return the score of the task's dev rows by the model in training. Collective; nothing is logged or written."""
    return _scores(context, [task], _Pass(world, split="dev"))[task.name].value


def tasks_with_data(context: TrainingContext, phase: Phase) -> list[Task]:
    """Return the evaluated tasks, but for those whose data is out of reach."""
    return [task for task in evaluated_tasks(context, phase) if context.stream.has_data(task)]


def evaluated_tasks(context: TrainingContext, phase: Phase) -> list[Task]:
    """Return the phase's own tasks (one model per task), every task seen, or all."""
    if context.schedule.one_model_per_task:
        return list(phase.tasks)
    if context.evaluation.tasks == "all":
        return list(context.stream.tasks)
    return [task for seen in context.phases[: phase.index + 1] for task in seen.tasks]


def _scores(context: TrainingContext, tasks: Sequence[Task], row: _Pass) -> dict[str, Score]:
    """Return the task name -> cell."""
    with context.backbone.inference():
        return _scored(context, tasks, row)


def _scored(context: TrainingContext, tasks: Sequence[Task], row: _Pass) -> dict[str, Score]:
    if context.stream.text_objective(context.backbone.codec, OBJECTIVE_SEED) is not None:
        return {task.name: _text_score(context, task, row) for task in tasks}
    adapts = context.method.local_adaptation is not None and not row.is_bare
    if context.evaluation.decoding == "auto" and answers_continuously(context.backbone) and not adapts:
        shares = _generated(context, tasks, row)
        return {task.name: _cell(context, task, shares[task.name], row) for task in tasks}
    return {task.name: _cell(context, task, _predicted(context, task, row), row) for task in tasks}


def _generated(context: TrainingContext, tasks: Sequence[Task], row: _Pass) -> dict[str, Predictions]:
    """Return this worker's answers to all tasks, decoded in one continuous batch."""
    backbone, method = context.backbone, context.method
    decoder = AnswerBatch(backbone, partial(activate, method), context.evaluation.batch_size)

    def prompts() -> Iterator[Prompts]:
        for task in tasks:
            scored = _opened(context, task, row)
            start = scored.table.common_start() if row.alone is None else []
            labels, limit = scored.allowed.values(), scored.limit
            allowed = AllowedTokens(labels, backbone.codec.eos_id) if labels else None
            for batch in _batches(context, scored, row, decoder.read_rows):
                real = int((batch.rows >= 0).sum())  # the last ones of a worker may be fill-ups, without an answer
                if real:
                    batch, mixture = _read(context, task, batch.first(real).to(row.world.device), row)
                    yield Prompts(task.name, batch, limit, mixture, start, allowed)

    shares: dict[str, Predictions] = {task.name: [] for task in tasks}
    for answer in decoder.answers(prompts()):
        shares[answer.task].append((answer.row, answer.text))
    return shares


def _predicted(context: TrainingContext, task: Task, row: _Pass) -> Predictions:
    """Return this worker's answers, batch by batch."""
    scored, backbone = _opened(context, task, row), context.backbone
    batches, limit = _batches(context, scored, row, context.evaluation.batch_size), scored.limit
    backbone.allowed_labels = scored.allowed
    try:
        return predict_share(batches, lambda batch: _answers(context, task, batch.to(row.world.device), limit, row))
    finally:
        backbone.allowed_labels = {}


def _task(context: TrainingContext, task: Task, row: _Pass) -> ScoredTask:
    return ScoredTask(context.stream, task, context.evaluation, context.backbone.codec, row.split)


def _opened(context: TrainingContext, task: Task, row: _Pass) -> ScoredTask:
    """Return the task's rows, with their sentence embeddings computed by all workers together. Collective."""
    row.before(task.name)
    scored, encoder = _task(context, task, row), context.method.encoder
    if encoder is not None and not row.is_bare:
        texts = scored.texts if row.alone is None else [row.alone.seen(text, task) for text in scored.texts]
        encoder.embed_all(texts, (row.world.rank, row.world.size), row.world.gather)
    return scored


def _batches(context: TrainingContext, scored: ScoredTask, row: _Pass, size: int) -> Iterator[Batch]:
    """Return this worker's share of a task's rows."""
    codec, routes_texts = context.backbone.codec, row.router is not None and "text" in row.router.router.needs
    reads = context.method.needs_texts or row.alone is not None or routes_texts
    objective = context.stream.text_objective(codec, OBJECTIVE_SEED)
    batches = eval_batches(scored.table, None, row.world.rank, row.world.size, size, codec.pad_id, reads, objective)
    return map(_without_task, batches) if scored.task in context.stream.unseen else batches


def _cell(context: TrainingContext, task: Task, share: Predictions, row: _Pass) -> Score:
    """Return a cell from all workers' answers. Collective."""
    scored = _task(context, task, row)
    answers = merge(row.world.gather(share), len(scored.table))
    cell = scored.score(answers)
    if row.world.is_first and row.storage is not None:
        log.info("%s", line_of(task.name, cell))
        if context.evaluation.save_predictions:
            name = f"predictions/{row.folder}/{task.name}.jsonl"
            row.storage.write(name, _jsonl(scored.texts, scored.references, answers))
    return cell


def _text_score(context: TrainingContext, task: Task, row: _Pass) -> Score:
    """Return the score where texts themselves are learned."""
    scored = _opened(context, task, row)
    batches = _batches(context, scored, row, context.evaluation.batch_size)

    def read(batch: Batch) -> Tensor:
        batch = batch.to(row.world.device)
        with activate(context.method, _route(context, task, batch, row)):
            return context.backbone.read(batch).cpu()

    cell = score_texts(batches, read, len(scored.table), row.world.gather)
    cell.extra |= {"truncated_sources": float(scored.table.truncated_sources)}
    if row.world.is_first and row.storage is not None:
        values = (task.name, cell.value, cell.extra["perplexity"], cell.extra["tokens"])
        log.info("    %-36s %5.1f  (perplexity %.4g, %d tokens)", *values)
    return cell


def _without_task(batch: Batch) -> Batch:
    """Return the batch as of no task, for tasks that the method cannot know."""
    return replace(batch, tasks=("",) * len(batch.tasks))


def _answers(context: TrainingContext, task: Task, batch: Batch, limit: int, row: _Pass) -> list[str]:
    def answer(batch: Batch) -> list[str]:
        batch, mixture = _read(context, task, batch, row)
        with activate(context.method, mixture):
            return predict(context.backbone, batch, limit)

    adaptation = context.method.local_adaptation
    if adaptation is None or row.is_bare:
        return answer(batch)
    return answer_each(context.method, adaptation, batch, answer)


def _read(context: TrainingContext, task: Task, batch: Batch, row: _Pass) -> tuple[Batch, Mixture | None]:
    """Return a batch of a task's rows as it is read, and its mixture, whose weights are observed."""
    if row.alone is None:
        return batch, _route(context, task, batch, row)
    read, mixture = row.alone.read(batch, task)
    row.observations.add(batch.tasks, mixture)
    return read, mixture


def _route(context: TrainingContext, task: Task, batch: Batch, row: _Pass) -> Mixture | None:
    """Return the batch's mixture, whose weights are observed; none, for the bare backbone."""
    if context.method.stack is None or row.is_bare:
        return None
    if row.router is not None:
        mixture: Mixture | None = row.router.mixture(batch, None if task in context.stream.unseen else task.name)
    else:
        with torch.no_grad():
            mixture = context.method.route(batch)
    row.observations.add(batch.tasks, mixture)
    return mixture


def _jsonl(texts: Sequence[str], references: Sequence[Sequence[str]], answers: Sequence[str]) -> bytes:
    rows = zip(texts, references, answers, strict=True)
    lines = [json.dumps({"text": text, "references": list(refs), "answer": answer}) for text, refs, answer in rows]
    return ("\n".join(lines) + "\n").encode()
