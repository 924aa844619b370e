"""Weights & Biases or TensorBoard behind one small interface.

The training loop logs numbers without knowing where they go, and a resumed run continues the earlier curves.
The only place that imports `wandb` or TensorBoard, and only when they are configured.

Resuming: the wandb run id is derived from project and run name, so the same name is the same wandb run. Steps are
logged as a number of their own and made the x-axis, because wandb drops points whose own step counter goes back.
TensorBoard hides points of an earlier attempt from the first step logged again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import netrc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import Field

from raycl.config import PathOrUri, Section, Tree
from raycl.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("raycl")

Cell = str | float | None


class TrackingConfig(Section):
    """A tracker for metrics, besides the run's own files."""

    backend: Literal["none", "wandb", "tensorboard", "auto"] = Field(
        "none",
        description="auto: wandb if it is installed and has a key, else tensorboard if it is installed, else none",
    )
    project: str = Field("raycl", description="wandb project")
    group: str | None = Field(None, description="wandb group, for runs of one comparison")
    directory: PathOrUri = Field(None, description="folder of the backend's files; null: below the run's folder")

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield the settings of a tracker where there is none; TensorBoard has no projects."""
        if self.backend == "none":
            yield from ((name, "backend=none") for name in ("project", "group", "directory"))
        elif self.backend == "tensorboard":
            yield from ((name, "backend=tensorboard") for name in ("project", "group"))


class Tracker(Protocol):
    """Takes numbers until closed."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record numbers of one step; steps may repeat after a resume."""
        ...

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table as it is at one step.

        Args:
            rows: names, numbers, and None for cells that are empty.
        """
        ...

    def close(self, failed: bool = False) -> None:
        """Write out what is pending; nothing may be logged afterwards.

        Args:
            failed: the run ended with an error.
        """
        ...


def open_tracker(config: TrackingConfig, run_name: str, tree: Tree, directory: str | Path) -> Tracker | None:
    """Start or continue tracking of a run; None: it has no tracker.

    Args:
        run_name: the same for all attempts of a run.
        tree: the resolved config, stored with the run.
        directory: the run's folder, a local path if `config.directory` is None.

    Raises:
        ConfigError: the library is not installed, cannot start, or has no local folder to write to.
    """
    backend = _choose() if config.backend == "auto" else config.backend
    if backend == "none":
        return None
    text = config.directory or f"{directory}/{backend}"
    if "://" in text:
        raise ConfigError(f"tracking needs a local folder but the run writes to '{text}': set tracking.directory")
    folder = Path(text).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    if backend == "wandb":
        return WandbTracker(config, run_name, tree, folder)
    return TensorBoardTracker(tree, folder)


class WandbTracker:
    """One wandb run, offline when there is no key (`wandb sync` uploads it later)."""

    def __init__(self, config: TrackingConfig, run_name: str, tree: Tree, folder: Path) -> None:
        self._wandb = wandb = _import_wandb()
        mode = _wandb_mode(wandb.setup().settings)
        try:
            self._run = wandb.init(
                project=config.project,
                group=config.group,
                name=run_name,
                id=wandb_run_id(config.project, run_name),
                dir=str(folder),
                config=tree,
                mode=mode,
                resume="allow",
                allow_val_change=True,
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"tracking.backend 'wandb' cannot start: {error}; or set WANDB_MODE=offline") from error
        self._offline = mode in ("offline", "dryrun")
        self._warned = not self._offline or _has_key(wandb.setup().settings)  # with a key, the user has chosen offline
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record numbers of one step."""
        self._warn_offline()
        self._run.log({"step": step, **metrics})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table of wandb's."""
        self._warn_offline()
        self._run.log({"step": step, name: self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def _warn_offline(self) -> None:
        """Warn once, when there is something to log: handlers may be missing before that."""
        if not self._warned:
            self._warned = True
            log.warning("wandb has no key here, so this run is logged offline; with 'wandb login' the next one is not")

    def close(self, failed: bool = False) -> None:
        """Finish the run; one that failed is shown as such."""
        folder = Path(self._run.dir).parent
        self._run.finish(exit_code=int(failed))
        if self._offline:
            log.info("the wandb run is on this machine; upload it with: wandb sync %s", folder)


class TensorBoardTracker:
    """One TensorBoard event file per attempt; the file is opened at the first number, whose step purges later ones."""

    def __init__(self, tree: Tree, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("tracking.backend 'tensorboard' needs: pip install 'raycl[tensorboard]'") from error
        self._open = SummaryWriter
        self._folder = folder
        self._tree = tree
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record numbers of one step."""
        for name, value in metrics.items():
            self._opened(step).add_scalar(name, value, step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table as Markdown text."""
        lines = [columns, *rows]
        text = [f"| {' | '.join(map(_cell, line))} |" for line in lines]
        self._opened(step).add_text(name, "\n".join([text[0], "|" + "---|" * len(columns), *text[1:]]), step)

    def _opened(self, step: int) -> SummaryWriter:
        if self._writer is None:
            self._writer = self._open(str(self._folder), purge_step=step)
            self._writer.add_text("config", f"```\n{self._tree}\n```", step)
        return self._writer

    def close(self, failed: bool = False) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    return value.replace("|", "\\|") if isinstance(value, str) else f"{value:.1f}"


def wandb_run_id(project: str, run_name: str) -> str:
    """Return the wandb id of a run: the same name in the same project is the same run, on every attempt."""
    return hashlib.sha256(f"{project}/{run_name}".encode()).hexdigest()[:16]


def _choose() -> Literal["none", "wandb", "tensorboard"]:
    if _installed("wandb") and _has_key(_import_wandb().setup().settings):
        return "wandb"
    return "tensorboard" if _installed("tensorboard") else "none"


def _installed(package: str) -> bool:
    """Return whether a package is installed; a mere folder of that name (wandb makes one) does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _import_wandb() -> Any:
    if not _installed("wandb"):
        raise ConfigError("tracking.backend 'wandb' needs: pip install 'raycl[wandb]'")
    import wandb

    return wandb


def _wandb_mode(settings: Any) -> str:
    """Return the mode that environment and wandb's settings files ask for; `offline` if it would need a key we lack.

    Decided before `wandb.init`, which would wait for an answer and then fail.

    Raises:
        ConfigError: WANDB_MODE asks for a connection without a key.
    """
    if settings.mode in ("offline", "disabled", "dryrun") or _has_key(settings):
        return str(settings.mode)
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
