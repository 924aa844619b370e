"""The bank against the disk it lies on, and the object-store cache against copying.

The disk's own rate is measured in the same folder with the same number of bytes in one file, flushed to the device
after writing, and dropped from the page cache before reading.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import ray
import torch

from benchmarks import sharing
from benchmarks.figures import Figure, Report, measured
from benchmarks.sharing import PATHS
from raycl.bank import AdapterManifest, Bank, NewSnapshot, Snapshot
from raycl.bank.manifest import ModelInfo, RouterInfo, SnapshotAdapter
from raycl.bank.object_store import ObjectStoreCache
from raycl.storage import Storage
from raycl.types import AdapterState

MIB = 2**20
DISK_SHARE, OPEN_LIMIT_S, MAP_LIMIT_S, PRIVATE_LIMIT = 0.5, 2.0, 0.2, 0.1
SETTINGS = ("dir", "large_mb", "large", "small", "rank", "opened", "rounds")
MODEL = ModelInfo(name="bench", sha256="0" * 64)
WIDTH = 384
"""The width of MiniLM: 0.3 MB at rank 8."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults end within five minutes on two cores."""
    parser.add_argument("--dir", type=Path, help="where to write; default: the folder for temporary files")
    parser.add_argument("--large-mb", type=int, default=64, help="size of the adapters that the rates are made from")
    parser.add_argument("--large", type=int, default=15, help="how many of them")
    parser.add_argument(
        "--small", type=int, default=1000, help="adapters in the object-store cache, 0.3 MB each at rank 8"
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--opened", type=int, default=10_000, help="adapters of the snapshot that is opened")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        parts = (_rates, _opening, _object_store_cache)
        figures = (figure for part in parts for figure in part(Path(folder), options))
        return measured("bank", options, SETTINGS, lambda: figures)


def _rates(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """Publishing and fetching adapters, each right before or after a plain file of its size: disks have bursts."""
    bank = Bank.at(folder / "rates")
    times: dict[str, list[float]] = {"disk write": [], "publish": [], "disk read": [], "fetch": []}
    for number in range(options.large):
        state = _adapter(PATHS[:1], options.large_mb * MIB // 8 // options.rank, options.rank, number)
        plain, data = folder / f"plain{number}", os.urandom(MIB) * options.large_mb
        manifests: list[AdapterManifest] = []

        def publish(name: str = f"l{number}", state: AdapterState = state, manifests: Any = manifests) -> None:
            manifests.append(bank.publish(name, state, MODEL))

        def fetch(manifests: Any = manifests) -> None:
            _touch(bank.fetch(manifests[0]))

        writing: dict[str, Callable[[], Any]] = {"publish": publish, "disk write": partial(_write, plain, data)}
        reading: dict[str, Callable[[], Any]] = {"fetch": fetch, "disk read": plain.read_bytes}
        for pair in (writing, reading):
            for kind, work in sorted(pair.items(), reverse=bool(number % 2)):
                times[kind].append(_seconds(work))
            _forget([plain, Path(bank.storage.path(manifests[0].tensors.file))])
    for mine, disk in (("publish", "disk write"), ("fetch", "disk read")):
        rates = [options.large_mb / median(times[kind]) for kind in (mine, disk)]
        detail = f"medians of {options.large}: {rates[0]:,.0f} MiB/s against {rates[1]:,.0f} MiB/s"
        yield Figure(f"{mine} over the {disk} rate", rates[0] / rates[1], "x", DISK_SHARE, ">=", detail)


def _opening(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    bank = Bank.at(folder / "opening")
    first = bank.publish("a", _adapter(PATHS, WIDTH, options.rank, 0), MODEL, ["a"])
    snapshot = bank.snapshot(NewSnapshot([first], MODEL, RouterInfo(kind="task")))
    entry = snapshot.adapters[0]
    fields = entry.model_dump()
    entries = [
        (SnapshotAdapter(**{**fields, "name": f"a{number:05d}"}), snapshot.layouts[entry.layout])
        for number in range(options.opened)
    ]
    many = bank.snapshot(NewSnapshot(entries, MODEL, RouterInfo(kind="task")))
    times = [_seconds(lambda: bank.open(many.number)) for _ in range(options.rounds)]
    size = bank.storage.files("snapshots")[many.file].size / MIB
    yield Figure(
        f"opening a snapshot of {options.opened:,}", median(times), "s", OPEN_LIMIT_S, detail=f"file of {size:.1f} MiB"
    )


def _object_store_cache(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """Measure one reader that fills the cache, and a second one on the node that maps it."""
    bank, run = Bank.at(folder / "object_store_cache"), Storage.at(folder / "run")
    states = [_adapter(PATHS, WIDTH, options.rank, number) for number in range(options.small)]
    manifests: list[AdapterManifest] = []
    spent = _seconds(lambda: manifests.extend(bank.publish(f"s{n}", state, MODEL) for n, state in enumerate(states)))
    size = sum(manifest.tensors.bytes for manifest in manifests)
    each = f"{size / len(manifests) / 1e6:.2f} MB each"
    yield Figure("publishing small adapters", len(manifests) / spent, "/s", detail=each)
    snapshot = sharing.make_snapshot(bank, run, {f"s{n}": state for n, state in enumerate(states)}, manifests)
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
        object_store_memory=4 * size + 100 * MIB,
    )  # fmt: skip
    object_store_cache = ObjectStoreCache(bank)
    try:
        names = [entry.name for entry in snapshot.adapters]
        filled = _seconds(lambda: object_store_cache.fetch(snapshot, names))
        yield Figure("first reader, empty cache", filled, "s", detail=f"{len(names):,} adapters, {size / MIB:.0f} MiB")
        reader = ray.remote(num_cpus=0)(_read)
        result = [ray.get(reader.remote(bank.storage.address, snapshot.number)) for _ in range(options.rounds)]
        object_store_cache.close()
        shared = list(sharing.figures(bank, run, snapshot))
    finally:
        ray.shutdown()
    took, private, opening, touched = (median(values) for values in zip(*result, strict=True))
    yield Figure("second reader on the node maps them in", took, "s", MAP_LIMIT_S, detail=f"{len(names):,} adapters")
    detail = f"{private / MIB:.1f} MiB private of {size / MIB:.0f} MiB mapped"
    yield Figure("second reader's own memory over what it maps", private / size, "x", PRIVATE_LIMIT, "<=", detail)
    yield Figure(
        "second reader makes tensors of all of them", opening, "s", detail=f"{2 * len(PATHS) * len(names):,} tensors"
    )
    detail = f"{touched / MIB:.1f} MiB"
    yield Figure("the same after reading every weight", touched / size, "x", PRIVATE_LIMIT, "<=", detail)
    yield from shared


def _read(address: str, number: int) -> tuple[float, int, float, int]:
    """Return another process's seconds to map all, private bytes that took, seconds for tensors, bytes at last."""
    torch.set_num_threads(1)
    bank = Bank.at(address)
    snapshot: Snapshot = bank.open(number)
    names = [entry.name for entry in snapshot.adapters]
    object_store_cache = ObjectStoreCache(bank)
    object_store_cache.fetch(snapshot, names[:1])
    before = psutil.Process().memory_full_info().uss
    began = time.perf_counter()
    mapped = object_store_cache.fetch(snapshot, names)
    took = time.perf_counter() - began
    private = psutil.Process().memory_full_info().uss
    began = time.perf_counter()
    states = list(map(mapped, names))
    opening = time.perf_counter() - began
    for state in states:
        _touch(state)
    return took, private - before, opening, psutil.Process().memory_full_info().uss - before


def _adapter(paths: Sequence[str], width: int, rank: int, seed: int) -> AdapterState:
    draw = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    return AdapterState({path: (drawn(rank, width), drawn(width, rank)) for path in paths})


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _forget(paths: list[Path]) -> None:
    """Drop files from the page cache, so that the next read comes from the device."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _touch(state: AdapterState) -> float:
    return sum(float(tensor.sum()) for pair in state.linears.values() for tensor in pair)
