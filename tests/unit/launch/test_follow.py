"""The thread that says a run's progress lines: a storage that is away for a moment costs nothing but that moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from raycl.errors import StorageError
from raycl.launch.follow import follow
from raycl.progress import Bar
from raycl.storage import Storage


@dataclass(frozen=True)
class Away(Storage):
    """Storage whose listings and reads fail while `failing` holds something."""

    failing: list[int] = field(default_factory=list)

    def list(self, name: str = "") -> list[str]:
        self._fail()
        return super().list(name)

    def read(self, name: str) -> bytes:
        self._fail()
        return super().read(name)

    def _fail(self) -> None:
        if self.failing:
            self.failing[0] += 1
            raise StorageError("cannot list 'log': the store is away")


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_a_failed_listing_is_followed_by_the_next_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = Storage.at(tmp_path)
    away = Away(plain.uri, plain.filesystem, plain.root)
    plain.write("log/attempt-0001.txt", b"written before\n")
    for stray in (".DS_Store", "attempt-0001.txt~", "._attempt-0001.txt", "Thumbs.db"):
        plain.write(f"log/{stray}", b"\xff\x00 not ours\n")
    with caplog.at_level(logging.INFO, logger="raycl"):
        with follow(away, "mine: ", every_s=0.01):
            plain.write("log/attempt-0001.txt", b"written before\nfirst\n")
            until(lambda: "mine: first" in caplog.messages)
            away.failing.append(0)
            until(lambda: away.failing[0] >= 2)
            away.failing.clear()
            plain.write("log/attempt-0001.txt", b"written before\nfirst\nsecond\n")
            until(lambda: "mine: second" in caplog.messages)
            plain.write("log/attempt-0001.txt", b"written before\nfirst\nsecond\nlast\n")
            away.failing.append(0)
        assert caplog.messages[-1] != "", "a store that is away at the end spoils no result"
    assert [line for line in caplog.messages if "written before" in line or "not ours" in line] == []


def test_steps_of_workers_elsewhere_are_a_bar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bar moves with the heartbeat, and ends with the task's steps, or when nothing is followed any more."""
    storage = Storage.at(tmp_path)
    task = {"phase": 1, "phases": 3, "task": "tone", "steps": 8}
    old = {**task, "activity": "training", "step": 5, "time": 1.0}
    storage.write_json("heartbeat.json", old)

    def bars() -> list[Bar]:
        return [bar for record in caplog.records if (bar := getattr(record, "bar", None))]

    def was_shown(step: int) -> bool:
        return any(bar.done == step for bar in bars())

    with caplog.at_level(logging.DEBUG, logger="raycl.progress"), follow(storage, "mine: ", every_s=0.01):
        for step in (6, 7):
            storage.write_json("heartbeat.json", {**old, "step": step, "time": float(step)})
            until(partial(was_shown, step))
        storage.write_json("heartbeat.json", {**old, "activity": "evaluating", "step": 8, "time": 8.0})
        until(lambda: bars()[-1].done == bars()[-1].total)
        storage.write_json("heartbeat.json", {**old, "phase": 2, "task": "way", "step": 1, "time": 9.0})
        until(lambda: "way" in bars()[-1].what)
    shown = list(dict.fromkeys((bar.what, bar.done, bar.total) for bar in bars()))
    tone, way = "mine: [2/3] tone, steps", "mine: [3/3] way, steps"
    assert shown == [(tone, 6, 8), (tone, 7, 8), (tone, 1, 1), (way, 1, 8), (way, 1, 1)]
    assert all(bar.has_lines for bar in bars())
