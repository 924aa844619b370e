"""Tasks from rows in memory: every kind of rows gives the same files, and what is wrong is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pandas
import pytest

import raycl
from raycl.config import validate
from raycl.data.settings import StreamConfig
from raycl.data.stream import open_stream
from raycl.errors import BankError, ConfigError, DataError
from raycl.storage import Storage

PAIRS = [("the sky", "blue"), ("the sea", "green")]


def columns(text: str = "text", label: str = "label") -> dict[str, list[str]]:
    return {text: [item for item, _ in PAIRS], label: [two for _, two in PAIRS]}


ROWS: dict[str, Any] = {
    "pairs": PAIRS,
    "dicts": [{"text": text, "label": label, "more": 1} for text, label in PAIRS],
    "columns": columns(),
    "frame": pandas.DataFrame(columns()),
    "dataset": datasets.Dataset.from_dict(columns()),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_every_kind_become_the_same_files(kind: str, tmp_path: Path) -> None:
    spec = raycl.task("mine", ROWS[kind], PAIRS, metric="macro_f1").saved(Storage.at(tmp_path))
    same = raycl.task("mine", PAIRS, PAIRS, metric="macro_f1").saved(Storage.at(tmp_path))
    assert spec == same and spec["name"] == "mine" and spec["metric"] == "macro_f1"
    folder = Path(spec["path"])
    assert sorted(path.name for path in folder.iterdir()) == ["test.jsonl", "train.jsonl"]
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert lines == [{"text": text, "label": label} for text, label in PAIRS]
    assert raycl.task("mine", PAIRS[:1], PAIRS).saved(Storage.at(tmp_path))["path"] != spec["path"]


def test_columns_have_other_names_and_labels_are_numbers(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"body": ["the sky"], "kind": np.array([3])})
    spec = raycl.task("mine", frame, frame, text="body", label="kind").saved(Storage.at(tmp_path))
    assert json.loads((Path(spec["path"]) / "train.jsonl").read_text()) == {"text": "the sky", "label": "3"}


def test_cells_of_frames_are_read_as_those_of_files(tmp_path: Path) -> None:
    """Arrays are lists of answers, a column may be called features, and an empty cell is no value."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    frame = pandas.DataFrame({"text": ["a"], "label": [np.array(["x", "y"], dtype=object)], "features": [1]})
    chats = pandas.DataFrame({"messages": [np.array(chat), chat], "system": [None, "be brief"], "user": [np.nan, 3]})
    spec = raycl.task("mine", frame, chats, group="user").saved(Storage.at(tmp_path))
    train, test = ((Path(spec["path"]) / f"{split}.jsonl").read_text().splitlines() for split in ("train", "test"))
    assert [json.loads(line) for line in train] == [{"text": "a", "label": ["x", "y"]}]
    brief = {"messages": chat, "system": "be brief", "user": "3.0"}
    assert [json.loads(line) for line in test] == [{"messages": chat}, brief]


