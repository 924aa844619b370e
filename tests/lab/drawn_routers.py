"""Routers over many drawn tasks, for tests of banks that are searched through an index."""

from __future__ import annotations

import torch
from torch import Tensor

from raycl.routing.slot_weights import RetrievalConfig
from raycl.routing.slots import Kind, SlotRouter
from raycl.routing.statistics import Statistics


def drawn_router(kind: Kind, tasks: int, more: int = 1) -> tuple[SlotRouter, Tensor]:
    """Return a router over tasks of three slots, or in turn of up to `more - 1` more, and a text near each."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(tasks, 2, 8, generator=draw)
    router = SlotRouter(kind, 2, RetrievalConfig(top_k=2))
    for number, centre in enumerate(centres):
        mean = torch.nn.functional.normalize(centre.flatten(), dim=0)
        keys = centre + 0.4 * torch.randn(3 + number % more, 2, 8, generator=draw)
        router.add(f"t{number}", keys, Statistics(9, mean, 0.1 * torch.eye(16)))
    return router, (centres + 0.3 * torch.randn(centres.shape, generator=draw)).flatten(1)
