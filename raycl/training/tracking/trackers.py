"""The settings `tracking`, and the trackers that they name, as one."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from raycl.config import PathOrUri, Section, Tree
from raycl.errors import ConfigError
from raycl.training.tracking.tracker import TrackedRun, Tracker

Name = Literal["wandb", "tensorboard", "mlflow", "trackio"]

TRACKERS: dict[Name, str] = {
    "wandb": "WandbTracker",
    "tensorboard": "TensorBoardTracker",
    "mlflow": "MlflowTracker",
    "trackio": "TrackioTracker",
}
"""Tracker -> its class in the module `<name>_tracker`, which imports the library."""


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
