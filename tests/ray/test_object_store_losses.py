"""The object-store cache without what it holds adapters in: a store that is full, and a node that is lost.

Both on one Ray that may not spill to disk.
"""

from __future__ import annotations

import logging
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

NODE = {"num_cpus": 1, "object_store_memory": 80 * 1024**2}

COUNT, WIDTH, RANK = 7, 4096, 512
"""Adapters of 16 MiB: the store of a node holds four."""

FULL_DISK = {"local_fs_capacity_threshold": 0.0001, "object_spilling_threshold": 1.0}
"""Settings by which Ray takes any disk for full, as it does at 95 %, and spills nothing ahead of need."""

QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}
"""Settings by which Ray soon sees that a node is lost: 5 checks that fail, every 3 s by default."""

TRIES = 30
"""Ray places the cache actor on either node by chance; the test needs it on the one that will be lost."""

MODEL = ModelInfo(name="tiny", sha256="a" * 64)


@pytest.fixture(scope="module")
def head(one_at_a_time: FileLock) -> Iterator[Cluster]:
    """Yield a head node with this process; a test that adds another node removes it again."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)  # Cluster writes its address there
    cluster = Cluster()
    try:
        with one_at_a_time:
            settings = {"temp_dir": folder, "include_dashboard": False, "_system_config": {**FULL_DISK, **QUICK}}
            cluster.add_node(**NODE, **settings)
            ray.init(address=cluster.address, namespace="raycl-tests", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def adapter(seed: int) -> AdapterState:
    draw = torch.Generator().manual_seed(seed)
    return AdapterState({"q": (torch.randn(RANK, WIDTH, generator=draw), torch.zeros(WIDTH, RANK))}, 2.0)


def test_objects_that_do_not_fit_are_read_from_the_bank(
    head: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once."""
    bank = Bank.at(tmp_path / "bank")
    manifests = [bank.publish(f"a{number}", adapter(number), MODEL) for number in range(COUNT)]
    snapshot = bank.snapshot(NewSnapshot(manifests, MODEL, RouterInfo(kind="task")))
    names = [f"a{number}" for number in range(COUNT)]
    object_store_cache = ObjectStoreCache(bank, capacity_mb=1000)
    with caplog.at_level(logging.WARNING, logger="raycl"):
        object_store_cache.check([(str(entry), entry.tensors) for entry in snapshot.adapters])
        held = [object_store_cache.fetch(snapshot, names), object_store_cache.fetch(snapshot, names)]
    for mapped in held:
        for number, name in enumerate(names):
            assert torch.equal(mapped(name).linears["q"][0], adapter(number).linears["q"][0])
    (said,) = caplog.messages
    assert "the object store is full" in said and "read from the bank" in said and str(bank.storage.uri) in said
    assert 0 < object_store_cache.held()[0] < COUNT
    ray.get_actor(object_store_cache.name, namespace=NAMESPACE)
    object_store_cache.close()


@pytest.fixture
def second(head: Cluster, one_at_a_time: FileLock) -> Iterator[str]:
    """Yield the id of another node on this machine."""
    with one_at_a_time:
        node = head.add_node(**NODE)
        head.wait_for_nodes()
    yield node.node_id
    if node in head.list_all_nodes():
        head.remove_node(node)


def node_of(object_store_cache: ObjectStoreCache) -> str:
    """Return the id of the cache actor's node; "" while it is on none."""
    actor = ray.get_actor(object_store_cache.name, namespace=NAMESPACE)
    try:
        node: str = ray.get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))
    except ActorUnavailableError:
        return ""
    return node


def test_a_cache_whose_node_is_lost_fills_again_on_another_from_the_bank(
    head: Cluster, second: str, tmp_path: Path
) -> None:
    bank = Bank.at(tmp_path / "bank")
    low, high = torch.randn(16, 2048), torch.randn(2048, 16)
    state = AdapterState({"q": (low, high)}, 2.0)
    snapshot = bank.snapshot(NewSnapshot([bank.publish("a", state, MODEL)], MODEL, RouterInfo(kind="single")))
    for _ in range(TRIES):
        object_store_cache = ObjectStoreCache(bank)
        if node_of(object_store_cache) == second:
            break
        object_store_cache.close()
    assert node_of(object_store_cache) == second
    held = object_store_cache.fetch(snapshot, ["a"])("a")
    (lost,) = (node for node in head.list_all_nodes() if node.node_id == second)
    head.remove_node(lost, allow_graceful=False)
    at_once = object_store_cache.fetch(snapshot, ["a"])("a")
    until = time.monotonic() + 60
    while node_of(object_store_cache) in ("", second) and time.monotonic() < until:
        time.sleep(0.2)
    assert node_of(object_store_cache) not in ("", second)
    for result in (held, at_once, object_store_cache.fetch(snapshot, ["a"])("a")):
        assert torch.equal(result.linears["q"][0], low) and torch.equal(result.linears["q"][1], high)
    object_store_cache.close()
