"""The settings `tracking`, the interface of trackers, and the trackers that the settings name, as one.

They get numbers, tables and pictures of a run, continued where the run resumes. An error of a tracker does not stop the
run.
"""

import hashlib
import importlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, field_validator

from raycl.config import PathOrUri, Section, Tree
from raycl.errors import ConfigError

log: logging.Logger = logging.getLogger("raycl")

Name = Literal["wandb", "tensorboard", "mlflow", "trackio"]

TRACKERS: dict[Name, str] = {
    "wandb": "WandbTracker",
    "tensorboard": "TensorBoardTracker",
    "mlflow": "MlflowTracker",
    "trackio": "TrackioTracker",
}
"""Tracker -> its class in the module `<name>_tracker`, which imports the library and names its `ERRORS`."""

Cell = str | float | None

Axis = Literal["step", "task"]
"""The axis of a number: optimizer steps of the whole run, or the number of tasks learned."""

PROJECT = "raycl"
"""The project of runs for which neither a setting nor the environment names one."""

PAUSE = 9.0
"""A tracker gets no steps for this many times the seconds of a call that failed, so that a library which waits for its
server takes a tenth of the time of training at most."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as its trackers see it.

    Attributes:
        name: name of its folder; runs in other folders may have it too.
        tree: the resolved config, stored with the run.
        project: of the settings; None: the tracker's environment variable, or `PROJECT`.
        group: of the settings; None: the tracker's environment variable, if it has one.
        directory: where the tracker's files go, of the settings; None: the tracker's environment variable, if it has
            one, or below or beside `folder`.
        folder: address of the run's folder, the same for all attempts of the run.
    """

    name: str
    tree: Tree
    project: str | None
    group: str | None
    directory: str | None
    folder: str

    def id_in(self, project: str) -> str:
        """Return the tracker's id of the run: the same folder in the same project is the same run, on every attempt."""
        return hashlib.sha256(f"{project}/{self.folder}".encode()).hexdigest()[:16]

    @property
    def own_name(self) -> str:
        """The name and a part of the id, for trackers that tell runs apart by their names."""
        return f"{self.name}-{self.id_in('')[:6]}"

    def local(self, default: str) -> Path:
        """Return the local folder for a tracker's files, which exists afterwards.

        Args:
            default: path or URI where no directory is set.

        Raises:
            ConfigError: it is no local folder, or cannot be made.
        """
        text = self.directory or default
        if "://" in text:
            raise ConfigError(f"tracking needs a local folder but the run writes to '{text}': set tracking.directory")
        folder = Path(text).expanduser().absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"tracking cannot write to '{folder}': {error.strerror}; expected a folder that can be written, set "
                "tracking.directory"
            ) from error
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


class CheckedTracker:
    """A tracker whose errors are logged, the first of them as a warning; what it did not take is missing there."""

    def __init__(self, name: str, tracker: Tracker, errors: tuple[type[Exception], ...]) -> None:
        """Wrap an open tracker.

        Args:
            errors: what its library raises where it, its server or its disk fails.
        """
        self.tracker = tracker
        self._name, self._errors = name, errors
        self._has_warned, self._next_s = False, 0.0

    def log(self, axis: Axis, at: int, metrics: dict[str, float]) -> None:
        if axis == "task":  # few, and worth another wait
            self._next_s = 0.0
        self._send(lambda: self.tracker.log(axis, at, metrics))

    def table(self, task: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._send(lambda: self.tracker.table(task, name, columns, rows))

    def picture(self, task: int, name: str, file: Path) -> None:
        self._send(lambda: self.tracker.picture(task, name, file))

    def close(self, failed: bool = False) -> None:
        self._next_s = 0.0  # it is the last call
        self._send(lambda: self.tracker.close(failed))

    def _send(self, call: Callable[[], None]) -> None:
        began_s = time.monotonic()
        if began_s < self._next_s:
            return
        try:
            call()
        except self._errors as error:
            ended_s = time.monotonic()
            self._next_s = ended_s + PAUSE * (ended_s - began_s)
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            log.log(
                level,
                "tracker %s failed: %s: %s; training continues, and numbers that %s does not take are only in the "
                "run's own files",
                self._name,
                type(error).__name__,
                " ".join(str(error).split()),
                self._name,
            )


class TrackingConfig(Section):
    """Trackers for metrics, besides the run's own files."""

    tracker: list[Literal["auto", Name]] = Field(
        default_factory=list,
        description="none, wandb, tensorboard, mlflow, trackio, or a list of them; auto: wandb if it is installed and "
        "has a key, else tensorboard if it is installed, else none",
    )
    project: str | None = Field(
        None,
        description="project of wandb and trackio, experiment of mlflow; null: WANDB_PROJECT or "
        "MLFLOW_EXPERIMENT_NAME, else raycl",
    )
    group: str | None = Field(None, description="for runs of one comparison; null: WANDB_RUN_GROUP, else none")
    directory: PathOrUri = Field(
        None,
        description="folder of the trackers' files; null: WANDB_DIR, MLFLOW_TRACKING_URI or TRACKIO_DIR, else below "
        "the run's folder (wandb, tensorboard), beside it (mlflow.db), trackio's own",
    )

    @field_validator("tracker", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        if value is None or value == "none":
            return []
        return [value] if isinstance(value, str) else value

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield the settings of a tracker where there is none; TensorBoard has no projects."""
        if not self.tracker:
            yield from ((name, "tracker=none") for name in ("project", "group", "directory"))
        elif self.tracker == ["tensorboard"]:
            yield from ((name, "tracker=tensorboard") for name in ("project", "group"))


def open_trackers(config: TrackingConfig, run_name: str, tree: Tree, folder: str) -> list[Tracker]:
    """Start or continue tracking of a run.

    Args:
        run_name: name of the run's folder.
        tree: the resolved config, stored with the run.
        folder: address of the run's folder, a local path if a tracker's files are below or beside it.

    Raises:
        ConfigError: a library is not installed, cannot start, or has no local folder to write to.
    """
    run = TrackedRun(run_name, tree, config.project, config.group, config.directory, str(folder))
    names: list[Name | None] = [_choose() if name == "auto" else name for name in config.tracker]
    opened: list[Tracker] = []
    with ExitStack() as stack:
        for name in dict.fromkeys(names):
            if name is not None:
                opened.append(_open(name, run))
                stack.callback(opened[-1].close, failed=True)
        stack.pop_all()  # they stay open
    return opened


def _open(name: Name, run: TrackedRun) -> Tracker:
    if not _installed(name):
        wanted = name if name == "wandb" else f"'raycl[{name}]'"  # wandb is no extra
        raise ConfigError(f"tracking.tracker '{name}' needs its library: type `pip install {wanted}`")
    module = importlib.import_module(f"raycl.training.tracking.{name}_tracker")
    return CheckedTracker(name, getattr(module, TRACKERS[name])(run), module.ERRORS)


def _choose() -> Name | None:
    if _installed("wandb"):
        from raycl.training.tracking.wandb_tracker import connects

        if connects():
            return "wandb"
    return "tensorboard" if _installed("tensorboard") else None


def _installed(package: str) -> bool:
    """Return whether a package is installed; a mere folder of that name (wandb makes one) does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
