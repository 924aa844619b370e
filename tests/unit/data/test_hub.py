"""Datasets in the layouts of the hub, written by `datasets` itself: found, named, sliced, refused in one sentence."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from data_samples import MiniLMCodec
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Sequence, Value
from listener import listener

from raycl.data.resolve import missing_files
from raycl.data.sources.reading import ReadLimits
from raycl.data.stream import Stream, StreamConfig, TaskSpec, open_stream
from raycl.errors import ConfigError, DataError

NAMES = ["World", "Sports"]
FEATURES = Features({"text": Value("string"), "label": ClassLabel(names=NAMES)})


def dataset(count: int, start: int = 0, **more: Any) -> Dataset:
    numbers = range(start, start + count)
    columns = {"text": [f"item {number}" for number in numbers], "label": [number % 2 for number in numbers], **more}
    return Dataset.from_dict(columns, features=FEATURES)


def parquet(folder: Path, **splits: Dataset) -> Path:
    """Return a repository as the hub converts it: shards below data/, class names in the files."""
    (folder / "data").mkdir(parents=True)
    for split, rows in splits.items():
        half = len(rows) // 2
        for number, part in enumerate((rows.select(range(half)), rows.select(range(half, len(rows))))):
            part.to_parquet(folder / "data" / f"{split}-{number:05d}-of-00002.parquet")
    return folder


def opened(path: Path | str, **settings: Any) -> Stream:
    spec = TaskSpec(name="news", path=str(path), **settings)
    return open_stream(StreamConfig(name="mine", tasks=(spec,)), seed=0)


def rows(stream: Stream, split: Any = "train") -> list[tuple[str, str]]:
    raw = stream.source(stream.tasks[0], split)
    assert raw is not None
    columns = raw.open()
    texts, names = columns.values("text", range(raw.count)), columns.values("references", range(raw.count))
    return [(text, name[0]) for text, name in zip(texts, names, strict=True)]


def pairs(count: int, start: int = 0) -> list[tuple[str, str]]:
    return [(f"item {number}", NAMES[number % 2]) for number in range(start, start + count)]


def as_parquet(folder: Path) -> Path:
    return parquet(folder, train=dataset(8), test=dataset(4, 8))


def as_saved(folder: Path) -> Path:
    DatasetDict(train=dataset(8), test=dataset(4, 8)).save_to_disk(folder)
    return folder


def as_infos(folder: Path) -> Path:
    """Csv files with class numbers, whose names an older repository keeps in dataset_infos.json."""
    folder.mkdir()
    for split, part in (("train", dataset(8)), ("test", dataset(4, 8))):
        part.to_csv(folder / f"{split}.data.csv")
    info = {
        "features": {"text": {"dtype": "string", "_type": "Value"}, "label": {"names": NAMES, "_type": "ClassLabel"}}
    }
    (folder / "dataset_infos.json").write_text(json.dumps({"default": info}))
    return folder


def as_card(folder: Path) -> Path:
    """Return two configurations, described in the card."""
    for config, start in (("other", 100), ("mine", 0)):
        (folder / config).mkdir(parents=True)
        dataset(8, start).to_json(folder / config / "learn.jsonl")
        dataset(4, start + 8).to_json(folder / config / "check.jsonl")
    names = "".join(f"\n          '{number}': {name}" for number, name in enumerate(NAMES))
    label = f"  - name: label\n    dtype:\n      class_label:\n        names:{names}"
    features = f"features:\n  - name: text\n    dtype: string\n{label}"
    card = "".join(
        f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {config}/learn.jsonl\n"
        f"  - split: test\n    path: {config}/check.jsonl\n"
        for config in ("other", "mine")
    )
    infos = "".join(f"- config_name: {config}\n  {features}\n" for config in ("other", "mine"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{card}dataset_info:\n{infos}---\n# News\n")
    return folder


@pytest.mark.parametrize("layout", [as_parquet, as_saved, as_infos, as_card], ids=lambda layout: layout.__name__)
def test_every_layout_gives_the_same_rows_and_classes(tmp_path: Path, layout: Any) -> None:
    settings = {"config": "mine"} if layout is as_card else {}
    stream = opened(layout(tmp_path / "repo"), **settings)
    assert stream.tasks[0].labels == ("World", "Sports"), "in the order of the classes, not of the alphabet"
    assert rows(stream) == pairs(8) and rows(stream, "test") == pairs(4, 8)
    assert stream.tasks[0].metric == "exact_match"


def test_splits_can_be_named_and_sliced(tmp_path: Path, codec: MiniLMCodec) -> None:
    folder = parquet(tmp_path / "repo", train=dataset(10))
    with pytest.raises(
        DataError, match=r"split 'test': there is no such split: expected one of train; .*splits\.train"
    ):
        opened(folder)
    stream = opened(folder, splits={"train": "train[:80%]", "test": "train[80%:]"})
    assert rows(stream) == pairs(8) and rows(stream, "test") == pairs(2, 8)
    assert stream.table(stream.tasks[0], "test", codec).labels([0, 1]).tolist() == [0, 1]


def test_a_folder_of_one_saved_split_is_named_as_a_file(tmp_path: Path) -> None:
    dataset(8).save_to_disk(tmp_path / "train")
    dataset(4, 8).save_to_disk(tmp_path / "test")
    spec = TaskSpec(name="news", train=str(tmp_path / "train"), test=str(tmp_path / "test"))
    assert rows(open_stream(StreamConfig(name="mine", tasks=(spec,)), seed=0)) == pairs(8)
    with pytest.raises(DataError, match=r"the folder is one split: expected a folder of several"):
        opened(tmp_path / "train")


def test_rows_without_a_class_are_dropped_and_counted(tmp_path: Path) -> None:
    hidden = Dataset.from_dict({"text": ["a", "b"], "label": [-1, -1]}, features=FEATURES)
    folder = parquet(tmp_path / "repo", train=dataset(8), test=hidden, validation=dataset(4, 8))
    with pytest.raises(DataError, match=r"split 'test': none of its 2 rows has a label: .*choose another split"):
        opened(folder)
    stream = opened(folder, splits={"test": "validation"})
    assert rows(stream, "test") == pairs(4, 8)


def test_lists_of_classes_and_other_column_names(tmp_path: Path) -> None:
    features = Features(
        {"body": Value("string"), "topics": Sequence(ClassLabel(names=NAMES)), "image": Value("binary")}
    )
    part = Dataset.from_dict({"body": ["a", "b"], "topics": [[0], [1, 0]], "image": [b"", b""]}, features=features)
    folder = parquet(tmp_path / "repo", train=part, test=part)
    stream = opened(folder, columns={"text": "body", "label": "topics"})
    assert rows(stream) == [("a", "World"), ("b", "Sports")] and stream.tasks[0].labels == ("World", "Sports")
    with pytest.raises(DataError, match=r"no text column among body, topics, image: expected text or input"):
        opened(folder)


def test_pandas_files_and_changed_data_are_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    frame = pandas.DataFrame({"text": ["a", "b"], "label": pandas.Categorical(["x", "y"])}, index=[7, 9])
    for split in ("train", "test"):
        frame.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    assert rows(opened(folder)) == [("a", "x"), ("b", "y")]
    frame.assign(text=["c", "d"]).to_parquet(folder / "train-00000-of-00001.parquet")
    assert rows(opened(folder)) == [("c", "x"), ("d", "y")]


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    folder = as_card(tmp_path / "card")
    with pytest.raises(DataError, match=r"the dataset has 2 configurations: set config to one of other, mine"):
        opened(folder)
    with pytest.raises(DataError, match=r"cannot read .*card none split 'train': .*'none' not found"):
        opened(folder, config="none")
    damaged = as_parquet(tmp_path / "damaged")
    shard = damaged / "data" / "test-00001-of-00002.parquet"
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"damaged/data/test-.*: not a readable Parquet file"):
        opened(damaged)
    with pytest.raises(ConfigError, match=r"names a config or splits of 's3://.*local folders and hf:// names"):
        opened("s3://bucket/data?region=x", config="a")
    with pytest.raises(DataError, match=r"cannot read hf://nobody/nothing split 'train': .*Hub"):
        opened("hf://nobody/nothing")
    config = StreamConfig(tasks=(TaskSpec(name="a", path=str(tmp_path / "none")),))
    assert "does not exist: expected a file or a folder of rows" in missing_files(config)


def test_conversations_of_a_dataset(tmp_path: Path, codec: MiniLMCodec) -> None:
    turns = [
        [{"role": "user", "content": f"hi {number}"}, {"role": "assistant", "content": "hello"}] for number in range(4)
    ]
    part = Dataset.from_dict({"messages": turns, "source": ["x"] * 4})
    stream = opened(parquet(tmp_path / "repo", train=part, test=part))
    assert stream.tasks[0].labels is None and stream.tasks[0].metric == "rouge_l"
    with pytest.raises(ConfigError, match=r"task 'news' needs a chat template .*backbone\.chat_template"):
        stream.check(codec)


def test_conversations_with_calls_of_tools_of_a_folder_with_one_split(tmp_path: Path) -> None:
    """`datasets` reads messages with different fields as JSON, which opens no files."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    messages = [
        {"role": "user", "content": "Is it warm in Bern?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "24"},
        {"role": "assistant", "content": "Yes."},
    ]
    row = json.dumps({"tools": [{"type": "function", "function": function}], "messages": messages})
    for name, file in (("folder", "train-0.jsonl"), ("files", "train.jsonl")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(f"{row}\n" * 3)
    (tmp_path / "files" / "test.jsonl").write_text(f"{row}\n")
    by_datasets = opened(tmp_path / "folder", splits={"test": "train"})
    assert rows(by_datasets) == rows(opened(tmp_path / "files")) and len(rows(by_datasets)) == 6


@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("where", ["address", "absolute", "above"])
def test_a_folder_cannot_name_data_elsewhere(
    tmp_path: Path, card: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's folder: `datasets` would ask any server, and read any file."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "secret.csv").write_text("text,label\nk3y,a\n")
    with listener() as server:
        named = {
            "address": f"http://127.0.0.1:{server.server_port}/rows.csv",
            "absolute": str(tmp_path / "secret.csv"),
            "above": "data/../../secret.csv",
        }
        folder = parquet(tmp_path / "news", train=dataset(8), test=dataset(4, 8))
        files = [{"split": "train", "path": [named[where]]}, {"split": "test", "path": "data/test-*"}]
        text = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files}]})
        (folder / card).write_text(f"---\n{text}---\n" if card == "README.md" else text)
        with pytest.raises(DataError, match=rf"{card} names '.*(rows|secret).csv': expected files of the dataset"):
            opened(folder)
        assert not server.asked


