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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycl.bank import Snapshot
from raycl.config import Tree
from raycl.data.conversation import messages_of
from raycl.data.sources.cache import cache_folder
from raycl.data.sources.fields import Columns, Row
from raycl.data.sources.formats import Format, Source, read_rows
from raycl.data.sources.hub import HUB, SAVED, HubSplit, is_dataset_folder
from raycl.data.sources.source import SourceFile
from raycl.errors import ConfigError, DataError, counted
from raycl.storage import Storage

if TYPE_CHECKING:
    from raycl.serve.offline import OfflineModel, Prediction, Text

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

    files: tuple[Source, ...]
    columns: Columns
    format: Format = "auto"

    def rows(self) -> Iterator[tuple[Source, Row]]:
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


def files_at(addresses: Sequence[str], split: str = "test", config: str | None = None) -> tuple[Source, ...]:
    """Files at paths or URIs; of a folder, those with a known suffix, in the order of their names; datasets.

    Args:
        split, config: of a dataset: an `hf://` name, or a local folder in the hub's layout.

    Raises:
        DataError: a file does not exist, or a folder has none.
    """
    found: list[Source] = []
    for address in addresses:
        if address.startswith(HUB) and not address.endswith(SUFFIXES):
            found.append(HubSplit(address, split, config))
            continue
        file, folder = SourceFile.at(address), Storage.at(address)
        if address.partition("?")[0].endswith(SUFFIXES):
            file.require()
            found.append(file)
            continue
        names = sorted(name for name in folder.list() if name.endswith(SUFFIXES))
        local = Path(folder.root) if folder.is_local else None
        is_saved = local is not None and any((local / name).is_file() for name in SAVED)
        if local is not None and is_dataset_folder(local) and (config or is_saved or not names):
            name = "" if (local / SAVED[1]).is_file() else split
            found.append(HubSplit(str(local), name, config, cache=str(cache_folder(None) / "hub")))
            continue
        if not names:
            file.refuse(f"expected a file, or a folder with files, that end with {', '.join(SUFFIXES)}, or a dataset")
        found += [SourceFile(folder, name) for name in names]
    return tuple(found)


def record_of(file: Source, row: Row, prediction: Prediction, names_file: bool) -> Tree:
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


def answered(model: OfflineModel, given: Input, pairs: Iterable[tuple[Source, Row]], **settings: Any) -> Iterator[Tree]:
    """The record of each row, in order.

    Args:
        settings: of `OfflineModel.predict`.

    Raises:
        DataError: a row cannot be used. RayclError: a text cannot be answered.
    """
    waiting: list[tuple[Source, Row]] = []

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
    claim(to, given, model.snapshot, part_rows, settings)
    done, began, progress = done_parts(to), time.monotonic(), Progress()
    for number, part in parts_of(given, part_rows):
        if number not in done:
            write_part(model, given, number, part, to, settings)
            progress.add(len(part))
    return summarise(to, progress.rows, time.monotonic() - began)


def parts_of(given: Input, part_rows: int) -> Iterator[tuple[int, list[tuple[Source, Row]]]]:
    """The rows in numbered parts, in order.

    Raises:
        DataError: a file or row cannot be used.
    """
    rows = given.rows()
    for number in count():
        part = list(islice(rows, part_rows))
        if not part:
            return
        yield number, part


def write_part(
    model: OfflineModel, given: Input, number: int, part: list[tuple[Source, Row]], to: Storage, settings: Tree
) -> None:
    """Answer one part and write it.

    Raises:
        DataError, RayclError: see `answered`.
    """
    lines = [json.dumps(record, ensure_ascii=False) for record in answered(model, given, part, **settings)]
    to.write(part_name(number), ("\n".join(lines) + "\n").encode())


def done_parts(to: Storage) -> frozenset[int]:
    """Numbers of the parts that are written."""
    return frozenset(int(name[len("part-") : -len(".jsonl")]) for name in to.list() if name.startswith("part-"))


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
    summary = {
        "rows": rows,
        "answered_now": answered_now,
        "rows_per_s": answered_now / seconds if answered_now else None,
        "answers": dict(answers.most_common(20)),
        "tasks": dict(tasks.most_common()),
        "mean_ood_score": scores / scored if scored else None,
    }
    to.write_json(SUMMARY, summary)
    return summary
