"""Adapters of drawn weights, in memory: a snapshot of them that a model can load without any file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raycl.backbone.roles import linear_names, linear_shapes
from raycl.bank import Snapshot
from raycl.bank.manifest import ModelInfo, ObjectInfo, RouterInfo, SnapshotAdapter
from raycl.routing.routers import SumRouter
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot
from raycl.types import AdapterState, Mixture

NO_OBJECT = ObjectInfo(sha256="0" * 64, bytes=0)
SCALE = 0.05
"""Standard deviation of drawn A and B."""


def drawn_adapters(model: nn.Module, targets: Sequence[str], count: int, rank: int) -> dict[str, AdapterState]:
    """Return `a0`, `a1`, ...: the first is drawn, the others are its values in another order, which takes less time."""
    draw = torch.Generator().manual_seed(0)
    paths, shapes = linear_names(model, targets), linear_shapes(model)

    def small(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * SCALE

    first = {path: (small(rank, shapes[path][0]), small(shapes[path][1], rank)) for path in paths}
    return {
        f"a{number}": AdapterState({path: (a.roll(number, 1), b.roll(number, 0)) for path, (a, b) in first.items()})
        for number in range(count)
    }


def loaded(adapters: dict[str, AdapterState], number: int = 1) -> LoadedSnapshot:
    """Return a snapshot of these adapters that a `raycl.serve.engine.multi_snapshot_model.MultiSnapshotModel` can
    load."""
    model = ModelInfo(name="drawn", sha256="0" * 64, kind="drawn")
    linears = next(iter(adapters.values())).linears
    layout = {path: (int(a.shape[1]), int(b.shape[0])) for path, (a, b) in linears.items()}
    entries = [
        SnapshotAdapter(
            name=name,
            version=1,
            tensors=NO_OBJECT,
            layout="drawn",
            rank=state.rank,
            scale=state.scale,
            dtype="float32",
            tasks=(name,),
        )
        for name, state in adapters.items()
    ]
    snapshot = Snapshot(
        number=number,
        backbone=model,
        router=RouterInfo(kind="sum"),
        layouts={"drawn": layout},
        adapters=tuple(entries),
    )
    return LoadedSnapshot.of(snapshot, SumRouter({name: (name,) for name in adapters}), adapters.__getitem__)


def dense(names: Sequence[str], rows: int, seed: int = 0) -> Mixture:
    """Return every adapter for every row, weights that sum to 1 and differ from row to row."""
    draw = torch.Generator().manual_seed(seed)
    return Mixture(tuple(names), torch.softmax(torch.randn(rows, len(names), generator=draw), 1))


def one_each(names: Sequence[str], rows: int) -> Mixture:
    """Return one adapter for each row, in turn."""
    return Mixture(tuple(names), torch.eye(len(names))[torch.arange(rows) % len(names)])
