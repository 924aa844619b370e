"""The rows of a task that are answered, and their score: the same for the workers of a run and for an engine."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from raycl import config as configs
from raycl.bank.manifest import Snapshot, TaskInfo
from raycl.data.prompts import Prompt
from raycl.data.sources.conversation import last_contents
from raycl.data.stream import Stream
from raycl.data.tokens import Split, TokenTable
from raycl.errors import counted
from raycl.metrics.answers import Answers
from raycl.metrics.per_example import metric_of, row_scores, score
from raycl.metrics.settings import EvalConfig
from raycl.types import Batch, Score, Task, TextCodec

Predictions = list[tuple[int, str]]
"""Pairs of row and answer."""


RECORDED = ("labels", "response_format", "off_task", "max_new_tokens", "unknown", "false_alarms")
"""Settings by which the run that made a snapshot judged answers."""


def recorded_settings(snapshot: Snapshot, **others: object) -> EvalConfig:
    """Return the settings of evaluation by which a snapshot's run judged answers, so that its scores are the run's.

    Args:
        others: settings that the caller decides.
    """
    recorded = snapshot.provenance.get("config", {}).get("eval", {})
    return configs.validate(EvalConfig, {name: recorded[name] for name in RECORDED if name in recorded} | others)


@dataclass(frozen=True)
class ScoredTask:
    """The rows of a task and their references.

    Attributes:
        split: the split; None: the configured one, sampled where `eval.subsample` is set.
        shots: examples in front of each text.
    """

    stream: Stream
    task: Task
    settings: EvalConfig
    codec: TextCodec
    split: Split | None = None
    shots: int = 0

    @cached_property
    def table(self) -> TokenTable:
        if self.split is not None:
            return self.stream.table(self.task, self.split, self.codec)
        return self.stream.scored(self.task, self.settings.split, self.codec, self.settings.subsample, self.shots)

    @property
    def texts(self) -> list[str]:
        """The texts of the rows, without prompts."""
        return self.table.texts(range(len(self.table)))

    @property
    def references(self) -> Sequence[Sequence[str]]:
        """Accepted answers of each row."""
        return self.table.references(range(len(self.table)))

    @property
    def limit(self) -> int:
        """The most tokens of a generated answer."""
        return self.settings.max_new_tokens or self.stream.limits(self.task, self.codec).target

    @property
    def allowed(self) -> dict[str, list[int]]:
        """The task's labels with their ids, if `eval.labels` is `task`: the only answers."""
        labels = (self.task.labels or ()) if self.settings.labels == "task" else ()
        return dict(zip(labels, self.stream.answer_ids(self.task, labels, self.codec), strict=True))

    def score(self, answers: Sequence[str]) -> Score:
        """Return the score of an answer to each row; behind examples that are no turns, it ends at a blank line."""
        prompt = self.stream.prompt(self.task, self.codec)
        sources = sources_of(self.task.metric, self.texts, prompt) if metric_of(self.task.metric).needs_sources else ()
        score = score_answers(
            self.task, self._ended(answers), self.references, sources, self._other_labels, self.settings
        )
        return replace(score, extra={**score.extra, "truncated_sources": float(self.table.truncated_sources)})

    def row_scores(self, answers: Sequence[str]) -> list[float] | None:
        """Return the score of each row, whose mean is `score`'s value; None: the task's metric is no mean of rows."""
        given = Answers(self._ended(answers), self.references, self.task.labels)
        wrong = self.settings.off_task == "wrong"
        return row_scores(self.task.metric, given, self._other_labels, off_task_is_wrong=wrong)

    def _ended(self, answers: Sequence[str]) -> Sequence[str]:
        if not self.shots or self.stream.prompt(self.task, self.codec).chat_template:
            return answers
        return [answer.partition("\n\n")[0].strip() for answer in answers]

    @property
    def _other_labels(self) -> set[str]:
        return {label for other in self.stream.tasks if other is not self.task for label in other.labels or ()}


def sources_of(metric: str, texts: Sequence[str], prompt: Prompt) -> Sequence[str]:
    """Return the input texts that a metric compares with: in their whole prompts (`Metric.reads_prompts`), or alone; of
    a conversation alone its last message."""
    return list(map(prompt.written, texts)) if metric_of(metric).reads_prompts else last_contents(texts)


def score_answers(
    task: Task | TaskInfo,
    answers: Sequence[str],
    references: Sequence[Sequence[str]],
    sources: Sequence[str],
    other_labels: Collection[str],
    settings: EvalConfig,
) -> Score:
    """Return the score of answers to texts, by the task's own metric.

    Args:
        sources: the texts, for metrics that compare with them (`Metric.needs_sources`).
        other_labels: label words of other tasks, which count as off-task answers.
        settings: evaluation settings of the run that learned the task.
    """
    return score(
        task.metric,
        Answers(answers, references, task.labels, sources),
        other_labels,
        off_task_is_wrong=settings.off_task == "wrong",
        with_interval=settings.subsample is not None,
    )


def line_of(task: str, score: Score) -> str:
    """Return a score as logs show it."""
    extra = score.extra
    off = f", {extra['off_task']:g} off task" if extra.get("off_task") else ""
    limits = f", 95 % interval {extra['low']:.1f} to {extra['high']:.1f}" if "low" in extra else ""
    return f"    {task:<36} {score.value:5.1f}  ({counted(score.count, 'example')}{off}{limits})"


def predict_share(batches: Iterable[Batch], predict: Callable[[Batch], list[str]]) -> Predictions:
    """Return a worker's answers; fill-ups are computed, so that workers stay in step, and dropped."""
    answers: Predictions = []
    for batch in batches:
        texts = predict(batch)
        answers += [(row, text) for row, text in zip(batch.rows.tolist(), texts, strict=True) if row >= 0]
    return answers


def merge(shares: Iterable[Predictions], count: int) -> list[str]:
    """Return all workers' answers in row order."""
    answers: Mapping[int, str] = dict(pair for share in shares for pair in share)
    assert sorted(answers) == list(range(count)), f"{len(answers)} answers for {count} rows"
    return [answers[row] for row in range(count)]
