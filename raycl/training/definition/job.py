"""The job of a run's workers: plain values, since they travel to other processes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from raycl.config import Tree
from raycl.plugins import Used
from raycl.storage import Storage
from raycl.training.workers.stopping import HostStop

Draw = Callable[[Tree, Path], None]


@dataclass(frozen=True)
class Resources:
    """CPUs and GPUs of one process."""

    cpus: float
    gpus: float = 0.0

    @property
    def threads(self) -> int:
        """Torch threads of the process."""
        return max(1, int(self.cpus))

    def named(self) -> dict[str, float]:
        """Return the resources by Ray's names, without zeros."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}


TASKS = "tasks"
"""Folder of a run with those of tasks that worker groups learn by themselves."""


@dataclass(frozen=True)
class TaskPart:
    """A part of a run whose tasks are learned at the same time (`launch.parallel_tasks`).

    Attributes:
        kind: learn: the task of a phase, without any other task; score: the phase's row of the matrix, once all its
            tasks are learned; begin: what comes before the first task that is learned: the start from a snapshot, and
            a phase that has a checkpoint already.
        phase: index of the phase. name: its name.
    """

    kind: Literal["begin", "learn", "score"]
    phase: int
    name: str

    @property
    def folder(self) -> str:
        """The folder of the phase in that of the run, which holds what is done of it apart from the others."""
        return f"{TASKS}/{self.phase:03d}-{self.name}"


@dataclass(frozen=True)
class TrainingJob:
    """A run as its workers get it, all of them the same.

    Attributes:
        config: tree of its config. folder: address of its folder. name: name of the folder.
        driver: the process that starts the workers, for the journal and requests to stop.
        phases: number of phases of the run.
        threads: torch threads of each worker.
        singles, replaces: see `RunInfo`.
        commit: commit of the backbone on the hub; None: it is in a folder.
        plugins: parts of other packages that the run uses, which every worker must have.
        awaits_decision: after every phase but the last, workers wait for a decision
            (`raycl.training.records.run_folder`).
        fork_points: number of finished phases -> folder that then gets a fork point.
        stop: where a sweep or a comparison requests that its runs stop.
        draw: draws the matrix of a result tree as a PNG, for trackers.
        part: the part of the run that these workers do; None: all that is left of it.
    """

    config: Tree
    folder: str
    name: str
    driver: str
    phases: int
    threads: int = 1
    singles: dict[str, float] | None = None
    replaces: str = ""
    commit: str | None = None
    plugins: Used = field(default_factory=dict)
    awaits_decision: bool = False
    fork_points: dict[int, str] = field(default_factory=dict)
    stop: HostStop | None = None
    draw: Draw | None = None
    part: TaskPart | None = None

    @property
    def run_storage(self) -> Storage:
        """The run's folder, with the retries of its config."""
        return Storage.at(self.folder).with_retries(self.config["output"]["retry_s"])

    @property
    def storage(self) -> Storage:
        """The folder of these workers: the run's, or that of their task."""
        if self.part is None or self.part.kind == "begin":
            return self.run_storage
        return self.run_storage.sub(self.part.folder)
