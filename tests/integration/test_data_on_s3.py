"""Tasks whose files lie on an S3-compatible server."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from data_samples import MiniLMCodec, news

from raycl import config as configs
from raycl.data.settings import as_specs
from raycl.data.sources.fields import SourceRow
from raycl.data.sources.formats import read_rows
from raycl.data.sources.source import SourceFile
from raycl.data.stream import StreamConfig, open_stream
from raycl.errors import DataError, MissingTasksError
from raycl.serve.offline.prediction_input import files_at
from raycl.storage import Storage


def test_files_are_read_from_an_s3_compatible_server(s3_uri: Callable[[str], str], tmp_path: Path) -> None:
    rows_file, missing = s3_uri("deep/x.jsonl"), s3_uri("deep/y.jsonl")
    Storage.at(s3_uri("deep")).write("x.jsonl", b'{"text": "a", "label": "b"}\n{"text": "c"}\n')
    file = SourceFile.at(rows_file)
    rows = read_rows(file)
    assert next(rows) == SourceRow(1, "a", ("b",))
    with pytest.raises(DataError, match=r"s3://bucket/deep/x\.jsonl, row 2: no label"):
        next(rows)
    assert file.content_hash(tmp_path) == file.content_hash(tmp_path)
    with pytest.raises(DataError, match=r"s3://bucket/deep/y\.jsonl: the file does not exist"):
        next(read_rows(SourceFile.at(missing)))


def test_a_task_is_one_file_whose_uri_has_a_query(s3_uri: Callable[[str], str], tmp_path: Path) -> None:
    """The query is no part of the name, and a suffix may be in capitals, as some programs write it."""
    rows = b"text,label,split\na,x,train\nb,x,test\n"
    Storage.at(s3_uri("single")).write("rows.CSV", rows)
    Storage.at(tmp_path).write("rows.CSV", rows)
    for path in (s3_uri("single/rows.CSV"), f"{tmp_path}/rows.CSV"):
        (spec,) = as_specs([path])
        stream = open_stream(configs.validate(StreamConfig, {"tasks": [spec]}), seed=0)
        assert [task.name for task in stream.tasks] == ["rows"]
        assert [len(stream.rows(stream.tasks[0], split)) for split in ("train", "test")] == [1, 1]
        assert [file.name for file in files_at([path]) if isinstance(file, SourceFile)] == ["rows.CSV"]


def test_a_benchmark_of_one_file_on_s3(s3_uri: Callable[[str], str]) -> None:
    Storage.at(s3_uri("files")).write("agnews.csv", b"text,label\n" + b"a,World\nb,Sports\n" * 4)
    config = StreamConfig(root=s3_uri("files"), tasks=("agnews",), test_fraction=0.5)
    assert open_stream(config, seed=0).tasks[0].name == "agnews"


def test_a_benchmark_on_an_s3_compatible_server(s3_uri: Callable[[str], str]) -> None:
    folder = Storage.at(s3_uri("data/CL_Benchmark/Long_Sequence/agnews"))
    for split, rows in (("train", news(20)), ("test", news(4, 20))):
        instances = [{"id": str(i), "input": text, "output": output} for i, (text, output) in enumerate(rows)]
        folder.write_json(f"{split}.json", {"Definition": ["Say which."], "Instances": instances})
    config = StreamConfig(name="x", root=s3_uri("data"), tasks=("agnews", "wic"))
    with pytest.raises(MissingTasksError, match=r"1 of 2 tasks .* 's3://bucket/data': wic \(no folder\)"):
        open_stream(config, seed=0)
    stream = pickle.loads(pickle.dumps(open_stream(config.model_copy(update={"allow_missing": True}), seed=0)))
    assert stream.table(stream.tasks[0], "test", MiniLMCodec()).texts([0]) == [news(1, 20)[0][0]]
