"""Workers of Ray Train: one group runs the whole stream, and restarts from the last checkpoint."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import ray
import torch
from ray.train import FailureConfig, ScalingConfig
from ray.train import RunConfig as RayRunConfig
from ray.train.torch import TorchTrainer, get_device

from raycl.bank.object_store import shared_readers
from raycl.config import Tree
from raycl.errors import LaunchError, RunError, UnreachableError
from raycl.launch import cluster as clusters
from raycl.launch.console import follow
from raycl.launch.crashes import error_file, leave_error
from raycl.launch.prepared_run import resume_line
from raycl.launch.worker import Worker, work
from raycl.run.config import RunConfig
from raycl.run.folder import CONFIG
from raycl.training.distributed import DistributedContext
from raycl.training.job import Resources, TrainingJob

if TYPE_CHECKING:
    from raycl.launch.driver import RunOptions
    from raycl.launch.prepared_run import Prepared

DEFAULTS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
"""Settings under which the end of a run is noticed earlier than Ray's 2 s."""

DEFAULTS_HERE = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""Settings for a Ray of this process alone, whose nodes end together with it."""

LOOK_S = 0.2
"""Seconds in which the end of a run is seen here, behind that."""


class RayTrain:
    """Launches a run on the workers of Ray Train.

    Attributes:
        resources: resources of each worker.
    """

    def __init__(self, prepared: Prepared, options: RunOptions) -> None:
        """Start nothing."""
        self._prepared, self._options = prepared, options
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Join the cluster, or start one.

        Raises:
            LaunchError: it can never provide the workers.
        """
        config, options = self._prepared.config, self._options
        with ExitStack() as stack:
            stack.enter_context(clusters.joined(config.launch.address))
            self.resources = worker_resources(config, options.share)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def work(self, job: TrainingJob) -> None:
        """Start one run of Ray Train.

        Raises:
            RunError: the workers failed. UnreachableError: the run's store does not answer.
        """
        config, storage = self._prepared.config, self._prepared.storage
        named = clusters.named(config.launch.address) is not None
        for name, value in {**DEFAULTS, **({} if named else DEFAULTS_HERE)}.items():
            os.environ.setdefault(name, value)
        trainer = TorchTrainer(
            partial(run_job, job),
            scaling_config=ScalingConfig(
                num_workers=config.launch.workers,
                use_gpu=bool(self.resources.gpus),
                resources_per_worker=self.resources.named(),
            ),
            run_config=RayRunConfig(
                name=f"{re.sub(r'[^A-Za-z0-9._-]+', '-', job.name)}-{job.driver}",  # Ray takes ASCII alone
                storage_path=storage.path("ray"),
                storage_filesystem=None if storage.is_local else storage.filesystem,
                failure_config=FailureConfig(max_failures=config.launch.max_failures),
            ),
        )
        try:
            with self._progress():
                _fit(trainer)
        except ray.train.TrainingFailedError as error:
            for failure in getattr(error, "worker_failures", {}).values():
                if isinstance(failure, UnreachableError):
                    raise failure from error
            message = f"the workers failed: {_cause(error)}; continue with {resume_line(storage, config)}"
            leave_error(storage, job.driver, RunError(message))
            raise RunError(message) from error
        if storage.exists(error_file(job.driver)):
            raise RunError(f"{storage.read_json(error_file(job.driver))['message']} (run {storage.uri})")

    @contextmanager
    def _progress(self) -> Iterator[None]:
        """Log the workers' progress lines, and before them the resources that they wait for."""
        workers = self._prepared.config.launch.workers
        requested = {name: amount * workers for name, amount in self.resources.named().items()}
        lower = "launch.workers, launch.cpus_per_worker or launch.gpus_per_worker"
        waiting = clusters.log_while_pending(clusters.is_pending, requested, lower)
        with waiting, follow(self._prepared.storage, self._options.label):
            yield


def run_job(job: TrainingJob) -> None:
    """Run the job; Ray Train calls this in every worker.

    It starts a failed group again, which helps after a crash, not after an error of ours: see `work`.
    """
    storage = job.storage
    if not storage.exists(CONFIG):
        raise RunError(
            f"the worker on {socket.gethostname()} does not see '{storage.uri}': "
            "set output.dir to a file system that all nodes share, or to s3://"
        )
    device, context = get_device(), ray.train.get_context()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = DistributedContext(context.get_world_rank(), context.get_world_size(), context.get_local_rank(), device)
    shares = world.size > 1 or job.config["bank"]["start"]
    work(job, Worker(world, shared_readers() if shares else None, _report, restarts=True, hangs=True))


def _report(record: Tree) -> None:
    """Report a finished phase to Ray Train."""
    scores = {f"score/{task}": cell["value"] for task, cell in record["row"].items()}
    ray.train.report({"phase": record["phase"], **scores, **record["times"]})


def _fit(trainer: TorchTrainer) -> None:
    """Train, in a thread where this is the main one.

    There Ray would put its own handler of Ctrl-C in the place of the command's (`raycl.launch.termination`), which
    aborts without a checkpoint. The thread ends with Ray at the latest.
    """
    if threading.current_thread() is not threading.main_thread():
        trainer.fit()
        return
    ended: Future[None] = Future()
    thread = threading.Thread(target=_fit_into, args=(trainer, ended), name="fit", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_S)  # a handler of signals may raise
    ended.result(timeout=0)


def _fit_into(trainer: TorchTrainer, ended: Future[None]) -> None:
    with _Kept(ended):
        trainer.fit()


class _Kept:
    """The outcome of what is inside goes to a future."""

    def __init__(self, ended: Future[None]) -> None:
        self.ended = ended

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
        return True


def worker_resources(config: RunConfig, share: int = 1) -> Resources:
    """Return what each worker gets of the cluster, which so many runs share.

    Raises:
        LaunchError: it can never give that.
    """
    launch, have = config.launch, ray.cluster_resources()
    cpus, gpus = have.get("CPU", 0.0), have.get("GPU", 0.0)
    gpu = launch.gpus_per_worker if launch.gpus_per_worker is not None else float(gpus >= launch.workers)
    even = cpus // (launch.workers * share)
    cpu = launch.cpus_per_worker or max(1.0, even if not gpu else 1.0)
    wanted = (cpu * launch.workers, gpu * launch.workers)
    if not launch.wait_for_nodes and (wanted[0] > cpus or wanted[1] > gpus):
        raise LaunchError(
            f"launch.workers={launch.workers} needs {wanted[0]:g} CPUs and {wanted[1]:g} GPUs, but the cluster has "
            f"{cpus:g} CPUs and {gpus:g} GPUs: request fewer workers, set launch.cpus_per_worker or "
            "launch.gpus_per_worker, or set launch.wait_for_nodes=true if the cluster grows"
        )
    return Resources(cpu, gpu)


def _cause(error: BaseException) -> str:
    text = str(error.__cause__ or error).strip()
    return text.splitlines()[-1] if text else type(error).__name__
