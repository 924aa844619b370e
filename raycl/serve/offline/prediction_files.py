"""Answers for files: rows are read as they are answered, and written in parts; a second start answers the rest.

predictions.json         what is answered: files with their hashes, snapshot, settings; written first
part-000000.jsonl ...    one object for each row, complete or absent
part-000000.json ...     the sealed record of each part; a part that is not what it says is answered again
summary.json             written last: rows, answers, tasks, rows that could not be answered

Parts are for programs that continue after a stop; people open one table, which is written at the end: CSV and Parquet
with the same columns in every row, or JSON lines as they are in the parts.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from decimal import Decimal
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from raycl.bank import Snapshot
from raycl.config import Tree
from raycl.data.sources.cache import key_of
from raycl.data.sources.conversation import messages_of
from raycl.data.sources.source import SourceFile
from raycl.data.sources.table_cells import SpreadsheetWriter
from raycl.errors import ConfigError, DamagedError, DataError, FormatError, counted
from raycl.serve.offline.prediction_input import Input, InputRow
from raycl.storage import Storage
from raycl.storage.records import read_record, read_sealed, seal, write_sealed

if TYPE_CHECKING:
    from raycl.serve.offline.model import OfflineModel, Prediction, Text

log: logging.Logger = logging.getLogger("raycl")

MANIFEST, SUMMARY = "predictions.json", "summary.json"
FORMAT = 1
_RECORD = re.compile(r"part-(\d{6,})\.json")
"""Matches the record of a part; other files in the folder, such as compressed copies, are no parts."""
PLACE = ("file", "row")
OWN = (*PLACE, "answer", "error", "scores", "tasks", "ood_score", "cut_tokens")
"""Columns of the output that are not those of the input; the first say where a row is."""

PART_ROWS = 4096
LOG_EVERY_S = 10.0


def record_of(row: InputRow, prediction: Prediction | None, names_file: bool) -> Tree:
    """Return a row of the output: where it is, the answer or why there is none, and the other columns of the input."""
    record: Tree = {"file": row.file.name} if names_file else {}
    error = row.problem if prediction is None else prediction.error
    record |= {"row": row.row.number, "answer": None if prediction is None or error else prediction.text}
    if error:
        record["error"] = error
    elif prediction is not None:
        if prediction.scores:
            record["scores"] = {label: round(score, 6) for label, score in prediction.scores.items()}
        record["tasks"] = {task: round(weight, 6) for task, weight in prediction.tasks.items()}
        if prediction.ood_score is not None:
            record["ood_score"] = round(prediction.ood_score, 4)
        if prediction.cut_tokens:
            record["cut_tokens"] = prediction.cut_tokens
    others = plain(row.row.others or {})
    return record | {f"input.{name}" if name in OWN else name: value for name, value in others.items()}


def plain(value: Any) -> Any:
    """Return a value of a file as JSON has it: text for dates and the like, null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {_whole(str(key)): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, int) else _whole(str(value))