def test_what_was_saved_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    folder = as_saved(tmp_path / "saved")
    other = as_saved(tmp_path / "other")
    state = json.loads((folder / "train/state.json").read_text())
    state["_data_files"][0]["filename"] = f"../../other/train/{state['_data_files'][0]['filename']}"
    (folder / "train/state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"state.json names '../../other/train/.*': expected files of the dataset"):
        opened(folder)
    assert rows(opened(other)) == pairs(8)


def test_rows_cannot_have_pictures_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("k3y")
    columns = {"text": [str(tmp_path / "secret")] * 4, "label": [0, 1, 0, 1]}
    pictures = Dataset.from_dict(columns, features=Features({"text": Image(), "label": ClassLabel(names=NAMES)}))
    DatasetDict(train=pictures, test=pictures).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="column 'text' holds pictures or sound: expected text or classes"):
        rows(opened(tmp_path / "saved"))


def test_compressed_files_that_expand_are_refused_before_they_are_read(tmp_path: Path) -> None:
    row, blank = b'{"text": "a", "label": "b"}\n', b" " * (1 << 20)
    for kind in ("gz", "zip", "parquet"):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "test.jsonl").write_bytes(row)
        if kind == "parquet":
            (folder / "test.jsonl").unlink()
            long = pa.DictionaryArray.from_arrays(pa.nulls(300_000, pa.int32()).fill_null(0), ["x" * 1_000])
            columns = pa.table({"text": long, "label": ["b"] * 300_000})  # stored as texts: its schema is left out
            pq.write_table(columns, folder / "train.parquet", row_group_size=300_000, store_schema=False)
            pq.write_table(columns.slice(0, 4), folder / "test.parquet", store_schema=False)
        elif kind == "zip":
            with zipfile.ZipFile(folder / "train.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                archive.writestr("train.jsonl", row + blank * 260)
        else:
            with gzip.open(folder / "train.jsonl.gz", "wb", compresslevel=1) as file:
                for _ in range(260):
                    file.write(blank)
                file.write(row)
        with pytest.raises(DataError, match=r"than 256 MiB, and the file .* bytes.*raise stream\.limits\.expansion"):
            spec = TaskSpec(name="news", path=str(folder))
            open_stream(StreamConfig(name="mine", tasks=(spec,), limits=ReadLimits(expansion=10)), seed=0)
    folder = tmp_path / "whole"
    folder.mkdir()
    for split in ("train", "test"):
        with gzip.open(folder / f"{split}.jsonl.gz", "wb") as file:
            file.write(row * 4)
    assert opened(folder).tasks[0].labels == ("b",)
    (folder / "train.jsonl.gz").write_bytes((folder / "train.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"'train\.jsonl\.gz' cannot be expanded.*: compress it again"):
        opened(folder)


def test_a_card_that_doubles_with_each_line_is_one_sentence(tmp_path: Path) -> None:
    folder = as_parquet(tmp_path / "card")
    doubled = "".join(f"  a{number}: &a{number} [*a{number - 1}, *a{number - 1}]\n" for number in range(1, 30))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: x\n  data_files: &a0 [x, y]\n{doubled}---\n")
    with pytest.raises(DataError, match="its description has more than 1,000,000 entries"):
        opened(folder)
