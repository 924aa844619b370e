"""Tests of how many workers the nodes of a cluster hold, and what each of them gets."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from raycl import config as configs
from raycl.errors import LaunchError
from raycl.launch.cluster import even_cpus, held
from raycl.launch.ray_train import worker_resources
from raycl.launch.warm_workers import runs_held, stays_warm
from raycl.training.definition.job import Resources
from raycl.training.setup.run_config import RunConfig

UNEVEN = [Resources(2.0), Resources(16.0), Resources(16.0)]


def config(**launch: Any) -> RunConfig:
    return configs.validate(RunConfig, {"launch": launch})


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The cluster has these nodes: (CPUs, GPUs)."""
    alive = [{"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}} for cpus, gpus in request.param]
    monkeypatch.setattr(ray, "nodes", lambda: [*alive, {"Alive": False, "Resources": {"CPU": 64.0}}])


@pytest.mark.parametrize(("processes", "cpus"), [(1, 16.0), (2, 16.0), (3, 8.0), (4, 8.0), (8, 4.0), (50, 1.0)])
def test_no_process_gets_more_than_a_node_has(processes: int, cpus: float) -> None:
    assert even_cpus(UNEVEN, processes) == cpus


def test_gpus_count_where_they_are_asked_for() -> None:
    machines = [Resources(4.0, 8.0), Resources(16.0, 2.0)]
    assert held(machines, Resources(1.0, 1.0)) == 6 and held(machines, Resources(1.0)) == 20
    assert held(machines, Resources(1.0, 0.5)) == 8


@pytest.mark.parametrize("nodes", [[(8.0, 0.0), (8.0, 0.0)]], indirect=True)
def test_a_worker_that_fits_no_node_is_refused(nodes: None) -> None:
    assert worker_resources(config()) == Resources(8.0)
    with pytest.raises(LaunchError, match=r"needs 12 CPUs and 0 GPUs for each, .* have 2 x \(8 CPUs, 0 GPUs\)"):
        worker_resources(config(cpus_per_worker=12))
    assert worker_resources(config(cpus_per_worker=12, wait_for_nodes=True)) == Resources(12.0)


@pytest.mark.parametrize(
    ("nodes", "launch", "count"),
    [
        ([(8.0, 0.0), (8.0, 0.0)], {}, 2),
        ([(8.0, 0.0), (8.0, 0.0)], {"cpus_per_worker": 3}, 4),
        ([(8.0, 0.0), (8.0, 0.0)], {"workers": 2}, 2),
        ([(8.0, 4.0), (8.0, 0.0)], {}, 4),
        ([(8.0, 4.0), (8.0, 0.0)], {"gpus_per_worker": 0}, 2),
    ],
    indirect=["nodes"],
)
def test_runs_at_a_time(nodes: None, launch: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named cluster has as many runs as it holds, and a Ray of the command's own has one."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert runs_held([config(**launch)]) == 1
    assert runs_held([config(**launch, address="head:6379")]) == count


def test_runs_that_need_processes_of_their_own() -> None:
    assert stays_warm(config())
    assert not stays_warm(config(workers=2))
    assert not stays_warm(configs.validate(RunConfig, {"engine": "deepspeed"}))
