"""Optimizers over parameters that belong to no backbone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from raycl.training.optimizers.base import OptimizerKind, ParameterSpec
from raycl.training.optimizers.parameters import groups_of
from raycl.training.optimizers.registry import optimizer_kind
from raycl.training.optimizers.settings import TrainConfig

Specs = Mapping[str, ParameterSpec]


def built(
    trained: Mapping[str, nn.Parameter], train: TrainConfig, rates: Mapping[str, float | None] | None = None
) -> tuple[OptimizerKind, Optimizer, Specs]:
    """Return the configured optimizer.

    Args:
        rates: name -> a parameter's own learning rate.
    """
    kind = optimizer_kind(train)
    specs = {
        name: ParameterSpec(p.shape, is_matrix=p.dim() == 2, learning_rate=(rates or {}).get(name))
        for name, p in trained.items()
    }
    return kind, kind.build(groups_of(trained, specs, kind.separates_matrices)), specs
