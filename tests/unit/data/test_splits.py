"""Splits under any of their names, slices of every source, one file with a column of splits, Arrow files, SQL."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from raycl import api
from raycl.api.tasks import InMemoryTask
from raycl.config.trust import Server, require_named
from raycl.data.sources.slices import sliced
from raycl.data.stream import Stream, StreamConfig, TaskSpec, open_stream
from raycl.errors import ConfigError, DataError

NAMES = ["no", "yes"]
FEATURES = Features({"text": Value("string"), "label": ClassLabel(names=NAMES)})


def items(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"text": f"item {number}", "label": NAMES[number % 2]} for number in range(start, start + count)]


def write(file: Path, rows: list[dict[str, str]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def opened(path: Path | str | None, dev: Any = "file", **settings: Any) -> Stream:
    spec = TaskSpec(name="mine", path=None if path is None else str(path), **settings)
    return open_stream(StreamConfig(name="mine", tasks=(spec,), dev=dev, dev_fraction=0, dev_rows=None), seed=0)


def numbers(stream: Stream) -> dict[str, list[int]]:
    """Return split -> the numbers in its texts."""
    found = {}
    for split in ("train", "dev", "test"):
        raw = stream._open["mine"].raws.get(split)
        if raw is not None:
            found[split] = [int(text.split()[1]) for text in raw.open().values("text", range(raw.count))]
    return found


@pytest.mark.parametrize("name", ["dev", "validation", "val", "eval"])
def test_a_dev_split_has_any_of_its_names(tmp_path: Path, name: str) -> None:
    expected = {"train": [0, 1, 2, 3], "dev": [4, 5], "test": [6, 7]}
    parts = {"train": items(4), name: items(2, 4), "test": items(2, 6)}
    for split, rows in parts.items():
        write(tmp_path / "files" / f"{split}.jsonl", rows)
    assert numbers(opened(tmp_path / "files")) == expected
    column = [{**row, "split": split} for split, rows in parts.items() for row in rows]
    assert numbers(opened(write(tmp_path / "one.jsonl", column))) == expected
    splits = DatasetDict({split: Dataset.from_list(rows) for split, rows in parts.items()})
    splits.save_to_disk(tmp_path / "saved")
    assert numbers(opened(tmp_path / "saved")) == expected
    for split, rows in splits.items():
        (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
        rows.to_parquet(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")
    assert numbers(opened(tmp_path / "hub")) == expected
    task = api.task("mine", splits)
    assert isinstance(task, InMemoryTask) and {split: len(rows) for split, rows in task.rows.items()} == {
        "train": 4,
        "dev": 2,
        "test": 2,
    }


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("[:3]", range(3)),
        ("[-2:]", range(8, 10)),
        ("[10%:50%]", range(1, 5)),
        ("[4:-4]", range(4, 6)),
        ("[75%:]", [8, 9]),
        ("[7:1000]", range(7, 10)),
    ],
)
def test_slices_of_every_source(tmp_path: Path, written: str, expected: Any) -> None:
    """Shares are rounded to the nearest row, as `datasets` rounds them."""
    whole = write(tmp_path / "files" / "train.jsonl", items(10))
    write(tmp_path / "files" / "test.jsonl", items(2, 10))
    splits = {"train": f"train{written}", "test": "test"}
    assert numbers(opened(tmp_path / "files", "carve", splits=splits))["train"] == list(expected)
    by_file = opened(None, "carve", train=f"{whole}{written}", test=str(tmp_path / "files" / "test.jsonl"))
    assert numbers(by_file)["train"] == list(expected)
    assert numbers(opened(whole, "carve", splits={"train": "train[:2]", "test": f"train{written}"}))["test"] == list(
        expected
    )
    DatasetDict(train=Dataset.from_list(items(10)), test=Dataset.from_list(items(2))).save_to_disk(tmp_path / "saved")
    assert numbers(opened(tmp_path / "saved", "carve", splits=splits))["train"] == list(expected)
    assert sliced(f"train{written}")[0] == "train" and sliced("SELECT [a] FROM t") == ("SELECT [a] FROM t", None)


def test_turns_of_a_conversation_are_one_row_of_a_slice(tmp_path: Path) -> None:
    turns = [{"role": role, "content": f"item {n}"} for n in range(2) for role in ("user", "assistant")]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(4)))
    stream = opened(file, "carve", splits={"train": "train[:75%]", "test": "train[-1:]"})
    raws = stream._open["mine"].raws
    assert {split: raw.count for split, raw in raws.items()} == {"train": 6, "test": 2}


def test_other_rows_and_slices_have_other_fingerprints(tmp_path: Path) -> None:
    file = write(tmp_path / "one.jsonl", items(10))
    keys = [
        opened(file, "carve", splits={"train": train, "test": "train[8:]"})._open["mine"].raws["train"].key
        for train in ("train[:4]", "train[:5]", "train[:4]")
    ]
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("stream_format", [True, False])
def test_arrow_files(tmp_path: Path, stream_format: bool) -> None:
    table = Dataset.from_list([{**row, "label": NAMES.index(row["label"])} for row in items(6)], FEATURES).data.table
    file = tmp_path / "rows.arrow"
    make = pa.ipc.new_stream if stream_format else pa.ipc.new_file
    with pa.OSFile(str(file), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table)
    stream = opened(file, "carve", splits={"train": "train[:4]", "test": "train[4:]"})
    assert numbers(stream) == {"train": [0, 1, 2, 3], "test": [4, 5]}
    assert stream.tasks[0].labels == tuple(NAMES), "class names are those of the file"
    (tmp_path / "bad.arrow").write_bytes(b"no rows")
    with pytest.raises(DataError, match=r"cannot read .*bad.arrow"):
        opened(tmp_path / "bad.arrow", "carve")


def test_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("t.db") as database:
        database.execute("CREATE TABLE tickets (id INTEGER, text TEXT, label TEXT)")
        values = [(number, row["text"], row["label"]) for number, row in enumerate(items(8))]
        database.executemany("INSERT INTO tickets VALUES (?, ?, ?)", values)
    query = "SELECT text, label FROM tickets WHERE id {} ORDER BY id"
    splits = {"train": query.format("< 6"), "test": f"{query.format('>= 6')}[:1]"}
    stream = opened("sql:sqlite:///t.db", "carve", splits=splits)
    assert numbers(stream) == {"train": [0, 1, 2, 3, 4, 5], "test": [6]}
    key = stream._open["mine"].raws["train"].key
    with sqlite3.connect("t.db") as database:
        database.execute("UPDATE tickets SET text = 'item 9' WHERE id = 0")
    changed = opened("sql:sqlite:///t.db", "carve", splits=splits)
    assert numbers(changed)["train"][0] == 9 and changed._open["mine"].raws["train"].key != key
    with pytest.raises(
        DataError, match=r"the database refuses .*near \"train\".*: expected a table or a query for each"
    ):
        opened("sql:sqlite:///t.db", "carve")
    with pytest.raises(DataError, match=r"the database needs its driver \(No module named 'psycopg"):
        opened("sql:postgresql://somewhere/x", "carve")
    for uri in (
        "postgresql://me:secret@somewhere/x",
        "postgresql://somewhere/x?user=me&password=secret",
        "mssql+pyodbc://?odbc_connect=UID%3Dme%3BPWD%3Dsecret",
    ):
        with pytest.raises(DataError, match=r"has a password, which a run would record") as caught:
            opened(f"sql:{uri}", "carve")
        assert "secret" not in str(caught.value)


def test_a_record_names_no_database_of_its_own() -> None:
    assert Server.of("sql:postgresql://me@host/x") == Server("postgresql", "host")
    known = ["sql:sqlite:////data/mine.db", "sql:postgresql://host/x"]
    require_named({"path": "sql:sqlite:////data/mine.db", "other": "sql:postgresql://host/y"}, known, "it", "that")
    with pytest.raises(ConfigError, match=r"names storage at 'sqlite:////data/other.db'"):
        require_named({"path": "sql:sqlite:////data/other.db"}, known, "it", "that")


def test_a_wrong_split_is_one_sentence_with_what_is_there(tmp_path: Path) -> None:
    rows = [{**row, "split": split} for split, row in zip(("train", "held", "train"), items(3), strict=True)]
    with pytest.raises(DataError, match=r"no row has 'test' in its column 'split': expected one of 'train', 'held'"):
        opened(write(tmp_path / "one.jsonl", rows), "carve", labels=None)
    named = opened(tmp_path / "one.jsonl", "carve", splits={"test": "held"}, labels=None)
    assert numbers(named) == {"train": [0, 2], "test": [1]}
    DatasetDict(train=Dataset.from_list(items(4)), val=Dataset.from_list(items(2))).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"there is no such split: expected one of train, val"):
        opened(tmp_path / "saved", "carve")
    for empty in ("train[4:]", "train[3:1]"):
        with pytest.raises(DataError, match="the split is empty: expected at least one row"):
            opened(tmp_path / "saved", "carve", splits={"train": empty, "test": "val"})
