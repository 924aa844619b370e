"""Rows that share one mask bit: partitions of a layer's rows into clusters of equal size (MIGU, appendix E).

The authors' code for this does not run as released, so equal sizes (they state it of weight clusters only), spectral
clustering that ends in the same balanced k-means, and rows normalised one by one are our reading.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raycl.adapters.layer import StackedLora, plain_weight
from raycl.methods.migu.observed_layers import LayerPart, Layout

ROUNDS = 10
"""Rounds of k-means, which converges much earlier."""


def sequential(rows: int, count: int) -> Tensor:
    """Return `[S]` cluster of each row: contiguous blocks whose sizes differ by one at most."""
    return torch.arange(rows) * min(count, rows) // rows


def balanced_kmeans(x_SD: Tensor, count: int, seed: int) -> Tensor:
    """Return `[S]` cluster of each row by direction (rows are L2-normalised), sizes as in `sequential`.

    Rows choose in the order of how near they are to their nearest centre, and a full cluster takes no more.
    """
    points = nn.functional.normalize(x_SD.float().cpu(), dim=1)
    rooms = torch.bincount(sequential(len(points), count)).tolist()
    draw = torch.Generator().manual_seed(seed)
    centres = points[torch.randperm(len(points), generator=draw)[: len(rooms)]]
    clusters = torch.zeros(len(points), dtype=torch.long)
    for _ in range(ROUNDS):
        before, clusters = clusters, _seated((points @ centres.T).numpy(), rooms)
        if torch.equal(before, clusters):
            break
        sums = torch.zeros_like(centres).index_add_(0, clusters, points)
        centres = nn.functional.normalize(sums, dim=1)
    return clusters


def _seated(similarity_SC: Any, rooms: list[int]) -> Tensor:
    left = list(rooms)
    wishes = np.argsort(-similarity_SC, axis=1, kind="stable")
    assigned = np.zeros(len(wishes), dtype=np.int64)
    for row in np.argsort(-similarity_SC.max(axis=1), kind="stable"):
        assigned[row] = next(wish for wish in wishes[row] if left[wish])
        left[assigned[row]] -= 1
    return torch.from_numpy(assigned)


def spectral(affinity_SS: Tensor, count: int, seed: int) -> Tensor:
    """Return `[S]` cluster of each row: the leading eigenvectors of the normalised affinity, then `balanced_kmeans`."""
    affinity = affinity_SS.double().cpu()
    scale = affinity.sum(1).clamp_min(1e-30).rsqrt()
    _, vectors = torch.linalg.eigh(affinity * scale * scale.unsqueeze(1))
    return balanced_kmeans(vectors[:, -min(count, len(affinity)) :], count, seed)


def weight_clusters(
    layout: Layout, layers: Mapping[str, nn.Module], count: int, seed: int, alone: bool = False
) -> Tensor:
    """Return `[F]` cluster of every unit within its group: outputs by rows of `W + s B A`, units of a slot by rows of
    A.

    Args:
        alone: outputs of a layer with a LoRA by rows of its B.
    """
    clusters = []
    for (path, part), units in layout.units.items():
        rows = _low(layers[path]) if part == "low" else _merged(layers[path], alone)
        clusters += [balanced_kmeans(own, count, seed) for own in torch.split(rows, list(units.groups))]
    return torch.cat(clusters)


def sequential_clusters(layout: Layout, count: int) -> Tensor:
    """Return `[F]` cluster of every unit within its group."""
    return torch.cat([sequential(size, count) for units in layout.units.values() for size in units.groups])


def _low(layer: Any) -> Tensor:
    low: Tensor = layer.lora_A.detach()
    return low


def _merged(layer: Any, alone: bool) -> Tensor:
    if alone and isinstance(layer, StackedLora) and layer.lora_B is not None:
        own: Tensor = layer.lora_B.detach().float()
        return own
    base: Any = layer.base if isinstance(layer, StackedLora) else layer
    weight = plain_weight(base)
    if isinstance(layer, StackedLora) and layer.lora_A is not None and layer.lora_B is not None:
        weight = weight + layer.update.scale * (layer.lora_B.detach().float() @ layer.lora_A.detach().float())
    return weight


class CoMagnitude:
    """`G += |h| |h|^T` per real token, for every group of units, over the examples that are shown."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.affinities: dict[tuple[str, LayerPart], list[Tensor]] = {
            key: [torch.zeros(size, size, device=device) for size in units.groups]
            for key, units in layout.units.items()
        }

    def add(self, key: Any, y: Tensor, weight: Tensor | None) -> None:
        """Outputs `[B, S, units]` of one layer, `weight` `[B, S]` 0 where they do not count."""
        magnitudes = y.detach().float().abs()
        if weight is not None:
            magnitudes = magnitudes * weight.unsqueeze(-1)
        flat = magnitudes.reshape(-1, y.shape[-1])
        sizes = [len(affinity) for affinity in self.affinities[key]]
        for affinity, units in zip(self.affinities[key], torch.split(flat, sizes, dim=1), strict=True):
            affinity += units.T @ units

    def clusters(self, reduce: Any, count: int, seed: int) -> Tensor:
        """Return `[F]` cluster of every unit within its group; collective."""
        groups = [affinity for affinity_group in self.affinities.values() for affinity in affinity_group]
        return torch.cat([spectral(reduce(affinity), count, seed) for affinity in groups])