def _whole(text: str) -> str:
    """Return a text without halves of surrogate pairs, which no file can hold."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def answered(model: OfflineModel, given: Input, rows: Iterable[InputRow], **settings: Any) -> Iterator[Tree]:
    """Yield the record of each row, in order; of a row that cannot be answered, the error.

    Args:
        settings: settings of `OfflineModel.predict`.

    Raises:
        DataError: a file cannot be used. RayclError: no text can be answered.
    """
    waiting, several = deque[InputRow](), len(given.files) > 1

    def texts() -> Iterator[Text]:
        for row in rows:
            waiting.append(row)
            if not row.problem:
                yield messages_of(row.row.text) if row.row.is_chat else row.row.text

    def bad() -> Iterator[Tree]:
        while waiting and waiting[0].problem:
            yield record_of(waiting.popleft(), None, several)

    for prediction in model.predict(texts(), keep_errors=True, **settings):
        yield from bad()
        yield record_of(waiting.popleft(), prediction, several)
    yield from bad()


def write_predictions(
    model: OfflineModel, given: Input, to: Storage, part_rows: int = PART_ROWS, **settings: Any
) -> Tree:
    """Answer all rows that have no part yet; returns the summary.

    Args:
        settings: settings of `OfflineModel.predict`.

    Raises:
        ConfigError: the folder holds answers to other files, of another snapshot or with other settings.
        DataError, RayclError: see `answered`. Parts that are written stay.
    """
    key = claim(to, given, model.snapshot, part_rows, settings)
    done, began, progress = set(done_parts(to, key)), time.monotonic(), PredictionProgress()
    for number, part in parts_of(given, part_rows):
        if number not in done:
            write_part(model, given, number, part, to, key, settings)
            done.add(number)
            progress.add(len(part))
    return summarise(to, key, done, progress.rows, time.monotonic() - began)


def parts_of(given: Input, part_rows: int) -> Iterator[tuple[int, list[InputRow]]]:
    """Yield the rows in numbered parts, in order.

    Raises:
        DataError: a file cannot be used.
    """
    rows = given.all_rows()
    for number in count():
        part = list(islice(rows, part_rows))
        if not part:
            return
        yield number, part


def write_part(
    model: OfflineModel, given: Input, number: int, part: list[InputRow], to: Storage, key: str, settings: Tree
) -> None:
    """Answer one part and write it.

    Args:
        key: see `claim`.

    Raises:
        DataError, RayclError: see `answered`.
    """
    lines = [json.dumps(record, ensure_ascii=False) for record in answered(model, given, part, **settings)]
    write_sealed(to, part_name(number), key, ("\n".join(lines) + "\n").encode(), rows=len(lines))


def done_parts(to: Storage, key: str) -> frozenset[int]:
    """Return numbers of the parts that are written, each read and its hash checked.

    Args:
        key: see `claim`.
    """
    files, done = set(to.list()), set()
    for number in sorted(int(match[1]) for name in files if (match := _RECORD.fullmatch(name))):
        try:
            if part_name(number) not in files:
                raise DamagedError(f"'{to.uri}/{part_name(number)}' is missing")
            read_sealed(to, part_name(number), key)
        except (DamagedError, FormatError) as error:
            log.warning("a part does not count, so its rows are answered: %s", error)
        else:
            done.add(number)
    return frozenset(done)


def records_of(to: Storage, key: str, parts: int) -> Iterator[Tree]:
    """Yield the records of so many parts, in order.

    Raises:
        DamagedError: one was changed since it was written.
    """
    for number in range(parts):
        try:
            data, _ = read_sealed(to, part_name(number), key)
        except (DamagedError, FormatError) as error:
            raise DamagedError(f"{error}: the same command answers this part again") from error
        yield from (json.loads(line) for line in data.split(b"\n") if line)


class PredictionProgress:
    """Logs how many rows are answered now and then.

    Attributes:
        rows: answered so far.
    """

    def __init__(self) -> None:
        self.rows: int = 0
        self._began = self._logged = time.monotonic()

    def add(self, rows: int) -> None:
        self.rows += rows
        now = time.monotonic()
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            log.info("%s answered, %.0f rows/s", f"{self.rows:,}", self.rows / (now - self._began))


def part_name(number: int) -> str:
    """Return the file name of a part."""
    return f"part-{number:06d}.jsonl"


def claim(to: Storage, given: Input, snapshot: Snapshot, part_rows: int, settings: Tree) -> str:
    """Claim the folder for this input, and return the key of its parts.

    Where the manifest is missing or damaged, parts that are whole and have the key of this input prove that it is.

    Raises:
        ConfigError: it is that of another input, snapshot or other settings, or holds something else.
        DamagedError, FormatError: its manifest is damaged, or of another version.
    """
    named = {"number": snapshot.number, "sha256": snapshot.sha256}
    manifest = {"input": given.tree(), "snapshot": named, "part_rows": part_rows, "settings": settings}
    key = key_of(manifest)
    try:
        there = read_record(to, MANIFEST, FORMAT) if to.exists(MANIFEST) else None
    except DamagedError as error:
        if not done_parts(to, key):
            raise DamagedError(f"{error}, or choose another folder") from error
        log.warning("it is written again, since the parts beside it are answers to this input: %s", error)
        there = None
    else:
        if there is None and to.list() and not done_parts(to, key):
            raise ConfigError(f"'{to.uri}' is not empty and holds no {MANIFEST}: choose another folder")
    if there is None:
        to.write(MANIFEST, seal({"format": FORMAT, **manifest}))
        return key
    changed = [name for name, value in manifest.items() if there.get(name) != value]
    if changed:
        raise ConfigError(
            f"'{to.uri}' holds answers of another {', '.join(changed)}: choose another folder, or delete it"
        )
    return key


def summarise(to: Storage, key: str, done: Set[int], answered_now: int, seconds: float) -> Tree:
    """Write the summary of all parts, and return it.

    Args:
        key: see `claim`. done: numbers of the parts.

    Raises:
        DataError: there are none. DamagedError: see `records_of`.
    """
    assert done == set(range(len(done))), f"parts {sorted(done)} are no whole"
    rows, errors, answers, tasks, scores, scored = 0, 0, Counter[str](), Counter[str](), 0.0, 0
    for record in records_of(to, key, len(done)):
        rows += 1
        if "error" in record:
            errors += 1
            continue
        answers[record["answer"]] += 1
        tasks.update({next(iter(record["tasks"]), ""): 1})
        if "ood_score" in record:
            scores, scored = scores + record["ood_score"], scored + 1
    if not rows:
        raise DataError(f"there are no rows to answer: expected at least one ({counted(0, 'row')} read)")
    summary = {
        "rows": rows,
        "errors": errors,
        "parts": len(done),
        "key": key,
        "answered_now": answered_now,
        "rows_per_s": answered_now / seconds if answered_now else None,
        "answers": dict(answers.most_common(20)),
        "tasks": dict(tasks.most_common()),
        "mean_ood_score": scores / scored if scored else None,
    }
    to.write_json(SUMMARY, summary)
    return summary


BATCH = 1024
"""Rows that are written at once."""

_OWN_TYPES = {"row": pa.int64(), "cut_tokens": pa.int64(), "ood_score": pa.float64()}
"""Other columns of ours are text."""

_INT64 = 1 << 63


def check_output(address: str, given: Input) -> None:
    """Refuse an address that `write_table` could not or should not write to, before any work starts.

    Raises:
        ConfigError: an unknown suffix, or a file that is read.
    """
    if not address.endswith(tuple(_WRITERS)):
        raise ConfigError(f"--output is '{address}': expected a file that ends with {', '.join(_WRITERS)}")
    if any(file.uri == SourceFile.at(address).uri for file in given.files):
        raise ConfigError(f"--output is '{address}', which is read: name another file")


def write_table(records: Callable[[], Iterator[Tree]], address: str) -> None:
    """Write records as one file, whole or not at all.

    Args:
        records: returns the records of all parts (`records_of`); called for each of two passes.

    Raises:
        StorageError: it cannot be written, or a part is damaged.
    """
    suffix = next(suffix for suffix in _WRITERS if address.endswith(suffix))
    columns = _columns(records())
    file = SourceFile.at(address)
    file.folder.write_parts(file.name, lambda: _WRITERS[suffix](records(), columns))


def _columns(records: Iterable[Tree]) -> dict[str, set[str]]:
    """Return columns in their order, with the kinds of their values: the file and row, the input's, then ours."""
    values_by_column: dict[str, set[str]] = {}
    for record in records:
        for name, value in record.items():
            values_by_column.setdefault(name, set()).add(_kind(value))
    order = (
        *PLACE,
        *(name for name in values_by_column if name not in OWN),
        *(name for name in OWN if name not in PLACE),
    )
    return {name: values_by_column.get(name, set()) for name in order if name in values_by_column or name == "error"}


