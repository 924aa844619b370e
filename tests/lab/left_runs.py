"""A complete run, and its folder as a process leaves it that is killed at some steps: one run in place of several."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.engines.engine import Engine
from raycl.training.setup.run_config import RunConfig
from raycl.training.stream_loop import StreamLoop
from raycl.training.workers.distributed import DistributedContext


class Copying:
    """An engine that copies the run's folder where `raycl.testing.tiny_models.StoppingEngine` would raise."""

    def __init__(self, engine: Engine, storage: Storage, left: Mapping[int, Path], done: list[int]) -> None:
        self.engine, self.storage, self.left, self.done = engine, storage, left, done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self, *given: Any) -> float:
        """Count a step of all phases together, trials included."""
        if self.done[0] in self.left:
            shutil.copytree(self.storage.root, self.left[self.done[0]])
        self.done[0] += 1
        return self.engine.step(*given)


def run_and_leave(config: RunConfig, storage: Storage, left: Mapping[int, Path]) -> StreamLoop:
    """Run the stream to its end, as `raycl.testing.runs.run` does.

    Args:
        left: optimizer steps that are done -> new folder for a copy of the run, made before the next step's update.
    """
    world, done = DistributedContext.alone(torch.device("cpu")), [0]
    context, open_engine = build(config, world)
    loop = StreamLoop(
        context, lambda *phase: cast(Engine, Copying(open_engine(*phase), storage, left, done)), storage, world
    )
    loop.run()
    assert max(left) < done[0], "a place that the run never came to"
    return loop
