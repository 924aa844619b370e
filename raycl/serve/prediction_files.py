"""Answers for files: rows are read as they are answered, and written in parts; a second start answers the rest.

    predictions.json         what is answered: files with their hashes, snapshot, settings; written first
    part-000000.jsonl ...    one object for each row, complete or absent
    summary.json             written last: rows, answers, tasks

What it does not know: how a text is answered.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from raycl.config import Tree
from raycl.data.conversation import messages_of
from raycl.data.sources.cache import cache_folder
from raycl.data.sources.fields import Columns, Row
from raycl.data.sources.formats import Format, read_rows
from raycl.data.sources.source import SourceFile
from raycl.errors import ConfigError, DataError, counted
from raycl.serve.offline import OfflineModel, Prediction, Text
from raycl.storage import Storage

log = logging.getLogger("raycl")

MANIFEST, SUMMARY = "predictions.json", "summary.json"
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt")
PART_ROWS = 4096
LOG_EVERY_S = 10.0


@dataclass(frozen=True)
class Input:
    """Rows of files, in order.

    Attributes:
        columns: where text (and label) are. format: of all files.
    """

    files: tuple[SourceFile, ...]
    columns: Columns
    format: Format = "auto"

    def rows(self) -> Iterator[tuple[SourceFile, Row]]:
        """Each row with its file.

        Raises:
            DataError: a file or row cannot be used.
        """
        for file in self.files:
            for row in read_rows(file, self.format, self.columns):
                yield file, row

    def tree(self) -> Tree:
        """What identifies it: names and hashes of the files, and how they are read."""
        hashes = {file.uri: file.content_hash(cache_folder(None)) for file in self.files}
        return {"files": hashes, "format": self.format, "columns": [list(self.columns.text), list(self.columns.label)]}


def files_at(addresses: Sequence[str]) -> tuple[SourceFile, ...]:
    """Files at paths or URIs; of a folder, those with a known suffix, in the order of their names.

    Raises:
        DataError: a file does not exist, or a folder has none.
    """
    found: list[SourceFile] = []
    for address in addresses:
        file, folder = SourceFile.at(address), Storage.at(address)
        if address.partition("?")[0].endswith(SUFFIXES):
            file.require()
            found.append(file)
            continue
        names = sorted(name for name in folder.list() if name.endswith(SUFFIXES))
        if not names:
            file.refuse(f"expected a file, or a folder with files, that end with {', '.join(SUFFIXES)}")
        found += [SourceFile(folder, name) for name in names]
    return tuple(found)


def record_of(file: SourceFile, row: Row, prediction: Prediction, names_file: bool) -> Tree:
    """A row of the output."""
    found: Tree = {"file": file.name} if names_file else {}
    found |= {"row": row.number, "answer": prediction.text}
    if prediction.scores:
        found["scores"] = {label: round(score, 6) for label, score in prediction.scores.items()}
    found["tasks"] = {task: round(weight, 6) for task, weight in prediction.tasks.items()}
    if prediction.ood_score is not None:
        found["ood_score"] = round(prediction.ood_score, 4)
    if prediction.cut_tokens:
        found["cut_tokens"] = prediction.cut_tokens
    return found


def answered(
    model: OfflineModel, given: Input, pairs: Iterable[tuple[SourceFile, Row]], **settings: Any
) -> Iterator[Tree]:
    """The record of each row, in order.

    Args:
        settings: of `OfflineModel.predict`.

    Raises:
        DataError: a row cannot be used. RayclError: a text cannot be answered.
    """
    waiting: list[tuple[SourceFile, Row]] = []

    def texts() -> Iterator[Text]:
        for file, row in pairs:
            if not row.text.strip():
                file.refuse("the text is empty: expected at least one word, complete or remove the row", row.number)
            waiting.append((file, row))
            yield messages_of(row.text) if row.is_chat else row.text

    several = len(given.files) > 1
    for prediction in model.predict(texts(), **settings):
        yield record_of(*waiting.pop(0), prediction, several)


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
    snapshot = {"number": model.snapshot.number, "sha256": model.snapshot.sha256}
    manifest = {"input": given.tree(), "snapshot": snapshot, "part_rows": part_rows, "settings": settings}
    _claim(to, manifest)
    there = set(to.list())
    rows, began, done = given.rows(), time.monotonic(), 0
    logged = began
    for number in count():
        part = list(islice(rows, part_rows))
        if not part:
            break
        name = part_name(number)
        if name not in there:
            lines = [json.dumps(record, ensure_ascii=False) for record in answered(model, given, part, **settings)]
            to.write(name, ("\n".join(lines) + "\n").encode())
            done += len(part)
        now = time.monotonic()
        if now - logged >= LOG_EVERY_S:
            logged = now
            log.info("%s answered, %.0f rows/s", f"{number * part_rows + len(part):,}", done / (now - began))
    summary = _summary(to, done, time.monotonic() - began)
    to.write_json(SUMMARY, summary)
    return summary


def part_name(number: int) -> str:
    """File of a part."""
    return f"part-{number:06d}.jsonl"


def _claim(to: Storage, manifest: Tree) -> None:
    """The folder is this input's, or is it from now on."""
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


def _summary(to: Storage, answered_now: int, seconds: float) -> Tree:
    rows, answers, tasks, scores, scored = 0, Counter[str](), Counter[str](), 0.0, 0
    for name in to.list():
        if not name.startswith("part-"):
            continue
        for line in to.read_text(name).splitlines():
            record = json.loads(line)
            rows += 1
            answers[record["answer"]] += 1
            tasks.update({next(iter(record["tasks"]), ""): 1})
            if "ood_score" in record:
                scores, scored = scores + record["ood_score"], scored + 1
    if not rows:
        raise DataError(f"there are no rows to answer: expected at least one ({counted(0, 'row')} read)")
    return {
        "rows": rows,
        "answered_now": answered_now,
        "rows_per_s": answered_now / seconds if answered_now else None,
        "answers": dict(answers.most_common(20)),
        "tasks": dict(tasks.most_common()),
        "mean_ood_score": scores / scored if scored else None,
    }
