"""Scores of TRACE's code against values computed by hand from its formulas."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raycl.data.prompts import Prompt
from raycl.metrics.answers import Answers
from raycl.metrics.per_example import score
from raycl.metrics.trace import without_tags
from raycl.scoring.scored_task import sources_of


def one(metric: str, prediction: str, reference: str, source: str = "", others: Sequence[str] = ()) -> float:
    return score(metric, Answers([prediction], [[reference]], sources=[source]), others).value


def f_measure(common: int, said: int, expected: int) -> float:
    precision, recall = common / expected, common / said
    return 100 * 2 * precision * recall / (precision + recall + 1e-8)


@pytest.mark.parametrize(
    ("prediction", "reference", "common", "said", "expected"),
    [
        # one sentence each: "a b c" of 4 and 5 distinct words
        ("a b x c", "a b c d e", 3, 4, 5),
        # words count once: the answer has 2 distinct words, both are common
        ("a b a b", "a b", 2, 2, 2),
        # two sentences each: common are "a b" of (1, 2) and "d" of (2, 1); "c" stands before "a" there
        ("a b c. d e", "d. c a b", 3, 5, 4),
        # nothing is lower-cased, stemmed or parted from its comma
        ("The votes, all", "the vote, all", 1, 3, 3),
        # the space after the last dot is an empty word of the answer
        ("a b. ", "a b", 2, 3, 2),
    ],
)
def test_rouge_of_trace_counts_distinct_words_over_pairs_of_sentences(
    prediction: str, reference: str, common: int, said: int, expected: int
) -> None:
    assert one("rouge_l_trace", prediction, reference) == pytest.approx(f_measure(common, said, expected), abs=1e-9)


@pytest.mark.parametrize(
    ("prediction", "reference", "value"),
    [
        # as the package rouge 1.0.1 has them, the reference given as the hypothesis
        (
            "The council approved the budget. It adjourned early",
            "The council approved it. The budget passed early",
            0.6666666616888889,
        ),
        ("x y z", "z y x", 0.3333333283333334),
        (
            "17 vote council item . seconded item . Council item",
            "votes . moved, 17 seconded vote . . . item",
            0.6153846104142012,
        ),
    ],
)
def test_rouge_of_trace_is_that_of_the_package(prediction: str, reference: str, value: float) -> None:
    assert one("rouge_l_trace", prediction, reference) == pytest.approx(100 * value, abs=1e-9)


def test_empty_answers_and_dots_score_nothing() -> None:
    assert [one("rouge_l_trace", text, "a b") for text in ("", "...", " ")] == [0, 0, 0]
    assert one("rouge_l_trace", "a", "") == 0
    assert [one("edit_similarity_py150", text, "x") for text in ("", "<STR_LIT>")] == [0, 0]
    assert one("first_character", "", "B\nBecause") == 0


def test_the_first_character_is_compared_and_is_never_off_task() -> None:
    assert one("first_character", "B", "B\nBecause whales breathe air.", others=("A", "B", "C")) == 100
    assert one("first_character", "b\nBecause", "B\nBecause") == 0
    assert one("exact_match", "B", "B\nBecause whales breathe air.", others=("A", "B", "C")) == 0


def test_literal_tags_of_code_are_replaced() -> None:
    code = "x = <NUM_LIT> + <NUM_LIT:12> + <STR_LIT> + <STR_LIT:a> + <CHAR_LIT>"
    assert without_tags(code) == "x = 0 + 12 +  + a + "
    assert one("edit_similarity_py150", "return <NUM_LIT:1>", "return 1") == 100
    # 'return 12' and 'return 1': 16 of 17 characters are common, 94.1 percent
    assert one("edit_similarity_py150", "return <NUM_LIT:12>", "return 1") == 94
    assert one("edit_similarity", "return 12", "return 1") == pytest.approx(100 * 16 / 17)


def test_sari_of_trace_compares_with_the_whole_prompt() -> None:
    prompt = Prompt("x ", "")
    assert sources_of("sari", ["a b"], prompt) == ["a b"]
    assert sources_of("sari_trace", ["a b"], prompt) == ["x a b"]
    # answer "a", reference "b": nothing is added (1), "a" is kept wrongly in one of four orders (3/4); of the deleted
    # words "x" is right and "b" is not: (1/2 + 1 + 1 + 1) / 4
    assert one("sari_trace", "a", "b", source="x a b") == pytest.approx(100 * (1 + 3 / 4 + 7 / 8) / 3)
    assert one("sari", "a", "b", source="a b") == pytest.approx(100 * (1 + 3 / 4 + 3 / 4) / 3)
