"""The last hour of one replica, for the page of metrics, and the texts that it was asked: still those of its tasks?

Requests, times, weights and out-of-distribution scores are counted in intervals of equal length, of which the oldest is
dropped, so that memory has a bound. What Prometheus reads is counted apart from it (`metrics`), for as long as the
replica lives.

Labels, out-of-distribution scores and texts of no learned task are counted for each task since the active snapshot
began to answer. The texts themselves are kept only where the setting `keep_unsure` asks for it.
"""

import heapq
import os
import socket
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from raycl.generation.requests import ResponseMetadata
from raycl.serve.service.service import ServedAnswer

INTERVAL_S, INTERVALS = 10, 360
"""Seconds of an interval, and how many are kept."""

BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000)
"""Upper bounds of the classes of times; one more class is for longer ones."""


OOD_CLASSES = 10
"""Classes of out-of-distribution scores, of equal width from 0 to 1."""

MOST_TASKS, OTHERS = 64, "others"
"""Tasks that are counted one by one; further ones are counted together under this name."""

MOST_LABELS = 256
"""Labels of a task that are counted one by one."""

LONGEST = 2_000
"""Characters of a kept text; the rest is cut."""

OTHER_LABEL = "(another text)"
"""Stands for answers of a task with labels that are none of them."""


def class_of(score: float) -> int:
    """Return the class of an out-of-distribution score."""
    return min(int(score * OOD_CLASSES), OOD_CLASSES - 1)


@dataclass
class TaskCounts:
    """Texts that went to one task.

    Attributes:
        texts: number of texts. unknown: how many of them belong to no learned task, by the endpoint's threshold; None:
            it has none.
        ood: number of texts in each class of out-of-distribution scores.
        labels: label -> number of texts; empty for tasks without labels.
    """

    texts: int = 0
    unknown: int | None = None
    ood: list[int] = field(default_factory=lambda: [0] * OOD_CLASSES)
    labels: Counter[str] = field(default_factory=Counter)

    def add(self, score: float | None, unknown: bool | None, label: str | None = None) -> None:
        """Count a text."""
        self.texts += 1
        if unknown is not None:
            self.unknown = (self.unknown or 0) + unknown
        if score is not None:
            self.ood[class_of(score)] += 1
        if label is not None:
            name = label if label in self.labels or len(self.labels) < MOST_LABELS else OTHER_LABEL
            self.labels[name] += 1


@dataclass(frozen=True)
class UnsureText:
    """A text far from all learned tasks: a candidate for the next one.

    Attributes:
        text: its first `LONGEST` characters. task, weight: the task with the largest weight; "": none.
        time: seconds since the epoch.
    """

    text: str
    task: str
    weight: float
    ood_score: float | None
    ood_distance: float | None
    unknown: bool | None
    time: float


class ServedCounts:
    """Counts of one snapshot's answers; another snapshot begins at zero, but unsure texts stay.

    Args:
        keep_unsure: number of texts that are kept, those with the largest out-of-distribution distance; without
            statistics of the tasks those whose largest weight is the smallest.
    """

    def __init__(self, keep_unsure: int = 0) -> None:
        self.keep_unsure = keep_unsure
        self.tasks: dict[str, TaskCounts] = {}
        self._snapshot: int | None = None
        self._unsure: list[tuple[float, int, UnsureText]] = []
        self._numbers = count()

    def add(self, text: str, metadata: ResponseMetadata, tasks: Mapping[str, float], label: str | None) -> None:
        """Count an answered text.

        Args:
            tasks: task -> weight of its adapters. label: the label that it got; None: its task has none.
        """
        if metadata.snapshot != self._snapshot:
            self._snapshot, self.tasks = metadata.snapshot, {}
        task, weight = max(tasks.items(), key=lambda pair: pair[1], default=("", 0.0))
        name = task if task in self.tasks or len(self.tasks) < MOST_TASKS else OTHERS
        self.tasks.setdefault(name, TaskCounts()).add(metadata.ood_score, metadata.unknown, label)
        if not self.keep_unsure:
            return
        found = UnsureText(
            text[:LONGEST], task, weight, metadata.ood_score, metadata.ood_distance, metadata.unknown, time.time()
        )
        measures = (metadata.ood_distance, metadata.ood_score, 1 - weight)
        entry = (next(value for value in measures if value is not None), next(self._numbers), found)
        if len(self._unsure) < self.keep_unsure:
            heapq.heappush(self._unsure, entry)
        else:
            heapq.heappushpop(self._unsure, entry)

    def unsure(self) -> list[dict[str, Any]]:
        """Return the kept texts, the farthest first; equal ones once."""
        listed = sorted(self._unsure, key=lambda entry: entry[:2], reverse=True)
        once = {entry[2].text: entry[2] for entry in reversed(listed)}
        return [asdict(once[text]) for text in dict.fromkeys(entry[2].text for entry in listed)]

    def tree(self, snapshot: int) -> dict[str, Any]:
        """Return the counts of a snapshot by task; none where it has not answered since another one did."""
        return {task: vars(counts) for task, counts in self.tasks.items()} if snapshot == self._snapshot else {}


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
