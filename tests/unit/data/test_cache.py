"""The node's cache: built once, whole or absent, and rows read from it by place."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raycl.data.sources import cache
from raycl.data.sources.cache import ChunkedRows, Info, cache_folder, entry, key_of
from raycl.errors import DataError

SCHEMA = pa.schema([("ids", pa.list_(pa.int32())), ("n", pa.int64())])


def build(writer: pa.RecordBatchFileWriter) -> Info:
    for start in (0, 3):
        ids = [list(range(n)) for n in range(start, start + 3)]
        writer.write_batch(pa.record_batch([ids, list(range(start, start + 3))], schema=SCHEMA))
    return {"count": 6}


def slow_build(folder: str, done: str) -> None:
    def marked(writer: pa.RecordBatchFileWriter) -> Info:
        time.sleep(0.3)
        with open(done, "a") as file:
            file.write("built\n")
        return build(writer)

    assert len(ChunkedRows(entry(Path(folder), "key", SCHEMA, marked).table())) == 6


def test_several_processes_build_an_entry_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=slow_build, args=(str(tmp_path), str(tmp_path / "done"))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "done").read_text() == "built\n"


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(writer: pa.RecordBatchFileWriter) -> Info:
        build(writer)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        entry(tmp_path, "key", SCHEMA, fail)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    assert entry(tmp_path, "key", SCHEMA, build).info == {"count": 6}


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(writer: pa.RecordBatchFileWriter) -> Info:
        raise OSError("the rows' own file")

    with pytest.raises(OSError, match="the rows' own file"):
        entry(tmp_path, "key", SCHEMA, unreadable)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write to the cache in '.*/file/raw' \(Not a directory\): expected a"):
        entry(tmp_path / "file" / "raw", "key", SCHEMA, build)
    monkeypatch.setattr(cache, "unfinished", lambda path: nullcontext(Path("/dev/full")))
    ids = pa.record_batch([[list(range(10_000))], [1]], schema=SCHEMA)
    for fill in (build, lambda writer: writer.write_batch(ids)):  # the disk is full at the end, or among the rows
        with pytest.raises(DataError, match=r"\(No space left on device\): .* set stream.cache_dir or RAYCL_CACHE to"):
            entry(tmp_path, "key", SCHEMA, fill)


def test_rows_are_read_in_any_order_across_chunks(tmp_path: Path) -> None:
    rows = ChunkedRows(entry(tmp_path, "key", SCHEMA, build).table())
    assert [ids.tolist() for ids in rows.lists("ids", [4, 0, 3, 2])] == [[0, 1, 2, 3], [], [0, 1, 2], [0, 1]]
    assert rows.values("ids", np.array([3])) == [[0, 1, 2]]
    assert rows.numbers("n", [5, 0]).tolist() == [5, 0]
    assert rows.list_lengths("ids").tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(AssertionError, match="outside"):
        rows.values("n", [6])


def test_reading_an_entry_imports_no_pandas(tmp_path: Path) -> None:
    """Arrow's own conversions do: a tenth of a second before a run's first step."""
    entry(tmp_path, "key", SCHEMA, build)
    code = f"""
import sys
from pathlib import Path
from raycl.data.sources.cache import ChunkedRows, entry
rows = ChunkedRows(entry(Path({str(tmp_path)!r}), "key", None, None).table())
print(rows.list_lengths("ids"), rows.lists("ids", [2]), rows.numbers("n", [5]), "pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[0 1 2 3 4 5] [array([0, 1], dtype=int32)] [5] False\n"


def test_an_entry_is_mapped_not_loaded(tmp_path: Path) -> None:
    table = entry(tmp_path, "key", SCHEMA, build).table()
    before = pa.total_allocated_bytes()
    ChunkedRows(table).lists("ids", [5])
    assert pa.total_allocated_bytes() == before


def test_the_folder_comes_from_config_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYCL_CACHE", "/from/environment")
    assert cache_folder("/configured") == Path("/configured")
    assert cache_folder(None) == Path("/from/environment")
    monkeypatch.delenv("RAYCL_CACHE")
    assert cache_folder(None) == Path.home() / ".cache" / "raycl"
    assert key_of(1, "a") != key_of("1", "a")
