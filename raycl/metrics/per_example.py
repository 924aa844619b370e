"""Per-task scores: predicted texts against reference texts, one number from 0 to 100.

The papers score the same tasks by different rules (whole string, first word, Rouge-L, F1), so each rule has a name, its
source, and a test. `METRICS` is the table; packages add to it. A task carries one name.

Labels: `exact_match` ignores case and punctuation, as SAPT does, and would take `-1` for `1` and `C++` for `C`. Where
it cannot tell two labels of a task apart, the task's answers are compared as they are. Published tasks have no such
labels.

Off-task answers: SLM (section 4.3) states that replies outside the task score 0, though its code has no such rule.
Here a reply counts as off-task when it is, after normalisation, a label word of another task and neither a label of
its own task nor one of its own references (`yes` belongs to several tasks). In a task with labels, so does a reply that
differs from them by punctuation and is a label of another task as it stands. Such replies score 0, except under metrics
of overlapping text (`Metric.overlap`), and are counted in `Score.extra` under every metric.
"""

import importlib.util
import re
import string
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial

import numpy as np

from raycl.errors import BackboneError, ConfigError, DataError, meant
from raycl.metrics import trace
from raycl.metrics.answers import Answers, Labels, Metric, mean_best
from raycl.metrics.matrix import ACCURACY
from raycl.metrics.overlap import bleu, edit_similarity, rouge, rouge_ascii, sari
from raycl.plugins import Names, load
from raycl.types import Score

_PUNCTUATION = str.maketrans("", "", string.punctuation)
AT_ONCE = 2**20
"""Drawn scores that are in memory together; all those of ten thousand rows would be gigabytes."""
_NO_LABEL = "<off task>"
"""F1 reads this text for an off-task answer."""


def score(
    metric: str,
    answers: Answers,
    other_labels: Collection[str] = (),
    *,
    off_task_is_wrong: bool = True,
    with_interval: bool = False,
) -> Score:
    """Score one task; the best of several references counts.

    Args:
        metric: a name in `METRICS`, or of a package.
        answers: one text per example, markers and prompt already cut off; sources where `Metric.needs_sources`.
        other_labels: label words of the other tasks; replies equal to one of them are off-task.
        off_task_is_wrong: off-task replies score 0, but under metrics of overlapping text; else they are only counted.
        with_interval: add `low` and `high`, the limits of the 95 % interval, where the metric is a mean of rows.

    Returns:
        Value 0-100, count, and in `extra` at least `off_task` and `empty` (numbers of examples).

    Raises:
        ConfigError: unknown metric, or its library is not installed.
        DataError: nothing to score, an example without reference, references that the metric cannot use.
    """
    rule = check_metric(metric)
    count = len(answers.predictions)
    assert count == len(answers.references), f"{count} predictions for {len(answers.references)} references"
    if not count:
        raise DataError("there are 0 examples to score: expected at least one, check the task's test split")
    for row, accepted in enumerate(answers.references):
        if not accepted:
            raise DataError(f"test example {row} has no reference: give at least one accepted answer")
    off_task = _off_task(answers, other_labels)
    empty = sum(text is not None and not text.strip() for text in answers.predictions)
    answers = _judged(rule, answers, off_task, off_task_is_wrong)
    value, extra = rule.compute(answers)
    if with_interval and rule.mean_of_rows:
        low, high = interval([rule.compute(row)[0] for row in answers.rows()])
        extra = {**extra, "low": low, "high": high}
    return Score(value, count, {"off_task": float(sum(off_task)), "empty": float(empty), **extra})


def row_scores(
    metric: str, answers: Answers, other_labels: Collection[str] = (), *, off_task_is_wrong: bool = True
) -> list[float] | None:
    """Return the score of each row, 0 to 100, whose mean is what `score` gives; None: the metric is no mean of rows.

    Args:
        metric, answers, other_labels, off_task_is_wrong: as in `score`.
    """
    rule = check_metric(metric)
    if not rule.mean_of_rows:
        return None
    judged = _judged(rule, answers, _off_task(answers, other_labels), off_task_is_wrong)
    return [rule.compute(row)[0] for row in judged.rows()]


def _off_task(answers: Answers, other_labels: Collection[str]) -> list[bool]:
    own_labels = {normalize(label) for label in answers.labels or ()}
    normalized = {normalize(label) for label in other_labels} - own_labels - {""}
    as_they_are = frozenset(other_labels) if answers.labels else frozenset()
    own = {_spaced(label) for label in answers.labels or ()}

    def is_foreign(prediction: str, accepted: Sequence[str]) -> bool:
        """Return whether a reply is a label of another task, and none of its own references."""
        reply = normalize(prediction)
        if reply in normalized:
            return all(reply != normalize(reference) for reference in accepted)
        return prediction in as_they_are and _spaced(prediction) not in own.union(map(_spaced, accepted))

    return [text is None or is_foreign(text, accepted) for text, accepted in answers.pairs()]


