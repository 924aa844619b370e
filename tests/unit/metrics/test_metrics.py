"""Text scores follow their published rules to the letter."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from raycl.data.benchmarks.knowledge import TASKS
from raycl.errors import ConfigError, DataError
from raycl.metrics.answers import Answers
from raycl.metrics.per_example import METRICS, check_labels, check_metric, first_word, normalize, score, taken_for_same


def one(metric: str, prediction: str, *references: str) -> float:
    return score(metric, Answers([prediction], [references])).value


def test_worked_examples_of_the_text_scores() -> None:
    assert one("exact_match", "Science or Technology.", "science or technology") == 100
    assert one("first_word", "Positive. This", "positive") == 0
    assert one("first_word_lower", "Positive. This", "positive") == 100


def test_normalisation_lowers_deletes_punctuation_and_collapses_spaces() -> None:
    assert normalize("  It's\t A_b,  TEST-case! ") == "its ab testcase"
    assert normalize("Café–") == "café–"  # only ASCII punctuation goes


@pytest.mark.parametrize(("text", "word"), [("'Yes', he", "Yes"), ("...", ""), ("", ""), ("sci/tech", "sci")])
def test_first_word_reads_non_word_characters_as_spaces(text: str, word: str) -> None:
    assert first_word(text) == word


def test_first_word_refuses_labels_of_several_words() -> None:
    with pytest.raises(DataError, match="'very good' is not one word"):
        one("first_word", "very", "very good")


@pytest.mark.parametrize(
    ("metric", "labels", "message"),
    [
        ("first_word", ["yes", "very good"], "its label 'very good' is not one word"),
        ("first_word", ["C", "C++"], "its labels 'C' and 'C\\+\\+' are one word"),
        ("first_word_lower", ["Yes", "yes"], "its labels 'Yes' and 'yes' are one word"),
    ],
)
def test_labels_that_first_words_cannot_tell_apart_are_refused(metric: str, labels: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_labels(metric, "mine", labels)
    check_labels("first_word", "mine", ["Yes", "yes"])
    check_labels("exact_match", "mine", labels)


def test_rouge_l_stems_and_takes_the_f_measure() -> None:
    assert one("rouge_l", "dogs running", "dog run") == pytest.approx(100)
    # longest common subsequence 2 of 3 predicted and 4 expected words: P 2/3, R 1/2, F 4/7
    assert one("rouge_l", "the cat sat", "the dog cat ran") == pytest.approx(400 / 7)


def test_accuracy_is_equality_of_labels_as_they_are() -> None:
    assert one("accuracy", "World", "World") == 100
    assert one("accuracy", "world", "World") == 0


@pytest.mark.parametrize("metric", ["exact_match", "accuracy", "rouge_l", "first_word", "micro_f1"])
def test_the_best_of_several_references_counts(metric: str) -> None:
    assert one(metric, "blue", "red", "blue") == pytest.approx(100)


def test_value_is_the_mean_over_examples() -> None:
    result = score("exact_match", Answers(["a", "b", "c"], [["a"], ["b"], ["x"]]))
    assert result.value == pytest.approx(200 / 3)
    assert result.count == 3
    assert result.extra == {"off_task": 0, "empty": 0}


def test_off_task_and_empty_replies_score_nothing_and_are_counted() -> None:
    result = score(
        "exact_match",
        Answers(["Positive.", "  ", "a positive day"], [["it was positive"], ["a day"], ["a positive day"]]),
        other_labels=["positive", "negative"],
    )
    assert result.extra == {"off_task": 1, "empty": 1}
    assert result.value == pytest.approx(100 / 3)


@pytest.mark.parametrize("metric", ["rouge_l", "rouge_l_ascii", "rouge_l_trace", "edit_similarity", "bleu"])
def test_the_off_task_rule_leaves_overlapping_text_alone(metric: str) -> None:
    replies = (["Positive. It was fine"], [["Positive. It was fine, all of the time"]])
    result = score(metric, Answers(*replies), other_labels=["positive it was fine"])
    assert result.extra["off_task"] == 1
    assert result.value == score(metric, Answers(*replies)).value > 0


def test_the_off_task_rule_can_be_switched_off() -> None:
    replies = (["good day"], [["good"]])  # the first word is right, the whole answer is a label of another task
    ruled = score("first_word", Answers(*replies), other_labels=["good day"])
    free = score("first_word", Answers(*replies), other_labels=["good day"], off_task_is_wrong=False)
    assert (ruled.value, free.value) == (0, 100)
    assert (ruled.extra["off_task"], free.extra["off_task"]) == (1, 1)


@pytest.mark.parametrize("metric", ["exact_match", "accuracy", "rouge_l", "rouge_l_ascii", "edit_similarity"])
def test_an_empty_answer_to_an_empty_reference_is_right(metric: str) -> None:
    result = score(metric, Answers(["", "", "x"], [[""], ["a"], [""]]))
    assert (result.value, result.extra["empty"]) == (pytest.approx(100 / 3), 2)


def test_an_off_task_answer_is_no_empty_answer() -> None:
    replies = (["yes"], [["", "no"]])
    assert score("accuracy", Answers(*replies), other_labels=["yes"]).value == 0
    assert score("micro_f1", Answers(*replies), other_labels=["yes"]).value == 0


def test_labels_shared_by_tasks_and_right_answers_are_never_off_task() -> None:
    shared = score(
        "exact_match", Answers(["yes", "no"], [["yes"], ["yes"]], labels=["yes", "no"]), other_labels=["yes", "no"]
    )
    assert (shared.value, shared.extra["off_task"]) == (50, 0)
    free_text = score("exact_match", Answers(["Paris"], [["paris"]]), other_labels=["paris"])
    assert (free_text.value, free_text.extra["off_task"]) == (100, 0)


@pytest.mark.parametrize(
    ("labels", "same"),
    [
        (("-1", "1"), True),
        (("C", "C++", "C#"), True),
        ((">50K", "<=50K", "?"), True),  # `?` is what an empty answer would be
        (("A", "a"), True),
        (("not_entailment", "entailment", ""), False),
    ],
)
def test_exact_match_never_takes_two_labels_of_a_task_for_one(labels: tuple[str, ...], same: bool) -> None:
    assert (taken_for_same(labels) is not None) == same
    pairs = [(answer, label) for answer in (*labels, "") for label in labels]
    answers, references = [answer for answer, _ in pairs], [[label] for _, label in pairs]
    right = 100 * sum(answer == label for answer, label in pairs) / len(pairs)
    assert score("exact_match", Answers(answers, references, labels)).value == pytest.approx(right)
    sampled = score("exact_match", Answers(answers, references, labels), with_interval=True).extra
    assert sampled["low"] < right < sampled["high"]


def test_labels_of_published_tasks_are_scored_as_published() -> None:
    sets = [task.labels for task in TASKS.values() if isinstance(task.labels, tuple)]
    assert len(sets) > 10 and not any(map(taken_for_same, sets))
    for task in sets:
        others = [label for other in sets if other is not task for label in other]
        for answer in (*task, *others):
            result = score("exact_match", Answers([answer], [[task[0]]], task), others)
            assert result.value == 100 * (normalize(answer) == normalize(task[0])), "case and punctuation do not matter"


def test_a_label_of_another_task_is_wrong_where_it_differs_by_its_sign() -> None:
    given = (["1", "Zero", "1"], [["-1"], ["zero"], ["1"]], ["-1", "zero"])
    result = score("exact_match", Answers(*given), other_labels=["1", "Zero"])
    assert (result.value, result.extra["off_task"]) == (pytest.approx(200 / 3), 1)


def test_macro_f1_averages_over_classes_that_occur() -> None:
    predictions, references = ["a", "a", "b", "noise"], [["a"], ["b"], ["b"], ["b"]]
    # a: P 1/2, R 1; b: P 1, R 1/3; "noise" is no class, c never occurs
    result = score("macro_f1", Answers(predictions, references, labels=["a", "b", "c"]))
    assert result.value == pytest.approx(100 * (2 / 3 + 1 / 2) / 2)


def test_micro_f1_is_the_share_of_right_answers() -> None:
    assert (
        score("micro_f1", Answers(["a", "b", "noise", ""], [["a"], ["a"], ["b"], ["b"]], labels=["a", "b"])).value == 25
    )


def test_unknown_metric_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown metric 'rougel': did you mean 'rouge_l'"):
        check_metric("rougel")
    with pytest.raises(ConfigError, match=r"expected one of \d+, of which .* are the nearest"):
        check_metric("zzzz")


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(DataError, match="0 examples"):
        score("accuracy", Answers([], []))
    with pytest.raises(DataError, match="test example 1 has no reference"):
        score("accuracy", Answers(["a", "b"], [["a"], []]))


def test_bertscore_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"raycl\[bertscore\]"):
        check_metric("bertscore")


def test_bertscore_reports_precision_recall_and_f1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(candidates: list[str], references: list[list[str]], lang: str) -> tuple[torch.Tensor, ...]:
        assert (candidates, references, lang) == (["a"], [["x", "y"]], "en")
        return torch.tensor([0.5]), torch.tensor([0.7]), torch.tensor([0.6])

    module = types.ModuleType("bert_score")
    module.__dict__["score"] = fake
    monkeypatch.setitem(sys.modules, "bert_score", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: module)
    result = score("bertscore", Answers(["a", ""], [["x", "y"], ["z"]]))  # the empty reply counts as 0
    assert result.value == pytest.approx(30)
    assert result.extra == pytest.approx({"off_task": 0, "empty": 1, "precision": 25, "recall": 35, "f1": 30})


@pytest.mark.parametrize("metric", sorted(set(METRICS) - {"bertscore", "bleu", "sari", "sari_trace"}))
def test_perfect_and_hopeless_answers(metric: str) -> None:
    values = [score(metric, Answers([text, text], [["good"], ["good"]])).value for text in ("good", "")]
    assert values == [pytest.approx(100), 0]
