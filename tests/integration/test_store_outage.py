"""A store that is away for a while: asked again with growing pauses, then a stop that can be resumed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store import Store
from tiny import Done, Lab, exported, matrix, run, trace, work

from raycl.bank import Bank
from raycl.errors import AlreadyExistsError, StorageError, UnreachableError
from raycl.launch import prepared_run
from raycl.operations.banks.maintenance import verify
from raycl.storage import Storage, remote


@pytest.fixture
def store(s3_uri: Callable[[str], str]) -> Iterator[Store]:
    made = Store()  # moto's servers of one process share what they hold, so the bucket is there
    yield made
    made.stop()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pause is short."""
    monkeypatch.setattr(remote, "PAUSE_S", 0.05)


@pytest.fixture(scope="module")
def done(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Return a run of one task whose store was never away."""
    config = lab.config("bert", "lora", stream={"tasks": lab.tasks[:1]})
    storage = Storage.at(tmp_path_factory.mktemp("done"))
    return Done(config, storage, run(config, storage).context)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("what", ["read", "write", "create", "exists", "list", "files", "delete", "open"])
def test_every_operation_waits_for_the_store(store: Store, what: str, caplog: pytest.LogCaptureFixture) -> None:
    storage = store.folder(f"every-{what}", 60)
    storage.write("a", b"1")
    operations: dict[str, Callable[[], Any]] = {
        "read": lambda: storage.read("a"),
        "write": lambda: storage.write("a", b"2"),
        "create": lambda: storage.create("b", b"3"),
        "exists": lambda: storage.exists("a"),
        "list": lambda: storage.list(),
        "files": lambda: list(storage.files()),
        "delete": lambda: storage.delete("a"),
        "open": lambda: _whole(storage, "a"),
    }
    expected = {"read": b"1", "exists": True, "list": ["a"], "files": ["a"], "open": b"1"}
    with caplog.at_level(logging.WARNING, logger="raycl"), store.away(0.2):
        assert operations[what]() == expected.get(what)
    assert "trying again" in caplog.text
    result = {name: storage.read(name) for name in storage.list()}
    assert result == {"write": {"a": b"2"}, "create": {"a": b"1", "b": b"3"}, "delete": {}}.get(what, {"a": b"1"})


def _whole(storage: Storage, name: str) -> bytes:
    with storage.open(name) as stream:
        return stream.read()


def test_permanent_errors_are_not_retried(store: Store) -> None:
    storage = store.folder("wrong", 60)
    began = time.monotonic()
    with pytest.raises(StorageError, match="cannot read") as raised:
        storage.read("nothing")
    assert not isinstance(raised.value, UnreachableError)
    storage.create("a", b"1")
    with pytest.raises(AlreadyExistsError):
        storage.create("a", b"2")
    with pytest.raises(StorageError, match=r"NoSuchBucket|does not exist"):
        Storage.at(store.uri("").replace("bucket", "no-such-bucket")).with_retries(60).create("a", b"1")
    assert time.monotonic() - began < 10


def test_retries_end_with_one_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    without, retrying = (store.folder("gone", seconds) for seconds in (0, 40))
    store.stop()
    try:
        with pytest.raises(UnreachableError, match=r"cannot reach 's3://bucket/gone/a'"):
            without.exists("a")
        assert not pauses
        with pytest.raises(
            UnreachableError, match=r"cannot write 's3://bucket/gone/a'.*did not answer for \d+ s"
        ) as raised:
            retrying.write("a", b"1")
        with pytest.raises(UnreachableError):
            retrying.sub("below").create("a", b"1")
        assert "\n" not in str(raised.value)
        assert len(pauses) % 2 == 0 and pauses[: len(pauses) // 2] == pauses[len(pauses) // 2 :] == [
            0.5,
            1,
            2,
            4,
            8,
            16,
        ]
    finally:
        store.start()


@pytest.mark.usefixtures("soon")
def test_a_run_continues_after_an_outage(done: Done, store: Store) -> None:
    """It is away at the first checkpoint, and again while the task is published."""
    storage = store.folder("run", 60)
    stopped: list[int] = []

    class Outage:
        """A tracker that stops the store after steps 1 and 4."""

        def log(self, axis: str, at: int, metrics: dict[str, float]) -> None:
            if at in (1, 4) and "train/loss" in metrics:
                stopped.append(at)
                store.stop()
                threading.Timer(0.5, store.start).start()

        def table(self, task: int, name: str, columns: object, rows: object) -> None:
            """Nothing happens at a table."""

        def picture(self, task: int, name: str, file: object) -> None:
            """Nothing happens at a picture."""

    run(done.config, storage, sink=Outage())
    assert stopped == [1, 4] and len(trace(storage)) == 4
    assert (trace(storage), matrix(storage), exported(storage)) == (
        trace(done.storage),
        matrix(done.storage),
        exported(done.storage),
    )
    assert verify(Bank(storage.sub("bank"))).problems == []


def test_a_run_that_gives_up_can_be_resumed(done: Done, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Storage.at
    once = store.folder("", 0).filesystem

    def at(uri: str | Path) -> Storage:
        storage = opened(uri)
        return storage if storage.is_local else replace(storage, filesystem=once)

    monkeypatch.setattr(Storage, "at", at)
    settings = {"dir": store.uri(""), "name": "given-up", "retry_s": 0.5}
    config = done.config.model_copy(update={"output": done.config.output.model_copy(update=settings)})
    prepared = prepared_run.prepare(config)
    store.stop()
    with pytest.raises(UnreachableError):
        work(prepared)
    store.start()
    assert prepared.storage.list("errors") == [], "its driver would take an error for the end of the run"
    work(prepared_run.reopen(prepared.storage.address))
    assert matrix(prepared.storage) == matrix(done.storage)
