"""Per-task scores: predicted texts against reference texts, one number from 0 to 100.

Why it exists: the papers score the same tasks by different rules (whole string, first word, Rouge-L, F1), so each
rule has a name, its source, and a test. `METRICS` is the list of names; a task carries one of them.
What it does not know: how predictions were made, the order of tasks, what is done with scores.

Off-task answers: SLM (section 4.3) states that replies outside the task score 0, though its code has no such rule.
Here a reply counts as off-task when it is, after normalisation, a label word of another task and neither a label of
its own task nor one of its own references (`yes` belongs to several tasks). Off-task and empty replies score 0 under
every metric and are counted in `Score.extra`.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import string
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from raycl.errors import BackboneError, ConfigError, DataError
from raycl.types import Score

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

Predictions = Sequence[str]
References = Sequence[Sequence[str]]
Labels = Sequence[str] | None
Metric = Callable[[Predictions, References, Labels], tuple[float, dict[str, float]]]
"""Predictions (`""` = off-task or empty, must count as wrong), references, labels -> value 0-100, extra numbers."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(
    metric: str,
    predictions: Predictions,
    references: References,
    labels: Labels = None,
    other_labels: Collection[str] = (),
) -> Score:
    """Score one task; the best of several references counts.

    Args:
        metric: a name in `METRICS`.
        predictions: one text per example, markers and prompt already cut off.
        references: per example one or more accepted texts.
        labels: the task's closed label set, None for free text.
        other_labels: label words of the other tasks; replies equal to one of them score 0.

    Returns:
        Value 0-100, count, and in `extra` at least `off_task` and `empty` (numbers of examples).

    Raises:
        ConfigError: unknown metric, or its library is not installed.
        DataError: nothing to score, an example without reference, references that the metric cannot use.
    """
    check_metric(metric)
    _check_examples(predictions, references)
    empty = [not prediction.strip() for prediction in predictions]
    foreign = _foreign(labels, other_labels)
    off_task = [_is_off_task(*example, foreign) for example in zip(predictions, references, strict=True)]
    judged = ["" if e or o else p for p, e, o in zip(predictions, empty, off_task, strict=True)]
    value, extra = METRICS[metric](judged, references, labels)
    return Score(value, len(predictions), {"off_task": float(sum(off_task)), "empty": float(sum(empty)), **extra})


def check_metric(name: str) -> None:
    """Refuse a metric that `score` could not compute, before any work starts.

    Raises:
        ConfigError: unknown name (with the nearest one), or an optional library is missing.
    """
    if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(sorted(METRICS))}"
        raise ConfigError(f"unknown metric '{name}': {hint}")
    if name == "bertscore" and importlib.util.find_spec("bert_score") is None:
        raise ConfigError("metric 'bertscore' needs the library bert-score: pip install 'raycl[bertscore]'")


def normalize(text: str) -> str:
    """Lower case, ASCII punctuation deleted, runs of white space made one space (SAPT `compute_metrics.py`)."""
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def first_word(text: str) -> str:
    """The first word, everything that is no word character read as a space; empty if there is none (SLM)."""
    return next(iter(_words(text)), "")


def _words(text: str) -> list[str]:
    return re.sub(r"\W", " ", text).split()


def _check_examples(predictions: Predictions, references: References) -> None:
    assert len(predictions) == len(references), f"{len(predictions)} predictions for {len(references)} references"
    if not predictions:
        raise DataError("there are 0 examples to score: expected at least one, check the task's test split")
    for row, accepted in enumerate(references):
        if not accepted:
            raise DataError(f"test example {row} has no reference: give at least one accepted answer")


def _foreign(labels: Labels, other_labels: Collection[str]) -> frozenset[str]:
    own = {normalize(label) for label in labels or ()}
    return frozenset(normalize(label) for label in other_labels) - own - {""}


def _is_off_task(prediction: str, accepted: Sequence[str], foreign: frozenset[str]) -> bool:
    reply = normalize(prediction)
    return reply in foreign and all(reply != normalize(reference) for reference in accepted)


def _mean_best(match: Callable[[str, str], float]) -> Metric:
    """A metric out of a rule for one prediction and one reference: best reference, mean over examples, times 100."""

    def metric(predictions: Predictions, references: References, labels: Labels) -> tuple[float, dict[str, float]]:
        del labels
        total = sum(
            max(match(prediction, reference) for reference in accepted)
            for prediction, accepted in zip(predictions, references, strict=True)
            if prediction
        )
        return 100.0 * total / len(predictions), {}

    return metric


