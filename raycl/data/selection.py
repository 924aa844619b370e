"""Selection of rows: the dev split, samples, few-shot subsets, one reference of several.

Every process must choose the same rows, so each choice is a pure function of the seed, the task's name and the rows,
drawn from a generator of its own. Where rows belong together (turns of a conversation), a cut takes whole groups;
`groups` are their numbers, one for each row, in the order of their first rows.
"""

import hashlib
import json

import numpy as np

from raycl.data.sources.cache import Indices


def generator(seed: int, *words: str) -> np.random.Generator:
    """Return a random generator that depends on the seed and the words alone."""
    digest = hashlib.sha256(json.dumps([seed, *words]).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def carve_dev(
    seed: int, task: str, count: int, fraction: float, limit: int, groups: Indices | None = None
) -> tuple[Indices, Indices]:
    """Split `count` rows into (train, dev), both ascending; dev holds `fraction` of them, at most `limit`."""
    size = min(int(fraction * count), limit)
    return _parted(generator(seed, task, "dev"), np.arange(count) if groups is None else groups, size)


def carve_test(
    seed: int, task: str, count: int, fraction: float, groups: Indices | None = None
) -> tuple[Indices, Indices]:
    """Split `count` rows of a task that comes as one file into (the others, test), both ascending.

    Test holds `fraction` of them, rounded, and at least one; each row once (the files of SLM's split draw rows twice).
    """
    size = max(1, round(fraction * count))
    return _parted(generator(seed, task, "carve test"), np.arange(count) if groups is None else groups, size)


def draw_groups(seed: int, task: str, split: str, groups: Indices, limit: int) -> Indices:
    """Return positions of whole groups with at most `limit` rows together, but of one group at least, ascending."""
    return _parted(generator(seed, task, split, "sample"), groups, limit)[1]


def _parted(random: np.random.Generator, groups: Indices, size: int) -> tuple[Indices, Indices]:
    """Return positions of the other groups, and of the first groups of a permutation with at most `size` rows together.

    Where one row is wanted, one group is taken, whatever its size. Groups of one row each are rows.
    """
    rows = np.bincount(groups)
    order = random.permutation(len(rows))
    taken = int(np.searchsorted(np.cumsum(rows[order]), size, side="right"))
    chosen = np.isin(groups, order[: max(taken, 1) if size else 0])
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def sample(seed: int, task: str, split: str, rows: Indices, limit: int | None) -> Indices:
    """Return at most `limit` of `rows` without replacement, ascending; all of them if `limit` is None."""
    if limit is None or limit >= len(rows):
        return rows
    return np.sort(generator(seed, task, split, "sample").permutation(rows)[:limit])


def per_class(seed: int, task: str, rows: Indices, labels: Indices, limit: int, *words: str) -> Indices:
    """Return at most `limit` of `rows` for each label, ascending.

    Args:
        labels: class of each of `rows`, same length.
        words: names of the draw, where a task has several.
    """
    order = generator(seed, task, "per_class", *words).permutation(len(rows))
    chosen = [order[labels[order] == label][:limit] for label in np.unique(labels)]
    return np.sort(rows[np.concatenate(chosen)]) if chosen else rows


def pick_reference(seed: int, task: str, split: str, counts: Indices) -> Indices:
    """Pick for each row one reference out of its `counts`, uniformly: the official loaders' choice, but seeded."""
    return generator(seed, task, split, "reference").integers(0, counts).astype(np.int64)
