"""Eight readers of one bank on a node: memory and time with the object store, and without it.

Four are training workers that restore a checkpoint, four are trials of a sweep that start from the bank. Each gives
what it reads to a method, IncLoRA on a small encoder, which could go on training, and reads the weights of a few
adapters. A reader's memory is what has become private to its process (USS) then: the state of all adapters. What the
object store holds is added once; model, method and libraries were there before. Then it reads every weight of all
adapters, one adapter after another. At last a mixture names the few: their weights are copied to the rows that layers
read, on the device where the model is. Here that is the CPU, so those rows are given beside the figure, not in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from statistics import median

import psutil
import ray
import torch
from transformers import BertConfig, BertModel

from benchmarks.figures import Figure
from raycl.backbone import Backbone
from raycl.backbone.load import wrap_model
from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.bank.manifest import AdapterManifest, ModelInfo, RouterInfo
from raycl.bank.object_store import ObjectStoreCache, shared_readers
from raycl.bank.tensor_groups import TensorGroups
from raycl.methods.lora.inclora import IncLora, IncLoraConfig
from raycl.storage import Storage
from raycl.testing.tiny_models import word_tokenizer
from raycl.training.records.bank_start import put_training_state, read_training_state
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.workers.memory import return_freed_memory
from raycl.types import AdapterState

MIB = 2**20
WORKERS, TRIALS = 4, 4
USED = 10
"""Adapters that a reader uses."""

LAYERS = 6
PATHS = tuple(f"encoder.layer.{n}.attention.self.{part}" for n in range(LAYERS) for part in ("query", "value"))
"""Linears of the adapters: query and value of six layers, as in MiniLM."""

MEMORY_LIMIT, OPEN_LIMIT_S = 1.1, 0.3
MODEL = ModelInfo(name="bench", sha256="0" * 64)


class Reader:
    """A process of the node that restores the checkpoint of a run into its method, and keeps both."""

    def __init__(self, bank: str, run: str, width: int, rank: int) -> None:
        torch.set_num_threads(1)
        self.bank, self.run = Bank.at(bank), Storage.at(run)
        self.readers = shared_readers()
        self.width, self.config = width, IncLoraConfig(r=rank)

    def restore(self, checkpoint: str, number: int, shared: bool, trial: bool) -> tuple[float, int, int, int]:
        """Return seconds to restore; private bytes after reading a few adapters, after reading all, after loading a
        few."""
        method = IncLora(self.config, make_backbone(self.width), 0)
        objects = TensorObjects(self.run, self.bank.storage, self.readers if shared else None)
        before = private_bytes()
        began = time.perf_counter()
        if trial:
            read_training_state(self.bank, self.bank.open(number), objects)
        self.held = read_checkpoint(self.run, checkpoint, objects)
        method.load_state_dict(self.held.method, self.held.frozen_state)
        took = time.perf_counter() - began
        states, some = method.stack.states, list(method.stack.states)[-USED:]
        read_weights(states[name] for name in some)
        restored = private_bytes()
        read_weights(states.values())
        read = private_bytes()
        method.stack.need(some)
        loaded = private_bytes()
        self.method = method
        return took, restored - before, read - before, loaded - before


def private_bytes() -> int:
    """Return private bytes of this process (USS), after returning freed memory."""
    return_freed_memory()
    return int(psutil.Process().memory_full_info().uss)


def read_weights(states: Iterable[AdapterState]) -> None:
    """Read every weight, one adapter after another."""
    for state in states:
        for low, high in state.linears.values():
            low.sum(), high.sum()


def make_backbone(width: int) -> Backbone:
    """Return an encoder with the linears of `PATHS`, and little else."""
    tokenizer = word_tokenizer("bert", [])
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=LAYERS, num_attention_heads=2,
        intermediate_size=width, max_position_embeddings=16,
    )  # fmt: skip
    return wrap_model(BertModel(config), tokenizer, 8, 8)


def make_snapshot(
    bank: Bank, run: Storage, states: dict[str, AdapterState], manifests: list[AdapterManifest]
) -> Snapshot:
    """Return a snapshot with a training state, and checkpoints that name its adapters: `one`, or `all`."""
    rank, width = next(iter(states.values())).linears[PATHS[0]][0].shape
    learned = IncLora(IncLoraConfig(r=rank), make_backbone(width), 0)
    learned._load(states, later=True)
    method, tensors = learned.state_dict()
    objects = TensorObjects(run, bank.storage)
    infos = {group: objects.info(group, held) for group, held in tensors.groups.items()}
    training = put_training_state(bank, Checkpoint(0, 1, 1, method, {}, frozen_state=tensors), [], objects)
    for name, count in (("one", 1), ("all", len(infos))):
        frozen = TensorGroups(objects.get(dict(list(infos.items())[:count])))
        values = {**method, "learned": method["learned"][:count]}
        write_checkpoint(run, name, Checkpoint(0, 1, 1, values, {}, frozen_state=frozen), objects)
    return bank.snapshot(NewSnapshot(manifests, MODEL, RouterInfo(kind="task"), training=training))


def figures(bank: Bank, run: Storage, snapshot: Snapshot) -> Iterator[Figure]:
    """Measure both ways on the Ray cluster of this process; the object store is empty before."""
    size, number = sum(entry.tensors.bytes for entry in snapshot.adapters), snapshot.number
    entry, (layout, *_) = snapshot.adapters[0], snapshot.layouts.values()
    what = f"{len(snapshot.adapters):,} adapters, {size / MIB:.0f} MiB; {WORKERS} workers and {TRIALS} trials"
    for shared in (True, False):
        actor = ray.remote(num_cpus=0)(Reader)
        model = (layout[PATHS[0]][0], entry.rank)
        readers = [actor.remote(bank.storage.address, run.address, *model) for _ in range(WORKERS + TRIALS)]
        ray.get([reader.restore.remote("one", number, shared, False) for reader in readers])
        values = [
            ray.get(reader.restore.remote("all", number, shared, index >= WORKERS))
            for index, reader in enumerate(readers)
        ]
        held = ObjectStoreCache(bank).held()[1] if shared else 0
        times, restored, read, loaded = zip(*values, strict=True)
        rows = median(after - before for after, before in zip(loaded, read, strict=True)) / MIB
        way, limit = ("with the object store", MEMORY_LIMIT) if shared else ("without it", None)
        for when, private in (("", restored), (" that read every weight", read)):
            ratio, total = (sum(private) + held) / (private[0] + held), (sum(private) + held) / MIB
            detail = f"{total:,.0f} MiB; {what}; not in it: rows of {USED} adapters in use, {rows:.1f} MiB each reader"
            yield Figure(f"memory of 8 readers over one{when}, {way}", ratio, "x", limit, "<=", detail)
        later = median(times[1:])
        yield Figure(f"a later reader restores all of them, {way}", later, "s", detail=f"the first: {times[0]:.2f} s")
        for reader in readers:
            ray.kill(reader)
    opened = [ray.get(ray.remote(num_cpus=0)(_open).remote(bank.storage.address, number)) for _ in range(3)]
    yield Figure("second reader opens the snapshot and maps it", median(opened), "s", OPEN_LIMIT_S, detail=what)


def _open(address: str, number: int) -> float:
    """Return seconds to read the snapshot's record and to map its adapters."""
    reader = ObjectStoreCache(Bank.at(address))
    began = time.perf_counter()
    snapshot = reader.bank.open(number)
    reader.fetch(snapshot, [entry.name for entry in snapshot.adapters])
    return time.perf_counter() - began
