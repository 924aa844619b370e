"""Answers for files: rows are read as they are answered, and written in parts; a second start answers the rest.

    predictions.json         what is answered: files with their hashes, snapshot, settings; written first
    part-000000.jsonl ...    one object for each row, complete or absent
    summary.json             written last: rows, answers, tasks, rows that could not be answered

What it does not know: how a text is answered.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from raycl.bank import Snapshot
from raycl.config import Tree
from raycl.data.conversation import messages_of
from raycl.errors import ConfigError, DataError, counted
from raycl.serve.prediction_input import Input, InputRow
from raycl.storage import Storage

if TYPE_CHECKING:
    from raycl.serve.offline import OfflineModel, Prediction, Text

log = logging.getLogger("raycl")

MANIFEST, SUMMARY = "predictions.json", "summary.json"
PART = re.compile(r"part-(\d{6,})\.jsonl")
"""A part's name; what else is in the folder is no part, a compressed copy for example."""
PLACE = ("file", "row")
OWN = (*PLACE, "answer", "error", "scores", "tasks", "ood_score", "cut_tokens")
"""Columns of the output that are not those of the input; the first say where a row is."""

PART_ROWS = 4096
LOG_EVERY_S = 10.0


def record_of(one: InputRow, prediction: Prediction | None, names_file: bool) -> Tree:
    """A row of the output: where it is, the answer or why there is none, and the other columns of the input."""
    found: Tree = {"file": one.file.name} if names_file else {}
    error = one.problem if prediction is None else prediction.error
    found |= {"row": one.row.number, "answer": None if prediction is None or error else prediction.text}
    if error:
        found["error"] = error
    elif prediction is not None:
        if prediction.scores:
            found["scores"] = {label: round(score, 6) for label, score in prediction.scores.items()}
        found["tasks"] = {task: round(weight, 6) for task, weight in prediction.tasks.items()}
        if prediction.ood_score is not None:
            found["ood_score"] = round(prediction.ood_score, 4)
        if prediction.cut_tokens:
            found["cut_tokens"] = prediction.cut_tokens
    others = plain(one.row.others or {})
    return found | {f"input.{name}" if name in OWN else name: value for name, value in others.items()}


def plain(value: Any) -> Any:
    """A value of a file as JSON has it: text for dates and the like, null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {_whole(str(key)): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, int) else _whole(str(value))


def _whole(text: str) -> str:
    """Without halves of surrogate pairs, which no file can hold."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def answered(model: OfflineModel, given: Input, rows: Iterable[InputRow], **settings: Any) -> Iterator[Tree]:
    """The record of each row, in order; of a row that cannot be answered, the error.

    Args:
        settings: of `OfflineModel.predict`.

    Raises:
        DataError: a file cannot be used. RayclError: no text can be answered.
    """
    waiting, several = deque[InputRow](), len(given.files) > 1

    def texts() -> Iterator[Text]:
        for one in rows:
            waiting.append(one)
            if not one.problem:
                yield messages_of(one.row.text) if one.row.is_chat else one.row.text

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
        settings: of `OfflineModel.predict`.

    Raises:
        ConfigError: the folder holds answers to other files, of another snapshot or with other settings.
        DataError, RayclError: see `answered`. Parts that are written stay.
    """
    claim(to, given, model.snapshot, part_rows, settings)
    done, began, progress = done_parts(to), time.monotonic(), Progress()
    for number, part in parts_of(given, part_rows):
        if number not in done:
            write_part(model, given, number, part, to, settings)
            progress.add(len(part))
    return summarise(to, progress.rows, time.monotonic() - began)


def parts_of(given: Input, part_rows: int) -> Iterator[tuple[int, list[InputRow]]]:
    """The rows in numbered parts, in order.

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
    model: OfflineModel, given: Input, number: int, part: list[InputRow], to: Storage, settings: Tree
) -> None:
    """Answer one part and write it.

    Raises:
        DataError, RayclError: see `answered`.
    """
    lines = [json.dumps(record, ensure_ascii=False) for record in answered(model, given, part, **settings)]
    to.write(part_name(number), ("\n".join(lines) + "\n").encode())


def done_parts(to: Storage) -> frozenset[int]:
    """Numbers of the parts that are written."""
    return frozenset(int(found[1]) for name in to.list() if (found := PART.fullmatch(name)))


def records_of(to: Storage) -> Iterator[Tree]:
    """The records of all parts, in order."""
    for name in to.list():
        if PART.fullmatch(name):
            yield from to.read_json_lines(name)


class Progress:
    """Logs how many rows are answered now and then.

    Attributes:
        rows: answered so far.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._began = self._logged = time.monotonic()

    def add(self, rows: int) -> None:
        """Some more."""
        self.rows += rows
        now = time.monotonic()
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            log.info("%s answered, %.0f rows/s", f"{self.rows:,}", self.rows / (now - self._began))


def part_name(number: int) -> str:
    """File of a part."""
    return f"part-{number:06d}.jsonl"


def claim(to: Storage, given: Input, snapshot: Snapshot, part_rows: int, settings: Tree) -> None:
    """The folder is this input's, or is it from now on.

    Raises:
        ConfigError: it is that of another input, snapshot or other settings, or holds something else.
    """
    named = {"number": snapshot.number, "sha256": snapshot.sha256}
    manifest = {"input": given.tree(), "snapshot": named, "part_rows": part_rows, "settings": settings}
    if to.exists(MANIFEST):
        there = to.read_json(MANIFEST)
        changed = [key for key, value in manifest.items() if there.get(key) != value]
        if changed:
            raise ConfigError(
                f"'{to.uri}' holds answers of another {', '.join(changed)}: choose another folder, or delete it"
            )
        return
    if to.list():
        raise ConfigError(f"'{to.uri}' is not empty and holds no {MANIFEST}: choose another folder")
    to.write_json(MANIFEST, manifest)


def summarise(to: Storage, answered_now: int, seconds: float) -> Tree:
    """Write the summary of all parts, and return it.

    Raises:
        DataError: there are none.
    """
    rows, errors, answers, tasks, scores, scored = 0, 0, Counter[str](), Counter[str](), 0.0, 0
    for record in records_of(to):
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
        "answered_now": answered_now,
        "rows_per_s": answered_now / seconds if answered_now else None,
        "answers": dict(answers.most_common(20)),
        "tasks": dict(tasks.most_common()),
        "mean_ood_score": scores / scored if scored else None,
    }
    to.write_json(SUMMARY, summary)
    return summary
