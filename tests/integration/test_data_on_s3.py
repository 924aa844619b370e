"""Tasks whose files lie on an S3-compatible server."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from data_samples import MiniLMCodec, news

from raycl.data.sources.fields import SourceRow
from raycl.data.sources.formats import read_rows
from raycl.data.sources.source import SourceFile
from raycl.data.stream import StreamConfig, open_stream
from raycl.errors import DataError, MissingTasksError
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
