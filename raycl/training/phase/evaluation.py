"""Evaluation after a phase: a row of the accuracy matrix, and at the end the tasks that were never trained.

Every task's examples are spread over the workers.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raycl.data.loader import Collate, eval_batches
from raycl.data.tokens import Split
from raycl.errors import counted
from raycl.generation.answer_batch import AnswerBatch, Prompts
from raycl.generation.batch_answers import answers_continuously, predict
from raycl.generation.requests import AllowedTokens
from raycl.methods.base import activate
from raycl.metrics.text_scores import score_texts
from raycl.progress import counted_off
from raycl.scoring.general_ability import RoutedModel, ability, line_of_ability, measure
from raycl.scoring.scored_task import Predictions, ScoredTask, line_of, merge, predict_share
from raycl.storage import Storage
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.adaptation import answer_each
from raycl.training.phase.routing import PublishedRouter, TextAlone
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Mixture, Phase, Score, Task

log: logging.Logger = logging.getLogger("raycl")

OBJECTIVE_SEED = 0
"""Hides the same words of a text in every evaluation of every run, so that scores can be compared."""

UNSEEN, UNTRAINED, IN_CONTEXT = "unseen", "untrained", "in_context"
"""Folders of the answers to tasks that were never trained, and of the backbone before any training, without and with
examples."""

GENERAL_BEFORE = "general_before"
"""Kind of the cells of the backbone's general ability before any training."""

