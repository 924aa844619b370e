"""Tests of the Ray that an endpoint runs on: its own unless RAY_ADDRESS names another; never one that is just there."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from raycl.errors import LaunchError
from raycl.serve.deployment import application
from raycl.serve.deployment.application import start
from raycl.serve.settings import ServeConfig


class Reached(Exception):
    """Ray would start now."""


@pytest.mark.parametrize(
    ("named", "reached"), [(None, "local"), ("", "local"), ("local", "local"), ("10.1.2.3:6379", "10.1.2.3:6379")]
)
def test_a_cluster_is_started_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, named: str | None, reached: str
) -> None:
    def init(address: str, **settings: Any) -> None:
        raise Reached(address)

    monkeypatch.setattr(ray, "init", init)
    if named is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(Reached, match=rf"^{reached}$"):
        start(ServeConfig(bank="bank"), None)


def test_a_missing_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:6379")
    with pytest.raises(LaunchError, match=r"no Ray answers at 10\.1\.2\.3:6379, which .*RAY_AUTH_MODE=token"):
        start(ServeConfig(bank="bank"), None)


def test_a_ray_that_does_not_start_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens on a slow machine; Ray's exception has no class of its own."""

    def init(**settings: Any) -> None:
        raise Exception("The current node timed out\nduring startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(LaunchError, match=r"^Ray did not start \(The current node timed out during startup\.\)"):
        start(ServeConfig(bank="bank"), None)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (TimeoutError("HTTP proxies not available after 60s."), "HTTP proxies not available after 60s"),
        (RayActorError(), "The actor experienced an error"),
        (RayServeException("there is no controller"), "there is no controller"),
    ],
)
def test_a_proxy_or_controller_that_does_not_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, said: str
) -> None:
    def start_serve(**settings: Any) -> None:
        raise raised

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    monkeypatch.setattr(application, "_get_global_client", lambda raise_if_no_controller_running: None)
    monkeypatch.setattr(serve, "start", start_serve)
    monkeypatch.setattr(serve, "status", start_serve)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(LaunchError, match=rf"^the endpoint did not start: {said}"):
        application.start(ServeConfig(bank="bank", device="cpu"), None)


@pytest.mark.parametrize(("access_log", "level"), [(False, logging.WARNING), (True, logging.INFO)])
def test_lines_of_serve_are_shown_where_its_log_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, access_log: bool, level: int
) -> None:
    def init(**settings: Any) -> None:
        raise Reached

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(logging.getLogger("ray.serve"), "level", logging.INFO)
    with pytest.raises(Reached):
        start(ServeConfig(bank="bank", access_log=access_log), None)
    assert logging.getLogger("ray.serve").level == level
