"""The package that `docs/extending` prints, in runs on Ray: workers that have it, and workers that lack it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from recipes import installed_recipes
from tiny import Lab

from raycl.bank import Bank
from raycl.errors import RunError
from raycl.launch import driver as launch
from raycl.launch import prepared_run
from raycl.plugins import Kind
from raycl.testing.packages import on_path, write_package

pytestmark = [pytest.mark.usefixtures("site", "ray_cluster"), pytest.mark.timeout(600)]
"""In this order: the cluster's workers take their path from the environment."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder where the package is installed, on the path of this process and of what it starts."""
    folder = installed_recipes(tmp_path_factory.mktemp("recipes"))
    with on_path(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield folder


def test_workers_use_the_package(lab: Lab, tmp_path: Path) -> None:
    sections = {"modifiers": ["scale"], "train": {"optimizer": "nesterov"}, "launch": {"workers": 2}}
    config = lab.config("bert", "fading", output={"dir": str(tmp_path), "name": "run"}, **sections)
    prepared = prepared_run.prepare(config)
    results = launch.train(prepared)
    assert results["finished"] and results["workers"] == 2
    assert results["versions"]["optimizer nesterov"] == "my-raycl 0.1.0"
    snapshot = Bank(prepared.storage.sub("bank")).newest()
    assert snapshot is not None and snapshot.router.package == "my-raycl 0.1.0"


def test_workers_that_lack_a_package_say_so(lab: Lab, tmp_path: Path) -> None:
    adds: dict[Kind, dict[str, str]] = {"optimizer": {"mine": "my_raycl.optimizer:Nesterov"}}
    folder = write_package(tmp_path / "here", "only-here", adds, "2.0")
    with on_path(folder):
        config = lab.config("bert", "lora", train={"optimizer": "mine"}, output={"dir": str(tmp_path), "name": "run"})
        words = "optimizer 'mine' comes from package 'only-here' 2.0, and the worker on .* does not have it: install it"
        with pytest.raises(RunError, match=words):
            launch.train(prepared_run.prepare(config))
