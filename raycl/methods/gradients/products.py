"""Products of gradients, each one vector over all trained parameters that is kept parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor]
"""Parameter -> whole gradient."""


def product(one: Gradients, other: Gradients) -> float:
    """Return the product of two gradients over the parameters of the first, summed in float64."""
    return sum(_dot(gradient, other[name]) for name, gradient in one.items())


def gram(gradients: Sequence[Gradients]) -> Tensor:
    """Return `[K, K]` products of K gradients, float64 on the CPU."""
    found = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for row, one in enumerate(gradients):
        for column, other in enumerate(gradients[: row + 1]):
            found[row, column] = found[column, row] = product(one, other)
    return found


def plus(gradients: Gradients, weights: Sequence[float], others: Sequence[Gradients]) -> dict[str, Tensor]:
    """`g + sum_k weights_k other_k`, in the dtype of g."""
    found = {}
    for name, gradient in gradients.items():
        total = gradient.float()
        for weight, other in zip(weights, others, strict=True):
            total = total + weight * other[name].to(gradient.device).float()
        found[name] = total.to(gradient.dtype)
    return found


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one.reshape(-1).double(), other.to(one.device).reshape(-1).double()))
