"""Small adapters and snapshots of a bank, of drawn weights."""

from __future__ import annotations

import torch

from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.bank.manifest import ModelInfo, RouterInfo, TaskInfo
from raycl.types import AdapterState

MODEL = ModelInfo(name="tiny", sha256="a" * 64, kind="encoder")
ROUTER = RouterInfo(kind="task")


def adapter(seed: int = 0, rank: int = 2) -> AdapterState:
    """Return an adapter of two linears, a prompt and a head."""
    draw = torch.Generator().manual_seed(seed)
    pairs = {path: (torch.randn(rank, 6, generator=draw), torch.randn(5, rank, generator=draw)) for path in ("q", "v")}
    head = (torch.randn(2, 6, generator=draw), torch.randn(2, generator=draw))
    return AdapterState(pairs, 4.0, torch.randn(3, 6, generator=draw), ("yes", "no"), *head)


def child(bank: Bank, task: str, parent: Snapshot | None = None) -> Snapshot:
    """Return a snapshot with one task more than its parent."""
    fresh = bank.publish(task, adapter(len(bank.names())), MODEL, [task])
    kept = [(entry, parent.layouts[entry.layout]) for entry in parent.adapters] if parent else []
    tasks = [*(parent.tasks if parent else ()), TaskInfo(name=task)]
    return bank.snapshot(NewSnapshot([fresh, *kept], MODEL, ROUTER, tasks, parent=parent.number if parent else None))