def _kind(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and not -_INT64 <= value < _INT64:
        return "str"
    return type(value).__name__


def _jsonl(records: Iterator[Tree], columns: Mapping[str, set[str]]) -> Iterator[bytes]:
    while batch := list(islice(records, BATCH)):
        yield "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in batch).encode()


def _csv(records: Iterator[Tree], columns: Mapping[str, set[str]]) -> Iterator[bytes]:
    text = io.StringIO()
    writer = SpreadsheetWriter(text)
    writer.writerow(columns)
    while batch := list(islice(records, BATCH)):
        writer.writerows([_cell(record.get(name)) for name in columns] for record in batch)
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    yield text.getvalue().encode()


def _cell(value: Any) -> str | None:
    """Return a value as text; None as it is, and what has parts as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _parquet(records: Iterator[Tree], columns: Mapping[str, set[str]]) -> Iterator[bytes]:
    schema = pa.schema([(name, _OWN_TYPES.get(name) or _type(kinds)) for name, kinds in columns.items()])
    sink = _Written()
    with pq.ParquetWriter(sink, schema) as writer:
        while batch := list(islice(records, BATCH)):
            values = {field.name: _values(batch, field) for field in schema}
            writer.write_table(pa.table(values, schema))
            yield sink.taken()
    yield sink.taken()


def _type(kinds: set[str]) -> pa.DataType:
    """Return the type of an input column: text where its values are of several kinds or have parts."""
    known = kinds - {"NoneType"}
    if known == {"bool"}:
        return pa.bool_()
    if known == {"int"}:
        return pa.int64()
    return pa.float64() if known and known <= {"int", "float"} else pa.string()


def _values(batch: Sequence[Tree], field: pa.Field) -> list[Any]:
    values = [record.get(field.name) for record in batch]
    return [_cell(value) for value in values] if field.type == pa.string() else values


class _Written(io.RawIOBase):
    """The bytes that a writer has written since they were last taken."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._count = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Keep a copy."""
        part = bytes(data)
        self._parts.append(part)
        self._count += len(part)
        return len(part)

    def tell(self) -> int:
        """Return bytes written in all."""
        return self._count

    def taken(self) -> bytes:
        """Give it away."""
        text, self._parts = b"".join(self._parts), []
        return text


_WRITERS: Mapping[str, Callable[[Iterator[Tree], Mapping[str, set[str]]], Iterator[bytes]]] = {
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