Before = Callable[[str], None]
"""Takes the name of a task that is evaluated next."""


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
class StreamEvaluation:
    """Evaluates tasks on the workers of a run. Its methods are collective.

    Attributes:
        storage: store of the answers; None: nothing is logged or written.
        router: router of the phase; None: the model has no adapters, or is in training, where the method routes.
        before: called on every worker before a task is evaluated, with its name; what it raises ends the evaluation.
        alone: reads texts without their tasks' instructions; None: each is read in its own task's prompt.
        folder: folder of the answers; "": the phase's.
        observations: gets the routing weights of all texts.
        split: the split; None: as configured. is_bare: answer by the backbone alone, without adapters.
        shots: examples in front of each text.
    """

    context: TrainingContext
    world: DistributedContext
    storage: Storage | None = None
    router: PublishedRouter | None = None
    before: Before | None = None
    alone: TextAlone | None = None
    folder: str = ""
    observations: Observations = field(default_factory=Observations)
    split: Split | None = None
    is_bare: bool = False
    shots: int = 0

    def row(self, phase: Phase) -> dict[str, Score]:
        """Return the task name -> score after `phase`; rank 0 logs each score and keeps the answers."""
        folder = self.folder or f"{phase.index:03d}-{phase.name}"
        return replace(self, folder=folder).scores(tasks_with_data(self.context, phase))

    def unseen(self) -> dict[str, Score]:
        """Return the task name -> score of tasks that were never trained, zero-shot; otherwise as `row`.

        The task id of such a task is not given to the router: a batch does not carry its name.
        """
        return self._titled("never trained", UNSEEN, self.context.stream.unseen)

    def untrained(self, known: Collection[str]) -> dict[str, Score]:
        """Return the task name -> score by the backbone before any training, unseen tasks included; as `row`.

        Args:
            known: tasks whose scores an earlier attempt has measured.
        """
        stream = self.context.stream
        tasks = [*filter(stream.has_data, stream.tasks), *stream.unseen]
        bare = replace(self, is_bare=True)
        return bare._titled("before any training", UNTRAINED, [task for task in tasks if task.name not in known])

    def in_context(self, known: Collection[str]) -> dict[str, Score]:
        """Return the task name -> score by the backbone before any training with examples, for tasks with train rows;
        as `untrained`."""
        stream, shots = self.context.stream, self.context.evaluation.shots
        tasks = [task for task in stream.tasks if len(stream.rows(task, "train")) and task.name not in known]
        bare = replace(self, is_bare=True, shots=shots)
        return bare._titled(f"before any training, {counted(shots, 'example')} in front", IN_CONTEXT, tasks)

    def general_before(self, known: Collection[str]) -> dict[str, Score]:
        """Return the general ability of the backbone before any training, unless it is known."""
        return {} if known else replace(self, is_bare=True).general()

    def general(self, learning: str = "") -> dict[str, Score]:
        """Return the task of lm-eval and its metric -> score, by texts that come without a task; rank 0 logs each.

        Args:
            learning: a task in training, as a text of which the method routes each.
        """
        context, world, router = self.context, self.world, self.router
        if self.before is not None:
            self.before("general ability")

        def route(batch: Batch) -> Mixture | None:
            if learning:
                with torch.no_grad():
                    return context.method.route(replace(batch.to(world.device), tasks=(learning,) * len(batch.tasks)))
            if self.is_bare or router is None:
                return None
            return router.rule.applied(router.mixture(batch.to(world.device)))

        activated, size = partial(activate, context.method), context.evaluation.batch_size
        share = world.rank, world.size
        model = RoutedModel(context.backbone, activated, route, size, share=share, gather=world.gather)
        scores = measure(model, context.evaluation.general)
        if world.is_first:
            log.info("    general ability %s: %.1f", "before any training" if self.is_bare else "now", ability(scores))
            for name, score in scores.items():
                log.info("%s", line_of_ability(name, score))
        return scores

    def _titled(self, title: str, folder: str, tasks: Sequence[Task]) -> dict[str, Score]:
        if tasks and self.world.is_first:
            log.info("    %s:", title)
        return replace(self, folder=folder).scores(tasks)

    def scores(self, tasks: Sequence[Task]) -> dict[str, Score]:
        """Return the task name -> score of these tasks."""
        context = self.context
        context.backbone.eval()
        with context.backbone.inference():
            if context.stream.text_objective(context.backbone.codec, OBJECTIVE_SEED) is not None:
                return {task.name: self._text_score(task) for task in counted_off(tasks, "evaluating tasks")}
            adapts = context.method.local_adaptation is not None and not self.is_bare
            if context.evaluation.decoding == "auto" and answers_continuously(context.backbone) and not adapts:
                shares = self._generated(tasks)
                return {task.name: self._cell(task, shares[task.name]) for task in tasks}
            return {
                task.name: self._cell(task, self._predicted(task)) for task in counted_off(tasks, "evaluating tasks")
            }

    def _generated(self, tasks: Sequence[Task]) -> dict[str, Predictions]:
        size, activated = self.context.evaluation.batch_size, partial(activate, self.context.method)
        decoder = AnswerBatch(self.context.backbone, activated, size)
        unanswered: set[tuple[str, int]] = set()

        def prompts() -> Iterator[Prompts]:
            for task in counted_off(tasks, "evaluating tasks"):
                scored = self._opened(task)
                start = scored.table.common_start() if self.alone is None else []
                labels, forms = scored.allowed.values(), self.context.forms
                tree = AllowedTokens(labels, self.context.backbone.codec.eos_id) if labels else None
                for batch in self._batches(scored, decoder.read_rows):
                    real = int((batch.rows >= 0).sum())  # the last ones of a worker may be fill-ups, without an answer
                    if real:
                        batch, mixture, names = self._read(task, batch.first(real).to(self.world.device))
                        unanswered.update((task.name, int(batch.rows[place])) for place in self._refused(mixture))
                        allowed = [tree or forms.get(name) for name in names]
                        yield Prompts(task.name, batch, scored.limit, mixture, start, allowed)

        shares: dict[str, Predictions] = {task.name: [] for task in tasks}
        for answer in decoder.answers(prompts()):
            refused = (answer.task, answer.row) in unanswered
            shares[answer.task].append((answer.row, "" if refused else answer.text))
        return shares

    def _predicted(self, task: Task) -> Predictions:
        scored, backbone, method = self._opened(task), self.context.backbone, self.context.method
        adaptation = None if self.is_bare else method.local_adaptation

        def answer(batch: Batch) -> list[str]:
            batch, mixture, names = self._read(task, batch)
            forms = list(map(self.context.forms.get, names))
            with activate(method, mixture):
                texts = predict(backbone, batch, scored.limit, forms)
            for place in self._refused(mixture):
                texts[place] = ""
            return texts

        def answers(batch: Batch) -> list[str]:
            batch = batch.to(self.world.device)
            return answer(batch) if adaptation is None else answer_each(method, adaptation, batch, answer)

        backbone.allowed_labels = scored.allowed
        try:
            return predict_share(self._batches(scored, self.context.evaluation.batch_size), answers)
        finally:
            backbone.allowed_labels = {}

    def _scored(self, task: Task) -> ScoredTask:
        context = self.context
        return ScoredTask(context.stream, task, context.evaluation, context.backbone.codec, self.split, self.shots)

    def _opened(self, task: Task) -> ScoredTask:
        """Return the task's rows, with their sentence embeddings computed by all workers together."""
        if self.before is not None:
            self.before(task.name)
        scored, encoder = self._scored(task), self.context.method.encoder
        if encoder is not None and not self.is_bare:
            seen = self.context.router_texts.words if self.alone is None else self.alone.seen
            texts = [seen(task, text) for text in scored.texts]
            encoder.embed_all(texts, (self.world.rank, self.world.size), self.world.gather)
        return scored

    def _batches(self, scored: ScoredTask, size: int) -> Iterator[Batch]:
        """Return this worker's share of a task's rows; those of an unseen task are of no task."""
        context, codec = self.context, self.context.backbone.codec
        reads = context.method.config.needs_texts or self.alone is not None or self.router is not None
        objective = context.stream.text_objective(codec, OBJECTIVE_SEED)
        router_texts = context.router_texts if self.alone is None else None
        collate = Collate([scored.table], codec.pad_id, None, reads, objective, router_texts)
        batches = eval_batches(collate, size, self.world.rank, self.world.size)
        if scored.task not in context.stream.unseen:
            return batches
        return (replace(batch, tasks=("",) * len(batch.tasks)) for batch in batches)

    def _cell(self, task: Task, share: Predictions) -> Score:
        scored = self._scored(task)
        answers = merge(self.world.gather(share), len(scored.table))
        cell = scored.score(answers)
        if self.world.is_first and self.storage is not None:
            log.info("%s", line_of(task.name, cell))
            if self.context.evaluation.save_predictions:
                scores: Sequence[float | None] = scored.row_scores(answers) or [None] * len(answers)
                rows = zip(scored.texts, scored.references, answers, scores, strict=True)
                lines = [
                    json.dumps({"text": text, "references": list(accepted), "answer": answer, "score": value})
                    for text, accepted, answer, value in rows
                ]
                name = f"predictions/{self.folder}/{task.name}.jsonl"
                self.storage.write(name, ("\n".join(lines) + "\n").encode())
        return cell

    def _text_score(self, task: Task) -> Score:
        scored = self._opened(task)

        def read(batch: Batch) -> Tensor:
            batch = batch.to(self.world.device)
            with activate(self.context.method, self._route(task, batch)):
                return self.context.backbone.read(batch).cpu()

        batches = self._batches(scored, self.context.evaluation.batch_size)
        cell = score_texts(batches, read, len(scored.table), self.world.gather)
        cell.extra |= {"truncated_sources": float(scored.table.truncated_sources)}
        if self.world.is_first and self.storage is not None:
            values = (task.name, cell.value, cell.extra["perplexity"], cell.extra["tokens"])
            log.info("    %-36s %5.1f  (perplexity %.4g, %d tokens)", *values)
        return cell

    def _read(self, task: Task, batch: Batch) -> tuple[Batch, Mixture | None, list[str]]:
        """Return a batch of a task's rows as it is read, its mixture, whose weights are observed, and the task whose
        prompt each row has."""
        if self.alone is None:
            return batch, self._route(task, batch), [task.name] * len(batch)
        read, mixture, names = self.alone.read(batch, task)
        self.observations.add(batch.tasks, mixture)
        return read, mixture, names

    def _refused(self, mixture: Mixture | None) -> list[int]:
        """Return the places of the texts of a batch that get no answer."""
        return [] if self.router is None else self.router.rule.refuses(mixture)

    def _route(self, task: Task, batch: Batch) -> Mixture | None:
        """Return the batch's mixture, whose weights are observed; none, for the bare backbone."""
        if self.context.method.stack is None or self.is_bare:
            return None
        if self.router is not None:
            name = None if task in self.context.stream.unseen else task.name
            mixture: Mixture | None = self.router.rule.applied(self.router.mixture(batch, name))
        else:
            with torch.no_grad():
                mixture = self.context.method.route(batch)
        self.observations.add(batch.tasks, mixture)
        return mixture


