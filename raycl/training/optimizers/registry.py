"""The table of optimizers by name. Checkpoints, plans and engines ask it; nothing else branches on an optimizer.

Why literal: the same on every worker, no import side effects, and a name that is missing is visible in a diff.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from raycl.errors import meant
from raycl.plugins import load, names

if TYPE_CHECKING:
    from raycl.training.optimizers.base import OptimizerKind
    from raycl.training.optimizers.settings import TrainConfig

OPTIMIZERS: dict[str, str] = {
    "adamw": "raycl.training.optimizers.built_in:AdamWKind",
    "adafactor": "raycl.training.optimizers.built_in:AdafactorKind",
    "sgd": "raycl.training.optimizers.built_in:SGDKind",
    "adamw_8bit": "raycl.training.optimizers.built_in:AdamW8bitKind",
    "muon": "raycl.training.optimizers.built_in:MuonKind",
}
"""Optimizer name -> class."""


def optimizer_names() -> tuple[str, ...]:
    """Return all names that `train.optimizer` may have."""
    return (*OPTIMIZERS, *names("optimizer"))


def optimizer_class(name: str) -> type[OptimizerKind]:
    """Return the class behind a name.

    Raises:
        ValueError: there is none; one sentence with the nearest name.
    """
    from raycl.training.optimizers.base import OptimizerKind  # brings torch, which settings do without

    if name not in OPTIMIZERS:
        loaded: type[OptimizerKind] | None = load("optimizer", name, OptimizerKind)
        if loaded is None:
            raise ValueError(f"train.optimizer is '{name}': {meant(name, optimizer_names())}")
        return loaded
    module, _, attribute = OPTIMIZERS[name].partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    assert isinstance(kind, type) and issubclass(kind, OptimizerKind), f"OPTIMIZERS['{name}'] is no OptimizerKind"
    return kind


def optimizer_kind(train: TrainConfig) -> OptimizerKind:
    """Return the configured optimizer's entry of the table, with its settings."""
    return optimizer_class(train.optimizer)(train)
