"""The driver of a prepared run: it starts workers, again where needed, until all is learned.

The outcome is read from the run's own journal, which is more reliable than what a launcher reports.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from raycl import config as configs
from raycl.backbone import at_commit
from raycl.errors import RunError, StoppedError, UnreachableError
from raycl.launch.console import LOGS
from raycl.launch.parallel_tasks import learn_at_once, parts_of
from raycl.launch.prepared_run import Prepared, finish, resume_line
from raycl.training.definition.job import Draw, Resources, TaskPart, TrainingJob
from raycl.training.records.journal import read_state
from raycl.training.records.publish import open_bank
from raycl.training.records.restoration import publish_again
from raycl.training.records.run_folder import is_stopped
from raycl.training.records.tensor_objects import SharedReader
from raycl.training.workers.stopping import HostStop, StopOnSignal, stopped_by

if TYPE_CHECKING:
    from raycl.launch.task_processes import TaskProcesses
    from raycl.launch.warm_workers import WarmWorkers

log: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that a sweep or a comparison sets.

    Attributes:
        in_process: parts of this process, the only worker, that the run may use; None: `launch.mode` decides.
        shared: see `raycl.launch.worker.Worker`, for a run in this process.
        share: runs that share the cluster, where the config does not set the CPUs of a worker.
        label: prefix of the run's progress lines.
        awaits_decision: after every phase but the last, the workers wait for a decision
            (`raycl.training.records.run_folder`).
        fork_points: number of finished phases -> folder that then gets a fork point.
        stop: place in which the host requests that its runs stop.
        warm: workers that stay between runs; None: each run has new ones.
        processes: processes of this machine for tasks that are learned at the same time, with `launch.mode=local`.
        draw: see `TrainingJob`.
    """

    in_process: Resources | None = None
    shared: SharedReader | None = None
    share: int = 1
    label: str = ""
    awaits_decision: bool = False
    fork_points: dict[int, str] = field(default_factory=dict)
    stop: HostStop | None = None
    warm: WarmWorkers | None = None
    processes: TaskProcesses | None = None
    draw: Draw | None = None


class Launcher(Protocol):
    """Starts the workers of a run.

    Attributes:
        resources: resources of each worker.
    """

    resources: Resources

    def work(self, job: TrainingJob) -> None:
        """Start workers with this job, and wait until they end.

        Raises:
            RunError: they failed. UnreachableError: the run's store does not answer.
        """
        ...


def train(prepared: Prepared, options: RunOptions | None = None) -> dict[str, Any]:
    """Train the stream to its end, or to where its host stops it, and return the results.

    Raises:
        LaunchError: there are no such resources.
        RunError: the workers failed more often than `launch.max_failures`.
        StoppedError: SIGTERM, Ctrl-C or its host stopped it, or its store did not answer for longer than
            `output.retry_s`.
    """
    options = options or RunOptions()
    config = prepared.config
    prepared = replace(prepared, storage=prepared.storage.with_retries(config.output.retry_s))
    phases = len(prepared.phases)
    try:
        if prepared.done < phases:
            log.info("%s", config.train.batch_line(config.launch.workers))
            with _groups(prepared, options) as options, _launcher(prepared, options) as launcher:
                while (done := prepared.done) < phases and not is_stopped(prepared.storage, done):
                    job = job_of(prepared, options, launcher.resources.threads)
                    with _attempt(prepared, options, job.driver):
                        launcher.work(job)
        elif config.bank.publish:  # workers that continue look after this themselves
            bank = open_bank(config.bank, prepared.storage)
            publish_again(bank, prepared.storage, read_state(prepared.storage), continues=False)
        return finish(prepared)
    except UnreachableError as error:
        resume = resume_line(prepared.storage, config)
        raise StoppedError(f"{error}; when it is back, continue with {resume}") from error


