"""Copies of a run's folder that are taken while it runs: what a crash at that moment would leave.

One run to its end then shows what several runs that are stopped would: each copy is continued, and must end the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

from raycl.methods.capabilities import Constraint
from raycl.methods.modifier import Modifiers
from raycl.storage import Storage
from raycl.testing import runs
from raycl.training.engines.engine import Engine, Transform


class CopyingEngine:
    """An engine that copies the run's folder after certain numbers of steps, counted over all phases.

    It does so before the next step, when no checkpoint is being written any more.
    """

    def __init__(self, engine: Engine, storage: Storage, places: Collection[int], steps: list[int]) -> None:
        self.engine = engine
        self.storage = storage
        self.places = places
        self.steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(
        self, modifiers: Modifiers, transform: Transform | None = None, constraint: Constraint | None = None
    ) -> float:
        """Copy the folder where it is wanted, then step."""
        if self.steps[0] in self.places:
            shutil.copytree(self.storage.root, _copy(self.storage, self.steps[0]))
        self.steps[0] += 1
        return self.engine.step(modifiers, transform, constraint)


@contextmanager
def copied_after(storage: Storage, *places: int) -> Iterator[None]:
    """Copy the folder of the run that is made inside, after these numbers of steps."""
    steps, build = [0], runs.build

    def watched(*args: Any) -> Any:
        context, open_engine = build(*args)
        return context, lambda *phase: cast(Engine, CopyingEngine(open_engine(*phase), storage, places, steps))

    with mock.patch.object(runs, "build", watched):
        yield


def _copy(storage: Storage, after: int) -> Path:
    return Path(f"{storage.root}-after-{after}")


def left_after(storage: Storage, after: int, folder: Path) -> Storage:
    """Return what a crash after so many steps would have left, in a folder where a test may continue it."""
    return Storage.at(shutil.copytree(_copy(storage, after), folder / f"left-after-{after}"))
