"""The interface of trackers: numbers, tables and pictures of a run, continued where the run resumes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from raycl.config import Tree
from raycl.errors import ConfigError

Cell = str | float | None

Axis = Literal["step", "task"]
"""The axis of a number: optimizer steps of the whole run, or the number of tasks learned."""

PROJECT = "raycl"
"""The project of runs for which neither a setting nor the environment names one."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as its trackers see it.

    Attributes:
        name: the same for all attempts of the run.
        tree: the resolved config, stored with the run.
        project: of the settings; None: the tracker's environment variable, or `PROJECT`.
        group: of the settings; None: the tracker's environment variable, if it has one.
        directory: where the tracker's files go, of the settings; None: the tracker's environment variable, if it has
            one, or below or beside `folder`.
        folder: the run's folder, a path or URI.
    """

    name: str
    tree: Tree
    project: str | None
    group: str | None
    directory: str | None
    folder: str

    def id_in(self, project: str) -> str:
        """Return the tracker's id of the run: the same name in the same project is the same run, on every attempt."""
        return hashlib.sha256(f"{project}/{self.name}".encode()).hexdigest()[:16]

    def local(self, default: str) -> Path:
        """Return the local folder for a tracker's files, which exists afterwards.

        Args:
            default: path or URI where no directory is set.

        Raises:
            ConfigError: it is no local folder.
        """
        text = self.directory or default
        if "://" in text:
            raise ConfigError(f"tracking needs a local folder but the run writes to '{text}': set tracking.directory")
        folder = Path(text).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class Tracker(Protocol):
    """Takes numbers until closed."""

    def log(self, axis: Axis, at: int, metrics: dict[str, float]) -> None:
        """Record numbers of one step, or after one task; both may repeat after a resume."""
        ...

    def table(self, task: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table as it is after a number of tasks.

        Args:
            rows: names, numbers, and None for cells that are empty.
        """
        ...

    def picture(self, task: int, name: str, file: Path) -> None:
        """Record a PNG as it is after a number of tasks; the file need not stay."""
        ...

    def close(self, failed: bool = False) -> None:
        """Write out what is pending; nothing may be logged afterwards.

        Args:
            failed: the run ended with an error.
        """
        ...
