"""Which rows are used: the dev split, samples, few-shot subsets, one reference of several.

Why it exists: every process must choose the same rows, so each choice is a pure function of the seed, the task's
name and the rows, drawn from a generator of its own. What it does not know: files, tokens.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def generator(seed: int, *words: str) -> np.random.Generator:
    """A random generator that depends on the seed and the words alone."""
    digest = hashlib.sha256(json.dumps([seed, *words]).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def carve_dev(seed: int, task: str, count: int, fraction: float, limit: int) -> tuple[Indices, Indices]:
    """Split `count` rows into (train, dev), both ascending; dev holds `fraction` of them, at most `limit`."""
    size = min(int(fraction * count), limit)
    order = generator(seed, task, "dev").permutation(count).astype(np.int64)
    return np.sort(order[size:]), np.sort(order[:size])


def carve_test(seed: int, task: str, count: int, fraction: float) -> tuple[Indices, Indices]:
    """Split `count` rows of a task that comes as one file into (the others, test), both ascending.

    Test holds `fraction` of them, rounded, and at least one; each row once (the files of SLM's split draw rows twice).
    """
    size = max(1, round(fraction * count))
    order = generator(seed, task, "carve test").permutation(count).astype(np.int64)
    return np.sort(order[size:]), np.sort(order[:size])


def sample(seed: int, task: str, split: str, rows: Indices, limit: int | None) -> Indices:
    """At most `limit` of `rows` without replacement, ascending; all of them if `limit` is None."""
    if limit is None or limit >= len(rows):
        return rows
    return np.sort(generator(seed, task, split, "sample").permutation(rows)[:limit])


def per_class(seed: int, task: str, rows: Indices, labels: Indices, limit: int, *words: str) -> Indices:
    """At most `limit` of `rows` for each label, ascending.

    Args:
        labels: class of each of `rows`, same length.
        words: of the draw, where a task has several.
    """
    order = generator(seed, task, "per_class", *words).permutation(len(rows))
    chosen = [order[labels[order] == label][:limit] for label in np.unique(labels)]
    return np.sort(rows[np.concatenate(chosen)]) if chosen else rows


def pick_reference(seed: int, task: str, split: str, counts: Indices) -> Indices:
    """For each row one reference out of its `counts`, uniformly: the official loaders' choice, but seeded."""
    return generator(seed, task, split, "reference").integers(0, counts).astype(np.int64)
