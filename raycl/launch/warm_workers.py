"""Workers that stay between runs: each takes one run after another, with everything imported.

A worker group of Ray Train is made of new processes, which import everything again: for a short run that is most of the
processor time. A comparison has many runs; those of one worker go to processes that stay.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raycl.errors import RunError
from raycl.launch import cluster as clusters
from raycl.launch.follow import follow
from raycl.launch.local import in_process_worker
from raycl.launch.ray_train import LOWER, cause_of, raise_failed, raise_left, work_as, worker_resources
from raycl.training.definition.job import Resources, TrainingJob
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.distributed import DistributedContext
from raycl.training.workers.stopping import HostStop

if TYPE_CHECKING:
    from raycl.launch.driver import RunOptions
    from raycl.launch.prepared_run import Prepared

log: logging.Logger = logging.getLogger("raycl")

LOOK_S = 1.0
"""Seconds between two looks at what a run waits for."""


def stays_warm(config: RunConfig) -> bool:
    """Return whether the run's worker may be a process that other runs had before and get after it.

    Not under DeepSpeed, whose process group ends with the run and is not made again.
    """
    return config.launch.workers == 1 and config.engine.name != "deepspeed"


class WarmProcess:
    """The actor: it runs one job after another."""

    def __init__(self, gpus: float) -> None:
        log.handlers = [logging.NullHandler()]  # a run has a log file of its own
        log.propagate = False
        self._device = torch.device("cuda", 0) if gpus else torch.device("cpu")  # Ray shows it its own GPUs alone

    def work(self, job: TrainingJob) -> None:
        """Do the job; nothing of it is left in the process."""
        with in_process_worker():
            work_as(DistributedContext.alone(self._device), job)


@dataclass(frozen=True)
class WarmWorker:
    """An actor on what it holds of the cluster.

    Attributes:
        actor: handle of a `WarmProcess`. room: its placement group.
    """

    actor: Any
    room: PlacementGroup
    resources: Resources

    @staticmethod
    def start(room: PlacementGroup, resources: Resources) -> WarmWorker:
        strategy = PlacementGroupSchedulingStrategy(room)
        takes = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "scheduling_strategy": strategy}
        return WarmWorker(ray.remote(WarmProcess).options(**takes).remote(resources.gpus), room, resources)

    def end(self) -> None:
        """End the process and free what it holds."""
        with suppress(RayError):  # it is dead already
            ray.kill(self.actor)
        remove_placement_group(self.room)


class WarmWorkers:
    """Workers of several runs at a time. Thread-safe; as a context manager it ends them on exit.

    A worker without a run stays, unless what waits for room needs another kind: a run with other resources, or a worker
    group of Ray Train.
    """

    def __init__(self, runs: int) -> None:
        """Start nothing; so many `runs` will begin."""
        self._to_come = runs
        self._idle: list[WarmWorker] = []
        self._waiting: list[Resources | None] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_idle()

    @contextmanager
    def next_run(self) -> Iterator[None]:
        """Enter a run; after it, workers that no later run needs are ended."""
        with self._lock:
            self._to_come -= 1
        yield
        with self._lock:
            ended, self._idle = self._idle[self._to_come :], self._idle[: self._to_come]
        for worker in ended:
            worker.end()

    @contextmanager
    def waiting_for(self, resources: Resources | None) -> Iterator[None]:
        """Let workers of other kinds end as soon as they have no run, inside.

        Args:
            resources: resources of the awaited worker; None: those of a group of Ray Train.
        """
        with self._lock:
            self._waiting.append(resources)
        try:
            self._end_idle(but=resources)
            yield
        finally:
            with self._lock:
                self._waiting.remove(resources)

    @contextmanager
    def acquired(self, resources: Resources, stop: HostStop | None) -> Iterator[WarmWorker | None]:
        """Yield a worker for one run; None: a stop was requested during the wait.

        A worker is ended if what is inside raises.
        """
        worker = self._take_idle(resources) or self._start(resources, stop)
        with ExitStack() as stack:
            if worker is not None:
                stack.callback(worker.end)
            yield worker
            stack.pop_all()
        if worker is not None:
            self._release(worker)

    def _take_idle(self, resources: Resources) -> WarmWorker | None:
        with self._lock:
            fitting = next((worker for worker in self._idle if worker.resources == resources), None)
            if fitting is not None:
                self._idle.remove(fitting)
            return fitting

    def _start(self, resources: Resources, stop: HostStop | None) -> WarmWorker | None:
        """Return a new worker as soon as there is room, or one that another run releases before."""
        with self.waiting_for(resources), clusters.log_while_pending(lambda: True, resources.named(), LOWER):
            room = placement_group([resources.named()])
            while not room.wait(LOOK_S):
                worker = self._take_idle(resources)
                if worker is not None or (stop is not None and stop.is_requested):
                    remove_placement_group(room)
                    return worker
        return WarmWorker.start(room, resources)

    def _release(self, worker: WarmWorker) -> None:
        with self._lock:
            is_wanted = len(self._idle) < self._to_come or worker.resources in self._waiting
            if is_wanted and all(resources == worker.resources for resources in self._waiting):
                self._idle.append(worker)
                return
        worker.end()

    def _end_idle(self, but: Resources | None = None) -> None:
        """End workers without a run, but those with these resources."""
        with self._lock:
            ended = [worker for worker in self._idle if worker.resources != but]
            self._idle = [worker for worker in self._idle if worker.resources == but]
        for worker in ended:
            worker.end()


class WarmRun:
    """Launches a run of one worker on a process that stays.

    Attributes:
        resources: resources of the worker.
    """

    def __init__(self, workers: WarmWorkers, prepared: Prepared, options: RunOptions) -> None:
        """Start nothing.

        Raises:
            LaunchError: the cluster can never provide the worker.
        """
        self._workers, self._prepared, self._options = workers, prepared, options
        self.resources: Resources = worker_resources(prepared.config, options.share)

    def work(self, job: TrainingJob) -> None:
        """Do the job on a worker, and where that fails or dies on a new one, up to `launch.max_failures` times.

        Raises:
            RunError: it failed. UnreachableError: the run's store does not answer.
        """
        limit = self._prepared.config.launch.max_failures
        with follow(job.storage, self._options.label):
            for failures in itertools.count():
                try:
                    with self._workers.acquired(self.resources, self._options.stop) as worker:
                        if worker is not None:
                            ray.get(worker.actor.work.remote(job))
                    return
                except RayError as error:
                    raise_left(job)
                    cause = _cause(error)
                    if failures == limit:
                        raise_failed(self._prepared, job, cause)
                    log.warning("%s%s: a new one starts", self._options.label, cause_of(cause))


def _cause(error: RayError) -> BaseException:
    cause: BaseException = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RayActorError) and not cause.actor_init_failed:
        return RunError("the worker's process died, perhaps killed, perhaps for want of memory")
    return cause


def runs_held(configs: Iterable[RunConfig]) -> int:
    """Return how many of these runs fit at a time: 1 on a Ray of this command's own, else what the cluster's nodes
    hold.

    A run takes what its config says; where that leaves it open, a GPU if the cluster has one for each worker, else the
    CPUs of a node.

    Raises:
        LaunchError: the cluster can never provide the workers of one.
    """
    planned = list(configs)
    if any(clusters.named(config.launch.address) is None for config in planned):
        return 1
    nodes = clusters.nodes()
    held = [clusters.held(nodes, worker_resources(config, len(nodes))) // config.launch.at_once for config in planned]
    return max(1, min(held))
