"""Ray Train's trainer, with fewer helper processes.

Why it exists: beside its workers, Train starts processes that serve what raycl does not use. Each one imports Ray Train
again, one to two seconds of a CPU at every start of a run or of a worker group.
What it does not know: what the workers do.
"""

from __future__ import annotations

import os
from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

DEFAULTS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
"""How soon the end of a run is seen; Ray's: 2 s."""

DEFAULTS_HERE = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""On a Ray of this process alone: its nodes end with it and not one by one."""


class StreamTrainer(TorchTrainer):  # type: ignore[misc]  # Ray has no types
    """`TorchTrainer` without a process of every worker group that hands out Ray's data sets: raycl reads its own."""

    def __init__(self, *given: Any, named: bool, **settings: Any) -> None:
        """Args:
        given, settings: of `TorchTrainer`. named: whether the config or the environment names the cluster. One that
            this process started ends with it: placement groups that a dead run leaves behind need no cleaner there.
        """
        super().__init__(*given, **settings)
        self._named = named

    def fit(self) -> Any:
        """Train; environment variables of Train that are not set get our defaults."""
        for name, value in {**DEFAULTS, **({} if self._named else DEFAULTS_HERE)}.items():
            os.environ.setdefault(name, value)
        return super().fit()

    def _create_default_callbacks(self) -> list[Any]:
        unused = (DatasetsCallback,) if self._named else (DatasetsCallback, PlacementGroupCleanerCallback)
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, unused)]
