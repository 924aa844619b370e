"""From a config to its plan."""

from __future__ import annotations

from raycl.data.loader import check_batch
from raycl.errors import ConfigError
from raycl.operations.plan.hardware import Cluster
from raycl.operations.plan.opening import opened
from raycl.operations.plan.report import Report, report
from raycl.operations.plan.shapes import numbers
from raycl.run.config import RunConfig
from raycl.training.seeds import micro_batch_size


def plan(config: RunConfig, cluster: Cluster) -> Report:
    """Return what the run needs on that cluster, with a worker on each of its GPUs.

    Raises:
        ConfigError: numbers that are out of range, or a batch that so many workers cannot share. RayclError: the
            config's own errors.
    """
    if cluster.gpus < 1 or cluster.per_node < 1:
        raise ConfigError(f"--gpus is {cluster.gpus} and --gpus-per-node {cluster.per_node}: expected at least 1 each")
    if not 0 < cluster.utilisation <= 1:
        raise ConfigError(f"--utilisation is {cluster.utilisation:g}: expected a share above 0 and at most 1")
    train = config.train
    micro = micro_batch_size(train.batch_size, train.micro_batch_size, cluster.gpus)
    check_batch(train.batch_size, micro, cluster.gpus)
    workers = config.launch.model_copy(update={"workers": cluster.gpus})
    parts = opened(config.model_copy(update={"launch": workers}))
    found = numbers(parts)
    return report(*found, cluster, tuple(parts.notes))