def bare_rows(evaluation: StreamEvaluation, known: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return cells of the backbone before any training, of the kinds that are configured (`eval.untrained`,
    `eval.shots`, `eval.general`). Collective.

    Args:
        known: kind -> cells that were measured before.
    """
    settings = evaluation.context.evaluation
    ways = {
        UNTRAINED: (settings.untrained, evaluation.untrained),
        IN_CONTEXT: (settings.shots, evaluation.in_context),
        GENERAL_BEFORE: (settings.general.tasks, evaluation.general_before),
    }
    return {kind: cells | (_cells(ways[kind][1](cells)) if ways[kind][0] else {}) for kind, cells in known.items()}


def dev_score(context: TrainingContext, task: Task, world: DistributedContext) -> float:
    """Return the score of the task's dev rows by the model in training. Collective; nothing is logged or written."""
    return StreamEvaluation(context, world, split="dev").scores([task])[task.name].value


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


@dataclass(frozen=True)
class ScoredRow:
    """A phase's part of the results.

    Attributes:
        row, unseen: task name -> cell; unseen: of the last phase only.
        other_row: the row that `eval.instruction` leaves out; {} where it would be the same, and before the last phase.
        summary: the method's and the modifiers', on the first worker.
        eval_s: seconds that it took.
        general: general ability (`eval.general`), where it is measured after this phase; else {}.
    """

    row: dict[str, Any]
    unseen: dict[str, Any]
    other_row: dict[str, Any]
    summary: dict[str, Any]
    eval_s: float
    general: dict[str, Any] = field(default_factory=dict)


def score_phase(
    context: TrainingContext,
    phase: Phase,
    world: DistributedContext,
    storage: Storage,
    before: Before,
    done: Checkpoint,
    known: ScoredRow | None = None,
) -> ScoredRow:
    """Evaluate the context's model as it is. Collective.

    Args:
        done: the phase's last checkpoint, with its router.
        known: what another worker group has scored already with the same model.
    """
    is_last, is_given = phase.index == len(context.phases) - 1, context.evaluation.instruction == "given"
    wants_other = is_last and context.evaluation.other_row
    if known is not None and not wants_other:
        return known
    began = time.perf_counter()
    router = PublishedRouter.of(context.method, done, context.evaluation)
    alone = TextAlone.after(context, storage, done, router) if is_last or not is_given else None
    evaluation = StreamEvaluation(context, world, storage, router, before, None if is_given else alone)
    if known is None:
        row = _cells(evaluation.row(phase))
        unseen = _cells(evaluation.unseen()) if is_last else {}
        observed = evaluation.observations.means(world.gather)
        summary = context.method.summary(observed) | context.modifiers.summary() if world.is_first else {}
        wants_general = context.evaluation.general.tasks and (is_last or context.evaluation.general.at != "ends")
        general = _cells(evaluation.general()) if wants_general else {}
        known = ScoredRow(row, unseen, {}, summary, 0.0, general)
    other: dict[str, Score] = {}
    if wants_other and alone is not None and alone.differs(tasks_with_data(context, phase)):
        if world.is_first:
            way = "by the text alone, without instructions" if is_given else "with each task's instruction"
            log.info("    %s:", way)
        folder = "chosen" if is_given else "given"
        chosen = alone if is_given else None
        other = replace(evaluation, alone=chosen, folder=folder, observations=Observations()).row(phase)
    return replace(known, other_row=_cells(other), eval_s=known.eval_s + time.perf_counter() - began)


def _cells(scores: dict[str, Score]) -> dict[str, Any]:
    return {name: asdict(score) for name, score in scores.items()}
