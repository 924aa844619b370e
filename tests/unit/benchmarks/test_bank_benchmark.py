"""The benchmark of the bank: its readers restore what its snapshot holds, without a cluster."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import bank as bank_benchmark
from benchmarks import sharing
from raycl.bank import Bank
from raycl.storage import Storage

WIDTH, RANK = 8, 2


def test_a_reader_restores_the_adapters_of_the_snapshot(tmp_path: Path) -> None:
    bank, run = Bank.at(tmp_path / "bank"), Storage.at(tmp_path / "run")
    states = {f"s{number}": bank_benchmark._adapter(sharing.PATHS, WIDTH, RANK, number) for number in range(3)}
    manifests = [bank.publish(name, state, sharing.MODEL) for name, state in states.items()]
    snapshot = sharing.make_snapshot(bank, run, states, manifests)
    reader = sharing.Reader(bank.storage.address, run.address, WIDTH, RANK)
    for checkpoint, names in (("one", ["s0"]), ("all", list(states))):
        for is_trial in (False, True):
            reader.restore(checkpoint, snapshot.number, False, is_trial)
            restored = reader.method.stack.states
            assert list(restored) == names
            pairs = zip(restored["s0"].linears.values(), states["s0"].linears.values(), strict=True)
            assert all(torch.equal(mine[0], its[0]) and torch.equal(mine[1], its[1]) for mine, its in pairs)
