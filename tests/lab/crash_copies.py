"""Copies of a run's folder that are taken while it runs: what a crash at that moment would leave.

One run to its end then shows what several runs that are stopped would: each copy is continued, and must end the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

from raycl.methods.capabilities import Constraint
from raycl.methods.modifier import Modifiers
from raycl.storage import Storage
from raycl.testing import runs
from raycl.training.engines.engine import Engine, Transform
from raycl.training.setup.run_config import RunConfig
from raycl.training.stream_loop import StreamLoop


class CopyingEngine:
    """An engine that copies the run's folder after certain numbers of steps, counted over all phases and trials.

    It does so before the next step, when no checkpoint is being written any more.
    """

    def __init__(self, engine: Engine, storage: Storage, left: Mapping[int, Path], steps: list[int]) -> None:
        self.engine = engine
        self.storage = storage
        self.left = left
        self.steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(
        self, modifiers: Modifiers, transform: Transform | None = None, constraint: Constraint | None = None
    ) -> float:
        """Copy the folder where it is wanted, then step."""
        if self.steps[0] in self.left:
            shutil.copytree(self.storage.root, self.left[self.steps[0]])
        self.steps[0] += 1
        return self.engine.step(modifiers, transform, constraint)


@contextmanager
def _copied(storage: Storage, left: Mapping[int, Path]) -> Iterator[list[int]]:
    """Copy the folder of the run that is made inside; yields the number of its steps so far."""
    steps, build = [0], runs.build

    def watched(*args: Any) -> Any:
        context, open_engine = build(*args)
        return context, lambda *phase: cast(Engine, CopyingEngine(open_engine(*phase), storage, left, steps))

    with mock.patch.object(runs, "build", watched):
        yield steps


@contextmanager
def copied_after(storage: Storage, *places: int) -> Iterator[None]:
    """Copy the folder of the run that is made inside, after these numbers of steps, beside it (`left_after`)."""
    with _copied(storage, {after: _copy(storage, after) for after in places}):
        yield


def run_and_leave(config: RunConfig, storage: Storage, left: Mapping[int, Path]) -> StreamLoop:
    """Run the stream to its end, as `raycl.testing.runs.run` does.

    Args:
        left: optimizer steps that are done -> new folder for a copy of the run, made before the next step's update.
    """
    with _copied(storage, left) as steps:
        loop = runs.run(config, storage)
    assert max(left) < steps[0], "a place that the run never came to"
    return loop


def _copy(storage: Storage, after: int) -> Path:
    return Path(f"{storage.root}-after-{after}")


def left_after(storage: Storage, after: int, folder: Path) -> Storage:
    """Return what a crash after so many steps would have left, in a folder where a test may continue it."""
    return Storage.at(shutil.copytree(_copy(storage, after), folder / f"left-after-{after}"))
