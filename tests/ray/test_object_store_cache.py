"""The object-store cache on a real cluster: one copy per node, and never wrong weights after failures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.exceptions import ObjectLostError

from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.bank.bank import info_of
from raycl.bank.integrity import objects_of
from raycl.bank.manifest import ModelInfo, RouterInfo
from raycl.bank.object_store import NAMESPACE, Location, ObjectStoreCache, shared_readers
from raycl.bank.tensor_groups import TensorGroups
from raycl.errors import BankError
from raycl.methods.base import packed
from raycl.storage import Storage
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from raycl.training.records.tensor_objects import TensorObjects
from raycl.types import AdapterState

pytestmark = pytest.mark.usefixtures("ray_cluster")
COUNT, WIDTH, RANK = 24, 4096, 32
BYTES = 2 * WIDTH * RANK * 4


def adapter(seed: int) -> AdapterState:
    """Return an adapter of 1 MiB of one linear."""
    draw = torch.Generator().manual_seed(seed)
    low = torch.randn(RANK, WIDTH, generator=draw)
    return AdapterState({"q": (low, torch.randn(WIDTH, RANK, generator=draw))}, 2.0)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bank, Snapshot]:
    """Return a bank of COUNT adapters a0, a1, ..."""
    bank = Bank.at(tmp_path_factory.mktemp("object_store_cache") / "bank")
    model = ModelInfo(name="tiny", sha256="a" * 64)
    manifests = [bank.publish(f"a{number}", adapter(number), model) for number in range(COUNT)]
    return bank, bank.snapshot(NewSnapshot(manifests, model, RouterInfo(kind="task")))


@pytest.fixture
def object_store_cache(snapshot: tuple[Bank, Snapshot]) -> Iterator[ObjectStoreCache]:
    """Open, and closed for all afterwards."""
    opened = ObjectStoreCache(snapshot[0])
    yield opened
    opened.close()


def is_right(state: AdapterState, number: int) -> bool:
    """Return True if it is bit for bit what was published."""
    pairs = zip(state.linears["q"], adapter(number).linears["q"], strict=True)
    return state.scale == 2.0 and all(torch.equal(mine, other) for mine, other in pairs)


def cache_actor_pid(object_store_cache: ObjectStoreCache) -> int:
    """Return the process of the cache actor."""
    actor = ray.get_actor(object_store_cache.name, namespace=NAMESPACE)
    pid: int = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    return pid


@ray.remote(num_cpus=0)
class Reader:
    """Another process of the node."""

    def read(self, bank: str, number: int) -> tuple[float, float, float]:
        """Map every adapter and touch every byte; MiB that became private, and that are shared; and the sum."""
        result = Bank.at(bank)
        opened, snapshot = result.open(number), [f"a{n}" for n in range(COUNT)]
        object_store_cache = ObjectStoreCache(result)
        object_store_cache.fetch(opened, snapshot[:1])
        before = psutil.Process().memory_full_info()
        self.states = list(map(object_store_cache.fetch(opened, snapshot), snapshot))
        total = sum(float(t.sum()) for s in self.states for pair in s.linears.values() for t in pair)
        after = psutil.Process().memory_full_info()
        return (after.uss - before.uss) / 2**20, (after.rss - before.rss) / 2**20, total


def test_readers_share_one_copy(snapshot: tuple[Bank, Snapshot], object_store_cache: ObjectStoreCache) -> None:
    bank, opened = snapshot
    names = [f"a{n}" for n in range(COUNT)]
    mine = list(map(object_store_cache.fetch(opened, names), names))
    assert all(is_right(state, n) for n, state in enumerate(mine))
    readers = [Reader.remote() for _ in range(2)]  # type: ignore[attr-defined]
    for reader in readers:
        private, mapped, total = ray.get(reader.read.remote(bank.storage.address, opened.number))
        assert mapped > 0.9 * COUNT * BYTES / 2**20, "the reader did not touch the shared memory"
        assert private < 0.2 * COUNT * BYTES / 2**20, f"{private:.1f} MiB were copied"
        expected = sum(float(t.sum()) for s in mine for pair in s.linears.values() for t in pair)
        assert total == expected
    assert object_store_cache.held()[0] == COUNT


@ray.remote(num_cpus=0)
class Owner:
    """Owns an object, and takes it along when it dies."""

    def put(self) -> list[Any]:
        """Return a reference, not its value."""
        return [ray.put(torch.zeros(BYTES).numpy())]


def test_the_cache_survives_a_killed_actor_and_requests_lost_references_again(
    snapshot: tuple[Bank, Snapshot], object_store_cache: ObjectStoreCache
) -> None:
    """Afterwards the cache actor lives, its objects do not: the reader reports them and gets new references."""
    _, opened = snapshot
    held = object_store_cache.fetch(opened, ["a0", "a1"])
    old = cache_actor_pid(object_store_cache)
    os.kill(old, signal.SIGKILL)
    again = object_store_cache.fetch(opened, ["a1", "a2"])
    assert is_right(again("a1"), 1) and is_right(again("a2"), 2)
    assert is_right(held("a0"), 0) and is_right(held("a1"), 1), "what was mapped must stay as it was"
    assert cache_actor_pid(object_store_cache) != old

    facts = opened.adapter("a3").tensors
    actor, owner = ray.get_actor(object_store_cache.name, namespace=NAMESPACE), Owner.remote()  # type: ignore[attr-defined]
    dead = ray.get(owner.put.remote())

    def swap(actor: Any, references: list[Any]) -> None:
        location = actor.locations[facts.sha256] = Location(references[0], 0, facts.bytes)
        actor.packs[location.pack] = {facts.sha256: location}

    ray.get(actor.__ray_call__.remote(swap, dead))
    ray.kill(owner)
    with pytest.raises(ObjectLostError):
        for _ in range(300):
            ray.get(dead)
            time.sleep(0.1)
    assert is_right(object_store_cache.fetch(opened, ["a3"])("a3"), 3)


def test_a_full_cache_evicts_the_least_recently_used(snapshot: tuple[Bank, Snapshot], tmp_path: Path) -> None:
    _, opened = snapshot
    object_store_cache = ObjectStoreCache(snapshot[0], capacity_mb=4.5)
    try:
        for number in range(8):
            assert is_right(object_store_cache.fetch(opened, [f"a{number}"])(f"a{number}"), number)
        assert object_store_cache.held()[0] == 4
        everything = object_store_cache.fetch(opened, [f"a{n}" for n in range(COUNT)])
        assert all(is_right(everything(f"a{n}"), n) for n in range(COUNT)), "more at once than it keeps"
    finally:
        object_store_cache.close()


def test_damaged_file_is_refused_by_name(snapshot: tuple[Bank, Snapshot], object_store_cache: ObjectStoreCache) -> None:
    bank, opened = snapshot
    path = Path(bank.storage.path(opened.adapter("a5").tensors.file))
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + b"\0\0\0\0")
    try:
        with pytest.raises(BankError, match=r"^the tensors of a5@1 are damaged: SHA-256"):
            object_store_cache.fetch(opened, ["a5"])
    finally:
        path.write_bytes(whole)
    assert is_right(object_store_cache.fetch(opened, ["a5"])("a5"), 5)


def test_a_closed_cache_is_an_error_and_other_readers_start_another(snapshot: tuple[Bank, Snapshot]) -> None:
    bank, opened = snapshot
    object_store_cache, other = ObjectStoreCache(bank), ObjectStoreCache(bank, detached=False)
    held = [cache.fetch(opened, ["a0"]) for cache in (object_store_cache, other)]
    object_store_cache.close()
    with pytest.raises(BankError, match="is closed: open it again"):
        object_store_cache.fetch(opened, ["a1"])
    assert is_right(other.fetch(opened, ["a1"])("a1"), 1) and all(is_right(item("a0"), 0) for item in held)
    other.close()


@pytest.mark.parametrize(("capacity_mb", "requests"), [(None, 1), (4.5, 3)])
def test_a_source_requests_all_adapters_at_once_if_they_fit(
    snapshot: tuple[Bank, Snapshot], monkeypatch: pytest.MonkeyPatch, capacity_mb: float | None, requests: int
) -> None:
    bank, opened = snapshot
    object_store_cache, seen = ObjectStoreCache(bank, capacity_mb), []
    read = object_store_cache.read_objects
    monkeypatch.setattr(object_store_cache, "read_objects", lambda wanted: seen.append(len(wanted)) or read(wanted))
    source = object_store_cache.source(opened)
    assert all(is_right(source(f"a{number}"), number) for number in (4, 7, 4))
    assert seen == ([COUNT] if requests == 1 else [1] * requests)
    object_store_cache.close()


@ray.remote(num_cpus=0)
class TrainingWorker:
    """Restores a checkpoint, as a worker of a run that is resumed or started from the bank."""

    def restore(self, run: str, bank: str) -> tuple[float, float]:
        """Return MiB that became private, and the sum of all weights."""
        storage = Storage.at(run)
        objects = TensorObjects(storage, Storage.at(bank), shared_readers())
        read_checkpoint(storage, "begin", objects)
        before = psutil.Process().memory_full_info().uss
        self.checkpoint = read_checkpoint(storage, "end", objects)
        total = sum(float(tensor.sum()) for tensor in self.checkpoint.frozen_state.values())
        return (psutil.Process().memory_full_info().uss - before) / 2**20, total


@pytest.fixture(scope="module")
def training_workers() -> list[Any]:
    """Return two processes of the node, which restore one run after another."""
    return [TrainingWorker.remote() for _ in range(2)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["bank", "run"])
def test_training_workers_share_one_copy_of_frozen_adapters(
    snapshot: tuple[Bank, Snapshot], training_workers: list[Any], tmp_path: Path, where: str
) -> None:
    """Workers share the adapters of the bank, or of the run's own folder where it does not publish."""
    bank, _ = snapshot
    frozen = packed({f"a{number}": adapter(number) for number in range(COUNT)})
    run, checkpoint = Storage.at(tmp_path / "run"), Checkpoint(0, 1, 1, {}, {})
    groups = list(frozen.groups.items())
    for name, some in (("begin", groups[:1]), ("end", groups)):
        objects = TensorObjects(run, bank.storage)
        infos = {group: info_of(tensors) for group, tensors in some}
        checkpoint.frozen_state = TensorGroups(objects.get(infos) if where == "bank" else dict(some))
        write_checkpoint(run, name, checkpoint, objects)
    assert bool(run.files("objects")) == (where == "run")
    address = bank.storage.address if where == "bank" else str(tmp_path / "none")
    for worker in training_workers:
        private, total = ray.get(worker.restore.remote(run.address, address))
        assert private < 0.2 * COUNT * BYTES / 2**20, f"{private:.1f} MiB were copied"
        assert total == sum(float(tensor.sum()) for tensor in frozen.values())