def test_what_belongs_to_a_row_is_kept_and_what_is_wrong_names_it(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", "weight": 0}] * 2
    chat = {"messages": turns, "system": "be brief", "user": np.int64(3), "note": "x"}
    spec = raycl.task("mine", [chat], [chat], group="user").saved(Storage.at(tmp_path))
    kept = json.loads((Path(spec["path"]) / "train.jsonl").read_text())
    assert kept == {"messages": turns, "system": "be brief", "user": "3"}
    bad: list[tuple[Any, str]] = [
        ([chat, {"messages": turns[1:]}], "train row 2: message 1 of the conversation is of assistant"),
        ([*PAIRS, ("cut \ud83d", "a")], r"train row 3: half a character \(.ud83d"),
        ([*PAIRS, ("a", "cut \ud83d")], r"train row 3: half a character \(.ud83d"),
    ]
    for rows, problem in bad:
        with pytest.raises(DataError, match=f"task 'mine', {problem}"):
            raycl.task("mine", rows, PAIRS)


def test_files_stay_where_they_are() -> None:
    spec = raycl.task("mine", "a.csv", "b.csv", text="body", definition="Name the colour.")
    assert spec == {
        "name": "mine",
        "train": "a.csv",
        "test": "b.csv",
        "definition": "Name the colour.",
        "columns": {"text": "body", "label": "label"},
    }
    assert raycl.task("mine", "a.csv", dev="c.csv") == {"name": "mine", "path": "a.csv", "dev": "c.csv"}


def test_dev_rows_that_are_given_are_used(tmp_path: Path) -> None:
    """Those that only come with a dataset need `stream.dev=file`: they often equal its test rows."""
    dev, both = [("the lake", "blue")], {"train": PAIRS * 8, "test": PAIRS}
    for task, used in (
        (raycl.task("mine", PAIRS * 8, PAIRS, dev), True),
        (raycl.task("mine", {**both, "validation": PAIRS}, dev=dev), True),
        (raycl.task("mine", {**both, "validation": dev}), False),
    ):
        spec = task.saved(Storage.at(tmp_path))
        config = validate(StreamConfig, {"tasks": [spec], "cache_dir": str(tmp_path / "cache")})
        stream = open_stream(config, 0)
        source = stream.source(stream.tasks[0], "dev")
        assert (source is not None and source.count == 1) == used


def test_classes_conversations_and_datasets_on_disk(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["b", "a"])})
    rows = datasets.Dataset.from_dict({"text": ["x", "y", "z"], "label": [1, 0, -1]}, features=features)
    spec = raycl.task("mine", rows.select([0, 1]), rows).saved(Storage.at(tmp_path))
    assert spec["labels"] == ["b", "a"], "in the order of the classes"
    lines = [json.loads(line)["label"] for line in (Path(spec["path"]) / "test.jsonl").read_text().splitlines()]
    assert lines == ["a", "b"]
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}], "id": 1}
    spec = raycl.task("chat", [chat], datasets.Dataset.from_list([chat])).saved(Storage.at(tmp_path))
    for split in ("train", "test"):
        (line,) = (Path(spec["path"]) / f"{split}.jsonl").read_text().splitlines()
        assert json.loads(line) == {"messages": chat["messages"]}
    assert raycl.task("mine", "a.csv", dev="b.csv") == {"name": "mine", "path": "a.csv", "dev": "b.csv"}
    assert raycl.task("news", "hf://fancyzhx/ag_news") == {"name": "news", "path": "hf://fancyzhx/ag_news"}


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (PAIRS, None, "task 'mine' has no test rows: expected rows to test on"),
        ([], PAIRS, "task 'mine' has no train rows: expected at least one"),
        ([("the sky", None)], PAIRS, "train row 1: expected a string under 'text' and an answer under 'label'"),
        ([*PAIRS, {"body": "x"}], PAIRS, "train row 3: expected a string under 'text'"),
        (["the sky"], PAIRS, r"train row 1 is a str: expected \(text, label\)"),
        (PAIRS, "b.csv", "test is a file and train is not"),
        (None, PAIRS, "task 'mine' has no train rows: expected rows to learn"),
        (42, PAIRS, "train is 42: expected a list of"),
        (pandas.Series(["the sky"]), PAIRS, r"train row 1 is a str: expected \(text, label\)"),
        (pandas.DataFrame({"body": ["x"]}), PAIRS, "train has no column 'text' among body: name the columns"),
        (
            pandas.DataFrame({"text": ["a", "b"], "label": ["x", np.nan]}),
            PAIRS,
            "train row 2: expected a string under 'text' and an answer under 'label', got 'b' and None",
        ),
        (
            pandas.DataFrame({"text": ["a", "b"], "label": pandas.array([1, None], dtype="Int64")}),
            PAIRS,
            "train row 2: expected a string under 'text' and an answer under 'label', got 'b' and None",
        ),
        ([("a", np.float32("nan"))], PAIRS, "an answer under 'label', got 'a' and nan"),
        (
            pandas.DataFrame({"text": ["a", "b"], "label": [1, None]}),
            PAIRS,
            r"train row 1: 'label' is 1\.0, a float: expected a string or a whole number; a pandas column of whole",
        ),
        ([("a", ["x", None])], PAIRS, "'label' is None, a missing value: expected a string, a whole number or a list"),
        ({"text": ["x"], "label": ["a", "b"]}, PAIRS, "expected columns of one length, got {'text': 1, 'label': 2}"),
    ],
)
def test_bad_rows_are_one_sentence(train: Any, test: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        raycl.task("mine", train, test)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (pandas.Series(["the sky"]), "cannot train on a Series: expected the name of a stream"),
        (pandas.DataFrame(columns()), "cannot train on a DataFrame"),
        ([1], "1 is no task: expected its name"),
        (PAIRS, "a tuple is no task"),
        (42, "cannot train on 42"),
        (None, "cannot train on None"),
        ("", "cannot train on ''"),
        ([], r"cannot train on \[\]"),
    ],
)
def test_what_is_no_stream_is_one_sentence(stream: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        raycl.train(stream, dir=str(tmp_path))
    assert "\n" not in str(raised.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../../x", "a/b", ""])
def test_a_name_that_is_no_folder_is_refused_before_rows_are_written(name: str) -> None:
    with pytest.raises(DataError, match=r"task name .* cannot be used"):
        raycl.task(name, PAIRS, PAIRS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": None}, "method is None: expected its name, or settings of the section method"),
        ({"backbone": 7}, "backbone is 7: expected its name, or settings of the section backbone"),
        ({"output": None}, "output is None: expected settings of the section output"),
    ],
)
def test_what_is_no_section_is_one_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        raycl.train(**given)


def test_paths_and_tasks_of_rows_are_taken_wherever_a_setting_has_them(tmp_path: Path) -> None:
    mine, nothing = raycl.task("mine", PAIRS, PAIRS), cast(Any, None)
    with pytest.raises(ConfigError, match=r"stream\.unseen names mine, which the stream trains"):
        raycl.train({"tasks": mine, "unseen": [mine]}, dir=tmp_path, bank={"dir": tmp_path / "bank"})
    with pytest.raises(ConfigError, match=f"'{tmp_path}/none' does not exist: expected a file or a folder of rows"):
        raycl.train([tmp_path / "none"], dir=tmp_path)
    with pytest.raises(BankError, match=f"{tmp_path}"):
        raycl.load(tmp_path / "bank")
    with pytest.raises(ConfigError, match="the bank is None: expected its folder or URI"):
        raycl.load(nothing)


def test_rows_in_memory_are_shown_by_their_number() -> None:
    assert repr(raycl.task("mine", PAIRS, PAIRS[:1])) == "InMemoryTask('mine', train: 2 rows, test: 1 row)"


def test_the_package_has_what_it_names() -> None:
    assert all(getattr(raycl, name) is not None for name in raycl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = raycl.nothing  # type: ignore[attr-defined]
