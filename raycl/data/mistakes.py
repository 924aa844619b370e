"""Mistakes that data often has: dirty labels, test rows that are trained on, texts with several answers.

They make a result meaningless without making a run fail. `raycl data check` and every new run look for the same ones;
each has a count, and the setting, command or change that mends it.
"""

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import numpy as np

from raycl.data.sources.cache import Indices
from raycl.data.sources.conversation import head_of, messages_of
from raycl.data.sources.ingest import MAX_AUTO_LABELS, RawRows
from raycl.data.stream import Stream
from raycl.data.tokens import SPLITS, Split
from raycl.types import Task

MOST_COMPARED = 200_000
"""Rows of a task whose texts a new run compares; `raycl data check` compares all."""
_SHOWN = 5
_RARE = 20
"""A label is rare where the most frequent one has so many times its rows."""
_ROWS_OF_A_CLASS = 4
"""Answers that each come so often on average are more likely classes than free text."""
_YES, _TRUE = frozenset(("yes", "no", "on", "off")), frozenset(("true", "false"))


@dataclass(frozen=True)
class Mistake:
    """Something in the data of a task that is probably not intended.

    Attributes:
        kind: kind of mistake. count: number of cases.
        which: examples. mend: remedy.
    """

    kind: str
    count: int
    which: str
    mend: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.count:,} ({self.which}); {self.mend}"


class SeenRow(NamedTuple):
    """A row of a split.

    Attributes:
        text: hash of the text, whatever its white space. answer: the first answer. number: the row's number in its
            file.
        belongs: hash of the group that it names, or of the first question and answer of its conversation.
    """

    text: int
    answer: str
    number: int
    belongs: int


@dataclass
class SeenRows:
    """The recorded properties of train and dev rows.

    Attributes:
        labels: first answer -> rows of train. texts: text -> its first row. groups: groups that rows belong to.
        answers: text -> its first answer in train. several: texts with several answers.
        empty: rows without a text.
    """

    labels: Counter[str] = field(default_factory=Counter)
    texts: dict[int, int] = field(default_factory=dict)
    groups: set[int] = field(default_factory=set)
    answers: dict[int, int] = field(default_factory=dict)
    several: set[int] = field(default_factory=set)
    empty: list[int] = field(default_factory=list)

    def add(self, row: SeenRow, split: Split) -> None:
        if row.text == _EMPTY:
            self.empty.append(row.number)
        self.texts.setdefault(row.text, row.number)
        self.groups.add(row.belongs)
        if split == "train":
            self.labels[row.answer] += 1
            answer = _key(row.answer)
            if self.answers.setdefault(row.text, answer) != answer:
                self.several.add(row.text)


def mistakes_of(stream: Stream, task: Task, most: int | None = None) -> list[Mistake]:
    """Return what is probably wrong with the data of a task.

    Args:
        most: texts are compared where the task has at most this many rows; None: always.
    """
    sources = {split: raw for split in SPLITS if (raw := stream.source(task, split)) is not None}
    rows = {split: stream.rows(task, split) for split in sources}
    train, test = sources.get("train"), sources.get("test")
    if train is not None and test is not None and train.where == test.where and not stream.carves_test(task):
        test = None  # a file that is checked alone stands for both
    mistakes = list(_of_reading(sources))
    if most is not None and sum(map(len, rows.values())) > most:
        return mistakes
    seen = SeenRows()
    for split in SPLITS[:2]:
        for row in seen_rows(sources[split], rows[split]) if split in sources else ():
            seen.add(row, split)
    tested = [] if test is None else list(seen_rows(test, rows["test"]))
    mistakes += _of_empty("train", seen.empty)
    mistakes += _of_empty("test", [row.number for row in tested if row.text == _EMPTY])
    if task.objective == "answer":
        mistakes += _of_labels(task, seen.labels, Counter(row.answer for row in tested))
        if seen.several:
            mend = "at most one of them can be learned, remove the others"
            mistakes.append(Mistake("texts of train with several answers", len(seen.several), "", mend))
    mistakes += _of_test(seen, tested, any(raw.names_groups for raw in sources.values()))
    return mistakes


def seen_rows(raw: RawRows, rows: Indices) -> Iterator[SeenRow]:
    """Yield some rows of a source, in order."""
    used, start = np.zeros(raw.count, dtype=bool), 0
    used[rows] = True
    for batch in raw.entry.table().to_batches():
        mask = used[start : start + len(batch)].tolist()
        start += len(batch)
        columns = [batch.column(name).to_pylist() for name in ("text", "references", "row", "group")]
        for text, names, number, group in compress(zip(*columns, strict=True), mask):
            key = _key(text)
            belongs = key
            if raw.names_groups:
                belongs = hash(group)
            elif raw.is_chat:
                # the first question of a conversation and the answer to it
                messages = messages_of(text)
                contents = [message.content for message in messages[len(head_of(messages)) :]]
                belongs = hash(tuple([*contents, names[0]][:2]))
            yield SeenRow(key, names[0], number, belongs)


