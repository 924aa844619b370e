"""The settings `tracking`, and the trackers that they name, as one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from raycl.config import PathOrUri, Section, Tree
from raycl.errors import ConfigError
from raycl.training.tracking.tracker import Axis, Cell, TrackedRun, Tracker

Name = Literal["wandb", "tensorboard", "mlflow", "trackio"]


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


def open_tracker(config: TrackingConfig, run_name: str, tree: Tree, folder: str) -> Tracker | None:
    """Start or continue tracking of a run; None: it has no tracker.

    Args:
        run_name: the same for all attempts of a run.
        tree: the resolved config, stored with the run.
        folder: the run's folder, a local path if a tracker's files are below or beside it.

    Raises:
        ConfigError: a library is not installed, cannot start, or has no local folder to write to.
    """
    run = TrackedRun(run_name, tree, config.project, config.group, config.directory, str(folder))
    names: list[Name | None] = [_choose() if name == "auto" else name for name in config.tracker]
    opened = _Several()
    try:
        for name in dict.fromkeys(names):
            if name is not None:
                opened.trackers.append(_open(name, run))
    except ConfigError:
        opened.close(failed=True)
        raise
    return opened if opened.trackers else None


class _Several:
    """Passes everything on to each tracker."""

    def __init__(self) -> None:
        self.trackers: list[Tracker] = []

    def log(self, axis: Axis, at: int, metrics: dict[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(axis, at, metrics)

    def table(self, task: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        for tracker in self.trackers:
            tracker.table(task, name, columns, rows)

    def picture(self, task: int, name: str, file: Path) -> None:
        for tracker in self.trackers:
            tracker.picture(task, name, file)

    def close(self, failed: bool = False) -> None:
        for tracker in self.trackers:
            tracker.close(failed)


def _open(name: Name, run: TrackedRun) -> Tracker:
    """Return a tracker; its library is imported here.

    Raises:
        ConfigError: the library is not installed, cannot start, or has no local folder to write to.
    """
    if not _installed(name):
        wanted = name if name == "wandb" else f"'raycl[{name}]'"  # wandb is no extra
        raise ConfigError(f"tracking.tracker '{name}' needs its library: type `pip install {wanted}`")
    match name:
        case "wandb":
            from raycl.training.tracking.wandb_tracker import WandbTracker

            return WandbTracker(run)
        case "tensorboard":
            from raycl.training.tracking.tensorboard_tracker import TensorBoardTracker

            return TensorBoardTracker(run)
        case "mlflow":
            from raycl.training.tracking.mlflow_tracker import MlflowTracker

            return MlflowTracker(run)
        case "trackio":
            from raycl.training.tracking.trackio_tracker import TrackioTracker

            return TrackioTracker(run)


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
