"""Tests of the Ray that a command works on: the one that is named, never one that is just there."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import ray

from raycl.errors import LaunchError
from raycl.launch import cluster


class Reached(Exception):
    """Ray would start now."""


@pytest.mark.parametrize(
    ("setting", "variable", "reached"),
    [
        (None, None, "local"),
        (None, "", "local"),
        (None, "local", "local"),
        ("local", None, "local"),
        (None, "10.1.2.3:6379", "10.1.2.3:6379"),
        ("10.1.2.4:6379", "10.1.2.3:6379", "10.1.2.4:6379"),
        ("auto", None, "auto"),
    ],
)
def test_a_run_starts_a_ray_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, variable: str | None, reached: str
) -> None:
    def init(address: str | None, **settings: Any) -> None:
        raise Reached(address)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(Reached, match=rf"^{reached}$"), cluster.joined(setting):
        pass
    assert os.environ.get("RAY_ADDRESS") == variable


def test_the_address_of_an_own_ray_is_set_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes inherit where it is; this one does not continue looking there."""
    seen: dict[str, str] = {}

    def init(**settings: Any) -> None:
        seen.update(os.environ)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster.connect()
    assert seen["RAY_ADDRESS"] == f"127.0.0.1:{seen['RAY_GCS_SERVER_PORT']}"
    assert int(seen["RAY_GCS_SERVER_PORT"]) in cluster.PORTS
    assert not {"RAY_ADDRESS", "RAY_GCS_SERVER_PORT"} & os.environ.keys()


def test_a_port_that_is_taken_is_not_chosen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"no free port from {port} to {port}"):
            cluster.free_port(range(port, port + 1))


@pytest.mark.parametrize("error", [ConnectionError, ValueError])
def test_a_missing_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def init(**settings: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(LaunchError, match=r"no Ray answers at 10\.1\.2\.3:6379, which launch.address or RAY_ADDRESS"):
        cluster.connect("10.1.2.3:6379")
