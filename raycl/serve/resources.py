"""The resources that replicas and the gate reserve in the cluster, so that others do not get them."""

import ray
import torch

from raycl.serve.settings import ServeConfig


def settled_device(device: str) -> str:
    """Return `cpu` or `cuda`: a replica uses its reserved device, whatever else its node has.

    `auto` is a GPU where the cluster has any, or this machine before there is a cluster.
    """
    if device != "auto":
        return device
    if ray.is_initialized():
        return "cuda" if ray.cluster_resources().get("GPU", 0.0) else "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def gate_device(config: ServeConfig) -> str:
    """Return the device of the gate's backbone; see `settled_device`."""
    return settled_device(config.gate.device or config.device)


def replica_takes(config: ServeConfig) -> dict[str, float]:
    """Return Ray's options of a replica that holds the model, or that routes for another engine."""
    return _takes(config, "cpu" if config.forwards else settled_device(config.device), config.gpus)


def gate_takes(config: ServeConfig) -> dict[str, float]:
    """Return Ray's options of the gate during an evaluation."""
    return _takes(config, gate_device(config), config.gate.gpus)


def _takes(config: ServeConfig, device: str, gpus: float) -> dict[str, float]:
    gpu = device == "cuda"
    return {"num_cpus": 0.0 if gpu else config.reserved, "num_gpus": gpus if gpu else 0.0}


def total_resources(config: ServeConfig) -> dict[str, float]:
    """CPUs and GPUs of everything, at least."""
    replica, gate = replica_takes(config), gate_takes(config)
    totals = {}
    for name, key in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        totals[name] = config.replicas * replica[key] + config.gates * gate[key]
    return totals
