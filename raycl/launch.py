"""Ray Train: one worker group runs the whole stream, and is started again where it died.

Why it exists: the driver validates everything it can, writes the config, asks the cluster for workers, and reads
the outcome from the run's own ledger, which it trusts more than Ray's record of reported checkpoints.
What it does not know: how training works (`raycl.train`), what the parts are (`raycl.run`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import ray
import torch
from ray.train import FailureConfig, ScalingConfig
from ray.train import RunConfig as RayRunConfig
from ray.train.torch import TorchTrainer, get_device

from raycl import config as configs
from raycl import run as runs
from raycl.data.stream import Stream
from raycl.errors import LaunchError, RayclError, ResumeError, RunError
from raycl.extension import other_changes, with_tasks
from raycl.run import EXEMPT, RunConfig
from raycl.storage import Storage
from raycl.tracking import open_tracker
from raycl.train.branch import lend
from raycl.train.ledger import last_attempt, read_state
from raycl.train.loop import StreamLoop
from raycl.train.parts import RunInfo
from raycl.train.results import build_results
from raycl.train.verdict import is_stopped, wait_for_word
from raycl.train.world import World
from raycl.types import Stage

log = logging.getLogger("raycl")
CONFIG = "config.yaml"
LOGS = "log"
FOLLOW_S = 1.0


@dataclass(frozen=True)
class Prepared:
    """A validated run with its folder, ready to start or to go on."""

    config: RunConfig
    stream: Stream
    storage: Storage
    name: str
    singles: dict[str, float] | None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What is trained one after another."""
        return runs.stages(self.config, self.stream)

    @property
    def done(self) -> int:
        """Stages that are trained and evaluated."""
        return len(read_state(self.storage).stages)


def prepare(config: RunConfig) -> Prepared:
    """Validate a new run and claim its folder.

    Raises:
        RayclError: bad input, or the folder holds a run already.
    """
    storage, name = runs.run_folder(config)
    if storage.exists(CONFIG) and last_attempt(storage):  # a run that never started holds nothing to lose
        if config.output.exists == "resume":
            return reopen(storage.address, config)
        raise RunError(
            f"'{storage.uri}' holds a run already: go on with --resume {storage.uri}, or choose another output.name"
        )
    stream = runs.check(config)
    singles = runs.read_singles(config)
    storage.write(CONFIG, configs.to_yaml(config).encode())
    return Prepared(config, stream, storage, name, singles)


def reopen(folder: str, wanted: RunConfig | None = None, overrides: tuple[str, ...] = ()) -> Prepared:
    """Go on with the run in `folder`.

    Args:
        wanted: the config that the caller has; None: the run's own, with `overrides`.

    Raises:
        ResumeError: there is no run, or a setting that changes what is learned differs.
    """
    storage, old = _run_in(folder)
    new = wanted or _config_of(storage, overrides)
    _refuse(folder, configs.differences(configs.as_tree(old), configs.as_tree(new), without=EXEMPT))
    return Prepared(new, runs.check(new), storage, storage.uri.rsplit("/", 1)[-1], runs.read_singles(new))


def extend(folder: str, added: Sequence[str], overrides: tuple[str, ...] = ()) -> Prepared:
    """Go on with the run in `folder`, finished or not, with more tasks at the end of its stream.

    Args:
        added: see `raycl.extension.with_tasks`.

    Raises:
        ResumeError: there is no run, its method takes no more tasks, or another setting differs.
        ConfigError, DataError: the tasks are not there.
    """
    storage, old = _run_in(folder)
    new = with_tasks(_config_of(storage, overrides), added)
    _refuse(folder, other_changes(old, new, len(added), without=EXEMPT))
    prepared = Prepared(new, runs.check(new), storage, storage.uri.rsplit("/", 1)[-1], runs.read_singles(new))
    storage.write(CONFIG, configs.to_yaml(new).encode())  # last: from now on the run has these tasks
    return prepared


def _run_in(folder: str) -> tuple[Storage, RunConfig]:
    storage = Storage.at(folder)
    if not storage.exists(CONFIG):
        raise ResumeError(f"'{folder}' holds no run (no {CONFIG}): give the run directory that an earlier run printed")
    return storage, _config_of(storage)


def _refuse(folder: str, changed: dict[str, tuple[Any, Any]]) -> None:
    if changed:
        listed = "; ".join(f"{key} was {before!r}, now {after!r}" for key, (before, after) in changed.items())
        raise ResumeError(f"'{folder}' cannot go on with a changed config: {listed}; start a new run instead")


def _config_of(storage: Storage, overrides: tuple[str, ...] = ()) -> RunConfig:
    tree: dict[str, Any] = configs.from_yaml(storage.read(CONFIG).decode(), f"{storage.uri}/{CONFIG}")
    for override in overrides:
        configs.apply_override(tree, override)
    return configs.validate(RunConfig, tree)


