"""The last hour of one replica, for the page of metrics: requests, times, weights and out-of-distribution scores.

Counted in intervals of equal length, of which the oldest is dropped, so that memory has a bound. What Prometheus reads
is counted apart from it (`metrics`), for as long as the replica lives.
"""

from __future__ import annotations

import os
import socket
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raycl.serve.service.served_counts import MOST_TASKS, OOD_CLASSES, OTHERS, ServedCounts, class_of
from raycl.serve.service.service import ServedAnswer

INTERVAL_S, INTERVALS = 10, 360
"""Seconds of an interval, and how many are kept."""

BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000)
"""Upper bounds of the classes of times; one more class is for longer ones."""


@dataclass
class Interval:
    """The counts of one interval.

    Attributes:
        start: seconds since the epoch, a multiple of `INTERVAL_S`.
        statuses: responses by the first digit of their status, `2` to `5`.
        answers, tokens: finished answers, and their generated tokens.
        total_ms, first_ms, queue_ms: number of answers in each class of `BOUNDS_MS`: to the answer's end, to its first
            piece, and in the queue.
        weights: task -> sum of the routing weights of all answers.
        ood: number of answers in each class of out-of-distribution scores. ood_sum: sum of these scores.
    """

    start: int
    statuses: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    tokens: int = 0
    total_ms: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    first_ms: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    queue_ms: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    weights: dict[str, float] = field(default_factory=dict)
    ood: list[int] = field(default_factory=lambda: [0] * OOD_CLASSES)
    ood_sum: float = 0.0


class History:
    """Intervals of one replica; used on the event loop's thread alone.

    Args:
        keep_unsure: see `ServedCounts`.

    Attributes:
        served: counts by task since the active snapshot began to answer.
    """

    def __init__(self, keep_unsure: int = 0) -> None:
        self.served = ServedCounts(keep_unsure)
        self.replica: str = f"{socket.gethostname()}:{os.getpid()}"
        self._intervals: deque[Interval] = deque(maxlen=INTERVALS)

    def add_response(self, status: int) -> None:
        """Count a response to a request for answers."""
        self._now().statuses[str(status)[0]] += 1

    def add_answer(self, answer: ServedAnswer, tasks: Mapping[str, float]) -> None:
        """Count a finished answer.

        Args:
            tasks: task -> weight of its adapters.
        """
        now = self._now()
        now.answers += 1
        now.tokens += answer.tokens
        now.total_ms[bisect_left(BOUNDS_MS, answer.total_s * 1e3)] += 1
        if answer.first_s:
            now.first_ms[bisect_left(BOUNDS_MS, answer.first_s * 1e3)] += 1
        for task, weight in tasks.items():
            name = task if task in now.weights or len(now.weights) < MOST_TASKS else OTHERS
            now.weights[name] = now.weights.get(name, 0.0) + weight
        if answer.metadata is None:
            return
        now.queue_ms[bisect_left(BOUNDS_MS, answer.metadata.queue_ms)] += 1
        score = answer.metadata.ood_score
        if score is not None:
            now.ood[class_of(score)] += 1
            now.ood_sum += score

    def tree(self) -> dict[str, Any]:
        """Return everything as JSON; intervals in which nothing happened are left out."""
        oldest = self._start() - INTERVAL_S * (INTERVALS - 1)
        return {
            "object": "metrics",
            "replica": self.replica,
            "now": time.time(),
            "interval_s": INTERVAL_S,
            "intervals": INTERVALS,
            "bounds_ms": list(BOUNDS_MS),
            "data": [vars(interval) for interval in self._intervals if interval.start >= oldest],
        }

    def _now(self) -> Interval:
        start = self._start()
        if not self._intervals or self._intervals[-1].start < start:
            self._intervals.append(Interval(start))
        return self._intervals[-1]

    def _start(self) -> int:
        return int(time.time()) // INTERVAL_S * INTERVAL_S
