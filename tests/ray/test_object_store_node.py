"""The object-store cache when a node is lost: it fills again on another one, from the bank."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from filelock import FileLock
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster
from ray.exceptions import ActorUnavailableError

from raycl.bank import Bank, NewSnapshot
from raycl.bank.manifest import ModelInfo, RouterInfo
from raycl.bank.object_store import NAMESPACE, ObjectStoreCache
from raycl.types import AdapterState

QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}
"""Settings by which Ray soon sees that a node is lost: 5 checks that fail, every 3 s by default."""

TRIES = 30
"""Ray places the cache actor on either node by chance; the test needs it on the one that will be lost."""


@pytest.fixture(scope="module")
def two_nodes(one_at_a_time: FileLock) -> Iterator[Cluster]:
    """Yield a head node with this process and a second node, both on this machine."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)  # Cluster writes its address there
    cluster = Cluster()
    try:
        memory = {"num_cpus": 1, "object_store_memory": 100 * 1024**2}
        with one_at_a_time:
            cluster.add_node(**memory, temp_dir=folder, include_dashboard=False, _system_config=QUICK)
            ray.init(address=cluster.address, namespace="raycl-tests", log_to_driver=False)
            cluster.add_node(**memory)
            cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def node_of(object_store_cache: ObjectStoreCache) -> str:
    """Return the id of the cache actor's node; "" while it is on none."""
    actor = ray.get_actor(object_store_cache.name, namespace=NAMESPACE)
    try:
        node: str = ray.get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))
    except ActorUnavailableError:
        return ""
    return node


def test_node_lost(two_nodes: Cluster, tmp_path: Path) -> None:
    bank = Bank.at(tmp_path / "bank")
    model = ModelInfo(name="tiny", sha256="a" * 64)
    low, high = torch.randn(16, 2048), torch.randn(2048, 16)
    state = AdapterState({"q": (low, high)}, 2.0)
    snapshot = bank.snapshot(NewSnapshot([bank.publish("a", state, model)], model, RouterInfo(kind="single")))
    second = two_nodes.list_all_nodes()[-1]
    for _ in range(TRIES):
        object_store_cache = ObjectStoreCache(bank)
        if node_of(object_store_cache) == second.node_id:
            break
        object_store_cache.close()
    assert node_of(object_store_cache) == second.node_id
    held = object_store_cache.fetch(snapshot, ["a"])["a"]
    two_nodes.remove_node(second, allow_graceful=False)
    at_once = object_store_cache.fetch(snapshot, ["a"])["a"]
    until = time.monotonic() + 60
    while node_of(object_store_cache) in ("", second.node_id) and time.monotonic() < until:
        time.sleep(0.2)
    assert node_of(object_store_cache) not in ("", second.node_id)
    for result in (held, at_once, object_store_cache.fetch(snapshot, ["a"])["a"]):
        assert torch.equal(result.linears["q"][0], low) and torch.equal(result.linears["q"][1], high)
    object_store_cache.close()
