"""Checks of a task's data: rows, labels, lengths, what would be cut, mistakes, examples.

Most mistakes in data are obvious to a person who looks at it before training.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from raycl.data.lengths import lines_of_cuts
from raycl.data.mistakes import Mistake, mistakes_of, seen_rows
from raycl.data.prepare import naming_rows
from raycl.data.selection import sample
from raycl.data.sources.cache import Indices
from raycl.data.sources.ingest import RawRows
from raycl.data.stream import Stream
from raycl.data.tokens import SPLITS, Split
from raycl.errors import RayclError
from raycl.types import Task, TextCodec

MOST_MEASURED = 20_000
"""Rows of a split whose tokens are counted, drawn at random from more."""
FEW_TEST_ROWS = 50
_BATCH = 1024


@dataclass(frozen=True)
class LengthSummary:
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
    """Counts of a split's rows, labels and lengths.

    Attributes:
        uri: address of its rows; that of train for a dev split that is carved from it.
        rows: rows that are used. left_out: rows that the settings leave out. unlabelled: rows dropped without a label.
        labels: label -> rows, the most frequent first; {} for free text.
        answers: different answers. repeated: rows whose text came before in the split.
        unusable: rows that are left out and that a run refuses; of a carved split those of train count there.
    """

    uri: str
    rows: int
    left_out: int
    unlabelled: int
    labels: dict[str, int]
    answers: int
    repeated: int
    unusable: int = 0
    sources: LengthSummary | None = None
    targets: LengthSummary | None = None


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
    """The data of a task as a run reads it.

    Attributes:
        kind: `labels`, `free text`, `conversations`, or `texts` (without answers).
        unread: address of a dev file that is there and is not read, since `stream.dev` is not file; "": there is none.
        notes: unusual ways in which its files were read. cut: what is cut of its rows, and how to keep it.
        mistakes: probable mistakes. problem: reason why a run could not start; "": it could.
    """

    name: str
    kind: str
    metric: str
    labels: tuple[str, ...] | None
    splits: dict[str, SplitCheck] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    unread: str = ""
    notes: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    problem: str = ""

    @property
    def unusable(self) -> int:
        """Rows that a run refuses, unless it leaves them out."""
        return sum(split.unusable for split in self.splits.values())


def check_task(stream: Stream, task: Task, codec: TextCodec, seed: int, examples: int = 5) -> TaskCheck:
    """Read the rows of a task, and tokenise them as a run would."""
    raws = {split: stream.source(task, split) for split in SPLITS}
    train, test = raws["train"], raws["test"]
    carved = stream.carves_test(task)
    if train is not None and test is not None and train.where == test.where and not carved:
        raws["test"] = None
    is_chat = any(raw is not None and raw.is_chat for raw in raws.values())
    kind = "conversations" if is_chat else "free text" if task.labels is None else "labels"
    check = TaskCheck(task.name, "texts" if task.objective != "answer" else kind, task.metric, task.labels)
    check.unread = stream.unread_dev(task)
    for split, raw in raws.items():
        rows = stream.rows(task, split)
        if raw is not None and len(rows):
            others = [other for other in SPLITS if other != split and raw is raws[other]] if split == "train" else []
            taken = sum(len(stream.rows(task, other)) for other in others)
            check.splits[split] = _split(raw, rows, task, raw.count - len(rows) - taken)
            if split != "train" and raw is train:  # what rows are left out of its file counts there
                check.splits[split] = replace(check.splits[split], left_out=0, unlabelled=0, unusable=0)
            check.notes += [note for note in raw.notes if note not in check.notes]
    check.mistakes = mistakes_of(stream, task)
    try:
        stream.check(codec)
        _lengths(check, stream, task, codec, seed)
        check.examples = _examples(stream, task, codec, seed, examples)
    except RayclError as error:
        check.problem = str(error)
    check.cut = list(lines_of_cuts(stream, task))
    check.mistakes += _few(check)
    if test is not raws["test"]:
        rows = stream.rows(task, "test")
        check.mistakes.append(Mistake("test rows that are train's", len(rows), "one file", "name other rows for test"))
    return check


def _split(raw: RawRows, rows: Indices, task: Task, left_out: int) -> SplitCheck:
    texts, answers, repeated = set[int](), Counter[str](), 0
    for row in seen_rows(raw, rows):
        repeated += row.text in texts
        texts.add(row.text)
        answers[row.answer] += 1
    labels = {} if task.labels is None else dict(answers.most_common())
    counts = (labels, len(answers), repeated, raw.left_out + raw.blank)
    return SplitCheck(raw.where, len(rows), left_out, raw.dropped, *counts)


def _batches(raw: RawRows, rows: Indices) -> Iterator[tuple[list[str], list[list[str]], list[int]]]:
    columns = raw.open()
    for start in range(0, len(rows), _BATCH):
        part = rows[start : start + _BATCH]
        yield columns.values("text", part), columns.values("references", part), columns.values("row", part)


def _lengths(check: TaskCheck, stream: Stream, task: Task, codec: TextCodec, seed: int) -> None:
    prompt, limits = stream.prompt(task, codec), stream.limits(task, codec)
    for name in tuple(check.splits):
        split: Split = next(known for known in SPLITS if known == name)
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
        check.splits[name] = replace(check.splits[name], sources=measured[0], targets=measured[1])


def _of(lengths: Sequence[int], limit: int) -> LengthSummary | None:
    if not lengths:
        return None
    values = np.array(lengths)
    median, p95, p99, longest = (int(np.ceil(np.percentile(values, part))) for part in (50, 95, 99, 100))
    return LengthSummary(len(values), median, p95, p99, longest, limit, float((values > limit).mean()))


def _examples(stream: Stream, task: Task, codec: TextCodec, seed: int, count: int) -> list[Example]:
    split: Split = "train" if len(stream.rows(task, "train")) else "test"
    table = stream.table(task, split, codec)
    rows = sample(seed, task.name, "examples", np.arange(len(table)), count)
    columns, numbers = table.columns(rows), table.row_numbers(rows)
    references = table.references(rows)
    examples = []
    for index, row in enumerate(numbers.tolist()):
        source, target = columns.source_ids[index].tolist(), columns.target_ids[index].tolist()
        answer = codec.shown(target) if target else references[index][0]
        examples.append(Example(row, codec.shown(source), answer, codec.pieces(source), codec.pieces(target)))
    return examples


def _few(check: TaskCheck) -> Iterator[Mistake]:
    test = check.splits.get("test")
    if test is not None and test.rows < FEW_TEST_ROWS:
        which = f"a score moves by {100 / test.rows:.1f} with each"
        yield Mistake("few test rows", test.rows, which, f"give test at least {FEW_TEST_ROWS}")
