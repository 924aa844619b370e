"""A file of a cache that is damaged, of another key or of another version is made anew, with one line that says so."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from damage import KINDS, damaged, flips

from raycl.backbone import model_hashes as hashes
from raycl.data.sources.cache import Info, entry
from raycl.data.sources.source import SourceFile
from raycl.errors import DataError
from raycl.routing.sentence_encoder import EncoderConfig, SentenceEncoder
from raycl.storage.records import seal

SCHEMA = pa.schema([("n", pa.int64())])


@dataclass(frozen=True)
class Cache:
    """A cache with two entries.

    Attributes:
        folder: of its files. read: an entry's value, from what was stored under `left` or `right`.
    """

    folder: Path
    read: Callable[[str], Any]

    def files(self) -> set[Path]:
        """Return all that it stores."""
        return {path for path in self.folder.iterdir() if path.is_file() and path.suffix != ".lock"}


def tokens(folder: Path) -> Cache:
    """Arrow files, as raw rows and token tables are."""

    def read(name: str) -> Any:
        def build(writer: pa.RecordBatchFileWriter) -> Info:
            writer.write_batch(pa.record_batch([[len(name), 2, 3]], schema=SCHEMA))
            return {"count": 3, "name": name}

        result = entry(folder / "tokens", name, SCHEMA, build)
        return result.info, result.table().to_pydict()

    return Cache(folder / "tokens", read)


def queries(folder: Path) -> Cache:
    """Return queries of a sentence encoder, whose pass is replaced by a quick one."""

    def read(name: str) -> Any:
        encoder = SentenceEncoder(EncoderConfig(), folder / "queries")
        encoder._computed = lambda texts: torch.tensor([[len(text), 0.5] for text in texts])  # type: ignore[method-assign]
        return encoder.embed_all([name, "more"], (0, 1), lambda part: [part]).tolist()

    return Cache(folder / "queries", read)


def data_hashes(folder: Path) -> Cache:
    """Return a cache of the hashes of data files."""

    def read(name: str) -> Any:
        file = folder / f"{name}.jsonl"
        if not file.exists():
            file.write_text(name)
            os.utime(file, (0, 0))
        return SourceFile.at(file).content_hash(folder / "cache")

    return Cache(folder / "cache" / "hashes", read)


def model_hashes(folder: Path) -> Cache:
    """Hashes of large files of models, one record for each folder; files of weights themselves are not the cache."""

    def read(name: str) -> Any:
        file = folder / name / "model.safetensors"
        if not file.exists():
            file.parent.mkdir()
            file.write_bytes(name.encode())
            os.truncate(file, hashes.LARGE)
        return hashes.hash_of(file)

    return Cache(folder / "left", read)


CACHES = {"tokens": tokens, "queries": queries, "data hashes": data_hashes, "model hashes": model_hashes}


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("RAYCL_CACHE", str(tmp_path / "own"))
    return CACHES[request.param](tmp_path)


def of_left(cache: Cache) -> tuple[Any, dict[Path, bytes], dict[str, bytes]]:
    """Return the value of `left`, its files, and those of `right` by their suffix."""
    value = cache.read("left")
    mine = {path: path.read_bytes() for path in cache.files() if path.name != "model.safetensors"}
    cache.read("right")
    others = {path.suffix: path.read_bytes() for path in cache.files() if path not in mine}
    record = cache.folder.parent / "right" / hashes.RECORD
    if record.exists():
        others[record.suffix] = record.read_bytes()
    return value, mine, others


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_made_anew(cache: Cache, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    value, mine, others = of_left(cache)
    caplog.set_level(logging.INFO, logger="raycl")
    for path, whole in mine.items():
        caplog.clear()
        bad = damaged(whole, kind, others[path.suffix])
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        assert cache.read("left") == value, path.name
        is_silent = (kind == "gone" and path.suffix == ".json") or (kind == "other" and path.name == hashes.RECORD)
        assert len(caplog.messages) == (0 if is_silent else 1), "a record of other models is as usual after a copy"
        assert all("\n" not in line and path.stem in line for line in caplog.messages)
        caplog.clear()
        assert cache.read("left") == value and not caplog.messages, "it was made anew"
        path.write_bytes(whole)


def test_no_flipped_bit_is_believed(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    value, mine, _ = of_left(cache)
    for path, whole in mine.items():
        for bad in flips(whole, 100):
            path.write_bytes(bad)
            assert cache.read("left") == value, (path.name, bad)
            for other, held in mine.items():
                other.write_bytes(held)
    assert len(caplog.messages) == 100 * len(mine)


def test_an_entry_under_another_name_is_not_believed(cache: Cache) -> None:
    """All files of an entry lie under the name of another one: each is whole, and of another key."""
    value, mine, _ = of_left(cache)
    theirs = [path for path in cache.files() - mine.keys() if path.name != "model.safetensors"]
    theirs = theirs or [cache.folder.parent / "right" / hashes.RECORD]
    for path in mine:
        (other,) = (item for item in theirs if item.suffix == path.suffix)
        content = other.read_bytes()
        if path.suffix == ".json":
            content = content.replace(other.stem.encode(), path.stem.encode())  # its hash differs then
            path.write_bytes(other.read_bytes())
            assert cache.read("left") == value
        path.write_bytes(content)
    assert cache.read("left") == value


@pytest.mark.parametrize("number", [0, 99])
def test_records_of_another_version_are_written_again(
    cache: Cache, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    value, mine, _ = of_left(cache)
    (record,) = (path for path in mine if path.suffix == ".json")
    record.write_bytes(seal({**json.loads(mine[record])["record"], "format": number}))
    assert cache.read("left") == value and f"has format {number}" in caplog.text
    caplog.clear()
    assert cache.read("left") == value and not caplog.messages


def test_strays_beside_the_files_change_nothing(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    value, mine, _ = of_left(cache)
    for path in mine:
        for name in (f"{path.name}~", f".{path.name}.swp", f"{path.stem} (1){path.suffix}", f"{path.name}.bak"):
            path.with_name(name).write_bytes(b"\0\xff not ours")
    assert cache.read("left") == value and not caplog.messages


def test_an_entry_that_is_damaged_while_processes_use_it_is_one_sentence(tmp_path: Path) -> None:
    """Another process has opened the entry and sends it here, where it cannot be built."""
    tokens(tmp_path).read("left")
    result = entry(tmp_path / "tokens", "left", SCHEMA, lambda writer: pytest.fail("it is there"))
    whole = result.path.read_bytes()
    result.path.write_bytes(whole[:-1] + b"\0")
    with pytest.raises(DataError, match=r"left.arrow' was changed .* start again, and this entry of the cache is made"):
        result.table()
    result.path.unlink()
    with pytest.raises(DataError, match=r"cannot read '.*left.arrow'"):
        result.table()


def test_a_record_that_is_a_pipe_does_not_hang(tmp_path: Path) -> None:
    """A stranger's model folder may hold one."""
    value = model_hashes(tmp_path).read("left")
    (tmp_path / "left" / hashes.RECORD).unlink()
    os.mkfifo(tmp_path / "left" / hashes.RECORD)
    assert model_hashes(tmp_path).read("left") == value
