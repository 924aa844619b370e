"""Ray Train's trainer, with fewer helper processes, and what it asks of the cluster.

Beside its workers, Train starts processes that serve what raycl does not use. Each one imports Ray Train again, one to
two seconds of a CPU at every start of a run or of a worker group.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from raycl.errors import LaunchError
from raycl.run.config import RunConfig

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

    def _register_sigint_handler(self, controller: Any) -> None:
        """Ctrl-C belongs to the command (`raycl.launch.termination`): Ray's handler aborts without a checkpoint."""

    def _create_default_callbacks(self) -> list[Any]:
        unused = (DatasetsCallback,) if self._named else (DatasetsCallback, PlacementGroupCleanerCallback)
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, unused)]


def scaling_of(config: RunConfig, share: int = 1) -> ScalingConfig:
    """What to ask of the cluster, which so many runs share.

    Raises:
        LaunchError: it can never give that.
    """
    launch, have = config.launch, ray.cluster_resources()
    cpus, gpus = have.get("CPU", 0.0), have.get("GPU", 0.0)
    gpu = launch.gpus_per_worker if launch.gpus_per_worker is not None else float(gpus >= launch.workers)
    even = cpus // (launch.workers * share)
    cpu = launch.cpus_per_worker or max(1.0, even if not gpu else 1.0)
    wanted = (cpu * launch.workers, gpu * launch.workers)
    if not launch.wait_for_nodes and (wanted[0] > cpus or wanted[1] > gpus):
        raise LaunchError(
            f"launch.workers={launch.workers} needs {wanted[0]:g} "
            f"CPUs and {wanted[1]:g} GPUs, but the cluster has {cpus:g} CPUs and {gpus:g} GPUs: request fewer workers, "
            f"set launch.cpus_per_worker or launch.gpus_per_worker, or set launch.wait_for_nodes=true if the "
            "cluster grows"
        )
    resources = {"CPU": cpu, **({"GPU": gpu} if gpu else {})}
    return ScalingConfig(num_workers=launch.workers, use_gpu=bool(gpu), resources_per_worker=resources)
