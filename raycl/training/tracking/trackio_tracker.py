"""Trackio: a run in its local database, or on a Space of the Hugging Face hub. The only place that imports it.

Resuming: Trackio continues the run of the same name. It has one axis, so numbers after a task have the task as step.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from contextvars import Context
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME

from raycl.errors import ConfigError
from raycl.training.tracking.trackers import PROJECT, Axis, Cell, TrackedRun

ERRORS = (OSError, RuntimeError)
"""What it raises where its disk fails, or its server; most of its errors it prints itself."""


class TrackioTracker:
    """One Trackio run.

    It has a context of its own, where Trackio keeps the current run: `init` would end one that the user has open.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._trackio, self._context = _library(run), Context()
        with redirect_stdout(sys.stderr):  # it greets on standard output
            self._run = self._context.run(
                self._trackio.init,
                project=run.project or PROJECT,
                name=run.own_name,
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
            self._context.run(self._trackio.finish)


def _library(run: TrackedRun) -> Any:
    """Import Trackio, which reads its folder from the environment once in a process.

    Raises:
        ConfigError: it has read another folder before.
    """
    before = os.environ.get("TRACKIO_DIR")
    folder = str(run.local(run.directory)) if run.directory else before or f"{HF_HOME}/trackio"
    os.environ["TRACKIO_DIR"] = folder
    try:
        import trackio
    finally:
        if before is None:
            del os.environ["TRACKIO_DIR"]
        else:
            os.environ["TRACKIO_DIR"] = before
    if Path(folder) != trackio.utils.TRACKIO_DIR:
        raise ConfigError(
            f"tracking.tracker 'trackio' cannot write to '{folder}', since it writes to '{trackio.utils.TRACKIO_DIR}' "
            "in this process already: expected the same tracking.directory in all runs of a process, train this run "
            "in another one"
        )
    return trackio
