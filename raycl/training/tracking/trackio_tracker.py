"""Trackio: a run in its local database, or on a Space of the Hugging Face hub. The only place that imports it.

Resuming: Trackio continues the run of the same name. It has one axis, so numbers after a task have the task as step.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from raycl.training.tracking.trackers import PROJECT, Axis, Cell, TrackedRun


class TrackioTracker:
    """One Trackio run."""

    def __init__(self, run: TrackedRun) -> None:
        if run.directory:
            os.environ["TRACKIO_DIR"] = str(run.local(run.directory))  # read at its import, and by its own processes
        import trackio

        self._trackio = trackio
        with redirect_stdout(sys.stderr):  # it greets on standard output
            self._run = trackio.init(
                project=run.project or PROJECT,
                name=run.name,
                group=run.group,
                config=run.tree,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, axis: Axis, at: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=at)

    def table(self, task: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        data = self._trackio.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: data}, step=task)

    def picture(self, task: int, name: str, file: Path) -> None:
        self._run.log({name: self._trackio.Image(str(file))}, step=task)

    def close(self, failed: bool = False) -> None:
        with redirect_stdout(sys.stderr):
            self._trackio.finish()
