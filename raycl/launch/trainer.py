"""Ray Train's trainer, with fewer helper processes.

Why it exists: beside its workers, Train starts processes that serve what raycl does not use. Each one imports Ray Train
again, about two seconds of a CPU at every start of a worker group.
What it does not know: what the workers do.
"""

from __future__ import annotations

import os
from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback

DEFAULTS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
"""How soon the end of a run is seen; Ray's: 2 s."""

DEFAULTS_HERE = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""On a Ray of this command alone: nobody takes nodes away from it one by one."""


class StreamTrainer(TorchTrainer):  # type: ignore[misc]  # Ray has no types
    """`TorchTrainer` without a process of every worker group that hands out Ray's data sets: raycl reads its own."""

    def _create_default_callbacks(self) -> list[Any]:
        return [one for one in super()._create_default_callbacks() if not isinstance(one, DatasetsCallback)]


def set_defaults(named: bool) -> None:
    """Settings of Train that the environment does not set.

    Args:
        named: whether the cluster is one that the config or the environment names, and not this command's own.
    """
    for name, value in {**DEFAULTS, **({} if named else DEFAULTS_HERE)}.items():
        os.environ.setdefault(name, value)
