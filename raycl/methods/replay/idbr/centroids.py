"""The rows nearest to the centroids of k-means: examples that are unlike each other and stand for the others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raycl.data.sources.cache import Indices

ROUNDS = 25
"""The most rounds of k-means, from rows drawn by the seed (IDBR's code: scikit-learn's start and 300 rounds, 10
times)."""

AT_ONCE = 4096
"""Rows whose distances are held together."""


def nearest_to_centroids(x_NC: Tensor, count: int, seed: int) -> Indices:
    """Return ascending numbers of at most `count` rows, the nearest one of each cluster; of equals the first."""
    if count >= len(x_NC):
        return np.arange(len(x_NC))
    draw = torch.Generator().manual_seed(seed)
    centroids_KC = x_NC[torch.randperm(len(x_NC), generator=draw)[:count].sort().values].clone()
    cluster_N = torch.full((len(x_NC),), -1)
    for _ in range(ROUNDS):
        before, (cluster_N, _) = cluster_N, _nearest(x_NC, centroids_KC)
        if torch.equal(before, cluster_N):
            break
        size_K = torch.bincount(cluster_N, minlength=count)
        sums_KC = torch.zeros_like(centroids_KC).index_add_(0, cluster_N, x_NC)
        means_KC = sums_KC / size_K.clamp(min=1).unsqueeze(1)
        centroids_KC = torch.where((size_K > 0).unsqueeze(1), means_KC, centroids_KC)
    cluster_N, distance_N = _nearest(x_NC, centroids_KC)
    order = torch.argsort(distance_N, stable=True)
    chosen: dict[int, int] = {}
    for row in order.tolist():
        chosen.setdefault(int(cluster_N[row]), row)
    return np.array(sorted(chosen.values()), dtype=np.int64)


def _nearest(x_NC: Tensor, centroids_KC: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[N]` the nearest centroid of each row, and its distance."""
    parts = [torch.cdist(rows, centroids_KC).min(1) for rows in torch.split(x_NC, AT_ONCE)]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
