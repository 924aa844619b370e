"""Settings of a run that no part of it reads for itself: where its workers run, and where it writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from raycl.config import Section
from raycl.config.names import FolderName


class LaunchConfig(Section):
    """Workers, and the Ray cluster that they run on."""

    mode: Literal["ray", "local"] = Field(
        "ray",
        description="ray: workers of Ray Train; local: this process is the only worker, without Ray: it starts in "
        "seconds, and a debugger stops in it",
    )
    workers: int = Field(1, ge=1, description="processes that train together")
    cpus_per_worker: float | None = Field(
        None, gt=0, description="CPUs of a worker; null: the cluster's CPUs shared evenly"
    )
    gpus_per_worker: float | None = Field(
        None, ge=0, description="GPUs of a worker; null: 1 if the cluster has one for each worker"
    )
    address: str | None = Field(None, description="Ray cluster to join; null: $RAY_ADDRESS, else one is started here")
    max_failures: int = Field(3, ge=-1, description="restarts of the worker group after crashes; -1: no limit")
    wait_for_nodes: bool = Field(
        False, description="wait for workers that the cluster cannot hold yet, because it grows"
    )
    grace_s: float = Field(
        110.0,
        ge=0,
        description="seconds after SIGTERM or Ctrl-C in which workers may write a checkpoint, before the command ends",
    )
    hang_s: float | None = Field(
        None,
        gt=0,
        description="a worker that makes no progress for so many seconds is ended, and the group starts again; null: "
        "never. Longer than its longest step: an optimizer step, the evaluation of one task, preparing one",
    )

    @model_validator(mode="after")
    def _one_worker_in_this_process(self) -> Self:
        if self.mode == "local" and self.workers > 1:
            raise ValueError(
                f"launch.workers is {self.workers}, and with launch.mode=local this process is the only worker: set "
                "launch.workers to 1, or launch.mode to ray"
            )
        return self

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield what is about Ray, and about other processes, in a run of this process alone."""
        if self.mode == "local":
            names = ("address", "max_failures", "wait_for_nodes", "hang_s")
            yield from ((name, "mode=local") for name in names)


class OutputConfig(Section):
    """The folder of the run."""

    dir: str | None = Field(
        None,
        description="folder or s3:// URI that every worker reaches; null: $RAYCL_RUNS, else ~/raycl-runs in a "
        "submitted job (whose own folder is temporary), else ./runs",
    )
    name: FolderName | None = Field(
        None,
        description="folder of this run, a plain name in any script; null: $RAYCL_RUN_NAME, else made from stream, "
        "backbone, method, seed",
    )
    retry_s: float = Field(
        180.0, ge=0, description="seconds for which operations of a store that does not answer are retried"
    )
    exists: str = Field(
        "error",
        pattern="^(error|resume)$",
        description="what happens if the run is there already. error: stop; resume: continue it",
    )
