"""Ray Train: one worker group runs the whole stream, and restarts from the last checkpoint.

The driver validates everything it can, writes the config, requests workers from the cluster, and reads the outcome from
the run's own journal, which is more reliable than Ray's record of reported checkpoints.
"""

from __future__ import annotations

import copy
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.train import FailureConfig, ScalingConfig
from ray.train import RunConfig as RayRunConfig

from raycl import config as configs
from raycl.config import trust
from raycl.config.addresses import announce
from raycl.data.stream import Stream
from raycl.errors import (
    AlreadyExistsError,
    RayclError,
    ResumeError,
    RunError,
    StoppedError,
    UnreachableError,
)
from raycl.launch import cluster as clusters
from raycl.launch.console import LOGS, follow
from raycl.launch.termination import StopOnSignal, exit_on_sigterm, exits_on_sigterm, stopped_by
from raycl.launch.trainer import StreamTrainer, scaling_of
from raycl.launch.worker import error_file, in_process_worker, leave_error, worker_main
from raycl.run import checks
from raycl.run import config as run_config
from raycl.run.config import RunConfig
from raycl.run.extension import other_changes, own_limits, with_tasks
from raycl.run.fingerprints import inputs_of
from raycl.run.folder import CONFIG, resume_arguments, run_at
from raycl.storage import Storage
from raycl.storage.records import hashed
from raycl.training.records.journal import RunState, check_inputs, check_owner, last_attempt, read_state
from raycl.training.records.publish import open_bank, publish_again
from raycl.training.records.results import build_results
from raycl.training.records.stops.request import HostStop
from raycl.training.records.stops.signal import is_stopped
from raycl.training.settings import EXEMPT
from raycl.training.training_context import RunInfo
from raycl.types import Phase


