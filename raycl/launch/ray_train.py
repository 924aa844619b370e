"""Workers of Ray Train: one group runs the whole stream, and restarts from the last checkpoint."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import ray
import torch
from ray.train import FailureConfig, ScalingConfig
from ray.train import RunConfig as RayRunConfig
from ray.train.torch import TorchTrainer, get_device

from raycl.bank.object_store import shared_readers
from raycl.config import Tree
from raycl.errors import LaunchError, RunError, UnreachableError
from raycl.launch import cluster as clusters
from raycl.launch.crashes import error_file, leave_error
from raycl.launch.follow import follow
from raycl.launch.prepared_run import resume_line
from raycl.launch.worker import Worker, work
from raycl.storage import Storage
from raycl.training.definition.job import Resources, TrainingJob
from raycl.training.records.run_folder import CONFIG
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.distributed import DistributedContext

if TYPE_CHECKING:
    from raycl.launch.driver import RunOptions
    from raycl.launch.prepared_run import Prepared

DEFAULTS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
"""Settings under which the end of a run is noticed earlier than Ray's 2 s."""

DEFAULTS_HERE = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""Settings for a Ray of this process alone, whose nodes end together with it."""

HELPERS = frozenset({"DatasetsCallback"})
"""Train's callbacks that start a process for what raycl does not use: it reads its own data. Each process imports Ray
Train again, one to two seconds of a CPU for every worker group."""

HELPERS_HERE = HELPERS | {"PlacementGroupCleanerCallback"}
"""Helpers that are also dropped on a Ray of this process alone, which ends with it: nothing is left to clean up. Where
several commands run on a machine, the cleaner asks another command's Ray whether the run lives, and removes its
workers."""

LOWER = "launch.workers, launch.cpus_per_worker or launch.gpus_per_worker"
"""Settings that ask for resources."""

LOOK_S = 0.2
"""Seconds in which the end of a run is seen here, behind that."""


class RayTrain:
    """Launches a run on the workers of Ray Train.

    Attributes:
        resources: resources of each worker.
    """

    def __init__(self, prepared: Prepared, options: RunOptions, resources: Resources) -> None:
        self.resources = resources
        self._prepared, self._options = prepared, options

    @classmethod
    @contextmanager
    def on_cluster(cls, prepared: Prepared, options: RunOptions) -> Iterator[RayTrain]:
        """Join the cluster, or start one, inside.

        Raises:
            LaunchError: it can never provide the workers.
        """
        config, warm = prepared.config, options.warm
        with clusters.joined(config.launch.address), nullcontext() if warm is None else warm.waiting_for(None):
            yield cls(prepared, options, worker_resources(config, options.share))

    def work(self, job: TrainingJob) -> None:
        """Start one run of Ray Train.

        Raises:
            RunError: the workers failed. UnreachableError: the run's store does not answer.
        """
        config, storage = self._prepared.config, job.storage
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
        _drop_helpers(trainer, HELPERS if named else HELPERS_HERE)
        try:
            with self._progress(storage):
                _fit(trainer)
        except ray.train.TrainingFailedError as error:
            failures = getattr(error, "worker_failures", {}).values()
            cause = next((failure for failure in failures if isinstance(failure, UnreachableError)), error)
            raise_failed(self._prepared, job, cause)
        raise_left(job)

    @contextmanager
    def _progress(self, storage: Storage) -> Iterator[None]:
        """Log the workers' progress lines, and before them the resources that they wait for."""
        workers = self._prepared.config.launch.workers
        requested = {name: amount * workers for name, amount in self.resources.named().items()}
        waiting = clusters.log_while_pending(clusters.is_pending, requested, LOWER)
        with waiting, follow(storage, self._options.label):
            yield


def run_job(job: TrainingJob) -> None:
    """Run the job; Ray Train calls this in every worker."""
    device, context = get_device(), ray.train.get_context()
    world = DistributedContext(context.get_world_rank(), context.get_world_size(), context.get_local_rank(), device)
    work_as(world, job, _report)


