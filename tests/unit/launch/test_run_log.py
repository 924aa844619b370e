"""The file of a run's log lines: written a few times, whole at the end, and through a store that does not answer."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from raycl.errors import StorageError, UnreachableError
from raycl.launch import worker
from raycl.storage import Storage

LOG = logging.getLogger("raycl")
FILE = "log/attempt-0001.txt"


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of files that are written from now on; each write logs a line, as those that are repeated do."""
    names, write = list[str](), Storage.write

    def logging_write(storage: Storage, name: str, *parts: bytes) -> None:
        names.append(name)
        LOG.warning("trying again")
        write(storage, name, *parts)

    monkeypatch.setattr(Storage, "write", logging_write)
    return names


def test_many_lines_are_a_few_writes(tmp_path: Path, writes: list[str]) -> None:
    storage = Storage.at(tmp_path)
    with worker.run_log(storage, 1):
        for number in range(200):
            LOG.info("line %d", number)
        assert storage.read_text(FILE).startswith("line 0\n"), "the first is written at once"
    text = storage.read_text(FILE)
    assert [line for line in text.splitlines() if line.startswith("line")] == [f"line {n}" for n in range(200)]
    assert "trying again" in text and len(writes) < 10


def test_the_last_of_several_lines_is_written_while_nothing_else_happens(tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    with worker.run_log(storage, 1):
        LOG.info("one")
        LOG.info("two")
        end = time.monotonic() + 20
        while storage.read_text(FILE) != "one\ntwo\n":
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.mark.parametrize("ending", [UnreachableError, StorageError])
def test_lines_before_an_error_are_written_unless_the_store_is_away(
    tmp_path: Path, writes: list[str], ending: type[StorageError]
) -> None:
    storage = Storage.at(tmp_path)
    with pytest.raises(ending), worker.run_log(storage, 1):
        LOG.info("one")
        LOG.info("two")
        writes.clear()
        raise ending("it is away")
    assert bool(writes) is (ending is StorageError)
    assert ("two" in storage.read_text(FILE)) is (ending is StorageError)


def test_a_line_that_cannot_be_written_is_an_error_and_the_next_one_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, write = Storage.at(tmp_path), Storage.write

    def away(storage: Storage, name: str, *parts: bytes) -> None:
        raise UnreachableError("the store did not answer")

    with worker.run_log(storage, 1):
        monkeypatch.setattr(Storage, "write", away)
        with pytest.raises(UnreachableError):
            LOG.info("one")
        monkeypatch.setattr(Storage, "write", write)
        LOG.info("two")
        assert storage.read_text(FILE) == "one\ntwo\n"