@dataclass(frozen=True)
class Prepared:
    """A validated run with its folder, ready to start or to continue.

    Attributes:
        replaces: fingerprint of the config that the folder's claims had when this one was compared with it.
    """

    config: RunConfig
    stream: Stream
    storage: Storage
    name: str
    singles: dict[str, float] | None
    replaces: str = ""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What is trained one after another."""
        return run_config.phases(self.config, self.stream)

    @property
    def info(self) -> RunInfo:
        """What identifies the run."""
        return run_config.info_of(self.config, self.singles, self.replaces)

    @property
    def done(self) -> int:
        """Phases that are trained and evaluated."""
        return len(read_state(self.storage).phases)


def prepare(config: RunConfig) -> Prepared:
    """Validate a new run and give it a folder. The first worker's claim decides which run owns it.

    Raises:
        RayclError: bad input, or the folder holds a run already.
    """
    name = run_config.name_of(config)
    if name is not None:
        storage = run_config.directory(config).sub(name)
        if storage.exists(CONFIG) and last_attempt(storage):  # a run that never started holds nothing to lose
            if config.output.exists == "resume":
                return reopen(storage.address, config)
            raise RunError(
                f"'{storage.uri}' holds a run already: continue with {resume_line(storage, config)}, or choose another "
                "output.name"
            )
    stream, singles = checks.check_new_run(config)
    text = configs.to_yaml(config).encode()
    if name is None:
        storage, name = _new_folder(config, text)
    else:
        storage.write(CONFIG, text)
    return Prepared(config, stream, storage, name, singles)


def _new_folder(config: RunConfig, text: bytes) -> tuple[Storage, str]:
    """Create a new folder with the config; two runs that start at once get one each."""
    root = run_config.directory(config)
    for name in run_config.free_names(config):
        try:
            root.sub(name).create(CONFIG, text)
        except AlreadyExistsError:
            continue
        return root.sub(name), name
    raise AssertionError("there is always a free name")


def reopen(folder: str, wanted: RunConfig | None = None, overrides: tuple[str, ...] = ()) -> Prepared:
    """Go on with the run in `folder`.

    Args:
        wanted: the config that the caller has; None: the run's own, with `overrides`.

    Raises:
        ResumeError: there is no run, or a setting, data or a model that changes what is learned differs.
        ConfigError: the run requests what `overrides` do not allow (`raycl.config.trust`).
    """
    storage, old, state = run_in(folder)
    new = wanted or _allowed(_config_of(storage, state, overrides), overrides, storage)
    _refuse(folder, configs.differences(configs.as_tree(old), configs.as_tree(new), without=EXEMPT))
    return _continued(new, storage, state)


def extend(folder: str, added: Sequence[str], overrides: tuple[str, ...] = ()) -> Prepared:
    """Go on with the run in `folder`, finished or not, with more tasks at the end of its stream.

    Args:
        added: see `raycl.run.extension.with_tasks`.

    Raises:
        ResumeError: there is no run, its method takes no more tasks, or another setting differs.
        ConfigError, DataError: the tasks are not there.
    """
    storage, old, state = run_in(folder)
    learned = [str(record["times"]["phase"]) for record in state.phases]
    new = with_tasks(_allowed(_config_of(storage, state, overrides), overrides, storage), added, learned)
    new = own_limits(old, new, len(added))
    _refuse(folder, other_changes(old, new, len(added)))
    found = _continued(new, storage, state)
    checks.warn_of_mistakes(found.stream, len(added))
    return found


def _continued(config: RunConfig, storage: Storage, state: RunState) -> Prepared:
    """The run with a config that may follow that of `state`; the next claim records it."""
    stream, singles = checks.check(config), checks.read_singles(config)
    check_inputs(storage, state, inputs_of(config, stream))
    return Prepared(config, stream, storage, storage.root.rsplit("/", 1)[-1], singles, state.fingerprint)


def run_in(folder: str) -> tuple[Storage, RunConfig, RunState]:
    """Folder, config and state of a run (`ResumeError`: there is none); its data is not looked at."""
    storage = run_at(folder)
    state = read_state(storage)
    config = _config_of(storage, state)
    announce(configs.as_tree(config), storage.address)
    return storage, config, state


def _refuse(folder: str, changed: dict[str, tuple[Any, Any]]) -> None:
    if changed:
        listed = "; ".join(f"{key} was {before!r}, now {after!r}" for key, (before, after) in changed.items())
        raise ResumeError(f"'{folder}' cannot continue with a changed config: {listed}; start a new run instead")


def _allowed(config: RunConfig, overrides: tuple[str, ...], storage: Storage) -> RunConfig:
    """The config, if these overrides allow what it requests (`raycl.config.trust`)."""
    trust.require(trust.requested(configs.as_tree(config)), overrides, f"the run '{storage.uri}'")
    return config


def resume_line(storage: Storage, config: RunConfig) -> str:
    """Arguments of the job that resume a run."""
    return resume_arguments(storage, configs.as_tree(config))


def _config_of(storage: Storage, state: RunState, overrides: tuple[str, ...] = ()) -> RunConfig:
    """The config that the run's claims recorded; before the first, and of older versions, its file."""
    tree: dict[str, Any] = copy.deepcopy(state.config) or configs.from_yaml(
        storage.read_text(CONFIG), f"{storage.uri}/{CONFIG}"
    )
    for override in overrides:
        configs.apply_override(tree, override)
    return configs.validate(RunConfig, tree)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that a sweep or a comparison sets.

    Attributes:
        in_process: the run's only worker is this process, which holds the worker's CPUs and GPUs (Ray Train's local
            mode).
        share: runs that share the cluster, where the config does not set the CPUs of a worker.
        label: prefix of the run's progress lines.
        awaits_decision: after every phase but the last, the workers wait for a decision
            (`raycl.training.records.stops.signal`).
        fork_points: number of finished phases -> folder that then gets a fork point.
        stop: where the host requests that its runs stop.
    """

    in_process: bool = False
    share: int = 1
    label: str = ""
    awaits_decision: bool = False
    fork_points: dict[int, str] = field(default_factory=dict)
    stop: HostStop | None = None


def train(prepared: Prepared, options: RunOptions | None = None) -> dict[str, Any]:
    """Run the stream on Ray to its end, or to where its host stops it, and return the results.

    Raises:
        LaunchError: the cluster cannot provide the workers.
        RunError: the workers failed more often than `launch.max_failures`.
        StoppedError: SIGTERM, Ctrl-C or its host stopped it, or its store did not answer for longer than
            `output.retry_s`.
    """
    storage = prepared.storage.with_retries(prepared.config.output.retry_s)
    try:
        return _train(replace(prepared, storage=storage), options or RunOptions())
    except UnreachableError as error:
        resume = resume_line(storage, prepared.config)
        raise StoppedError(f"{error}; when it is back, continue with {resume}") from error


def _train(prepared: Prepared, options: RunOptions) -> dict[str, Any]:
    phases = len(prepared.phases)
    if prepared.done < phases:
        with cluster(prepared.config):
            scaling = scaling_of(prepared.config, options.share)
            while (done := prepared.done) < phases and not is_stopped(prepared.storage, done):
                _fit(prepared, scaling, done, options)
    elif prepared.config.bank.publish:  # workers that continue look after this themselves
        bank = open_bank(prepared.config.bank, prepared.storage)
        publish_again(bank, prepared.storage, read_state(prepared.storage), continues=False)
    return finish(prepared)


def finish(prepared: Prepared) -> dict[str, Any]:
    """Results from the journal, written to `results.json`.

    Raises:
        ResumeError: what is in the journal is another run's.
    """
    state = read_state(prepared.storage)
    check_owner(prepared.storage, state, prepared.info)
    results = build_results(prepared.info, prepared.stream, prepared.phases, state)
    prepared.storage.write_json("results.json", hashed(results))
    return results


@contextmanager
def cluster(config: RunConfig, dashboard: bool = False) -> Iterator[None]:
    """Join the cluster, or start one on this machine; a cluster that we started is stopped again.

    Args:
        dashboard: start it too; without it Train's cleaner of what a dead trial leaves behind cannot work.
    """
    if ray.is_initialized():
        yield
        return
    # Progress comes through the run's own log (`follow`): Ray's forwarding would mix in its helpers' chatter. Without
    # the dashboard a local start takes a third of the time; what it would clean up ends with the cluster anyway.
    exits = exits_on_sigterm()
    clusters.connect(config.launch.address, dashboard=dashboard)
    if exits:  # Ray has put its own handler there
        exit_on_sigterm()
    try:
        yield
    finally:
        ray.shutdown()


def job_of(prepared: Prepared, options: RunOptions, driver: str, threads: int = 1, gpu: bool = False) -> dict[str, Any]:
    """What every worker of a run is given (`raycl.launch.worker.worker_main`).

    Args:
        driver: the process that starts them (journal). threads: torch threads of each. gpu: whether each has one.
    """
    return {
        "driver": driver,
        "config": configs.as_tree(prepared.config),
        "folder": prepared.storage.address,
        "retry_s": prepared.config.output.retry_s,
        "name": prepared.name,
        "singles": prepared.singles,
        "replaces": prepared.replaces,
        "stop_after": 1 if prepared.config.launch.fresh_workers_per_task else None,
        "threads": threads,
        "in_process": options.in_process,
        "gpu": gpu,
        "awaits_decision": options.awaits_decision,
        "phases": len(prepared.phases),
        "fork_points": options.fork_points,
        "commit": run_config.commit_of(prepared.config),
        "plugins": prepared.info.plugins,
        "stop": options.stop,
    }


def _fit(prepared: Prepared, scaling: ScalingConfig, done: int, options: RunOptions) -> None:
    """One Ray Train run: the whole stream, or one phase of it (with fresh workers, if not `in_process`)."""
    config, storage = prepared.config, prepared.storage
    driver = uuid.uuid4().hex[:12]
    job = job_of(prepared, options, driver, max(1, int(scaling.num_cpus_per_worker)), bool(scaling.use_gpu))
    ray_run = RayRunConfig(
        name=f"{re.sub(r'[^A-Za-z0-9._-]+', '-', prepared.name)}-{driver}",  # Ray takes ASCII alone
        storage_path=storage.path("ray"),
        storage_filesystem=None if storage.is_local else storage.filesystem,
        failure_config=FailureConfig(max_failures=config.launch.max_failures),
    )
    requested = ScalingConfig(num_workers=0, use_gpu=scaling.use_gpu) if options.in_process else scaling
    train: dict[str, Any] = {"train_loop_config": job, "scaling_config": requested, "run_config": ray_run}
    trainer = StreamTrainer(worker_main, named=clusters.named(config.launch.address) is not None, **train)
    signals = StopOnSignal(storage, driver, config.launch.grace_s)
    try:
        with signals, in_process_worker() if options.in_process else _log_progress(storage, scaling, options.label):
            trainer.fit()
    except SystemExit:
        if not signals.reason:
            raise
    except ray.train.TrainingFailedError as error:
        for failure in getattr(error, "worker_failures", {}).values():
            if isinstance(failure, UnreachableError):
                raise failure from error
        message = f"the workers failed: {_cause(error)}; continue with {resume_line(storage, config)}"
        leave_error(storage, driver, RunError(message))
        raise RunError(message) from error
    except UnreachableError:
        raise
    except RayclError as error:  # of a worker in this process
        raise RunError(f"{error} (run {storage.uri})") from error
    if storage.exists(error_file(driver)):
        raise RunError(f"{storage.read_json(error_file(driver))['message']} (run {storage.uri})")
    reason = signals.reason or (options.stop.reason if options.stop is not None else "")
    if reason and prepared.done < len(prepared.phases):
        raise stopped_by(reason, f"{_resume_point(prepared)}; continue with {resume_line(storage, config)}")
    if prepared.done == done:
        raise RunError(f"the workers ended without finishing a phase: see '{storage.uri}/{LOGS}'")


def _resume_point(prepared: Prepared) -> str:
    """The progress of a stopped run, for its message."""
    newest = read_state(prepared.storage).checkpoints[-1:]
    at = f"checkpoint '{newest[0]}' is the last one" if newest else "before its first checkpoint"
    return f"{prepared.done} of {len(prepared.phases)} tasks are done, {at}"


@contextmanager
def _log_progress(storage: Storage, scaling: ScalingConfig, label: str) -> Iterator[None]:
    """Log the workers' progress lines, and before them the resources that they wait for."""
    each, workers = scaling.resources_per_worker or {}, int(scaling.num_workers)
    requested = {name: amount * workers for name, amount in each.items()}
    lower = "launch.workers, launch.cpus_per_worker or launch.gpus_per_worker"
    with clusters.log_while_pending(clusters.is_pending, requested, lower), follow(storage, label):
        yield


def _cause(error: BaseException) -> str:
    text = str(error.__cause__ or error).strip()
    return text.splitlines()[-1] if text else type(error).__name__
