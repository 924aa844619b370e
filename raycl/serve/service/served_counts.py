"""The texts that an endpoint answers beside those that its tasks were learned from: is it still asked the same?

Counted for each task since the active snapshot began to answer: labels, out-of-distribution scores and texts of no
learned task. The texts themselves are kept only where the setting `keep_unsure` asks for it.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from raycl.generation.requests import ResponseMetadata

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
class KeptText:
    """A text far from all learned tasks: a candidate for the next one.

    Attributes:
        text: its first `LONGEST` characters. task, weight: the task with the largest weight.
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
        self._unsure: list[tuple[float, int, KeptText]] = []
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
        found = KeptText(
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

    def tree(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {task: vars(counts) for task, counts in self.tasks.items()}
