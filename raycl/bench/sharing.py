"""Eight readers of one bank on a node: memory and time with the object store, and without it.

Four are training workers that restore a checkpoint, four are trials of a sweep that start from the bank. A reader's
memory is what becomes private to its process (USS); what the object store holds is added once.
What it does not know: what the adapters were learned for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import psutil
import ray
import torch

from raycl.bank import Bank, Snapshot
from raycl.bank.bank import info_of
from raycl.bank.manifest import AdapterManifest, ModelInfo, RouterInfo
from raycl.bank.object_store import ObjectStoreCache, shared_readers
from raycl.bank.training_state import get_state, put_state
from raycl.bench.figures import Figure
from raycl.methods.base import packed
from raycl.storage import Storage
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from raycl.training.records.tensor_objects import TensorObjects, grouped, ungrouped
from raycl.types import AdapterState

MIB = 2**20
WORKERS, TRIALS = 4, 4
MEMORY_LIMIT, OPEN_LIMIT_S = 1.1, 0.3
MODEL = ModelInfo(name="bench", sha256="0" * 64)


class Reader:
    """A process of the node that restores the checkpoint of a run, and keeps it."""

    def __init__(self, bank: str, run: str) -> None:
        torch.set_num_threads(1)
        self.bank, self.run = Bank.at(bank), Storage.at(run)
        self.readers = shared_readers()

    def restore(self, checkpoint: str, number: int, shared: bool, trial: bool) -> tuple[float, float]:
        """Seconds, and bytes that became private while every weight was read."""
        objects = TensorObjects(self.run, self.bank.storage, self.readers if shared else None)
        before, began = psutil.Process().memory_full_info().uss, time.perf_counter()
        if trial:
            reader = self.readers(self.bank.storage) if shared else None
            get_state(self.bank, self.bank.open(number), reader)
        self.held = read_checkpoint(self.run, checkpoint, objects).frozen_state
        took = time.perf_counter() - began
        for tensor in self.held.values():
            tensor.sum()
        return took, psutil.Process().memory_full_info().uss - before


def make_snapshot(
    bank: Bank, run: Storage, states: dict[str, AdapterState], manifests: list[AdapterManifest]
) -> Snapshot:
    """A snapshot with a training state, and checkpoints that name its adapters: `one`, or `all`."""
    groups = grouped(packed(states))
    infos = {group: info_of(tensors) for group, tensors in groups.items()}
    training = put_state(bank, {}, groups, infos)
    for name, some in (("one", dict(list(infos.items())[:1])), ("all", infos)):
        objects = TensorObjects(run, bank.storage)
        frozen = ungrouped(objects.get(some))
        write_checkpoint(run, name, Checkpoint(0, 1, 1, {}, {}, frozen_state=frozen), objects)
    return bank.snapshot(manifests, MODEL, RouterInfo(kind="task"), training=training)


def figures(bank: Bank, run: Storage, snapshot: Snapshot) -> Iterator[Figure]:
    """Both ways, on the Ray cluster of this process; the object store is empty before."""
    size, number = sum(entry.tensors.bytes for entry in snapshot.adapters), snapshot.number
    what = f"{len(snapshot.adapters):,} adapters, {size / MIB:.0f} MiB; {WORKERS} workers and {TRIALS} trials"
    for shared in (True, False):
        actor = ray.remote(num_cpus=0)(Reader)
        readers = [actor.remote(bank.storage.address, run.address) for _ in range(WORKERS + TRIALS)]
        ray.get([reader.restore.remote("one", number, shared, False) for reader in readers])
        found = [
            ray.get(reader.restore.remote("all", number, shared, place >= WORKERS))
            for place, reader in enumerate(readers)
        ]
        held = ObjectStoreCache(bank).held()[1] if shared else 0
        private = [growth for _, growth in found]
        ratio = (sum(private) + held) / (private[0] + held)
        way = "with the object store" if shared else "without it"
        detail = f"{(sum(private) + held) / MIB:,.0f} MiB; {what}"
        limit = MEMORY_LIMIT if shared else None
        yield Figure(f"memory of 8 readers over one, {way}", ratio, "x", limit, "<=", detail)
        later = median(took for took, _ in found[1:])
        yield Figure(
            f"a later reader restores all of them, {way}", later, "s", detail=f"the first: {found[0][0]:.2f} s"
        )
        for reader in readers:
            ray.kill(reader)
    times = [ray.get(ray.remote(num_cpus=0)(_open).remote(bank.storage.address, number)) for _ in range(3)]
    yield Figure("second reader opens the snapshot and maps it", median(times), "s", OPEN_LIMIT_S, detail=what)


def _open(address: str, number: int) -> float:
    """Seconds to read the snapshot's record and to map its adapters."""
    reader = ObjectStoreCache(Bank.at(address))
    began = time.perf_counter()
    snapshot = reader.bank.open(number)
    reader.fetch(snapshot, [entry.name for entry in snapshot.adapters])
    return time.perf_counter() - began
