"""Processes of this machine in which a run with `launch.mode=local` learns several tasks at the same time.

They stay until the run is over: each takes one task after another, with everything imported.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Self

from raycl.errors import RayclError, RunError, UnreachableError
from raycl.launch.crashes import error_file
from raycl.launch.follow import follow
from raycl.launch.local import own_resources, work_here
from raycl.training.definition.job import Resources, TrainingJob
from raycl.training.workers.stopping import REASONS

if TYPE_CHECKING:
    from raycl.launch.driver import RunOptions
    from raycl.launch.prepared_run import Prepared

log: logging.Logger = logging.getLogger("raycl")

IMPORTED = ("raycl.launch.worker", "transformers.models.auto.modeling_auto", "transformers.modeling_utils")
"""Are imported once, by the process of which the others are copies: any backbone needs the latter two, for two seconds
of a CPU."""


@dataclass(frozen=True)
class TaskProcess:
    """A process, and the pipe through which it gets jobs and says how they ended."""

    process: BaseProcess
    pipe: Connection

    @staticmethod
    def start() -> TaskProcess:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*IMPORTED])
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), name="task", daemon=False)
        process.start()
        theirs.close()
        return TaskProcess(process, ours)

    def work(self, job: TrainingJob, resources: Resources) -> None:
        """Do the job there, and wait for its end.

        Raises:
            RunError: it failed, or the process died. UnreachableError: the run's store does not answer.
        """
        try:
            self.pipe.send((job, resources))
            kind, message = self.pipe.recv()
        except (EOFError, OSError) as error:
            storage = job.storage
            left = storage.read_json(file) if storage.exists(file := error_file(job.driver)) else {}
            died = "its process died, perhaps killed, perhaps for want of memory"
            raise RunError(f"{left.get('message', died)} (run {job.run_storage.uri})") from error
        if kind == UnreachableError.__name__:
            raise UnreachableError(message)
        if kind:
            raise RunError(f"{message} (run {job.run_storage.uri})")

    def end(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class TaskProcesses:
    """The processes of one run. Thread-safe; as a context manager it ends them on exit."""

    def __init__(self) -> None:
        """Start nothing."""
        self._all: list[TaskProcess] = []
        self._idle: list[TaskProcess] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            started, self._all, self._idle = self._all, [], []
        for process in started:
            process.end()

    @contextmanager
    def acquired(self) -> Iterator[TaskProcess]:
        """Yield a process for one job; after an error it is not used again."""
        with self._lock:
            process = self._idle.pop() if self._idle else TaskProcess.start()
            if process not in self._all:
                self._all.append(process)
        yield process
        with self._lock:
            self._idle.append(process)


class ProcessRun:
    """Launches a part of a run in a process of its own.

    Attributes:
        resources: resources of the process.
    """

    def __init__(self, processes: TaskProcesses, prepared: Prepared, options: RunOptions) -> None:
        """Start nothing.

        Raises:
            LaunchError: the config asks for a GPU, and there is none.
        """
        self._processes, self._label = processes, options.label
        self.resources: Resources = own_resources(prepared.config.launch)

    def work(self, job: TrainingJob) -> None:
        """Do the job in a process; see `TaskProcess.work`."""
        with self._processes.acquired() as process, follow(job.storage, self._label):
            process.work(job, self.resources)


def _serve(pipe: Connection) -> None:
    """Do one job after another, until the other end of the pipe is closed, or the process there has ended."""
    for number in REASONS:  # the command asks for checkpoints when they come
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    log.handlers = [logging.NullHandler()]  # a task has a log file of its own
    log.propagate = False
    while True:
        try:
            job, resources = pipe.recv()
        except EOFError:
            return
        try:
            work_here(job, resources)
        except RayclError as error:
            pipe.send((type(error).__name__, str(error)))
        else:
            pipe.send(("", ""))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "another process starts these"
    parent.join()
    os._exit(os.EX_TEMPFAIL)
