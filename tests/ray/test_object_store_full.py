"""A full object store, on a Ray that may not spill to disk: adapters are read from the bank, and that is said once."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from filelock import FileLock

from raycl.bank import Bank, NewSnapshot
from raycl.bank.manifest import ModelInfo, RouterInfo
from raycl.bank.object_store import NAMESPACE, ObjectStoreCache
from raycl.types import AdapterState

COUNT, WIDTH, RANK = 7, 4096, 512
"""Adapters of 16 MiB: the store of 80 MiB holds four."""


@pytest.fixture(scope="module")
def full_disk(one_at_a_time: FileLock) -> Iterator[None]:
    """Yield a Ray that takes any disk for full, as it does at 95 %, and spills nothing ahead of need."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    try:
        with one_at_a_time:
            ray.init(
                "local",
                num_cpus=1,
                object_store_memory=80 * 1024**2,
                include_dashboard=False,
                log_to_driver=False,
                namespace="raycl-tests",
                _temp_dir=folder,
                _system_config={"local_fs_capacity_threshold": 0.0001, "object_spilling_threshold": 1.0},
            )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def adapter(seed: int) -> AdapterState:
    draw = torch.Generator().manual_seed(seed)
    return AdapterState({"q": (torch.randn(RANK, WIDTH, generator=draw), torch.zeros(WIDTH, RANK))}, 2.0)


def test_objects_that_do_not_fit_are_read_from_the_bank(
    full_disk: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bank = Bank.at(tmp_path / "bank")
    model = ModelInfo(name="tiny", sha256="a" * 64)
    manifests = [bank.publish(f"a{number}", adapter(number), model) for number in range(COUNT)]
    snapshot = bank.snapshot(NewSnapshot(manifests, model, RouterInfo(kind="task")))
    names = [f"a{number}" for number in range(COUNT)]
    object_store_cache = ObjectStoreCache(bank, capacity_mb=1000)
    with caplog.at_level(logging.WARNING, logger="raycl"):
        object_store_cache.check([(str(entry), entry.tensors) for entry in snapshot.adapters])
        held = [object_store_cache.fetch(snapshot, names), object_store_cache.fetch(snapshot, names)]
    for mapped in held:
        for number, name in enumerate(names):
            assert torch.equal(mapped[name].linears["q"][0], adapter(number).linears["q"][0])
    (said,) = caplog.messages
    assert "the object store is full" in said and "read from the bank" in said and str(bank.storage.uri) in said
    assert 0 < object_store_cache.held()[0] < COUNT
    ray.get_actor(object_store_cache.name, namespace=NAMESPACE)
