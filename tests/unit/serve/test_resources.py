"""Tests of what replicas and the gate reserve in the cluster: all that they use, GPUs above all."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray import serve

from raycl import config as configs
from raycl.errors import LaunchError
from raycl.serve.deployment import application
from raycl.serve.resources import gate_takes, replica_takes, total_resources
from raycl.serve.settings import ServeConfig

GATED = {"follow": {"gated": True}}


def config(**settings: Any) -> ServeConfig:
    return configs.validate(ServeConfig, {"bank": "bank", **settings})


@pytest.mark.parametrize(
    ("settings", "replica", "gate"),
    [
        ({"device": "cpu", "threads": 2}, (2, 0), (2, 0)),
        ({"device": "cuda"}, (0, 1), (0, 1)),
        ({"device": "cuda", "gpus": 0.5, "gate": {"gpus": 0.25}}, (0, 0.5), (0, 0.25)),
        ({"device": "cuda", "threads": 2, "gate": {"device": "cpu"}}, (0, 1), (2, 0)),
        ({"device": "cpu", "cpus": 0.5, "gate": {"device": "cuda"}}, (0.5, 0), (0, 1)),
    ],
)
def test_each_reserves_the_device_that_it_uses(
    settings: dict[str, Any], replica: tuple[float, float], gate: tuple[float, float]
) -> None:
    made = config(**settings, **GATED)
    assert replica_takes(made) == {"num_cpus": replica[0], "num_gpus": replica[1]}
    assert gate_takes(made) == {"num_cpus": gate[0], "num_gpus": gate[1]}


def test_everything_together() -> None:
    two = {"cpus": 0.5, "replicas": 2}
    assert total_resources(config(device="cuda", **two)) == {"CPU": 0, "GPU": 2}
    assert total_resources(config(device="cuda", **two, **GATED)) == {"CPU": 0, "GPU": 3}
    assert total_resources(config(device="cpu", **two, **GATED)) == {"CPU": 1.5, "GPU": 0}


def test_a_cluster_without_a_gpu_for_the_gate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 1.0})

    def started(**settings: Any) -> None:
        raise AssertionError("it goes on")

    monkeypatch.setattr(serve, "start", started)
    monkeypatch.setattr(application, "_get_global_client", lambda raise_if_no_controller_running: None)
    with pytest.raises(LaunchError, match=r"2 GPUs \(1 for its gate\), but the cluster has 1: .*gate\.device=cpu"):
        application.start(config(device="cuda", **GATED), None)
    with pytest.raises(AssertionError, match="it goes on"):
        application.start(config(device="cuda", gpus=0.5, gate={"gpus": 0.5}, **GATED), None)


def test_auto_is_a_gpu_where_the_cluster_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint may be deployed from a node without GPUs: what its own process sees does not matter."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    assert replica_takes(config(device="auto"))["num_gpus"] == 1
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    assert replica_takes(config(device="auto"))["num_gpus"] == 0
