"""Rouge-L in every script, BLEU, SARI and edit similarity against published examples and hand-made counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from raycl.metrics.answers import Answers
from raycl.metrics.overlap import UnicodeTokenizer, tokenizer_for
from raycl.metrics.per_example import score

ASCII = st.text(st.characters(max_codepoint=127), max_size=60)


def one(metric: str, prediction: str, *references: str, source: str = "") -> float:
    return score(metric, Answers([prediction], [references], sources=[source])).value


@given(ASCII, ASCII)
def test_rouge_of_ascii_texts_is_that_of_rouge_score(prediction: str, reference: str) -> None:
    if not prediction.strip() and not reference.strip():
        return
    official = RougeScorer(["rougeL"], use_stemmer=True).score(reference, prediction)["rougeL"].fmeasure
    assert one("rouge_l", prediction, reference) == one("rouge_l_ascii", prediction, reference) == 100 * official


def test_rouge_reads_chinese_character_by_character() -> None:
    assert one("rouge_l_ascii", "我喜欢猫", "我喜欢猫") == 0
    assert one("rouge_l", "我喜欢猫", "我喜欢猫。") == pytest.approx(100)
    # longest common subsequence 3 of 4 and 4 characters
    assert one("rouge_l", "我喜欢猫", "我喜欢狗") == pytest.approx(75)


def test_rouge_keeps_words_with_umlauts_whole() -> None:
    assert one("rouge_l", "schöne Häuser", "schone Hauser") == 0
    assert one("rouge_l_ascii", "schöne Häuser", "sch ne h user") == pytest.approx(100)
    assert one("rouge_l", "SCHÖNE Häuser", "scho\u0308ne ha\u0308user") == pytest.approx(100)  # composed and not


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Der 3.-größte_Fluß", ["der", "3", "größte", "fluß"]),
        ("dogs running, Привет мир", ["dog", "run", "привет", "мир"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("GPT模型2个かな", ["gpt", "模", "型", "2", "个", "か", "な"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("سلام دنیا؟", ["سلام", "دنیا"]),
        ("、。！", []),
    ],
)
def test_words_of_many_scripts(text: str, words: list[str]) -> None:
    assert UnicodeTokenizer().tokenize(text) == words


def test_bleu_of_a_worked_example() -> None:
    """sacrebleu's own: three sentences, two references each."""
    answers = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
    references = [
        ["The dog bit the man.", "The dog had bit the man."],
        ["It was not unexpected.", "No one was surprised."],
        ["The man bit him first.", "The man had bitten the dog."],
    ]
    result = score("bleu", Answers(answers, references))
    assert result.value == pytest.approx(48.530827, abs=1e-5)
    assert result.extra["brevity"] == pytest.approx(math.exp(1 - 18 / 17))  # 17 tokens for the nearest 18


def test_bleu_takes_as_many_references_as_there_are() -> None:
    answers = ["a b c d", "e f g h"]
    assert score("bleu", Answers(answers, [["x", "a b c d"], ["e f g h"]])).value == pytest.approx(100)


def test_bleu_splits_chinese_characters() -> None:
    assert tokenizer_for([["hello"], ["世界"]]) == "zh"
    assert tokenizer_for([["schöne Häuser"]]) == "13a"
    # precisions 5/6, 4/5, 3/4, 2/3 of sequences of 1 to 4 characters: their geometric mean is (1/3) ** (1/4)
    assert one("bleu", "我非常喜欢狗", "我非常喜欢猫") == pytest.approx(100 * (1 / 3) ** 0.25)


def test_sari_of_the_published_examples() -> None:
    """The examples that the metric's page in Hugging Face's `evaluate` gives."""
    source, answer = "About 95 species are currently accepted.", "About 95 you now get in."
    references = (
        "About 95 species are currently known.",
        "About 95 species are now accepted.",
        "95 species are now accepted.",
    )
    result = score("sari", Answers([answer], [references], sources=[source]))
    assert result.value == pytest.approx(26.953601953601954)
    parts = {"add": 100 / 12, "keep": 22.527472527472525, "delete": 50}
    assert {name: result.extra[name] for name in parts} == pytest.approx(parts)
    assert one("sari", answer, references[0], source=source) == pytest.approx(21.805555555555557)


def test_sari_rewards_what_the_references_changed() -> None:
    source, short = "der sehr alte Hund bellt laut", "der Hund bellt"
    assert one("sari", short, short, source=source) == pytest.approx(100)
    assert one("sari", source, short, source=source) < 60
    assert score("sari", Answers([short, source], [[short], [short]], sources=[source, source])).value == pytest.approx(
        (100 + one("sari", source, short, source=source)) / 2
    )


def test_edit_similarity_counts_insertions_and_deletions() -> None:
    assert one("edit_similarity", "kitten", "sitting") == pytest.approx(100 * (1 - 5 / 13))
    assert one("edit_similarity", "x = 1", "y", "x = 2") == pytest.approx(80)