@dataclass(frozen=True)
class Hosting:
    """What a host of many runs (a sweep, a comparison) asks of each.

    Attributes:
        share: runs that share the cluster, where the config does not say how many CPUs a worker gets.
        label: said before each of the run's progress lines.
        asks: after every stage but the last the workers wait for the host's word (`raycl.train.verdict`).
        weights: in the object store, the files of the run's backbone; None: every worker reads them itself.
        lends: number of finished stages -> folder that then gets a place to go on from (`raycl.train.branch`).
    """

    share: int = 1
    label: str = ""
    asks: bool = False
    weights: ray.ObjectRef[list[Any]] | None = None
    lends: dict[int, str] = field(default_factory=dict)


def train(prepared: Prepared, hosting: Hosting | None = None) -> dict[str, Any]:
    """Run the stream on Ray to its end, or to where its host stops it, and return the results.

    Raises:
        LaunchError: the cluster cannot ever give the workers.
        RunError: the workers failed more often than `launch.max_failures`.
    """
    stages = len(prepared.stages)
    if prepared.done < stages:
        with cluster(prepared.config):
            hosting = hosting or Hosting()
            scaling = scaling_of(prepared.config, hosting.share)
            while (done := prepared.done) < stages and not is_stopped(prepared.storage, done):
                _fit(prepared, scaling, done, hosting)
    return finish(prepared)


def finish(prepared: Prepared) -> dict[str, Any]:
    """Results from the ledger, written to `results.json`."""
    config, stream = prepared.config, prepared.stream
    info = RunInfo(config.seed, configs.as_tree(config), runs.fingerprint(config), prepared.singles)
    state = read_state(prepared.storage)
    results = build_results(info, stream.name, stream.notes, stream.tasks, prepared.stages, state)
    prepared.storage.write_json("results.json", results)
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
    address = config.launch.address or os.environ.get("RAY_ADDRESS")
    began = time.monotonic()
    # Progress comes through the run's own log (`follow`): Ray's forwarding would mix in its helpers' chatter. Without
    # the dashboard a local start takes a third of the time; what it would clean up ends with the cluster anyway.
    with_dashboard = None if address else dashboard
    ray.init(address=address, include_dashboard=with_dashboard, log_to_driver=False, logging_level="error")
    log.info("Ray %s in %.0f s", "joined" if address else "started on this machine", time.monotonic() - began)
    try:
        yield
    finally:
        ray.shutdown()


