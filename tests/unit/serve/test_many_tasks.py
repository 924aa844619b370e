"""Tests that no request loops over all tasks or adapters of a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from raycl.bank.manifest import ModelInfo, ObjectInfo, RouterInfo, Snapshot, SnapshotAdapter, TaskInfo
from raycl.routing.class_gaussians import ClassGaussians
from raycl.routing.routers import SumRouter
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot
from raycl.types import AdapterState

HASH = "0" * 64
LIMITS = {"max_source_tokens": 8, "max_source_tokens_by_task": {"b": 16}, "max_target_tokens": "auto"}


class Unread(tuple[Any, ...]):
    """A tuple that must not be read."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a loop over all of them")


def snapshot_of(*names: str) -> Snapshot:
    tensors = ObjectInfo(sha256=HASH, bytes=1)
    entries = [
        SnapshotAdapter(
            name=name, version=1, tensors=tensors, rank=0, scale=1.0, dtype="float32", prompt=(number, 4), layout="none"
        )
        for number, name in enumerate(names, 3)
    ]
    return Snapshot(
        number=1,
        backbone=ModelInfo(name="model", sha256=HASH),
        router=RouterInfo(kind="sum", settings={"prompt_mixing": "concat"}),
        tasks=tuple(TaskInfo(name=name) for name in names),
        adapters=tuple(entries),
        provenance={"config": {"stream": LIMITS}},
    )


def test_lengths_and_limits_are_looked_up() -> None:
    snapshot = snapshot_of("a", "b", "c")
    loaded = LoadedSnapshot.of(snapshot, SumRouter({}), lambda name: AdapterState())
    assert loaded.prompt_positions() == 12 and snapshot.token_limits() == (16, None)
    snapshot.__dict__.update(tasks=Unread(), adapters=Unread())
    assert loaded.prompt_positions() == 12 and loaded.prompt_positions({"a", "c"}) == 8
    assert [snapshot.token_limits(name) for name in ("a", "b", "")] == [(8, None), (16, None), (16, None)]


def test_limits_of_a_snapshot_without_tasks() -> None:
    assert snapshot_of().token_limits() == snapshot_of().token_limits("a") == (8, None)


def test_the_nearest_class_is_found_without_a_loop_over_tasks() -> None:
    gaussians = ClassGaussians()
    for number, name in enumerate(("a", "b")):
        gaussians.add(name, 9.0 * torch.eye(2)[number : number + 1].repeat(1 + number, 1), torch.eye(2))
    queries = torch.tensor([[0.0, 8.0], [8.0, 0.0]])
    assert gaussians.nearest(queries).tolist() == [1, 0]
    gaussians.means.clear()
    assert gaussians.nearest(queries).tolist() == [1, 0]
