"""The built-in tasks: same rows everywhere, honest splits, balanced, neither trivial nor hopeless."""

import hashlib
import shutil
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from raycl.data.benchmarks import builtin
from raycl.data.benchmarks.builtin import TASKS, labels, rows
from raycl.errors import DataError

TRAIN, TEST = 2000, 500
GOLDEN = "2fe6c84fda6e02b4f6355112578e60b5ffbb5f251f7fc4d50bf2aa99b6aca142"
"""SHA-256 of the first rows of every task; changes only when the grammars or the walk are changed on purpose."""


@cache
def split_of(task: str, split: str, seed: int = 0) -> tuple[tuple[str, str], ...]:
    """Return a whole split, drawn once for all tests that read it."""
    return tuple(rows(task, split, TRAIN if split == "train" else TEST, seed))


def test_at_least_five_tasks_with_labels_of_their_own() -> None:
    assert len(TASKS) >= 5
    every = [label for task in TASKS for label in labels(task)]
    assert len(set(every)) == len(every)
    assert all(label == label.strip() and len(label.split()) <= 2 for label in every)


@pytest.mark.parametrize("task", TASKS)
def test_rows_depend_on_task_split_and_seed_only(task: str) -> None:
    first = list(rows(task, "train", 60, seed=1))
    assert first == list(rows(task, "train", 60, seed=1))
    assert first[:25] == list(rows(task, "train", 25, seed=1))
    assert first != list(rows(task, "train", 60, seed=2))
    assert first != list(rows(task, "test", 60, seed=1))


def test_rows_stay_the_same_across_machines_and_releases() -> None:
    digest = hashlib.sha256()
    for task in TASKS:
        for split in ("train", "test"):
            digest.update(repr(list(rows(task, split, 40, seed=0))).encode())
    assert digest.hexdigest() == GOLDEN, "built-in rows changed: published demo figures change with them"


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_text_and_hold_none_twice(task: str) -> None:
    train = [text for text, _ in split_of(task, "train")]
    test = [text for text, _ in split_of(task, "test")]
    assert len(set(train)) == TRAIN
    assert len(set(test)) == TEST
    assert not set(train) & set(test)


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_whatever_the_seeds(task: str) -> None:
    train = {text for seed in range(5) for text, _ in rows(task, "train", 400, seed)}
    test = {text for seed in range(5, 10) for text, _ in rows(task, "test", 400, seed)}
    assert not train & test


@pytest.mark.parametrize("task", TASKS)
def test_labels_are_balanced_in_every_prefix(task: str) -> None:
    drawn = [label for _, label in rows(task, "train", 320, seed=3)]
    assert set(drawn) == set(labels(task))
    for size in (20, 100, 320):
        counts = Counter(dict.fromkeys(labels(task), 0))
        counts.update(drawn[:size])
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("task", TASKS)
def test_no_text_carries_two_labels(task: str) -> None:
    meaning: dict[str, str] = {}
    for seed in range(3):
        for text, label in split_of(task, "train", seed):
            assert meaning.setdefault(text, label) == label, text


@pytest.mark.parametrize("task", TASKS)
def test_texts_are_short_whole_sentences(task: str) -> None:
    lengths = []
    for text, _ in split_of(task, "test"):
        assert text[0].isupper()
        assert text[-1] in ".?"
        assert not set("{}|~@!") & set(text), text
        assert "  " not in text
        assert " ." not in text
        lengths.append(len(text.split()))
    assert min(lengths) >= 4
    assert max(lengths) <= 40
    assert 8 <= sum(lengths) / len(lengths) <= 25


@pytest.mark.parametrize("task", TASKS)
def test_test_split_has_words_never_trained_on(task: str) -> None:
    known = {word for text, _ in split_of(task, "train") for word in text.split()}
    test = [text for text, _ in split_of(task, "test")]
    assert sum(bool(set(text.split()) - known) for text in test) >= 0.25 * TEST


@pytest.mark.parametrize("task", TASKS)
def test_bag_of_words_is_above_chance_and_below_perfect(task: str) -> None:
    texts, names = zip(*rows(task, "train", 320, seed=0), strict=True)
    test_texts, test_names = zip(*rows(task, "test", 300, seed=0), strict=True)
    model = make_pipeline(CountVectorizer(ngram_range=(1, 2)), LogisticRegression(max_iter=500))
    accuracy = model.fit(texts, names).score(test_texts, test_names)
    chance = 1 / len(labels(task))
    assert chance + 0.1 < accuracy < 0.98, f"{task}: {accuracy:.3f}"


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(DataError, match=r"'wine'.*topic, sentiment"):
        labels("wine")
    with pytest.raises(DataError, match=r"'wine'.*topic, sentiment"):
        rows("wine", "train", 1, 0)
    with pytest.raises(DataError, match=r"'dev'.*train, test"):
        rows("topic", "dev", 1, 0)
    with pytest.raises(DataError, match="-1"):
        rows("topic", "train", -1, 0)


def test_fingerprint_changes_with_the_word_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = builtin.fingerprint()
    assert before == builtin.fingerprint()
    shutil.copytree(builtin.GRAMMARS, tmp_path / "grammars")
    with (tmp_path / "grammars" / "topic.txt").open("a") as words:
        words.write("town = Rome\n")
    monkeypatch.setattr(builtin, "GRAMMARS", tmp_path / "grammars")
    assert builtin.fingerprint() != before


def test_zero_rows_is_an_empty_stream() -> None:
    assert list(rows("topic", "train", 0, 0)) == []


def test_too_many_rows_give_an_error_with_the_number_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"text": ("{word} and {word2}",), "word": tuple("abcdef")}
    monkeypatch.setattr(builtin, "_grammar", lambda task, split: tiny)
    drawn: list[tuple[str, str]] = []
    with pytest.raises(DataError, match=r"1000 rows requested, but only (\d+) distinct") as caught:
        drawn.extend(islice(rows("topic", "train", 1000, 0), 1000))
    assert "at most" in str(caught.value)


def test_grammar_notation() -> None:
    lists = builtin._parse("text = {kind.1} {other}\n    | second\nkind = a~b | c~d\nother = x\n")
    assert lists == {"text": ("{kind.1} {other}", "second"), "kind": ("a~b", "c~d"), "other": ("x",)}
    assert builtin._kept_for_training(tuple("abcdefgh")) == tuple("abcefg")


@pytest.mark.parametrize("task", TASKS)
def test_every_reference_of_every_grammar_can_be_drawn(task: str) -> None:
    for lists in (builtin._grammar(task, "train"), builtin._grammar(task, "test")):
        names = {name.split(":")[-1] for name in lists}
        for body in (option for options in lists.values() for option in options):
            for _, name, _, _ in builtin._REFERENCE.findall(body):
                assert name in names, body
            assert "{" not in builtin._REFERENCE.sub("", body), body
