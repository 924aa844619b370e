"""Five small English text tasks, generated when they are needed, so that `make demo` shows forgetting offline.

A new user must see a stream, a matrix and a forgetting figure before downloading anything; real benchmarks are neither
small nor redistributable. Each task is a small grammar, a text of `grammars`, all of which were written for this
project, and each row is one seeded walk through it. One alternative in four of every list is kept from the training
split, so the test split holds words and phrasings that training never showed.

This module does not know models, tokenizers, folders or streams: it yields `(text, label)` pairs,
the same ones on every machine for the same `(task, split, seed)`.

Grammar, one list per symbol: `symbol = alternative | alternative`, continued on indented lines.
An alternative may hold references in braces:

    {city}      one alternative of `city`, the same each time it is named within one text
    {city2}     another one, different from those the text already took from `city`
    {state.1}   field 1 of an alternative whose fields are separated by `~`
    {@act}      `act` of the label being written (symbol `<label>:act`)
    {!act}      `act` of one other label, drawn once per text

A text starts at the symbol named like its label or, without one, at `text`.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from raycl.errors import DataError

Grammar = Mapping[str, tuple[str, ...]]

_LABELS: Mapping[str, tuple[str, ...]] = {
    "topic": ("sport", "cooking", "finance", "health", "music", "gardening"),
    "sentiment": ("positive", "negative", "mixed", "neutral"),
    "question_type": ("person", "place", "quantity", "date", "reason", "method"),
    "intent": ("book table", "set reminder", "send message", "find route", "play video", "order goods"),
    "entailment": ("yes", "no"),
}
TASKS: tuple[str, ...] = tuple(_LABELS)
"""Task names in stream order."""

GRAMMARS = Path(__file__).parent / "grammars"
"""The grammar of each task, and the lists that they have in common."""

_SPLITS = ("train", "test")
_HELD_OUT_EVERY = 4  # each fourth alternative of a list appears in the test split only
_TEST_SHARE = 4  # one text in four, by its hash, belongs to the test split
_TRIES = 5000  # walks without a new text after which a task counts as exhausted
_SENTENCE_START = re.compile(r"^[a-z]|(?<=[.?:] )[a-z]")
_REFERENCE = re.compile(r"\{([@!]?)([a-z_]+)(\d?)(?:\.(\d))?\}")


def labels(task: str) -> tuple[str, ...]:
    """Return the label texts of `task`; raise DataError for a name that is not in `TASKS`."""
    _require(task, TASKS, "built-in task")
    return _LABELS[task]


def rows(task: str, split: str, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield `count` distinct `(text, label)` pairs, labels in shuffled rounds so they stay balanced.

    Depends on `(task, split, seed)` alone: a smaller `count` gives a prefix of a larger one.  No
    text of one split occurs in the other, whatever the seeds.  Raises DataError at the call for an
    unknown task or split or a negative count, and while iterating when the grammar runs dry.
    """
    names = labels(task)
    _require(split, _SPLITS, "split")
    if count < 0:
        raise DataError(f"built-in task {task!r}: count is {count}; expected 0 or more rows")
    return _rows(task, split, count, seed, names)


def _rows(task: str, split: str, count: int, seed: int, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    rng = _generator(task, split, seed)
    grammar = _grammar(task, split)
    seen: set[str] = set()
    order: list[int] = []
    for _ in range(count):
        order = order or rng.permutation(len(names)).tolist()
        label = names[order.pop()]
        text = _new_text(grammar, names, label, split, rng, seen)
        if text is None:
            raise DataError(
                f"built-in task {task!r}, split {split!r}: {count} rows requested, but only {len(seen)} distinct texts "
                f"exist before label {label!r} is exhausted; request at most {len(seen)}"
            )
        seen.add(text)
        yield text, label


def _new_text(
    grammar: Grammar, names: tuple[str, ...], label: str, split: str, rng: np.random.Generator, seen: set[str]
) -> str | None:
    """Walk the grammar until a text is new and of this split; None when it seems exhausted."""
    others = tuple(name for name in names if name != label)
    for _ in range(_TRIES):
        other = others[rng.integers(len(others))]
        text = _Walk(grammar, label, other, rng).text()
        if text not in seen and split_of(text) == split:
            return text
    return None


def fingerprint() -> str:
    """Return a digest of everything the rows depend on, so that caches notice an edited word list."""
    sources = (Path(__file__), *sorted(GRAMMARS.glob("*.txt")))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def split_of(text: str) -> str:
    """Return the only split that may hold `text`, decided by its SHA-256."""
    return "test" if hashlib.sha256(text.encode()).digest()[0] % _TEST_SHARE == 0 else "train"


@dataclass
class _Walk:
    """One walk through a grammar: remembers what each reference became in this text."""

    grammar: Grammar
    label: str
    other: str
    rng: np.random.Generator
    taken: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        start = self.label if self.label in self.grammar else "text"
        return _SENTENCE_START.sub(lambda first: first[0].upper(), self._expand(self._draw(start, start)))

    def _expand(self, alternative: str) -> str:
        return _REFERENCE.sub(self._resolve, alternative)

    def _resolve(self, reference: re.Match[str]) -> str:
        owner, name, number, part = reference.groups()
        symbol = {"": name, "@": f"{self.label}:{name}", "!": f"{self.other}:{name}"}[owner]
        key = symbol + number
        if key not in self.taken:
            self.taken[key] = self._draw(symbol, key)
        chosen = self.taken[key]
        return self._expand(chosen.split("~")[int(part)] if part else chosen)

    def _draw(self, symbol: str, key: str) -> str:
        used = {value for name, value in self.taken.items() if name.rstrip("0123456789") == symbol}
        free = [option for option in self.grammar[symbol] if option not in used]
        assert free, f"grammar list {symbol!r} is too short for reference {key!r}"
        return free[self.rng.integers(len(free))]


@cache
def _grammar(task: str, split: str) -> Grammar:
    lists = _parse("".join((GRAMMARS / f"{name}.txt").read_text(encoding="utf-8") for name in (task, "common")))
    if split == "test":
        return lists
    return {symbol: _kept_for_training(options) for symbol, options in lists.items()}


def _parse(source: str) -> dict[str, tuple[str, ...]]:
    logical = re.sub(r"\n[ \t]+", " ", source)
    pairs = (line.split(" = ", 1) for line in logical.splitlines() if line.strip())
    return {name.strip(): tuple(option.strip() for option in body.split("|")) for name, body in pairs}


def _kept_for_training(options: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(option for number, option in enumerate(options, 1) if number % _HELD_OUT_EVERY)


def _generator(task: str, split: str, seed: int) -> np.random.Generator:
    digest = hashlib.sha256(f"raycl builtin {task} {split} {seed}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def _require(value: str, valid: tuple[str, ...], what: str) -> None:
    if value not in valid:
        raise DataError(f"unknown {what} {value!r}; expected one of {', '.join(valid)}")
