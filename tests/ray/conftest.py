"""Fixtures of the tests that start Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from complete_runs import COPIES
from shared_cluster import SharedCluster


@pytest.fixture(scope="session")
def pause_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an installed package of the modifier `pause`."""
    import pausing

    from raycl.testing.packages import write_package

    modules = {"pausing.py": Path(pausing.__file__).read_text()}
    adds = {"pause": "pausing:Pause"}
    return write_package(tmp_path_factory.mktemp("pausing"), "pausing", {"modifier": adds}, modules=modules)


@pytest.fixture(scope="module", autouse=True)
def copies(pytestconfig: pytest.Config, pause_package: Path) -> Iterator[None]:
    """Jobs and Ray's processes of tests/ray start as copies of a process that has imported the libraries.

    They have the modifier `pause`.
    """
    from raycl.testing.packages import on_path

    with on_path(pause_package), pytest.MonkeyPatch.context() as patch:
        pytestconfig.stash[COPIES].set_in(patch)
        patch.setenv("PYTHONPATH", str(pause_package), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_caches_left(shared_cluster: SharedCluster, copies: None) -> Iterator[None]:
    """End the cache actors that endpoints leave, for later ones, on the cluster that modules share."""
    yield
    if shared_cluster.is_running:
        import ray

        from raycl.bank.object_store import NAMESPACE

        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE:
                with suppress(ValueError):  # it has ended in this moment
                    ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))
