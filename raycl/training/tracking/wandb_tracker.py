"""Weights & Biases. The only place that imports it.

Resuming: the wandb run id is derived from project and folder, so the same folder is the same wandb run. Steps are
logged as a number of their own and made the x-axis, because wandb drops points whose own step counter goes back.
"""

import logging
import netrc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb

from raycl.errors import ConfigError
from raycl.training.tracking.trackers import PROJECT, Axis, Cell, TrackedRun

log: logging.Logger = logging.getLogger("raycl")

ERRORS = (wandb.errors.Error, OSError)
"""What it raises where its server fails, or its own process, which it reaches through a socket."""


class WandbTracker:
    """One wandb run, offline when there is no key (`wandb sync` uploads it later).

    What no setting names is left to wandb, which reads WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_TAGS, WANDB_DIR and others.
    """

    def __init__(self, run: TrackedRun) -> None:
        mode = _wandb_mode(wandb.setup().settings)
        project = run.project or os.environ.get("WANDB_PROJECT") or PROJECT
        own_folder = run.directory or not os.environ.get("WANDB_DIR")
        try:
            self._run = wandb.init(
                project=project,
                group=run.group,
                name=os.environ.get("WANDB_NAME") or run.name,
                id=os.environ.get("WANDB_RUN_ID") or run.id_in(project),
                dir=str(run.local(f"{run.folder}/wandb")) if own_folder else None,
                config=run.tree,
                mode=mode,
                resume="allow",
                reinit="create_new",  # by default it would return a run that the user has open in this process
                allow_val_change=True,
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"tracking.tracker 'wandb' cannot start: {error}; or set WANDB_MODE=offline") from error
        self._offline = mode in ("offline", "dryrun")
        self._warned = not self._offline or _has_key(wandb.setup().settings)  # with a key, the user has chosen offline
        for axis in ("step", "task"):
            self._run.define_metric(axis, hidden=True)
        for names, axis in (("train/*", "step"), ("eval/*", "task"), ("cl/*", "task")):
            self._run.define_metric(names, step_metric=axis)

    def log(self, axis: Axis, at: int, metrics: dict[str, float]) -> None:
        self._record(axis, at, metrics)

    def table(self, task: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._record("task", task, {name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def picture(self, task: int, name: str, file: Path) -> None:
        self._record("task", task, {name: wandb.Image(str(file))})

    def _record(self, axis: Axis, at: int, values: dict[str, Any]) -> None:
        """Record values; warn once that they stay here, when handlers of the log are set up."""
        if not self._warned:
            self._warned = True
            log.warning("wandb has no key here, so this run is logged offline; with 'wandb login' the next one is not")
        self._run.log({axis: at, **values})

    def close(self, failed: bool = False) -> None:
        """Finish the run; one that failed is shown as such."""
        folder = Path(self._run.dir).parent
        self._run.finish(exit_code=int(failed))
        if self._offline:
            log.info("the wandb run is on this machine; upload it with: wandb sync %s", folder)


def connects() -> bool:
    """Return whether a run would reach a server: there is a key."""
    return _has_key(wandb.setup().settings)


def _wandb_mode(settings: Any) -> Any:
    """Return the mode that is asked for, `offline` where it needs a key; `wandb.init` would wait for one, and fail."""
    if settings.mode in ("offline", "disabled", "dryrun") or _has_key(settings):
        return settings.mode
    wanted = os.environ.get("WANDB_MODE")
    if wanted:
        raise ConfigError(f"WANDB_MODE is '{wanted}' but there is no key: run 'wandb login' or set WANDB_MODE=offline")
    return "offline"


def _has_key(settings: Any) -> bool:
    return bool(settings.api_key or settings.identity_token_file or _in_netrc(str(settings.base_url)))


def _in_netrc(base_url: str) -> bool:
    """Return whether the netrc file that `wandb login` writes has an entry for the server."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        entries = netrc.netrc(str(path))
    except (OSError, netrc.NetrcParseError):
        return False
    hosts = {urlsplit(base_url).netloc, *(("api.wandb.ai",) if "WANDB_BASE_URL" not in os.environ else ())}
    return any(entries.authenticators(host) for host in hosts)
