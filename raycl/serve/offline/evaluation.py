"""Scores of a snapshot: on the tasks of a stream, as its run's evaluation scores them, and on rows of any files."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raycl.bank import Snapshot
from raycl.bank.manifest import TaskInfo
from raycl.data.prompts import Prompt
from raycl.data.sources.conversation import answer_of, messages_of
from raycl.data.sources.fields import SourceRow
from raycl.data.sources.ingest import MAX_AUTO_LABELS
from raycl.data.stream import Stream
from raycl.errors import BankError, DataError
from raycl.metrics.per_example import check_metric, metric_of, taken_for_same
from raycl.metrics.settings import EvalConfig
from raycl.scoring.scored_task import ScoredTask, line_of, recorded_settings, score_answers, sources_of
from raycl.serve.offline.model import OfflineModel, Text
from raycl.serve.offline.prediction_input import Input
from raycl.types import Score, Task

log: logging.Logger = logging.getLogger("raycl")


def score_snapshot(
    model: OfflineModel, stream: Stream, tasks: Sequence[Task], settings: EvalConfig
) -> dict[str, Score]:
    """Return task -> score, for these tasks of the stream.

    Raises:
        BankError: a task without answers.
    """
    scores = {}
    for task in tasks:
        if task.objective != "answer":
            raise BankError(
                f"task '{task.name}' trains on the texts themselves (stream.objective={task.objective}): it has no "
                "answers to evaluate a snapshot on: expected tasks with answers; see the run's own matrix"
            )
        rows = ScoredTask(stream, task, settings, model.codec)
        scores[task.name] = rows.score(model.answers_to(rows))
        log.info("%s", line_of(task.name, scores[task.name]))
    return scores


@dataclass(frozen=True)
class Evaluation:
    """The scores of a snapshot on rows.

    Attributes:
        labels: true and predicted labels, the most frequent first; () for generated answers.
        confusion: rows of each true label by predicted label, in that order.
        by_label: label -> precision, recall, f1-score (0 to 1) and support.
        tasks: task -> mean weight over the rows.
        mean_ood_score: None: the router has no such score.
        alone: the score of the texts without their task, where it is given and the texts can be read otherwise without;
            None: the same as `score`.
    """

    metric: str
    score: Score
    labels: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    by_label: dict[str, dict[str, float]] = field(default_factory=dict)
    tasks: dict[str, float] = field(default_factory=dict)
    mean_ood_score: float | None = None
    alone: Score | None = None


def evaluate_rows(model: OfflineModel, given: Input, metric: str | None = None, **settings: Any) -> Evaluation:
    """Answer all rows and compare with their references, as the snapshot's run compares the answers of a task.

    Its `eval.off_task` and `eval.max_new_tokens` count here too, and its `eval.labels` where the task is named.

    Args:
        metric: a name in `raycl.metrics.per_example.METRICS` or of a package; None: that of the task whose rows these
            are (`_task_of`), else `exact_match`.
        settings: settings of `OfflineModel.predict`.

    Raises:
        ConfigError: no such metric. DataError: no rows, or one cannot be used.
    """
    needs_sources = metric is None or check_metric(metric).needs_sources
    references: list[tuple[str, ...]] = []
    sources: list[str] = []
    with_calls: dict[int, str] = {}

    def texts() -> Iterator[Text]:
        for _, row in given.rows():
            if row.is_chat and any(len(answer_of(name)) > 1 for name in row.references):
                with_calls[len(references)] = row.text
            references.append(row.references)
            if needs_sources:
                sources.append(row.text)
            yield _text_of(row)

    rules = recorded_settings(model.snapshot)
    settings["max_tokens"] = settings.get("max_tokens") or rules.max_new_tokens
    named = next((info for info in model.snapshot.tasks if info.name == settings.get("task")), None)
    settings["allowed"] = model.answers_of(named) if named is not None and rules.labels == "task" else None
    answers, weights, ood_scores = [], Counter[str](), []
    for number, prediction in enumerate(model.predict(texts(), **settings)):
        if number in with_calls:
            task_name = settings.get("task") or next(iter(prediction.tasks), "")
            references[number] = tuple(model.as_generated(with_calls[number], references[number], task_name))
        answers.append(prediction.text)
        weights.update(prediction.tasks)
        ood_scores += [] if prediction.ood_score is None else [prediction.ood_score]
    if not answers:
        raise DataError(f"{', '.join(file.uri for file in given.files)}: no rows to evaluate: expected at least one")
    extra: dict[str, Any] = {}
    if model.answers == "label":
        truth = [known_task[0] for known_task in references]
        extra = dict(zip(("labels", "confusion", "by_label"), _by_label(truth, answers), strict=True))
    distinct = {text for accepted in references for text in accepted}
    task = _task_of(model.snapshot, distinct, settings.get("task"))
    labels = task.labels or (tuple(sorted(distinct)) if extra or len(distinct) <= MAX_AUTO_LABELS else None)
    others = {label for other in model.snapshot.tasks for label in other.labels or ()}.difference(labels or ())
    metric = metric or task.metric
    task = task.model_copy(update={"metric": metric, "labels": labels})
    compared = sources_of(metric, sources, Prompt.of(task)) if metric_of(metric).needs_sources else ()

    def scored(answers: Sequence[str]) -> Score:
        return score_answers(task, answers, references, compared, others, rules)

    alone = None
    if settings.get("task") and model.reads_alone:
        texts_alone = (_text_of(row) for _, row in given.rows())
        alone = scored([prediction.text for prediction in model.predict(texts_alone, **{**settings, "task": None})])
    return Evaluation(
        metric,
        scored(answers),
        alone=alone,
        tasks={task: total / len(answers) for task, total in weights.most_common()},
        mean_ood_score=sum(ood_scores) / len(ood_scores) if ood_scores else None,
        **extra,
    )


def _text_of(row: SourceRow) -> Text:
    return messages_of(row.text) if row.is_chat else row.text


def _task_of(snapshot: Snapshot, references: set[str], name: str | None) -> TaskInfo:
    """Return the task whose rows are evaluated, as far as it is known: the one named, else one with all these labels.

    Of several, one whose labels normalisation cannot tell apart.
    """
    fitting = [
        task for task in snapshot.tasks if task.name == name or (not name and references <= {*(task.labels or ())})
    ]
    return max(fitting, key=lambda task: taken_for_same(task.labels or ()) is not None, default=TaskInfo(name=""))


def _by_label(
    truth: list[str], answers: list[str]
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...], dict[str, dict[str, float]]]:
    from sklearn.metrics import classification_report, confusion_matrix  # a second of imports

    labels = tuple(label for label, _ in (Counter(truth) + Counter(answers)).most_common())
    confusion = confusion_matrix(truth, answers, labels=list(labels))
    report = classification_report(truth, answers, labels=list(labels), output_dict=True, zero_division=0)
    by_label = {label: {key: float(value) for key, value in report[label].items()} for label in labels}
    return labels, tuple(tuple(int(cell) for cell in row) for row in confusion), by_label