def scaling_of(config: RunConfig, share: int = 1) -> ScalingConfig:
    """What to ask of the cluster, which so many runs share.

    Raises:
        LaunchError: it can never give that.
    """
    launch, have = config.launch, ray.cluster_resources()
    cpus, gpus = have.get("CPU", 0.0), have.get("GPU", 0.0)
    gpu = launch.gpus_per_worker if launch.gpus_per_worker is not None else float(gpus >= launch.workers)
    cpu = launch.cpus_per_worker or max(1.0, cpus // (launch.workers * share) if not gpu else 1.0)
    wanted = (cpu * launch.workers, gpu * launch.workers)
    if not launch.wait_for_nodes and (wanted[0] > cpus or wanted[1] > gpus):
        raise LaunchError(
            f"launch.workers={launch.workers} needs {wanted[0]:g} CPUs and {wanted[1]:g} GPUs, but the cluster has "
            f"{cpus:g} CPUs and {gpus:g} GPUs: ask for fewer workers, set launch.cpus_per_worker or "
            "launch.gpus_per_worker, or set launch.wait_for_nodes=true if the cluster grows"
        )
    resources = {"CPU": cpu, **({"GPU": gpu} if gpu else {})}
    return ScalingConfig(num_workers=launch.workers, use_gpu=bool(gpu), resources_per_worker=resources)


def _fit(prepared: Prepared, scaling: ScalingConfig, done: int, hosting: Hosting) -> None:
    """One Ray Train run: the whole stream, or one stage of it with fresh workers."""
    config, storage = prepared.config, prepared.storage
    driver = uuid.uuid4().hex[:12]
    job = {
        "driver": driver,
        "config": configs.as_tree(config),
        "folder": storage.address,
        "name": prepared.name,
        "singles": prepared.singles,
        "stop_after": 1 if config.launch.fresh_workers_per_task else None,
        "threads": max(1, int(scaling.num_cpus_per_worker)),
        "asks": hosting.asks,
        "stages": len(prepared.stages),
        "lends": hosting.lends,
        "weights": hosting.weights,
    }
    ray_run = RayRunConfig(
        name=f"{prepared.name}-{driver}",
        storage_path=storage.path("ray"),
        storage_filesystem=None if storage.is_local else storage.filesystem,
        failure_config=FailureConfig(max_failures=config.launch.max_failures),
    )
    trainer = TorchTrainer(worker_main, train_loop_config=job, scaling_config=scaling, run_config=ray_run)
    try:
        with follow(storage, hosting.label):
            trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise RunError(f"the workers failed: {_cause(error)}; go on with --resume {storage.uri}") from error
    if storage.exists(_error_file(driver)):
        raise RunError(f"{storage.read_json(_error_file(driver))['message']} (run {storage.uri})")
    if prepared.done == done:
        raise RunError(f"the workers ended without finishing a stage: see '{storage.uri}/{LOGS}'")


def _cause(error: BaseException) -> str:
    text = str(error.__cause__ or error).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def _error_file(driver: str) -> str:
    return f"errors/{driver}.json"


def worker_main(job: dict[str, Any]) -> None:
    """What every Ray Train worker runs.

    Ray starts a failed worker group again. That helps after a crash, not after an error of ours, which would only
    come back: it is left on storage, and the new group ends at once, so that the driver can say it.
    """
    storage = Storage.at(job["folder"])
    if not storage.exists(CONFIG):
        raise RunError(
            f"the worker on {socket.gethostname()} does not see '{storage.uri}': "
            "set output.dir to a file system that all nodes share, or to s3://"
        )
    if storage.exists(_error_file(job["driver"])):
        return
    try:
        _run_worker(job, storage)
    except RayclError as error:
        storage.write_json(_error_file(job["driver"]), {"type": type(error).__name__, "message": str(error)})
        raise


def _run_worker(job: dict[str, Any], storage: Storage) -> None:
    torch.set_num_threads(job["threads"])
    context, device = ray.train.get_context(), get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = World(context.get_world_rank(), context.get_world_size(), context.get_local_rank(), device)
    config = configs.validate(RunConfig, job["config"])
    files = ray.get(job["weights"]) if job["weights"] is not None else ()
    parts, open_engine = runs.build(config, world, job["singles"], files)
    tracker = open_tracker(config.tracking, job["name"], job["config"], job["folder"]) if world.is_first else None
    loop = StreamLoop(parts, open_engine, storage, world, tracker, partial(_report, job, storage, world), job["driver"])
    if loop.ledger is not None:
        log_to(RunLog(storage, loop.ledger.attempt))
        if files:
            log.info("the backbone's %.0f MiB came from the object store", sum(map(len, files)) / 2**20)
    loop.run(job["stop_after"])
    if tracker is not None:
        tracker.close()


def _report(job: dict[str, Any], storage: Storage, world: World, record: dict[str, Any]) -> bool:
    """Tell Ray Train about a finished stage (all workers, equally often); whether to go on."""
    done = record["stage"] + 1
    if world.is_first and done in job["lends"]:
        lend(storage, done, Storage.at(job["lends"][done]))
    scores = {f"score/{task}": cell["value"] for task, cell in record["row"].items()}
    ray.train.report({"stage": record["stage"], **scores, **record["times"]})
    if not job["asks"] or done == job["stages"]:
        return True
    return world.broadcast(wait_for_word(storage, done) if world.is_first else True)


class RunLog(logging.Handler):
    """Progress lines of rank 0 as a file of the run, `log/attempt-0001.txt`, which the driver reads aloud."""

    def __init__(self, storage: Storage, attempt: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self.storage = storage
        self.name_on_storage = f"{LOGS}/attempt-{attempt:04d}.txt"
        self._text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line."""
        self._text += self.format(record) + "\n"
        self.storage.write(self.name_on_storage, self._text.encode())


@contextmanager
def follow(storage: Storage, label: str = "") -> Iterator[None]:
    """Say the workers' progress lines here, each after `label`, as they come; only what is written from now on."""
    seen = {name: len(storage.read(f"{LOGS}/{name}")) for name in storage.list(LOGS)}
    over = threading.Event()

    def say_new() -> None:
        for name in storage.list(LOGS):
            data = storage.read(f"{LOGS}/{name}")
            fresh, seen[name] = data[seen.get(name, 0) :], len(data)
            for line in fresh.decode().splitlines():
                log.info("%s%s", label, line)

    def watch() -> None:
        while not over.wait(FOLLOW_S):
            say_new()

    thread = threading.Thread(target=watch, name="follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        say_new()


def log_to_stderr() -> None:
    """Progress lines of this process without decoration."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log_to(handler)


def log_to(handler: logging.Handler) -> None:
    """Send raycl's own lines, from INFO on, to one place only."""
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def exit_on_sigterm() -> None:
    """`ray job stop` sends SIGTERM: leave in order, so that Ray ends the workers; the ledger keeps what is done."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
