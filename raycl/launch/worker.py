"""What a worker of Ray Train does: builds the parts of its run, learns the stream, and writes its log."""

from __future__ import annotations

import gc
import logging
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import ray
import torch
from ray.train.torch import get_device

from raycl import config as configs
from raycl.bank.object_store import shared_readers
from raycl.errors import RayclError, RunError, UnreachableError
from raycl.launch.console import LOGS, log_to
from raycl.launch.starting import scores_of, start_from_bank
from raycl.plugins import require
from raycl.run import assembly
from raycl.run.config import RunConfig
from raycl.run.folder import CONFIG
from raycl.storage import Storage
from raycl.tracking import open_tracker
from raycl.training.control import Control, hang_file
from raycl.training.distributed import DistributedContext
from raycl.training.inputs import version_changes
from raycl.training.memory import forget_peak, is_out_of_memory, out_of_memory
from raycl.training.records.fork_points import save_fork_point
from raycl.training.records.journal import read_state
from raycl.training.records.stops.signal import wait_for_decision
from raycl.training.records.tensor_objects import SharedReader
from raycl.training.stream_loop import StreamLoop
from raycl.types import Score

log = logging.getLogger("raycl")


def error_file(driver: str) -> str:
    """Where on a run's storage an error of ours is left for its driver."""
    return f"errors/{driver}.json"


def leave_error(storage: Storage, driver: str, error: RayclError) -> None:
    """Write an error of ours for its driver, and for the status of the run."""
    record = {"type": type(error).__name__, "message": str(error), "time": time.time()}
    storage.write_json(error_file(driver), record)


def worker_main(job: dict[str, Any]) -> None:
    """What every Ray Train worker runs.

    Ray starts a failed worker group again. That helps after a crash, not after an error of ours, or an exception that
    repeats itself (`_Crash`), which would only come back: it is written to storage, and the new group ends at once, so
    that the driver can raise it.
    """
    storage = Storage.at(job["folder"]).with_retries(job["retry_s"])
    if not storage.exists(CONFIG):
        raise RunError(
            f"the worker on {socket.gethostname()} does not see '{storage.uri}': "
            "set output.dir to a file system that all nodes share, or to s3://"
        )
    if storage.exists(error_file(job["driver"])):
        return
    try:
        _run_worker(job, storage)
    except UnreachableError:
        raise  # there is no place for it, and a new group may find the store back
    except RayclError as error:
        leave_error(storage, job["driver"], error)
        raise


def _run_worker(job: dict[str, Any], storage: Storage) -> None:
    torch.set_num_threads(job["threads"])
    device = (
        torch.device("cpu") if job["in_process"] and not job["gpu"] else get_device()
    )  # local mode takes what it sees
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = _world(job, device)
    require(job["plugins"])
    config = configs.validate(RunConfig, job["config"])
    hang_s = None if job["in_process"] else config.launch.hang_s  # the host's process must not be ended
    with Control(storage, world, job["driver"], hang_s, host=job["stop"]) as control, _Crash(storage, world, control):
        try:
            _learn(job, storage, world, config, control)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            where = f"worker {world.rank + 1} of {world.size} on {socket.gethostname()}, {device.type.upper()}"
            raise RunError(out_of_memory(control.activity, job["config"], world.size, where)) from error


class _Crash:
    """An exception that is none of ours ends this worker; the same one again becomes an error of ours.

    Ray starts the workers again, from the last checkpoint. An exception that comes back at the same step would come
    back each time; one of the set-up is not tried again at all.
    """

    def __init__(self, storage: Storage, world: DistributedContext, control: Control) -> None:
        self.storage, self.world, self.control = storage, world, control

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, RayclError):
            return
        frames = traceback.extract_tb(error.__traceback__)
        if self.world.size > 1 and "/torch/distributed/" in frames[-1].filename:
            return  # another worker is gone
        at = f"{frames[-1].filename}:{frames[-1].lineno}"
        found = {
            "type": type(error).__name__,
            "at": at,
            "position": self.control.position,
            "rows": self.control.failed_rows,
        }
        file = f"errors/crash-{self.world.rank}.json"
        before = self.storage.read_json(file) if self.storage.exists(file) else {}
        self.storage.write_json(file, {**found, "message": str(error), "time": time.time()})
        again = found == {key: before.get(key) for key in found}
        if not again and not _is_of_setup(error, self.control.activity):
            return
        ours = [f"{one.filename}:{one.lineno}" for one in frames if "/raycl/" in one.filename][-1:]
        called = f", called at {ours[0]}" if ours and ours[0] != at else ""
        rows = f", in a micro-batch of {', '.join(self.control.failed_rows)}" if self.control.failed_rows else ""
        raise RunError(
            f"{type(error).__name__}: {error} (at {at}{called}), {'twice ' if again else ''}while "
            f"{_described(self.control.position)}{rows}: it would come back, so it is not tried again; mend its cause "
            "first"
        ) from error