@pytest.mark.parametrize("capacity_mb", [None, 3.5])
def test_verified_objects_are_read_once(snapshot: tuple[Bank, Snapshot], capacity_mb: float | None) -> None:
    """The cache actor reads them for all readers; objects without room are hashed too."""
    bank, opened = snapshot
    wanted = objects_of(opened)
    path = Path(bank.storage.path(opened.adapter("a9").tensors.file))
    whole = path.read_bytes()
    object_store_cache = ObjectStoreCache(bank, capacity_mb)
    try:
        path.write_bytes(whole[:-4] + b"\0\0\0\0")
        with pytest.raises(BankError, match=r"^the tensors of a9@1 are damaged: SHA-256"):
            object_store_cache.check(wanted)
        path.write_bytes(whole)
        object_store_cache.check(wanted)
        held = object_store_cache.held()
        assert held[0] == (COUNT if capacity_mb is None else 3)
        path.write_bytes(whole[:-4] + b"\0\0\0\0")
        ObjectStoreCache(bank).check(wanted)  # another reader: nothing is read again
        assert object_store_cache.held() == held
    finally:
        path.write_bytes(whole)
        object_store_cache.close()


@ray.remote(num_cpus=0)
def never() -> None:
    """An object that does not come: as a spilled one for which there is no room again."""
    time.sleep(600)


def test_objects_that_do_not_come_are_not_waited_for(ray_cluster: dict[str, str], tmp_path: Path) -> None:
    cache = ObjectStoreCache(Bank.at(tmp_path / "bank"))
    cache._wait_s = 0.2
    late, there = never.remote(), ray.put(b"here")
    began = time.monotonic()
    assert cache._local([there, late, there]) == {there: b"here"} and time.monotonic() - began < 10
    ray.cancel(late, force=True)
    cache.close()