def _judged(rule: Metric, answers: Answers, off_task: Sequence[bool], off_task_is_wrong: bool) -> Answers:
    """Return the answers with those that count as wrong left out."""
    if not off_task_is_wrong or rule.overlap:
        return answers
    pairs = zip(answers.predictions, off_task, strict=True)
    return answers._replace(predictions=[None if wrong else text for text, wrong in pairs])


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the limits of the 95 % confidence interval of the mean of a sample's scores, 0 to 100.

    Rows that are right or wrong have Wilson's interval of a share, which is no point where all are right; others the
    bias-corrected and accelerated bootstrap of 9,999 resamples with a fixed seed (both of scipy). Rows are taken as
    drawn from endlessly many: for a sample that is a large part of its test set the interval is wider than it need be.
    """
    from scipy import stats  # half a second of imports, only paid by runs that sample

    values = np.asarray(scores, dtype=np.float64)
    if np.isin(values, (0.0, 100.0)).all():
        limits = stats.binomtest(int((values > 0).sum()), len(values)).proportion_ci(0.95, method="wilson")
        return 100.0 * float(limits.low), 100.0 * float(limits.high)
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    batch = max(1, AT_ONCE // len(values))
    limits = stats.bootstrap((values,), np.mean, n_resamples=9_999, batch=batch, rng=0).confidence_interval
    return float(limits.low), float(limits.high)


def metric_of(name: str) -> Metric:
    """Return the metric of a name: of `METRICS`, else of an installed package.

    Raises:
        ConfigError: unknown name (with the nearest one). PluginError: the package cannot be used.
    """
    metric = METRICS.get(name) or load("metric", name, Metric)
    if metric is None:
        raise ConfigError(f"unknown metric '{name}': {meant(name, sorted(METRIC_NAMES))}")
    return metric


def check_metric(name: str) -> Metric:
    """Return the metric of a name, if `score` can compute it, before any work starts.

    Raises:
        ConfigError: see `metric_of`; or an optional library is missing.
    """
    metric = metric_of(name)
    if metric.library and importlib.util.find_spec(metric.library) is None:
        raise ConfigError(
            f"metric '{name}' needs the library {metric.library.replace('_', '-')}: pip install {metric.install}"
        )
    return metric


def check_labels(metric: str, task: str, labels: Labels) -> None:
    """Refuse labels that the metric cannot tell apart.

    Raises:
        ConfigError: the metric reads first words, and a label has several, or two have the same.
    """
    if metric not in ("first_word", "first_word_lower"):
        return
    way_out = "use exact_match, or stream.answers=words with a word for each label"
    long = [label for label in labels or () if len(_words(label)) != 1]
    if long:
        raise ConfigError(f"task '{task}' is scored by '{metric}' and its label '{long[0]}' is not one word: {way_out}")
    same = _same(labels or (), lambda label: _words(label.lower() if metric == "first_word_lower" else label)[0])
    if same:
        raise ConfigError(
            f"task '{task}' is scored by '{metric}', to which its labels '{same[0]}' and '{same[1]}' are one "
            f"word: {way_out}"
        )


@lru_cache(maxsize=64)
def taken_for_same(labels: tuple[str, ...]) -> tuple[str, str] | None:
    """Return two labels, or one and the empty answer, that are equal after normalisation; None: there are none."""
    return _same(("", *labels), normalize)


def _same(labels: Collection[str], key: Callable[[str], str]) -> tuple[str, str] | None:
    """Return the first two different labels of one key."""
    first: dict[str, str] = {}
    return next(((seen, label) for label in labels if (seen := first.setdefault(key(label), label)) != label), None)


def normalize(text: str) -> str:
    """Return the text in lower case, ASCII punctuation deleted, runs of white space made one space (SAPT
    `compute_metrics.py`)."""
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def first_word(text: str) -> str:
    """Return the first word, everything that is no word character read as a space; empty if there is none (SLM)."""
    return next(iter(_words(text)), "")


def _words(text: str) -> list[str]:
    return re.sub(r"\W", " ", text).split()


def _spaced(text: str) -> str:
    """Return the text in lower case, runs of white space made one space; punctuation stays."""
    return " ".join(text.lower().split())


def _exact_match(answers: Answers) -> tuple[float, dict[str, float]]:
    """Compare normalised texts if these distinguish the task's labels, else the unchanged texts."""
    return mean_best(_equal if taken_for_same(tuple(answers.labels or ())) else _exact)(answers)


def _exact(prediction: str, reference: str) -> float:
    return float(normalize(prediction) == normalize(reference))


def _equal(prediction: str, reference: str) -> float:
    return float(prediction == reference)


def _first(prediction: str, reference: str) -> float:
    """Compare first words; a reference of several, by which wrong answers would be right, is refused."""
    words = _words(reference)
    if len(words) != 1:
        raise DataError(
            f"reference '{reference:.60}' is not one word, which first-word metrics need: use 'exact_match'"
        )
    return float(first_word(prediction) == words[0])


