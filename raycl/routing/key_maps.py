"""Keys for plots: the similarity of tasks' keys, and their positions in a plane."""

from typing import Any

import torch

from raycl.routing.slot_keys import cosines
from raycl.routing.slots import SlotRouter

MOST_POINTS, STEPS = 1000, 500
"""The most sub-keys for t-SNE, and its steps: about a second. Twice the steps do not improve it (a divergence of 0.62
with 500 and with 1,000)."""


def similarity(router: SlotRouter) -> list[list[float]]:
    """Return the `[T][T]` mean cosine of the keys of two tasks in the same group (with itself: of different slots)."""
    keys = router.keys()
    rows = []
    for task in router.tasks:
        row = []
        for other in router.tasks:
            similar = cosines(keys[task], keys[other]).mean(1)
            if task == other and len(similar) > 1:
                similar = similar[~torch.eye(len(similar), dtype=torch.bool)]
            row.append(float(similar.mean()))
        rows.append(row)
    return rows


def newest_rows(router: SlotRouter) -> list[list[float]]:
    """Return the `[m][N]` mean cosine over groups of each slot of the newest task with every slot so far, in order of
    learning.

    Keys never change once learned, so the rows of all tasks below each other are the lower triangle of `[N][N]`.
    """
    keys = router.keys()
    means = cosines(keys[router.tasks[-1]], torch.cat([keys[task] for task in router.tasks])).mean(1)
    return [[round(value, 3) for value in row] for row in means.tolist()]


def plane(router: SlotRouter, seed: int = 0) -> list[dict[str, Any]]:
    """Compute t-SNE of all sub-keys by cosine: x, y, slot and group; empty where there are too few or too many."""
    from sklearn.manifold import TSNE

    keys = router.keys()
    names = [slot for task in router.tasks for slot in router.slots(task)]
    points = torch.nn.functional.normalize(torch.cat(list(keys.values())), dim=-1).flatten(0, 1)
    if not 4 < len(points) <= MOST_POINTS:
        return []
    perplexity = min(30, len(points) / 4)
    drawn = TSNE(metric="cosine", init="random", perplexity=perplexity, random_state=seed, max_iter=STEPS)
    places = drawn.fit_transform(points.numpy()).round(3).tolist()
    labels = [(name, group) for name in names for group in range(router.groups)]
    return [
        {"x": x, "y": y, "slot": name, "group": group} for (x, y), (name, group) in zip(places, labels, strict=True)
    ]