def _key(text: str) -> int:
    return hash(" ".join(text.split()))


_EMPTY = _key("")


def _of_reading(sources: Mapping[Split, RawRows]) -> Iterator[Mistake]:
    for split, raw in sources.items():
        if raw is sources.get("train") and split != "train":
            continue
        if raw.left_out:
            yield Mistake(f"rows of {split} that cannot be used", raw.left_out, raw.problems[0], _LEAVE_OUT)
        if raw.blank:
            yield Mistake(f"empty labels in {split}", raw.blank, f"of {raw.count + raw.dropped:,} rows", _LEAVE_OUT)


def _of_empty(split: Split, rows: Sequence[int]) -> Iterator[Mistake]:
    if rows:
        which = _some([f"row {row}" for row in rows])
        yield Mistake(f"empty texts in {split}", len(rows), which, "give them texts, or remove the rows")


_LEAVE_OUT = "correct them; stream.on_bad_row=skip leaves them out"


def _of_labels(task: Task, train: Mapping[str, int], test: Mapping[str, int]) -> Iterator[Mistake]:
    if task.labels is None:
        rows = sum(train.values())
        if MAX_AUTO_LABELS < len(train) <= rows / _ROWS_OF_A_CLASS:
            which = f"of {rows:,} rows, which count as free text"
            mend = "if they are classes, list them in labels; raycl data labels PATH writes them to labels.json"
            yield Mistake("different answers", len(train), which, mend)
        return
    empty = [label for label in train if not label.strip()]
    if empty:
        which = f"{len(empty)} of the {len(train)} labels"
        yield Mistake("rows with an empty label", sum(train[label] for label in empty), which, _LEAVE_OUT)
    spellings: dict[str, list[str]] = {}  # of labels that differ in case, white space and Unicode's forms
    for label in sorted(train, key=lambda label: -train[label]):
        spellings.setdefault(" ".join(unicodedata.normalize("NFKC", label).casefold().split()), []).append(label)
    alike = [names for names in spellings.values() if len(names) > 1]
    if alike:
        rarer = sum(train[name] for names in alike for name in names[1:])
        which = "; ".join(" ".join(f"'{name}' {train[name]:,}" for name in names) for names in alike[:_SHOWN])
        mend = "write them alike, or leave the others out: labels=[...] with one of each and stream.on_bad_row=skip"
        yield Mistake("rows whose label is written otherwise in most rows", rarer, which, mend)
    folded = {label.strip().casefold() for label in train}
    if folded & _YES and folded & _TRUE:
        wrong = [label for label in train if label.strip().casefold() in _TRUE]
        which = ", ".join(f"'{label}' {train[label]:,}" for label in wrong)
        mend = "a program that reads YAML writes yes as true: write them alike"
        yield Mistake("rows with true or false beside yes and no", sum(map(train.__getitem__, wrong)), which, mend)
    once = [label for label, count in train.items() if count == 1]
    if once and len(train) > len(once):
        mend = "give them more rows, or leave them out: labels=[...] without them and stream.on_bad_row=skip"
        yield Mistake("labels with one row of train", len(once), _some([f"'{label}'" for label in once]), mend)
    never = [label for label in test if label not in train]
    if never and train:
        yield Mistake(
            "labels of test that train never has",
            len(never),
            _some([f"'{label}'" for label in never]),
            "give train rows of them",
        )
    rare = [label for label, count in train.items() if 1 < count < max(train.values()) / _RARE]
    if rare:
        which = ", ".join(f"'{label}' {train[label]:,} rows" for label in rare[:_SHOWN])
        mend = "use metric=macro_f1, or stream.per_class rows of each"
        yield Mistake("rare labels", len(rare), f"{which}, the most frequent {max(train.values()):,}", mend)


def _of_test(train: SeenRows, tested: Collection[SeenRow], by_group: bool) -> Iterator[Mistake]:
    """Find test rows that train has, and those of whose conversations it has another turn."""
    shared = [row for row in tested if row.text in train.texts]
    if shared:
        which = ", ".join(f"test {row.number} = train {train.texts[row.text]}" for row in shared[:_SHOWN])
        more = ", ..." if len(shared) > _SHOWN else ""
        mend = f"scores on them say little, remove them: {len(tested):,} test rows in all"
        yield Mistake("test rows with a text that is in train", len(shared), f"{which}{more}", mend)
    related = [row for row in tested if row.belongs in train.groups and row.text not in train.texts]
    if related:
        what = "group" if by_group else "conversation"
        mend = f"put each {what} in one split: give one file with stream.test_fraction"
        which = _some([f"row {row.number}" for row in related])
        yield Mistake(f"test rows of a {what} that is trained on", len(related), which, mend)


def _some(names: Collection[str]) -> str:
    return ", ".join([*list(names)[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])