SETUP = ("starting", "preparing")
"""Activities before a phase's first step."""


def _is_of_setup(error: Exception, activity: str) -> bool:
    """Whether an exception comes from modules, config or data; stores, devices and networks may fail once."""
    if isinstance(error, ImportError | SyntaxError):
        return True
    return activity in SETUP and not isinstance(error, OSError | RuntimeError)


def _described(position: dict[str, Any]) -> str:
    task = f" task '{position['task']}'" if "task" in position else ""
    step = f" after step {position['step']}" if position["activity"] == "training" and "step" in position else ""
    return f"{position['activity']}{task}{step}"


def _learn(
    job: dict[str, Any], storage: Storage, world: DistributedContext, config: RunConfig, control: Control
) -> None:
    """Build the parts of the run and continue it."""
    context, open_engine = assembly.build(config, world, job["singles"], job["replaces"], job["commit"])
    shared = _shared_reader(config, world)
    if config.bank.start and not world.broadcast(world.is_first and _has_begun(storage)):
        before: dict[str, Score] = {}
        if config.bank.revise:
            before = scores_of(config.bank.start, context, storage, world, shared, control)
            context, open_engine = assembly.build(config, world, job["singles"], job["replaces"], job["commit"])
        start_from_bank(config.bank, context, storage, world, shared, before)
    tracker = open_tracker(config.tracking, job["name"], job["config"], job["folder"]) if world.is_first else None
    failed = True
    try:
        report = partial(_report, job, storage, world)
        try:
            parts = (context, open_engine, storage, world, tracker, report, job["driver"], control, shared)
            loop = StreamLoop(*parts)
        finally:
            if world.is_first:
                _copy_config(storage)
        if loop.journal is not None:
            log_to(RunLog(storage, loop.journal.attempt))
            for rank in range(world.size):
                _log_hang(storage, hang_file(job["driver"], rank))
            for change in version_changes(loop.state.attempts):
                log.warning("%s", change)
        loop.run(job["stop_after"])
        failed = False
    finally:  # the process may continue: with another trial
        if tracker is not None:
            tracker.close(failed)


def _has_begun(storage: Storage) -> bool:
    """Whether the run has a checkpoint; it has none if it died right after its claim."""
    state = read_state(storage)
    return bool(state.checkpoints or state.phases)


def _shared_reader(config: RunConfig, world: DistributedContext) -> SharedReader | None:
    """Reads objects of a bank or a run through the node's object store, where other processes read the same ones."""
    if not ray.is_initialized() or (world.size == 1 and not config.bank.start):
        return None
    return shared_readers()


def _log_hang(storage: Storage, file: str) -> None:
    """Log the message of a worker that hung in the previous attempt; each attempt logs it again, the file stays."""
    if storage.exists(file):
        log.warning("%s", storage.read_json(file)["message"])


def _copy_config(storage: Storage) -> None:
    """`config.yaml` as the claims have it: a driver whose run is refused may have written its own."""
    config = read_state(storage).config
    text = configs.tree_to_yaml(config).encode()
    if config and storage.read(CONFIG) != text:
        storage.write(CONFIG, text)


def _world(job: dict[str, Any], device: torch.device) -> DistributedContext:
    """Rank and number of the workers; inside a Tune trial, where Train has no context, there is only this one."""
    if job["in_process"]:
        return DistributedContext(0, 1, 0, device)
    context = ray.train.get_context()
    return DistributedContext(context.get_world_rank(), context.get_world_size(), context.get_local_rank(), device)


@contextmanager
def in_process_worker() -> Iterator[None]:
    """A worker inside a process that is not its own: on exit its changes are reverted and its memory is freed."""
    handlers, level, propagate, threads = log.handlers, log.level, log.propagate, torch.get_num_threads()
    forget_peak()
    try:
        yield
    finally:
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)
        torch.set_num_threads(threads)
        gc.collect()
        torch.cuda.empty_cache()


def _report(job: dict[str, Any], storage: Storage, world: DistributedContext, record: dict[str, Any]) -> bool:
    """Report a finished phase to Ray Train (all workers, equally often) if it runs them; whether to continue."""
    done = record["phase"] + 1
    if world.is_first and done in job["fork_points"]:
        save_fork_point(storage, done, Storage.at(job["fork_points"][done]))
    if not job["in_process"]:
        scores = {f"score/{task}": cell["value"] for task, cell in record["row"].items()}
        ray.train.report({"phase": record["phase"], **scores, **record["times"]})
    if not job["awaits_decision"] or done == job["phases"]:
        return True
    return world.broadcast(wait_for_decision(storage, done) if world.is_first else True)


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
