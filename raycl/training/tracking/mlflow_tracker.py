"""MLflow: a run in an experiment, on a server or in a local SQLite file. The only place that imports it.

Resuming: the run is found again by a tag.
"""

import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from raycl.config import Tree, flatten
from raycl.errors import ConfigError
from raycl.training.tracking.trackers import PROJECT, Axis, Cell, TrackedRun

ERRORS = (MlflowException, OSError)
"""What it raises where its server, its database or its disk fails."""

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
            if known is not None and known.lifecycle_stage == "deleted":  # its name is not free yet
                raise ConfigError(
                    f"tracking.tracker 'mlflow' cannot record a run in experiment '{project}' at '{address}', which is "
                    "deleted: restore it with `mlflow experiments restore`, or set tracking.project to another one"
                )
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
        values = {_allowed(name): str(value)[:500] for name, value in flatten(tree).items()}
        params = [Param(name, value) for name, value in values.items() if name not in known]
        for first in range(0, len(params), 100):  # the most that a request may have
            self._client.log_batch(self._id, params=params[first : first + 100])
        self._client.log_dict(self._id, tree, "config.yaml")

    def log(self, axis: Axis, at: int, metrics: dict[str, float]) -> None:
        """Record numbers; MLflow has one number for the axis, the task or the step."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(_allowed(name), value, now, at) for name, value in metrics.items()])

    def table(self, task: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table of MLflow's, one after each task, in place of one that an earlier attempt has recorded."""
        file = f"{name}-{task:03d}.json"
        if any(artifact.path == file for artifact in self._client.list_artifacts(self._id)):  # log_table appends
            self._client.log_dict(self._id, {"columns": list(columns), "data": [list(row) for row in rows]}, file)
            return
        data = {column: [row[number] for row in rows] for number, column in enumerate(columns)}
        self._client.log_table(self._id, data, file)

    def picture(self, task: int, name: str, file: Path) -> None:
        """Record a picture in place of the one before."""
        self._client.log_artifact(self._id, str(file))

    def close(self, failed: bool = False) -> None:
        """Set the run's status."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _allowed(name: str) -> str:
    """Return the name of a setting or number as MLflow takes it: `mails (new)` is `mails _28_new_29_`.

    Other characters than letters, digits, `_`, `-`, `.`, spaces and slashes are replaced by their codes, so that
    different names stay different; a path has no empty part and none of dots, and 250 characters at most.
    """
    coded = re.sub(r"[^/\w.\- ]", lambda found: f"_{ord(found[0]):x}_", name)
    return "/".join(part for part in coded.split("/") if part not in ("", ".", ".."))[:250].rstrip("/")
