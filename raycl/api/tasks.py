"""Tasks of rows in memory, as files that a run can read again when it is resumed."""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from raycl.data.benchmarks.layout import check_name
from raycl.data.sources.conversation import BESIDE, CHAT_NAMES, conversation_of, is_chat
from raycl.data.sources.fields import half_character, kind_of
from raycl.data.sources.hub import NO_LABEL, class_names, named
from raycl.data.sources.slices import named_in
from raycl.errors import DataError, counted
from raycl.storage import Storage

log: logging.Logger = logging.getLogger("raycl")

FOLDER = "data"
"""A folder next to the runs: `data/NAME-HASH/train.jsonl` and so on."""


@dataclass(frozen=True)
class InMemoryTask:
    """A task whose rows are in memory.

    Attributes:
        rows: split -> rows of `text` and `label`. settings: settings of `stream.tasks`.
        uses_dev: the dev rows are used without `stream.dev=file` too.
    """

    name: str
    rows: Mapping[str, list[dict[str, Any]]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    uses_dev: bool = False

    def __repr__(self) -> str:
        counts = ", ".join(f"{split}: {counted(len(rows), 'row')}" for split, rows in self.rows.items())
        return f"InMemoryTask('{self.name}', {counts})"

    def saved(self, directory: Storage) -> dict[str, Any]:
        """Write the rows once, under the hash of all of them, and return the entry for `stream.tasks`."""
        files = {
            f"{split}.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
            for split, rows in self.rows.items()
        }
        digest = hashlib.sha256()
        for name in sorted(files):
            digest.update(name.encode() + files[name])
        folder = directory.sub(f"{FOLDER}/{self.name}-{digest.hexdigest()[:12]}")
        for name, data in files.items():
            if not folder.exists(name):
                folder.write(name, data)
        dev = {"dev": folder.sub("dev.jsonl").address} if self.uses_dev else {}
        return {"name": self.name, "path": folder.address, **dev, **self.settings}


Rows = Any
"""A list of (text, label) pairs, of dicts or of conversations, a mapping of columns, a pandas frame, or a
`datasets.Dataset`."""


def task(
    name: str,
    train: Rows,
    test: Rows = None,
    dev: Rows = None,
    text: str = "text",
    label: str = "label",
    group: str = "",
    **settings: Any,
) -> InMemoryTask | dict[str, Any]:
    """Return a task for `raycl.train`, `Run.add` and `Run.revise`.

    Args:
        name: Its name.
        train: Rows as a list of (text, label) pairs or dicts, a pandas frame or a `datasets.Dataset`; or a path or URI
            of a file, as for test and dev. Rows with `messages` are conversations. Alone: a folder, a dataset's folder
            or a name on the hub (`hf://fancyzhx/ag_news`), as `path` of `stream.tasks`; or a `DatasetDict` (any
            mapping) of `train`, `test` and maybe `dev`, which may be called validation, val or eval.
        test: Rows to test on.
        dev: Rows to choose settings on, or a file of them beside a path in train; None: a part of train, or with
            `stream.dev=file` the dev rows beside it.
        text: Name of the column of texts.
        label: Name of the column of labels or answers.
        group: The column that `stream.group` names, which is kept with the rows.
        settings: Settings of `stream.tasks` (metric, labels, definition, format).

    Raises:
        DataError: The name cannot be used, rows have no text or label, or files are given together with rows.

    Examples:
        >>> raycl.task("orders", [("a pot of tea", "drink"), ("a bowl of rice", "food")] * 8, [("tea", "drink")])
        InMemoryTask('orders', train: 16 rows, test: 1 row)
        >>> raycl.task("orders", train="train.csv", test="test.csv", text="body")["columns"]
        {'text': 'body', 'label': 'label'}
    """
    check_name(name)  # rows are written to a folder of this name
    uses_dev = dev is not None
    if test is None and isinstance(train, Mapping) and {"train", "test"} <= train.keys():
        others = {split: named_in(split, train) for split in ("train", "test", "dev")}
        train, test, beside = (None if known is None else train[known] for known in others.values())
        dev = beside if dev is None else dev
    given = {"train": train, "test": test, "dev": dev}
    there = {split: rows for split, rows in given.items() if rows is not None}
    files = {split for split, rows in there.items() if isinstance(rows, str | PathLike)}
    if files and files != there.keys():
        raise DataError(
            f"task '{name}': {', '.join(sorted(files))} is a file and "
            f"{', '.join(sorted(there.keys() - files))} is not: give files for all splits, or rows for all"
        )
    if "train" not in there:
        raise DataError(f"task '{name}' has no train rows: expected rows to learn, or a path of a file or folder")
    if files:
        columns = {} if (text, label) == ("text", "label") else {"columns": {"text": text, "label": label}}
        paths = {"path" if split == "train" and test is None else split: str(rows) for split, rows in there.items()}
        return {"name": name, **paths, **columns, **settings}
    if test is None:
        raise DataError(f"task '{name}' has no test rows: expected rows to test on, which are never trained on")
    names = _class_names(train, label)
    if names is not None:
        settings = {"labels": names, **settings}
    saved = {split: _rows(name, split, rows, text, label, group) for split, rows in there.items()}
    return InMemoryTask(name, saved, settings, uses_dev)


def _rows(name: str, split: str, rows: Rows, text: str, label: str, group: str) -> list[dict[str, Any]]:
    names = _class_names(rows, label)
    items: list[dict[str, Any]] = []
    unlabelled = 0
    for number, item in enumerate(_items(name, split, rows, text, label), 1):
        row = _row(f"task '{name}', {split} row {number}", item, text, label, names)
        if row is None:
            unlabelled += 1
            continue
        of_group = _plain(item.get(group)) if group and isinstance(item, Mapping) else None
        if not _is_missing(of_group):
            row[group] = str(of_group)
        items.append(row)
    if unlabelled:
        log.warning("task '%s': %d %s rows without a class are left out", name, unlabelled, split)
    if not items:
        raise DataError(f"task '{name}' has no {split} rows: expected at least one")
    return items


def _row(where: str, item: Any, text: str, label: str, names: list[str] | None) -> dict[str, Any] | None:
    """Return a row as its file has it; None: its class is not known."""
    messages = _plain(item.get(CHAT_NAMES[0])) if isinstance(item, Mapping) else None
    if is_chat(messages):
        conversation_of(messages, where)
        beside = {key: item[key] for key in BESIDE if not _is_missing(item.get(key))}
        return _whole({CHAT_NAMES[0]: messages, **beside}, where)
    if isinstance(item, Mapping):
        source, answer = item.get(text), _plain(item.get(label))
    elif isinstance(item, list | tuple) and len(item) == 2:
        source, answer = item[0], _plain(item[1])
    else:
        raise DataError(
            f"{where} is a {type(item).__name__}: expected (text, label), or a dict with {text} and {label}"
        )
    if not isinstance(source, str) or _is_missing(answer):
        raise DataError(
            f"{where}: expected a string under '{text}' and an answer under '{label}', got {source!r} and {answer!r}"
        )
    named_answer = named(answer, names) if names else _answer(answer, where, label)
    return None if names and named_answer == NO_LABEL else _whole({"text": source, "label": named_answer}, where)


def _whole(row: dict[str, Any], where: str) -> dict[str, Any]:
    if problem := half_character(json.dumps(row, ensure_ascii=False)):
        raise DataError(f"{where}: {problem}")
    return row


def _class_names(rows: Rows, label: str) -> list[str] | None:
    features = getattr(rows, "features", None)  # a frame's column may have this name
    return class_names(features[label]) if isinstance(features, Mapping) and label in features else None


def _items(name: str, split: str, rows: Rows, text: str, label: str) -> Iterable[Any]:
    """Yield rows one by one; of pandas frames and mappings of columns too."""
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        _require_columns(name, split, map(str, rows.columns), text, label)
        return list(rows.astype(object).where(rows.notna(), None).to_dict("records"))
    if isinstance(rows, Mapping):
        names = list(rows)
        _require_columns(name, split, map(str, names), text, label)
        lengths = {key: len(values) for key, values in rows.items() if hasattr(values, "__len__")}
        if len(lengths) < len(names) or len(set(lengths.values())) > 1:
            raise DataError(f"task '{name}', {split}: expected columns of one length, got {lengths or names}")
        return [dict(zip(names, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    if not isinstance(rows, Iterable):
        raise DataError(
            f"task '{name}', {split} is {rows!r}: expected a list of (text, label) pairs or dicts, a pandas frame, a "
            "datasets.Dataset, or a path"
        )
    return list(rows)


def _require_columns(name: str, split: str, columns: Iterable[str], text: str, label: str) -> None:
    present = list(columns)
    missing = [column for column in (text, label) if column not in present]
    if missing and CHAT_NAMES[0] not in present:
        raise DataError(
            f"task '{name}', {split} has no column '{missing[0]}' among {', '.join(present) or 'none'}: name the "
            "columns with text= and label="
        )


def _plain(value: Any) -> Any:
    """Return numbers of NumPy as Python's, and arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_missing(value: Any) -> bool:
    """Return whether a value stands for an empty cell, which pandas reads as NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _answer(value: Any, where: str, label: str) -> str | list[str]:
    """Return a string or a list of accepted answers; whole numbers as text.

    Raises:
        DataError: it is of another type, as files of rows refuse it.
    """
    answers = list(value) if isinstance(value, list | tuple) else [value]
    for answer in answers:
        if isinstance(answer, float):
            raise DataError(
                f"{where}: '{label}' is {answer!r}, a float: expected a string or a whole number; a pandas column of "
                "whole numbers with an empty cell holds floats: drop its rows without a label, and convert it with "
                ".astype(int)"
            )
        if not isinstance(answer, str | int):
            raise DataError(
                f"{where}: '{label}' is {answer!r}, a {kind_of(answer)}: expected a string, a whole number or a list "
                "of strings, convert or remove the row"
            )
    texts = list(map(str, answers))
    return texts if isinstance(value, list | tuple) else texts[0]
