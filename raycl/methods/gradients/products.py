"""Products of gradients, each one vector over all trained parameters that is kept parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor]
"""Parameter -> whole gradient."""


def product(first: Gradients, other: Gradients) -> float:
    """Return the product of two gradients over the parameters of the first, summed in float64."""
    return sum(_dot(gradient, other[name]) for name, gradient in first.items())


def gram(gradients: Sequence[Gradients]) -> Tensor:
    """Return `[K, K]` products of K gradients, float64 on the CPU."""
    products_KK = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for row, gradient in enumerate(gradients):
        for column, other in enumerate(gradients[: row + 1]):
            products_KK[row, column] = products_KK[column, row] = product(gradient, other)
    return products_KK


def plus(gradients: Gradients, weights: Sequence[float], others: Sequence[Gradients]) -> dict[str, Tensor]:
    """Return `g + sum_k weights_k other_k`, in the dtype of g."""
    sums = {}
    for name, gradient in gradients.items():
        total = gradient.float()
        for weight, other in zip(weights, others, strict=True):
            total = total + weight * other[name].to(gradient.device).float()
        sums[name] = total.to(gradient.dtype)
    return sums


def _dot(first: Tensor, other: Tensor) -> float:
    return float(torch.dot(first.reshape(-1).double(), other.to(first.device).reshape(-1).double()))
