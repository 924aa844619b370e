"""Runs in this process as their only worker: no Ray, no other process, so a debugger stops inside a method."""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from raycl.errors import LaunchError, RayclError, RunError, StorageError, UnreachableError
from raycl.launch.crashes import leave_error
from raycl.launch.worker import Worker, work
from raycl.storage import Storage
from raycl.training.definition.job import Resources, TrainingJob
from raycl.training.definition.settings import LaunchConfig
from raycl.training.records.tensor_objects import SharedReader
from raycl.training.workers.distributed import DistributedContext
from raycl.training.workers.memory import forget_peak, gpus_in_use, return_freed_memory

if TYPE_CHECKING:
    from raycl.launch.driver import RunOptions
    from raycl.launch.prepared_run import Prepared

log: logging.Logger = logging.getLogger("raycl")


class LocalProcess:
    """Launches a run in this process.

    Attributes:
        resources: parts of this process that the run uses.
    """

    def __init__(self, prepared: Prepared, options: RunOptions) -> None:
        """Start nothing.

        Raises:
            LaunchError: the config asks for a GPU, and there is none.
        """
        self._prepared, self._options = prepared, options
        self.resources: Resources = options.in_process or own_resources(prepared.config.launch)

    def work(self, job: TrainingJob) -> None:
        """Do the job here.

        An exception that is none of ours is raised as it is, with its trace; the run's status says so.

        Raises:
            RunError: the run failed. UnreachableError: its store does not answer.
        """
        options, storage = self._options, self._prepared.storage
        try:
            work_here(job, self.resources, options.shared, restarts=options.in_process is not None)
        except UnreachableError:
            raise
        except RayclError as error:
            raise RunError(f"{error} (run {storage.uri})") from error


def work_here(
    job: TrainingJob, resources: Resources, shared: SharedReader | None = None, restarts: bool = False
) -> None:
    """Do the job in this process; an exception that is none of ours is recorded for the status of the run.

    Args:
        shared, restarts: see `Worker`.

    Raises:
        RayclError: the run failed.
    """
    world = DistributedContext.alone(torch.device("cuda" if resources.gpus else "cpu"))
    with in_process_worker(), ExitStack() as stack:
        stack.push(partial(_leave_fault, job.storage, job.driver))
        work(job, Worker(world, shared, restarts=restarts))


def own_resources(launch: LaunchConfig) -> Resources:
    """Return what each process of a run with `launch.mode=local` uses: its share of the CPUs that this process may use,
    and a GPU, unless the config says.

    Raises:
        LaunchError: the config asks for a GPU, and there is none.
    """
    cpus = launch.cpus_per_worker or max(1.0, float(available_cpus() // launch.parallel_tasks))
    gpus = float(torch.cuda.is_available()) if launch.gpus_per_worker is None else launch.gpus_per_worker
    if gpus and not torch.cuda.is_available():
        raise LaunchError(
            f"launch.gpus_per_worker={gpus:g} with launch.mode=local, but this process sees no GPU: leave it out to "
            "train on the CPU"
        )
    return Resources(cpus, gpus)


def available_cpus() -> int:
    """Return the number of CPUs that this process may use; fewer than the machine has, where it is a container's."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cpus = os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such group, or "max" of it
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cpus = min(cpus, math.ceil(quota / period))
    return cpus


@contextmanager
def in_process_worker() -> Iterator[None]:
    """Run a worker inside another process; on exit its changes are reverted and its memory is freed."""
    threads, state = torch.get_num_threads(), random.getstate()
    forget_peak()
    try:
        with torch.random.fork_rng(gpus_in_use()):
            yield
    finally:
        random.setstate(state)
        torch.set_num_threads(threads)
        return_freed_memory()
        torch.cuda.empty_cache()


def _leave_fault(storage: Storage, driver: str, kind: type[BaseException] | None, error: object, trace: object) -> None:
    """Record an exception other than ours for the status of the run; it is raised again."""
    if isinstance(error, Exception) and not isinstance(error, RayclError):
        with suppress(StorageError):
            leave_error(storage, driver, RunError(f"{type(error).__name__}: {error}"))
