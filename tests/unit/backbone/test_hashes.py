"""Hashes of weights: each file is read once on a node, and again when it, or what was kept of it, is not the same."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycl.backbone import model_hashes as hashes

SIZE = hashes.LARGE + 1


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return files whose bytes were read."""
    paths: list[Path] = []
    read = hashes._read
    monkeypatch.setattr(hashes, "_read", lambda file: (paths.append(file), read(file))[1])
    return paths


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "model" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(bytes(SIZE))
    yield file
    file.parent.chmod(0o700)


def test_a_file_is_read_once_and_again_after_a_change(large: Path, reads: list[Path]) -> None:
    first = hashes.hash_of(large)
    assert hashes.hash_of(large) == first == hashes._read(large) and len(reads) == 2
    record = large.parent / hashes.RECORD
    kept = json.loads(record.read_text())["record"]["files"][large.name]
    assert kept.keys() == {"size", "mtime_ns", "inode", "sha256"}
    os.utime(large, ns=(0, kept["mtime_ns"] + 1))
    assert hashes.hash_of(large) == first and len(reads) == 3, "another time"
    replaced = large.with_suffix(".new")
    replaced.write_bytes(b"1" + bytes(SIZE - 1))
    os.utime(replaced, ns=(0, kept["mtime_ns"] + 1))
    replaced.replace(large)
    assert hashes.hash_of(large) != first and len(reads) == 4, "another inode"
    large.write_bytes(bytes(SIZE + 1))
    hashes.hash_of(large)
    assert json.loads(record.read_text())["record"]["files"][large.name]["size"] == SIZE + 1 and len(reads) == 5


def test_a_folder_that_cannot_be_written_to(
    large: Path, reads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is in the cache folder; the write is refused, since root could write to any folder."""
    monkeypatch.setenv("RAYCL_CACHE", str(tmp_path / "cache"))
    access = os.access
    monkeypatch.setattr(hashes.os, "access", lambda path, mode: path != large.parent and access(path, mode))
    first = hashes.hash_of(large)
    assert hashes.hash_of(large) == first and len(reads) == 1
    assert [file.name for file in large.parent.iterdir()] == [large.name]
    assert len(list((tmp_path / "cache" / "hashes").glob("*.json"))) == 1


def test_of_several_processes_one_reads(large: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    times = context.Value("i", 0)

    def reader() -> None:
        read = hashes._read

        def counted(file: Path) -> str:
            with times.get_lock():
                times.value += 1
            return read(file)

        hashes._read = counted  # type: ignore[assignment]
        hashes.hash_of(large)

    processes = [context.Process(target=reader) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4 and times.value == 1


def test_small_files_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert len(hashes.hash_of(tmp_path / "config.json")) == 64
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