def _exact(prediction: str, reference: str) -> float:
    return float(normalize(prediction) == normalize(reference))


def _equal(prediction: str, reference: str) -> float:
    return float(prediction == reference)


def _rouge(prediction: str, reference: str) -> float:
    return float(_rouge_scorer().score(target=reference, prediction=prediction)["rougeL"].fmeasure)


@lru_cache(maxsize=1)
def _rouge_scorer() -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer  # two seconds of imports, only paid by tasks that need it

    return RougeScorer(["rougeL"], use_stemmer=True)


def _first(prediction: str, reference: str) -> float:
    word = first_word(prediction)
    return float(bool(word) and word == _label_word(reference))


def _first_lower(prediction: str, reference: str) -> float:
    return _first(prediction.lower(), reference.lower())


def _label_word(reference: str) -> str:
    """The reference as the first-word rules need it.

    Raises:
        DataError: it is not one word, so that the rule would accept wrong answers.
    """
    words = _words(reference)
    if len(words) != 1:
        raise DataError(f"reference '{reference}' is not one word, which first-word metrics need: use 'exact_match'")
    return words[0]


def _macro_f1(predictions: Predictions, references: References, labels: Labels) -> tuple[float, dict[str, float]]:
    """Unweighted mean over the classes that occur; replies that are no label count as misses, not as a class."""
    truth = _single_truth(predictions, references)
    classes = sorted(set(truth) | (set(labels or ()) & set(predictions)))
    return _f1(truth, predictions, classes, "macro"), {}


def _micro_f1(predictions: Predictions, references: References, labels: Labels) -> tuple[float, dict[str, float]]:
    """Over pooled decisions; a reply that is no label is a wrong decision, so this equals the share of right ones."""
    del labels
    truth = _single_truth(predictions, references)
    return _f1(truth, predictions, sorted(set(truth) | set(predictions)), "micro"), {}


def _f1(truth: Sequence[str], predictions: Predictions, classes: Sequence[str], average: str) -> float:
    from sklearn.metrics import f1_score  # a second of imports, only paid by tasks that need it

    value = f1_score(list(truth), list(predictions), labels=list(classes), average=average, zero_division=0)
    return 100.0 * float(value)


def _single_truth(predictions: Predictions, references: References) -> list[str]:
    """F1 needs one truth per example: the reference that was met, else the first."""
    pairs = zip(predictions, references, strict=True)
    return [prediction if prediction in accepted else accepted[0] for prediction, accepted in pairs]


def _bertscore(predictions: Predictions, references: References, labels: Labels) -> tuple[float, dict[str, float]]:
    """English BERTScore (roberta-large, layer 17, no idf, no rescaling); the best reference per number."""
    del labels
    from bert_score import score as bert_score

    rows = [row for row, prediction in enumerate(predictions) if prediction]
    if not rows:
        return 0.0, {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    try:
        parts = bert_score([predictions[row] for row in rows], [list(references[row]) for row in rows], lang="en")
    except OSError as error:
        raise BackboneError(
            f"metric 'bertscore' cannot load roberta-large: {error}; put the model into the local cache"
        ) from error
    means = [100.0 * float(part.sum()) / len(predictions) for part in parts]
    return means[2], dict(zip(("precision", "recall", "f1"), means, strict=True))


METRICS: dict[str, Metric] = {
    # SAPT, O-LoRA and MIGU: normalised whole-string equality (SAPT src/compute_metrics.py).
    "exact_match": _mean_best(_exact),
    # Equality of label texts as they are, for label heads (SLM's BERT: argmax over the head) and DAS.
    "accuracy": _mean_best(_equal),
    # SAPT, SuperNI tasks: rouge_score, stemming on, F-measure.
    "rouge_l": _mean_best(_rouge),
    # SLM, T5 and LLaMA choice tasks: first words compared case-sensitively.
    "first_word": _mean_best(_first),
    "first_word_lower": _mean_best(_first_lower),
    # DAS (MIGU section on continual pre-training): sklearn's F1 over label texts; ChemProt reports micro-F1.
    "macro_f1": _macro_f1,
    "micro_f1": _micro_f1,
    # SLM, medical task.
    "bertscore": _bertscore,
}
"""Metric name -> how it is computed."""