@contextmanager
def _groups(prepared: Prepared, options: RunOptions) -> Iterator[RunOptions]:
    """Learn tasks that are learned at the same time; yields the options of the run that joins them, inside which it
    finds the workers that have learned them."""
    schedule = parts_of(prepared)
    if not schedule.waiting:
        yield options
        return
    with ExitStack() as stack:
        if prepared.config.launch.mode == "local":
            from raycl.launch.task_processes import TaskProcesses

            options = replace(options, processes=stack.enter_context(TaskProcesses()))
        else:
            from raycl.launch.cluster import joined
            from raycl.launch.warm_workers import WarmWorkers

            stack.enter_context(joined(prepared.config.launch.address))
            if options.warm is not None:
                stack.enter_context(options.warm.waiting_for(None))
            options = replace(options, warm=stack.enter_context(WarmWorkers(prepared.config.launch.parallel_tasks)))
        learn_at_once(prepared, schedule, options.stop, partial(_work_on_part, prepared, options))
        yield options


def _work_on_part(prepared: Prepared, options: RunOptions, part: TaskPart, stop: HostStop) -> None:
    own = replace(options, label=f"{options.label}{part.name}: ", stop=stop)
    with _launcher(prepared, own, part) as launcher:
        launcher.work(replace(job_of(prepared, own, launcher.resources.threads), part=part))


@contextmanager
def _launcher(prepared: Prepared, options: RunOptions, part: TaskPart | None = None) -> Iterator[Launcher]:
    """Yield the launcher that the config and the options mean; what its workers run on is held inside.

    Args:
        part: the part of the run that it launches; None: what is left of it.
    """
    if part is not None and options.processes is not None:
        from raycl.launch.task_processes import ProcessRun

        yield ProcessRun(options.processes, prepared, options)
        return
    if options.in_process is not None or prepared.config.launch.mode == "local":
        from raycl.launch.local import LocalProcess

        yield LocalProcess(prepared, options)
        return
    if options.warm is not None:
        from raycl.launch.warm_workers import WarmRun, stays_warm

        if stays_warm(prepared.config):
            yield WarmRun(options.warm, prepared, options)
            return
    from raycl.launch.ray_train import RayTrain

    with RayTrain.on_cluster(prepared, options) as launcher:
        yield launcher


@contextmanager
def _attempt(prepared: Prepared, options: RunOptions, driver: str) -> Iterator[None]:
    """Let workers learn the stream, or one phase of it where each has fresh ones; raise what stopped them."""
    done = prepared.done

    def has_begun() -> bool:
        return any(attempt.get("driver") == driver for attempt in read_state(prepared.storage.with_retries(0)).attempts)

    signals = StopOnSignal(prepared.storage, driver, prepared.config.launch.grace_s, has_begun)
    try:
        with signals:
            yield
    except SystemExit:
        if not signals.reason:
            raise
    reason = signals.reason or (options.stop.reason if options.stop is not None else "")
    if reason and prepared.done < len(prepared.phases):
        resume = resume_line(prepared.storage, prepared.config)
        raise stopped_by(reason, f"{_resume_point(prepared)}; continue with {resume}")
    if prepared.done == done:
        raise RunError(f"the workers ended without finishing a phase: see '{prepared.storage.uri}/{LOGS}'")


def job_of(prepared: Prepared, options: RunOptions, threads: int = 1) -> TrainingJob:
    """Return what every worker of a run gets from this process."""
    return TrainingJob(
        config=configs.as_tree(prepared.config),
        folder=prepared.storage.address,
        name=prepared.name,
        driver=uuid.uuid4().hex[:12],
        phases=len(prepared.phases),
        threads=threads,
        singles=prepared.singles,
        replaces=prepared.replaces,
        commit=at_commit(prepared.config.backbone).revision,  # for workers that start later too
        plugins=prepared.info.plugins,
        awaits_decision=options.awaits_decision,
        fork_points=options.fork_points,
        stop=options.stop,
        draw=options.draw,
    )


def _resume_point(prepared: Prepared) -> str:
    newest = read_state(prepared.storage).checkpoints[-1:]
    at = f"checkpoint '{newest[0]}' is the last one" if newest else "before its first checkpoint"
    return f"{prepared.done} of {len(prepared.phases)} tasks are done, {at}"
