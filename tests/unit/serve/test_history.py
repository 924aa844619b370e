"""The last hour of a replica: what an interval counts, and that memory has a bound."""

from __future__ import annotations

import json
import time

import pytest

from raycl.generation.requests import ResponseMetadata
from raycl.serve.service.history import BOUNDS_MS, INTERVAL_S, INTERVALS, MOST_TASKS, OTHERS, History
from raycl.serve.service.service import ServedAnswer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds since the epoch, to be set."""
    now = [1_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def answer(total_s: float, ood_score: float | None = None) -> ServedAnswer:
    metadata = ResponseMetadata(1, {}, ood_score=ood_score, queue_ms=3.0)
    return ServedAnswer(metadata, tokens=4, first_s=0.004, total_s=total_s)


def test_an_interval_counts_answers_times_weights_and_scores(clock: list[float]) -> None:
    history = History()
    for status in (200, 200, 404, 503):
        history.add_response(status)
    history.add_answer(answer(0.005, 0.96), {"news": 0.75, "film": 0.25})
    history.add_answer(answer(0.0051, 1.0), {"news": 1.0})
    history.add_answer(answer(999.0), {})
    (one,) = json.loads(json.dumps(history.tree()))["data"]
    assert one["start"] == 1_000_000 and one["statuses"] == {"2": 2, "4": 1, "5": 1}
    assert (one["answers"], one["tokens"], one["weights"]) == (3, 12, {"news": 1.75, "film": 0.25})
    place = BOUNDS_MS.index(5)
    assert (one["total_ms"][place], one["total_ms"][place + 1], one["total_ms"][-1]) == (1, 1, 1)
    assert one["queue_ms"][place] == one["first_ms"][place] == 3
    assert one["ood"] == [0] * 9 + [2] and one["ood_sum"] == pytest.approx(1.96)


def test_the_oldest_intervals_are_dropped(clock: list[float]) -> None:
    history = History()
    for _ in range(INTERVALS + 50):
        history.add_response(200)
        clock[0] += INTERVAL_S
    kept = history.tree()["data"]
    assert len(history._intervals) == INTERVALS and len(kept) == INTERVALS - 1, "the newest interval is empty"
    clock[0] += INTERVAL_S * INTERVALS
    assert history.tree()["data"] == [], "what is older than an hour is not shown"


def test_an_interval_tells_so_many_tasks_apart(clock: list[float]) -> None:
    history = History()
    for number in range(MOST_TASKS + 30):
        history.add_answer(answer(0.01), {f"task{number}": 1.0})
    (one,) = history.tree()["data"]
    assert len(one["weights"]) == MOST_TASKS + 1 and one["weights"][OTHERS] == 30
