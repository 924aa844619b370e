"""The bars of trials that learn, by the heartbeats of their runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycl.operations.sweep.definition.sweep_folder import SweepFolder
from raycl.operations.sweep.trials.bars import steps_shown
from raycl.progress import Bar
from raycl.storage import Storage
from raycl.training.workers.control import HEARTBEAT


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_running_trial_has_a_bar_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, running = SweepFolder(Storage.at(tmp_path), "mine"), {0, 1}
    caplog.set_level(logging.DEBUG, logger="raycl.progress")

    def shown() -> dict[str, tuple[int, int]]:
        """Return the last state of each bar."""
        bars: list[Bar] = [vars(record)["bar"] for record in caplog.records if "bar" in vars(record)]
        return {bar.what: (bar.done, bar.total) for bar in bars}

    def beat(number: int, **fields: Any) -> None:
        summary = {"activity": "training", "task": "mail", "phase": 0, "phases": 2, "steps": 9, **fields}
        folder.run(number).write_json(HEARTBEAT, summary)

    with steps_shown(folder, running, every_s=0.01):
        time.sleep(0.1)
        beat(0, step=3)
        beat(1, step=5)
        first, second = (f"trial {number} [1/2] mail, steps" for number in (1, 2))
        until(lambda: shown() == {first: (3, 9), second: (5, 9)})
        running.discard(0)
        until(lambda: shown() == {first: (1, 1), second: (5, 9)})
    assert shown() == {first: (1, 1), second: (1, 1)}, "bars that have ended are removed"