def _f1(answers: Answers, average: str) -> tuple[float, dict[str, float]]:
    """Compute F1 over label texts, and the share of right answers, which DAS reports with it.

    Macro: the unweighted mean over the classes that occur; replies that are no label are misses, not a class. Micro:
    over pooled decisions; replies that are no label are wrong, so this equals the accuracy. The truth is the reference
    that matches, else the first.
    """
    from sklearn.metrics import f1_score  # a second of imports, only paid by tasks that need it

    predictions = [_NO_LABEL if text is None else text for text in answers.predictions]
    pairs = list(zip(predictions, answers.references, strict=True))
    truth = [prediction if prediction in accepted else accepted[0] for prediction, accepted in pairs]
    predicted = set(predictions) & set(answers.labels or ()) if average == "macro" else set(predictions)
    classes = sorted(predicted.union(truth))
    value = f1_score(truth, predictions, labels=classes, average=average, zero_division=0)
    right = sum(prediction in accepted for prediction, accepted in pairs)
    return 100.0 * float(value), {ACCURACY: 100.0 * right / len(truth)}


def _bertscore(answers: Answers) -> tuple[float, dict[str, float]]:
    """Compute English BERTScore (roberta-large, layer 17, no idf, no rescaling); the best reference per number."""
    from bert_score import score as bert_score

    examples = list(zip(answers.predictions, answers.references, strict=True))
    met = sum(text is not None and not text.strip() and "" in accepted for text, accepted in examples)
    judged = [(text, list(accepted)) for text, accepted in examples if text is not None and text.strip()]
    sums = [float(met)] * 3
    if judged:
        try:
            parts = bert_score([text for text, _ in judged], [accepted for _, accepted in judged], lang="en")
        except OSError as error:
            raise BackboneError(
                f"metric 'bertscore' cannot load roberta-large: {error}; put the model into the local cache"
            ) from error
        sums = [met + float(part.sum()) for part in parts]
    means = [100.0 * total / len(examples) for total in sums]
    return means[2], dict(zip(("precision", "recall", "f1"), means, strict=True))


METRICS: dict[str, Metric] = {
    # SAPT, O-LoRA and MIGU: normalised whole-string equality (SAPT src/compute_metrics.py).
    "exact_match": Metric(_exact_match),
    # Equality of label texts as they are, for label heads (SLM's BERT: argmax over the head) and DAS.
    "accuracy": Metric(mean_best(_equal)),
    # SAPT, SuperNI tasks: rouge_score, stemming on, F-measure; words of every script. The published numbers are of
    # rouge_l_ascii, which reads ASCII letters and digits alone; both agree on ASCII texts.
    "rouge_l": Metric(rouge, overlap=True),
    "rouge_l_ascii": Metric(rouge_ascii, overlap=True),
    # SLM, T5 and LLaMA choice tasks: first words compared case-sensitively.
    "first_word": Metric(mean_best(_first)),
    "first_word_lower": Metric(mean_best(lambda text, reference: _first(text.lower(), reference.lower()))),
    # DAS (MIGU section on continual pre-training): sklearn's F1 over label texts; ChemProt reports micro-F1.
    "macro_f1": Metric(partial(_f1, average="macro"), mean_of_rows=False),
    "micro_f1": Metric(partial(_f1, average="micro")),
    # SLM, medical task.
    "bertscore": Metric(_bertscore, mean_of_rows=False, library="bert_score", install="'raycl[bertscore]'"),
    # Papineni et al. 2002, over the whole task, by sacrebleu.
    "bleu": Metric(bleu, overlap=True, mean_of_rows=False, library="sacrebleu", install="'raycl[scores]'"),
    # Xu et al. 2016, simplification (TRACE: 20Minuten).
    "sari": Metric(sari, True, False, needs_sources=True, library="sacrebleu", install="'raycl[scores]'"),
    # rapidfuzz: 200 * longest common subsequence of characters / characters of both.
    "edit_similarity": Metric(edit_similarity, overlap=True, library="rapidfuzz", install="'raycl[scores]'"),
    # TRACE, Py150: the same after literal tags are replaced, in whole percent.
    "edit_similarity_py150": Metric(
        trace.edit_similarity_py150, overlap=True, library="rapidfuzz", install="'raycl[scores]'"
    ),
    # TRACE, ScienceQA: the letter before the reasons; free text, so that the letters of other tasks are no off-task
    # answers.
    "first_character": Metric(trace.first_character, overlap=True),
    # TRACE's code: the package rouge 1.0.1, and SARI whose source is the whole prompt.
    "rouge_l_trace": Metric(trace.rouge_l, overlap=True),
    "sari_trace": Metric(
        sari, True, False, needs_sources=True, reads_prompts=True, library="sacrebleu", install="'raycl[scores]'"
    ),
}
"""Metric name -> its function."""

METRIC_NAMES = Names("metric", METRICS)
"""Built-in names and those of packages."""
