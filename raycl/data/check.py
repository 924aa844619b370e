"""What a task's data is understood as: rows, labels, lengths, what would be cut, duplicates, examples.

Why it exists: most mistakes with data are seen at once when somebody looks at it before training.
What it does not know: how the findings are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from raycl.data.prepare import naming_rows
from raycl.data.selection import Indices, sample
from raycl.data.sources.ingest import RawRows
from raycl.data.stream import Stream
from raycl.data.tokens import Split
from raycl.errors import RayclError
from raycl.types import Task, TextCodec

SPLITS: tuple[Split, ...] = ("train", "dev", "test")
MOST_MEASURED = 20_000
"""Rows of a split whose tokens are counted, drawn at random from more."""
MANY_CUT = 0.02
_BATCH = 1024


@dataclass(frozen=True)
class Lengths:
    """Tokens of sources or targets, special tokens included.

    Attributes:
        measured: rows that were tokenised. limit: most tokens that the run reads. cut: share of rows above it.
    """

    measured: int
    median: int
    p95: int
    p99: int
    longest: int
    limit: int
    cut: float


@dataclass(frozen=True)
class SplitCheck:
    """What a split is.

    Attributes:
        uri: where its rows are; that of train for a dev split that is carved from it.
        rows: that are used. left_out: that the settings leave out. unlabelled: that were dropped for having no label.
        labels: label -> rows, the most frequent first; {} for free text.
        answers: different answers. repeated: rows whose text came before in the split.
    """

    uri: str
    rows: int
    left_out: int
    unlabelled: int
    labels: dict[str, int]
    answers: int
    repeated: int
    sources: Lengths | None = None
    targets: Lengths | None = None


@dataclass(frozen=True)
class Example:
    """A row as the model reads it: with prompt and special tokens, cut to the limits.

    Attributes:
        row: 1-based number in its file.
        source_tokens, target_tokens: each token as the vocabulary has it; no target tokens where a label is learned.
    """

    row: int
    source: str
    target: str
    source_tokens: list[str]
    target_tokens: list[str]


@dataclass
class TaskCheck:
    """What a task is understood as.

    Attributes:
        kind: `labels`, `free text`, `conversations`, or `texts` (without answers).
        shared: rows of test that are in train too, as (row in train, row in test): a few of them. shared_rows: all.
        contradictions: texts of train with different answers.
        warnings: sentences about what is probably not intended. problem: why a run could not start; "": it could.
    """

    name: str
    kind: str
    metric: str
    labels: tuple[str, ...] | None
    splits: dict[str, SplitCheck] = field(default_factory=dict)
    shared_rows: int = 0
    shared: list[tuple[int, int]] = field(default_factory=list)
    contradictions: int = 0
    examples: list[Example] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problem: str = ""


def check_task(stream: Stream, task: Task, codec: TextCodec, seed: int, examples: int = 5) -> TaskCheck:
    """Read the rows of a task, and tokenise them as a run would."""
    raws = {split: stream.source(task, split) for split in SPLITS}
    train, test = raws["train"], raws["test"]
    carved = stream.carves_test(task)
    if train is not None and test is not None and train.where == test.where and not carved:
        raws["test"] = None
    is_chat = any(raw is not None and raw.is_chat for raw in raws.values())
    kind = "conversations" if is_chat else "free text" if task.labels is None else "labels"
    found = TaskCheck(task.name, "texts" if task.objective != "answer" else kind, task.metric, task.labels)
    digests: dict[str, dict[bytes, int]] = {}
    for split, raw in raws.items():
        rows = stream.rows(task, split)
        if raw is not None and len(rows):
            others = [one for one in SPLITS if one != split and raw is raws[one]] if split == "train" else []
            taken = sum(len(stream.rows(task, one)) for one in others)
            unused = 0 if split != "train" and raw is train else raw.count - len(rows) - taken
            found.splits[split], digests[split] = _split(raw, rows, task, unused)
    _duplicates(found, digests, raws, stream, task)
    try:
        stream.check(codec)
        _lengths(found, stream, task, codec, seed)
        found.examples = _examples(stream, task, codec, seed, examples)
    except RayclError as error:
        found.problem = str(error)
    found.warnings += _warnings(found)
    if test is not raws["test"]:
        found.warnings.append("test is the same data as train: give a run other rows to test on")
    return found


def _split(raw: RawRows, rows: Indices, task: Task, unused: int) -> tuple[SplitCheck, dict[bytes, int]]:
    """Counts of a split, and the first row of each text by its hash."""
    first: dict[bytes, int] = {}
    answers, labels, repeated = set[bytes](), Counter[str](), 0
    for texts, references, numbers in _batches(raw, rows):
        for text, names, number in zip(texts, references, numbers, strict=True):
            repeated += first.setdefault(_digest(text), number) != number
            answers.add(_digest(names[0]))
            if task.labels is not None:
                labels[names[0]] += 1
    counts = dict(labels.most_common())
    return SplitCheck(raw.where, len(rows), unused, raw.dropped, counts, len(answers), repeated), first


def _batches(raw: RawRows, rows: Indices) -> Iterator[tuple[list[str], list[list[str]], list[int]]]:
    """Texts, references and row numbers, some rows at a time."""
    columns = raw.open()
    for start in range(0, len(rows), _BATCH):
        part = rows[start : start + _BATCH]
        yield columns.values("text", part), columns.values("references", part), columns.values("row", part)


def _digest(text: str) -> bytes:
    return blake2b(" ".join(text.split()).encode(), digest_size=12).digest()


def _duplicates(
    found: TaskCheck,
    digests: dict[str, dict[bytes, int]],
    raws: dict[Split, RawRows | None],
    stream: Stream,
    task: Task,
) -> None:
    """Test rows whose text is in train or dev, and texts of train with several answers."""
    train = {**digests.get("dev", {}), **digests.get("train", {})}
    test = raws["test"]
    if test is not None and train:
        for texts, _, numbers in _batches(test, stream.rows(task, "test")):
            pairs = zip(map(_digest, texts), numbers, strict=True)
            shared = [(train[digest], row) for digest, row in pairs if digest in train]
            found.shared_rows += len(shared)
            found.shared += shared[: 5 - len(found.shared)]
    if raws["train"] is not None and task.objective == "answer":
        answers: dict[bytes, bytes] = {}
        several = set()
        for texts, references, _ in _batches(raws["train"], stream.rows(task, "train")):
            for text, names in zip(texts, references, strict=True):
                key, answer = _digest(text), _digest(names[0])
                if answers.setdefault(key, answer) != answer:
                    several.add(key)
        found.contradictions = len(several)


def _lengths(found: TaskCheck, stream: Stream, task: Task, codec: TextCodec, seed: int) -> None:
    prompt, limits = stream.prompt(task, codec), stream.limits(task, codec)
    for name in tuple(found.splits):
        split: Split = next(one for one in SPLITS if one == name)
        raw = stream.source(task, split)
        assert raw is not None, "a split that was counted has rows"
        rows = sample(seed, task.name, f"{split} lengths", stream.rows(task, split), MOST_MEASURED)
        sources: list[int] = []
        targets: list[int] = []
        for texts, references, numbers in _batches(raw, rows):
            with naming_rows(raw, numbers):
                sources += map(len, prompt.encode(texts, codec))
                if not codec.needs_labels and task.objective == "answer":
                    targets += map(len, prompt.encode_answers(texts, [names[0] for names in references], codec))
        measured = _of(sources, limits.source), _of(targets, limits.target)
        found.splits[name] = replace(found.splits[name], sources=measured[0], targets=measured[1])


def _of(lengths: Sequence[int], limit: int) -> Lengths | None:
    if not lengths:
        return None
    values = np.array(lengths)
    median, p95, p99, longest = (int(np.ceil(np.percentile(values, part))) for part in (50, 95, 99, 100))
    return Lengths(len(values), median, p95, p99, longest, limit, float((values > limit).mean()))


def _examples(stream: Stream, task: Task, codec: TextCodec, seed: int, count: int) -> list[Example]:
    split: Split = "train" if len(stream.rows(task, "train")) else "test"
    table = stream.table(task, split, codec)
    rows = sample(seed, task.name, "examples", np.arange(len(table)), count)
    columns, numbers = table.columns(rows), table.row_numbers(rows)
    references = table.references(rows)
    found = []
    for place, row in enumerate(numbers.tolist()):
        source, target = columns.source_ids[place].tolist(), columns.target_ids[place].tolist()
        answer = codec.shown(target) if target else references[place][0]
        found.append(Example(row, codec.shown(source), answer, codec.pieces(source), codec.pieces(target)))
    return found


def _warnings(found: TaskCheck) -> Iterator[str]:
    for side, setting in (("sources", "stream.max_source_tokens"), ("targets", "stream.max_target_tokens")):
        for name, split in found.splits.items():
            lengths: Lengths | None = getattr(split, side)
            if lengths is not None and lengths.cut > MANY_CUT and name != "dev":
                yield (
                    f"{lengths.cut:.0%} of the {side} in {name} are longer than {lengths.limit} tokens and will be "
                    f"cut: set {setting} to {lengths.p99} to keep 99 % of them whole"
                )
    test, train = found.splits.get("test"), found.splits.get("train")
    if found.shared_rows and test is not None:
        places = ", ".join(f"test {here} = train {there}" for there, here in found.shared)
        yield (
            f"{found.shared_rows:,} of {test.rows:,} test rows have a text that is in train (rows: {places}"
            f"{', ...' if found.shared_rows > len(found.shared) else ''}): scores on them say little, remove them"
        )
    if found.contradictions:
        yield f"{found.contradictions:,} texts of train come with different answers: at most one of them can be learned"
    if found.kind == "free text" and train is not None and 64 < train.answers < train.rows / 10:
        yield (
            f"train has {train.answers:,} different answers for {train.rows:,} rows and counts as free text: if they "
            "are classes, list them in labels"
        )
    if train is not None and test is not None and found.labels is not None:
        never = [label for label in test.labels if label not in train.labels]
        if never:
            yield f"labels of test that train never has: {', '.join(never[:10])}"
        if len(train.labels) > 1:
            counts = sorted(train.labels.values())
            if counts[-1] > 20 * counts[0]:
                rarest = min(train.labels, key=lambda label: train.labels[label])
                yield (
                    f"label '{rarest}' has {counts[0]:,} rows and the most frequent one {counts[-1]:,}: use metric "
                    "macro_f1, or per_class rows"
                )
    yield from (
        f"split {name} is small: {split.rows} rows, a score moves by {100 / split.rows:.1f} with each"
        for name, split in found.splits.items()
        if name == "test" and split.rows < 50
    )
