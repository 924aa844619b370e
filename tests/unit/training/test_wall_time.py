"""Tests of how long a run took: the time of its attempts, not of the weeks between them."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_records import HASH, phase_record

from raycl.storage import Storage
from raycl.training.records import journal as journals
from raycl.training.records.journal import Journal, read_state
from raycl.training.records.results import wall_seconds

WEEK = 7 * 24 * 3600


def test_wall_time_sums_the_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that crashed after a checkpoint, one that went on, and one that added a task weeks later; whatever people do
    to the clock meanwhile."""
    now, clock = [1000.0], iter(range(10**9, 0, -WEEK))
    monkeypatch.setattr(journals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(journals.time, "time", lambda: float(next(clock)))
    storage = Storage.at(tmp_path)

    def attempt(*events: tuple[float, str]) -> None:
        journal = Journal.claim(storage, workers=1)
        for seconds, event in events:
            now[0] += seconds
            if event == "checkpoint":
                journal.checkpoint("name", HASH, keep=2)
            else:
                journal.phase_done(phase_record(len(journal.state.phases), ended=0.0))

    assert wall_seconds(read_state(storage)) is None
    attempt((10, "checkpoint"))
    assert wall_seconds(read_state(storage)) is None, "nothing is measured yet"
    now[0] += 500  # it had crashed, and was started again
    attempt((5, "checkpoint"), (15, "phase"))
    now[0] += 3 * WEEK
    attempt()  # crashed at once
    now[0] += 60
    attempt((40, "checkpoint"), (2, "phase"))
    assert wall_seconds(read_state(storage)) == 10 + 20 + 42
