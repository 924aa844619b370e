"""Files of a few kilobytes that would fill memory or disk end in one sentence that names the setting that allows them.

They are read in a process of its own that may take 4 GB, so that a reader that fails here fails alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

READ = """
import json, resource, sys
from raycl.data.sources.formats import read_rows
from raycl.data.sources.reading import ReadLimits
from raycl.data.sources.source import SourceFile
from raycl.errors import DataError

resource.setrlimit(resource.RLIMIT_AS, (4_000_000_000, 4_000_000_000))
found = {}
for path in sys.argv[2:]:
    try:
        found[path] = sum(1 for _ in read_rows(SourceFile.at(path).within(ReadLimits(**json.loads(sys.argv[1])))))
    except DataError as error:
        found[path] = str(error)
print(json.dumps(found))
"""

ROW = '{"text": "a", "label": "b", "more": '
MEBIBYTE = "x" * (1 << 20)


def read_apart(files: list[Path], **limits: int) -> dict[str, str | int]:
    """Return for each file's name the sentence that it is refused with, or the number of its rows."""
    command = [sys.executable, "-c", READ, json.dumps(limits), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {Path(path).name: result for path, result in json.loads(done.stdout).items()}


def write(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def test_text_that_is_deep_or_never_ends_is_one_sentence(tmp_path: Path) -> None:
    depths = {
        "list.json": "[" * 400_000,
        "object.json": '{"a":' * 100_000,
        "field.json": '{"data": [{"text": "a", "label": "b"}], "more": ' + "[" * 400_000,
        "levels.json": f"[{ROW}{'[' * 100}{']' * 100}}}]",
        "levels.jsonl": f"{ROW}{'[' * 100}{']' * 100}}}",
        "instances.json": '{"Definition": ' + "[" * 400_000,
    }
    sizes = {
        "line.jsonl": '{"text": "' + MEBIBYTE * 3,
        "line.csv": f"text,label\na,{MEBIBYTE * 3}",
        "quote.csv": 'text,label\na,b\n"' + f"{MEBIBYTE}\n" * 3,
        "quotes.csv": 'text,label\n"' + '\n","' * 1_000_000,
        "quote.tsv": 'text\tlabel\na\tb\n"' + f"{MEBIBYTE}\n" * 3,
        "text.json": f'[{{"text": "{MEBIBYTE * 3}"}}]',
        "skipped.json": '{"more": "' + MEBIBYTE * 3 + '", "data": [{"text": "a", "label": "b"}]}',
    }
    result = read_apart(write(tmp_path, {**depths, **sizes}), row_mb=2)
    for name in depths:
        assert "more than 64 levels deep" in str(result[name]) and "raise stream.limits.depth" in str(result[name]), (
            name
        )
    for name in sizes:
        assert "larger than 2 MiB" in str(result[name]) and "raise stream.limits.row_mb" in str(result[name]), name


def test_what_the_settings_allow_is_read(tmp_path: Path) -> None:
    texts = {
        "levels.jsonl": f"{ROW}{'[' * 100}{']' * 100}}}",
        "levels.json": f"[{ROW}{'[' * 100}{']' * 100}}}]",
        "line.jsonl": json.dumps({"text": MEBIBYTE * 17, "label": "b"}),
        "rows.json": json.dumps([{"text": MEBIBYTE * 17, "label": "b"}, *[{"text": "a b", "label": "c"}] * 20_000]),
    }
    result = read_apart(write(tmp_path, texts), depth=102, row_mb=18)
    assert result == {"levels.jsonl": 1, "levels.json": 1, "line.jsonl": 1, "rows.json": 20_001}


def test_parquet_that_expands_is_one_sentence(tmp_path: Path) -> None:
    zeros = pa.array(np.zeros(500_000, np.int32))
    tables = {
        "shared.parquet": {"text": pa.DictionaryArray.from_arrays(zeros, ["x" * 1_000]), "label": ["b"] * 500_000},
        "run.parquet": {"text": pa.nulls(18_000_000, pa.string()), "label": pa.nulls(18_000_000, pa.string())},
        "page.parquet": {"text": ["x" * 270_000_000], "label": ["b"]},
        "list.parquet": {"text": ["a"], "label": pa.ListArray.from_arrays([0, 34_000_000], pa.nulls(34_000_000))},
        "value.parquet": {"text": ["x" * 20_000_000], "label": ["b"]},
        "values.parquet": {
            "text": pa.DictionaryArray.from_arrays(zeros[:2_000], ["x" * 15_000_000]),
            "label": ["b"] * 2_000,
        },
    }
    for name, columns in tables.items():
        pages = {"use_dictionary": name != "page.parquet", "dictionary_pagesize_limit": 1 << 30}
        pq.write_table(pa.table(columns), tmp_path / name, compression="zstd", write_statistics=False, **pages)
        assert (tmp_path / name).stat().st_size < 300_000
    result = read_apart([tmp_path / name for name in tables])
    assert "row 1: a row is larger than 16 MiB" in str(result.pop("value.parquet"))
    for name, sentence in result.items():
        assert "its rows take more than 256 MiB" in str(sentence), (name, sentence)
        assert "raise stream.limits.expansion (in raycl predict: --expansion)" in str(sentence)


def test_pages_of_every_encoding_and_version_are_read_whole(tmp_path: Path) -> None:
    texts = [f"text {number % 700}" * (number % 50 + 1) for number in range(5_000)]
    rows = {"text": texts, "label": [["a", None]] * 5_000, "other": [{"a": 1.5, "b": [1]}] * 5_000}
    kinds = {"snappy": {}, "none": {"use_dictionary": False}, "zstd": {"write_page_index": True}}
    for version, (name, more) in product(("1.0", "2.0"), kinds.items()):
        file = tmp_path / f"{name}-{version}.parquet"
        pages = {"data_page_version": version, "data_page_size": 4096, "row_group_size": 1_500}
        pq.write_table(pa.table(rows), file, compression=name, **pages, **more)
    result = read_apart(sorted(tmp_path.iterdir()))
    assert all("row 1: the label is a missing value" in str(item) for item in result.values()) and len(result) == 6
