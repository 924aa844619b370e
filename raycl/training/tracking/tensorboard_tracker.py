"""TensorBoard: event files below the run's folder, or in a folder of each run. The only place that imports it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from raycl.config import tree_to_yaml
from raycl.training.tracking.trackers import Axis, Cell, TrackedRun

ERRORS = (OSError,)
"""What it raises where its disk fails."""


class TensorBoardTracker:
    """One event file per attempt in the folders `step` and `task`: numbers over steps, and those after each task.

    A file is opened at its first number: TensorBoard hides points of an earlier attempt from there on, in a folder.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.local(f"{run.folder}/tensorboard")
        if run.directory:  # other runs may write there, and a file hides the later points of older ones in its folder
            self._folder /= run.own_name
        self._config = f"```\n{tree_to_yaml(run.tree)}\n```"
        self._writers: dict[Axis, SummaryWriter] = {}

    def log(self, axis: Axis, at: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._opened(axis, at).add_scalar(name, value, at)

    def table(self, task: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table as Markdown text."""
        lines = [columns, *rows]
        text = [f"| {' | '.join(map(_cell, line))} |" for line in lines]
        self._opened("task", task).add_text(name, "\n".join([text[0], "|" + "---|" * len(columns), *text[1:]]), task)

    def picture(self, task: int, name: str, file: Path) -> None:
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._opened("task", task).add_image(name, pixels, task, dataformats="HWC")

    def _opened(self, axis: Axis, at: int) -> SummaryWriter:
        if axis not in self._writers:
            self._writers[axis] = SummaryWriter(str(self._folder / axis), purge_step=at)
            self._writers[axis].add_text("config", self._config, at)
        return self._writers[axis]

    def close(self, failed: bool = False) -> None:
        """Flush and close the event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    return value.replace("|", "\\|") if isinstance(value, str) else f"{value:.1f}"
