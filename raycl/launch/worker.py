"""A worker's job: it builds the parts of the run, learns the stream, and writes the run's log."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from raycl import config as configs
from raycl.config import Tree
from raycl.errors import RayclError, StorageError, UnreachableError
from raycl.launch.console import LOGS, repeating
from raycl.launch.crashes import Crashes, error_file, leave_error
from raycl.plugins import require
from raycl.storage import Storage
from raycl.training import assembly
from raycl.training.definition.inputs import version_changes
from raycl.training.definition.job import TaskPart, TrainingJob
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.engine import OpenEngine
from raycl.training.phase.evaluation import StreamEvaluation
from raycl.training.phase.routing import PublishedRouter, TextAlone
from raycl.training.records.bank_start import Revision, check_backbone, read_training_state, start_from_snapshot
from raycl.training.records.fork_points import save_fork_point
from raycl.training.records.journal import Journal, read_state
from raycl.training.records.named_bank import snapshot_at
from raycl.training.records.recorder import Listeners
from raycl.training.records.run_folder import CONFIG, wait_for_decision
from raycl.training.records.tensor_objects import SharedReader, TensorObjects
from raycl.training.setup.run_config import RunConfig
from raycl.training.stream_loop import StreamLoop
from raycl.training.task_parts import begin_alone, learn_alone, score_row
from raycl.training.tracking.trackers import Tracker, open_trackers
from raycl.training.workers.control import Control, hang_file
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Score

log: logging.Logger = logging.getLogger("raycl")

LOG_S = 0.3
"""Seconds between two writes of the run's log: a run that joins tasks logs hundreds of lines in a second."""

BEFORE = "before"
"""Folder of the answers of the snapshot that a revision starts from."""


@dataclass(frozen=True)
class Worker:
    """A worker among the others of its run, and what its launcher gives it.

    Attributes:
        shared: reads objects of a bank or a run through memory that all processes of the node share.
        report: is called with the record of each phase, by all workers equally often.
        restarts: a worker that fails is started again. hangs: one that makes no progress may be ended
            (`launch.hang_s`); not where the process is another's too.
    """

    world: DistributedContext
    shared: SharedReader | None = None
    report: Callable[[Tree], None] | None = None
    restarts: bool = False
    hangs: bool = False


def work(job: TrainingJob, worker: Worker) -> None:
    """Begin or continue the run, to its end, or to where it is stopped. Collective.

    An error of ours, or an exception that repeats itself (`crashes`), would only come back in a worker that is started
    again. It is written to the run's folder, for its driver and its status, and a new worker ends at once.

    Raises:
        RayclError: the run has failed.
    """
    storage, world = job.storage, worker.world
    if storage.exists(error_file(job.driver)):
        return
    torch.set_num_threads(job.threads)
    try:
        require(job.plugins)
        config = configs.validate(RunConfig, job.config)
        hang_s = config.launch.hang_s if worker.hangs else None
        control = Control(storage, world, job.driver, hang_s, host=job.stop)
        with control, ExitStack() as stack:
            stack.push(Crashes(storage, world, control, job.config, worker.restarts).at_exit)
            if job.part is not None and job.part.kind != "begin":
                _work_on_task(job, job.part, worker, config, control, stack)
                return
            context, open_engine = _begun(job, worker, config, storage, control)
            trackers = open_trackers(config.tracking, job.name, job.config, job.folder) if world.is_first else ()
            for tracker in trackers:
                stack.push(partial(_close, tracker))
            listeners = Listeners(trackers, partial(_report, job, worker, storage), job.draw)
            try:
                loop = StreamLoop(context, open_engine, storage, world, listeners, control, worker.shared)
            finally:
                if world.is_first:
                    _copy_config(storage)
            _log_attempt(loop.recorder.journal, storage, stack)
            if world.is_first:
                _log_earlier(storage, loop, job.driver)
            loop.run(None if job.part is None else 1)
    except UnreachableError:
        raise  # there is no place to write it to, and a worker that is started again may find the store back
    except RayclError as error:
        leave_error(storage, job.driver, error)
        raise


def _work_on_task(
    job: TrainingJob, part: TaskPart, worker: Worker, config: RunConfig, control: Control, stack: ExitStack
) -> None:
    """Learn one task of the run without the others, or score its row of the matrix."""
    world, storage = worker.world, job.storage
    context, open_engine = assembly.build(config, world, job.singles, job.replaces, job.commit)
    phase = context.phases[part.phase]
    if part.kind == "learn":
        trainer = begin_alone(context, open_engine, storage, phase, world, control, worker.shared)
        _log_attempt(trainer.recorder.journal, storage, stack)
        learn_alone(trainer, phase)
        return
    summary = {"workers": world.size, "driver": job.driver}
    journal = Journal.claim(storage, context.info, **summary) if world.is_first else None
    _log_attempt(journal, storage, stack)
    score_row(context, job.run_storage, storage, phase, world, control, journal, worker.shared)


def _log_attempt(journal: Journal | None, storage: Storage, stack: ExitStack) -> None:
    if journal is not None:
        stack.enter_context(run_log(storage, journal.attempt))


