"""The settings `tracking`, the interface of trackers, and the trackers that the settings name, as one.

They get numbers, tables and pictures of a run, continued where the run resumes.
"""

import hashlib
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, field_validator

from raycl.config import PathOrUri, Section, Tree
from raycl.errors import ConfigError

Name = Literal["wandb", "tensorboard", "mlflow", "trackio"]

TRACKERS: dict[Name, str] = {
    "wandb": "WandbTracker",
    "tensorboard": "TensorBoardTracker",
    "mlflow": "MlflowTracker",
    "trackio": "TrackioTracker",
}
"""Tracker -> its class in the module `<name>_tracker`, which imports the library."""


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
        run_name: the same for all attempts of a run.
        tree: the resolved config, stored with the run.
        folder: the run's folder, a local path if a tracker's files are below or beside it.

    Raises:
        ConfigError: a library is not installed, cannot start, or has no local folder to write to.
    """
    run = TrackedRun(run_name, tree, config.project, config.group, config.directory, str(folder))
    names: list[Name | None] = [_choose() if name == "auto" else name for name in config.tracker]
    opened: list[Tracker] = []
    try:
        for name in dict.fromkeys(names):
            if name is not None:
                opened.append(_open(name, run))
    except ConfigError:
        for tracker in opened:
            tracker.close(failed=True)
        raise
    return opened


def _open(name: Name, run: TrackedRun) -> Tracker:
    if not _installed(name):
        wanted = name if name == "wandb" else f"'raycl[{name}]'"  # wandb is no extra
        raise ConfigError(f"tracking.tracker '{name}' needs its library: type `pip install {wanted}`")
    module = importlib.import_module(f"raycl.training.tracking.{name}_tracker")
    tracker: Tracker = getattr(module, TRACKERS[name])(run)
    return tracker


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