def work_as(world: DistributedContext, job: TrainingJob, report: Callable[[Tree], None] | None = None) -> None:
    """Do the job in a process that Ray has started for it.

    A process that fails is started again, which helps after a crash, not after an error of ours: see `work`.

    Args:
        report: see `Worker`.
    """
    storage = job.run_storage
    if not storage.exists(CONFIG):
        raise RunError(
            f"the worker on {socket.gethostname()} does not see '{storage.uri}': "
            "set output.dir to a file system that all nodes share, or to s3://"
        )
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    shares = world.size > 1 or job.config["bank"]["start"]
    work(job, Worker(world, shared_readers() if shares else None, report, restarts=True, hangs=True))


def _report(record: Tree) -> None:
    scores = {f"score/{task}": cell["value"] for task, cell in record["row"].items()}
    ray.train.report({"phase": record["phase"], **scores, **record["times"]})


def _drop_helpers(trainer: TorchTrainer, names: frozenset[str]) -> None:
    """Leave out callbacks with these class names; a Ray without the method keeps its own."""
    if hasattr(trainer, "_create_default_callbacks"):
        create = trainer._create_default_callbacks
        trainer._create_default_callbacks = lambda: [given for given in create() if type(given).__name__ not in names]


def _fit(trainer: TorchTrainer) -> None:
    """Train, in a thread where this is the main one.

    There Ray would put its own handler of Ctrl-C in the place of the command's (`StopOnSignal`), which aborts without a
    checkpoint. The thread ends with Ray at the latest.
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
    def keep(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)
        return True

    with ExitStack() as stack:
        stack.push(keep)
        trainer.fit()


def worker_resources(config: RunConfig, share: int = 1) -> Resources:
    """Return what each worker gets of the cluster, which so many runs share.

    Raises:
        LaunchError: it can never give that.
    """
    launch, nodes = config.launch, clusters.nodes()
    gpus = sum(node.gpus for node in nodes)
    gpu = launch.gpus_per_worker if launch.gpus_per_worker is not None else float(gpus >= launch.workers)
    cpu = launch.cpus_per_worker or (1.0 if gpu else clusters.even_cpus(nodes, launch.at_once * share))
    resources = Resources(cpu, gpu)
    if not launch.wait_for_nodes and clusters.held(nodes, resources) < launch.workers:
        raise LaunchError(
            f"launch.workers={launch.workers} needs {cpu:g} CPUs and {gpu:g} GPUs for each, but the cluster's nodes "
            f"have {clusters.described(nodes)}: request fewer workers, set launch.cpus_per_worker or "
            "launch.gpus_per_worker, or set launch.wait_for_nodes=true if the cluster grows"
        )
    return resources


def raise_left(job: TrainingJob) -> None:
    """Raise the error of ours that ended the workers, if there is one.

    Raises:
        RunError: its message.
    """
    storage = job.storage
    if storage.exists(file := error_file(job.driver)):
        raise RunError(f"{storage.read_json(file)['message']} (run {storage.uri})")


def raise_failed(prepared: Prepared, job: TrainingJob, cause: BaseException) -> NoReturn:
    """Raise what workers failed with that are not started again, and leave it for the run's status.

    Raises:
        UnreachableError: the cause is one. RunError: any other.
    """
    if isinstance(cause, UnreachableError):
        raise cause
    message = f"the workers failed: {cause_of(cause)}; continue with {resume_line(prepared.storage, prepared.config)}"
    leave_error(job.storage, job.driver, RunError(message))
    raise RunError(message) from cause


def cause_of(error: BaseException) -> str:
    """Return the last line of an error's message, or of its cause's."""
    text = str(error.__cause__ or error).strip()
    return text.splitlines()[-1] if text else type(error).__name__
