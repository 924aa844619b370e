"""MLflow: a run in an experiment, on a server or in a local SQLite file. The only place that imports it.

Resuming: the run is found again by a tag.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from raycl.config import Tree, flatten
from raycl.errors import ConfigError
from raycl.training.tracking.trackers import PROJECT, Axis, Cell, TrackedRun

TAG = "raycl.run"
"""Tag of a run with its id."""

GROUP = "raycl.group"
"""Tag of a run with its group."""


class MlflowTracker:
    """One MLflow run."""

    def __init__(self, run: TrackedRun) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports each table that it adds to its database
        address, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if run.directory or not address:
            folder = run.local(run.folder.rstrip("/").rpartition("/")[0] or ".")
            address, artifacts = f"sqlite:///{folder}/mlflow.db", f"file://{folder}/mlflow"
        project = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        try:
            self._client = client = MlflowClient(address)
            known = client.get_experiment_by_name(project)
            experiment = known.experiment_id if known else client.create_experiment(project, artifacts)
            own = run.id_in(project)
            found = client.search_runs([experiment], f"tags.`{TAG}` = '{own}'")
            tags = {TAG: own, **({GROUP: run.group} if run.group else {})}
            started = found[0] if found else client.create_run(experiment, tags=tags, run_name=run.name)
            self._id = started.info.run_id
            client.update_run(self._id, "RUNNING")
            self._log_config(run.tree, set(started.data.params))
        except MlflowException as error:
            raise ConfigError(
                f"tracking.tracker 'mlflow' cannot start at '{address}': {error}; expected a server or store that "
                "answers, set MLFLOW_TRACKING_URI or tracking.directory"
            ) from error

    def _log_config(self, tree: Tree, known: set[str]) -> None:
        """Record the config as a file, and settings that the run does not have yet: MLflow never changes one."""
        params = [Param(name, str(value)[:500]) for name, value in flatten(tree).items() if name not in known]
        for first in range(0, len(params), 100):  # the most that a request may have
            self._client.log_batch(self._id, params=params[first : first + 100])
        self._client.log_dict(self._id, tree, "config.yaml")

    def log(self, axis: Axis, at: int, metrics: dict[str, float]) -> None:
        """Record numbers; MLflow has one number for the axis, the task or the step."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now, at) for name, value in metrics.items()])

    def table(self, task: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table of MLflow's, one after each task."""
        data = {column: [row[number] for row in rows] for number, column in enumerate(columns)}
        self._client.log_table(self._id, data, f"{name}-{task:03d}.json")

    def picture(self, task: int, name: str, file: Path) -> None:
        """Record a picture in place of the one before."""
        self._client.log_artifact(self._id, str(file))

    def close(self, failed: bool = False) -> None:
        """Set the run's status."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