def _begun(
    job: TrainingJob, worker: Worker, config: RunConfig, storage: Storage, control: Control
) -> tuple[TrainingContext, OpenEngine]:
    """Return the parts of the run; of one that starts from a snapshot, with what that has learned. Collective.

    Raises:
        BankError: the snapshot is of another backbone, or its training state is missing or damaged.
    """
    world = worker.world
    build = partial(assembly.build, config, world, job.singles, job.replaces, job.commit)
    context, open_engine = build()
    state = read_state(storage) if config.bank.start and world.is_first else None
    has_begun = state is not None and bool(state.checkpoints or state.phases)  # no checkpoint: it died after its claim
    if config.bank.start and not world.broadcast(has_begun):
        before: dict[str, Score] = {}
        if config.bank.revise:
            before = _scores_of(config.bank.start, context, storage, worker, control)
            context, open_engine = build()
        with world.shared_errors():
            if world.is_first:
                bank, snapshot = snapshot_at(config.bank.start)
                from_previous = config.bank.revise_from == "previous"
                revision = Revision(config.bank.revise, from_previous, before) if config.bank.revise else None
                start_from_snapshot(
                    bank, snapshot, context, TensorObjects(storage, bank.storage, worker.shared), revision
                )
    return context, open_engine


def _scores_of(
    start: str, context: TrainingContext, storage: Storage, worker: Worker, control: Control
) -> dict[str, Score]:
    """Return the score of every task of the stream with the snapshot as it is. Collective; the context is used up.

    Where each task has a model of its own, the newest task's model is evaluated, and the run's records have the others'
    scores.
    """
    world = worker.world
    with world.shared_errors():
        bank, snapshot = snapshot_at(start)
        if world.is_first:
            check_backbone(snapshot, context)
        done, phases = read_training_state(bank, snapshot, TensorObjects(storage, bank.storage, worker.shared))
    context.method.load_state_dict(done.method, done.frozen_state)
    context.load_learned(done.parameters)
    if world.is_first:
        log.info("snapshot %d, before the task is learned again:", snapshot.number)
    newest = tuple(task for task in context.stream.tasks if task.name == snapshot.tasks[-1].name)
    last = replace(context.phases[-1], name=BEFORE, tasks=newest)
    router = PublishedRouter.of(context.method, done, context.evaluation)
    is_chosen = context.evaluation.instruction == "chosen"
    evaluation = StreamEvaluation(
        context,
        world,
        storage,
        router,
        lambda task: control.progress("evaluating", phase=last.index, phases=len(context.phases), task=task),
        TextAlone.of(context, router, snapshot) if router is not None and is_chosen else None,
    )
    row = evaluation.row(last)
    if context.schedule.one_model_per_task and phases:
        row = {**{name: Score(**cell) for name, cell in phases[-1]["row"].items()}, **row}
    return row


def _close(tracker: Tracker, kind: type[BaseException] | None, error: object, trace: object) -> None:
    """Release a run's resources, since the process may continue with another run."""
    tracker.close(failed=kind is not None)


def _log_earlier(storage: Storage, loop: StreamLoop, driver: str) -> None:
    """Log what an earlier attempt of this driver has hung at, and which versions of libraries have changed."""
    for rank in range(loop.world.size):
        if storage.exists(file := hang_file(driver, rank)):
            log.warning("%s", storage.read_json(file)["message"])
    for change in version_changes(loop.state.attempts):
        log.warning("%s", change)


def _copy_config(storage: Storage) -> None:
    """Write `config.yaml` from the claim, since a driver whose run is refused may have written its own."""
    config = read_state(storage).config
    text = configs.tree_to_yaml(config).encode()
    if config and storage.read(CONFIG) != text:
        storage.write(CONFIG, text)


def _report(job: TrainingJob, worker: Worker, storage: Storage, record: dict[str, Any]) -> bool:
    """Report a finished phase; whether to continue."""
    done, world = record["phase"] + 1, worker.world
    if world.is_first and done in job.fork_points:
        save_fork_point(storage, done, Storage.at(job.fork_points[done]))
    if worker.report is not None:
        worker.report(record)
    if not job.awaits_decision or done == job.phases:
        return True
    return world.broadcast(wait_for_decision(storage, done) if world.is_first else True)


class RunLog(logging.Handler):
    """raycl's lines as a file of the run, `log/attempt-0001.txt`.

    A line within `LOG_S` after a write waits for the next one (`run_log`).
    """

    def __init__(self, storage: Storage, attempt: int) -> None:
        super().__init__()
        self.setLevel(logging.INFO)
        self.setFormatter(logging.Formatter("%(message)s"))
        self.storage = storage
        self.name_on_storage: str = f"{LOGS}/attempt-{attempt:04d}.txt"
        self._text, self._saved, self._saved_at = "", 0, -LOG_S
        self._is_writing = False

    def emit(self, record: logging.LogRecord) -> None:
        self._text += self.format(record) + "\n"
        if time.monotonic() - self._saved_at > LOG_S:
            self.write()

    def write(self) -> None:
        """Write the file if it lacks lines, unless a write that logs a line asks."""
        self.acquire()
        try:
            if not self._is_writing and self._saved < len(self._text):
                self._write()
        finally:
            self.release()

    def _write(self) -> None:
        text, self._is_writing = self._text, True
        try:
            self.storage.write(self.name_on_storage, text.encode())
        finally:
            self._is_writing = False
        self._saved, self._saved_at = len(text), time.monotonic()


@contextmanager
def run_log(storage: Storage, attempt: int) -> Iterator[None]:
    """Send raycl's log lines from INFO on to the attempt's file as well, inside."""
    handler, level = RunLog(storage, attempt), log.level

    def write() -> None:
        with suppress(StorageError):  # the next line, or the end, raises it
            handler.write()

    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with repeating(write, LOG_S, "log"):
            yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        if not isinstance(sys.exception(), UnreachableError):
            handler.write()
