"""Several tasks of a run at the same time, each by a worker group of its own, before the run joins them.

What a group has done of a task is in the task's own folder (`raycl.training.records.task_records`). So a run that
stops continues each task from its last checkpoint, and learns none twice.

Tasks are learned in the stream's order, as soon as a group is free. A row of the accuracy matrix can be scored once all
its tasks are learned; of several such rows the last one comes first, since it has the most tasks.
"""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from raycl.errors import RayclError, RunError, UnreachableError
from raycl.launch.crashes import leave_error
from raycl.launch.prepared_run import Prepared, resume_line
from raycl.training.definition.job import TaskPart
from raycl.training.records.journal import read_state
from raycl.training.records.named_bank import snapshot_at
from raycl.training.records.task_records import TaskRecords
from raycl.training.workers.stopping import HostStop, StopOnSignal, left_at_once, stopped_by
from raycl.types import Phase

log: logging.Logger = logging.getLogger("raycl")

LOOK_S = 0.5
"""Seconds between two looks whether a stop is requested, by a group that has nothing to do."""

_PHASE = re.compile(r"phase(\d+)-")

Work = Callable[[TaskPart, HostStop], None]
"""Does a part, and waits for its end; what it raises ends the part."""


def parts_of(prepared: Prepared) -> TaskSchedule:
    """Return what worker groups of their own have to do before the run joins its tasks; nothing, where one task at a
    time is learned or only one is left."""
    config, storage, phases = prepared.config, prepared.storage, prepared.phases
    if config.launch.parallel_tasks == 1:
        return TaskSchedule([])
    state = read_state(storage)
    done = len(state.phases)
    first = _begun(prepared, done, state.checkpoints)
    records = {phase.index: TaskRecords.of(storage, phase) for phase in phases[first:]}
    learned = [index for index, record in records.items() if record.learned is not None]
    if len(phases) - first - len(learned) < 2 and not learned:
        return TaskSchedule([])
    scored = [index for index, record in records.items() if record.scored is not None]
    if config.eval.instruction == "chosen":  # a row reads the snapshot that the run publishes when it joins the task
        scored = list(records)
    return TaskSchedule.of(phases[done:], learned, scored, first)


def _begun(prepared: Prepared, done: int, checkpoints: list[str]) -> int:
    """Return the number of phases that the run has begun or done itself, or begins with."""
    if checkpoints:
        newest = _PHASE.match(checkpoints[-1])
        assert newest is not None, f"the name of a checkpoint is '{checkpoints[-1]}'"
        return max(done, int(newest[1]) + 1)
    bank = prepared.config.bank
    if not bank.start:
        return done
    learned = len(snapshot_at(bank.start)[1].tasks)
    return learned - 1 if bank.revise else learned


def learn_at_once(prepared: Prepared, schedule: TaskSchedule, host: HostStop | None, work: Work) -> None:
    """Let worker groups learn and score the parts of a schedule, `launch.parallel_tasks` at a time.

    A task that fails does not stop the others.

    Args:
        host: the place in which a sweep or a comparison requests a stop; None: this process does, on signals.
        work: see `Work`.

    Raises:
        RunError: a task failed; what the others learned is kept.
        StoppedError: SIGTERM, Ctrl-C or the host stopped it. UnreachableError: its store does not answer.
    """
    config, storage = prepared.config, prepared.storage
    stop = host or HostStop(storage.address, uuid.uuid4().hex[:12])
    groups = _Groups(schedule, stop, work)
    signals = StopOnSignal(storage, stop.driver, config.launch.grace_s, has_begun=lambda: True)
    count = config.launch.parallel_tasks
    with signals, ExitStack() as stack:
        pool = ThreadPoolExecutor(count, "group")
        stack.callback(pool.shutdown, cancel_futures=True)
        with left_at_once():  # without waiting for the threads
            for group in [pool.submit(groups.serve) for _ in range(count)]:
                group.result()
    resume = resume_line(storage, config)
    if away := next((error for error in groups.errors.values() if isinstance(error, UnreachableError)), None):
        raise away
    if groups.errors:
        failed = "; ".join(map(_named, groups.errors.items()))
        error = RunError(f"{failed}; the other tasks are kept: continue with {resume}")
        leave_error(storage, stop.driver, error)  # for the status of the run
        raise error
    if reason := signals.reason or stop.reason:
        raise stopped_by(reason, f"{_progress(prepared)}; continue with {resume}")


def _named(failed: tuple[TaskPart, RayclError]) -> str:
    part, error = failed
    what = {"learn": "learning", "score": "scoring the row after", "begin": "beginning with"}[part.kind]
    return f"{what} task '{part.name}' failed: {error}"


def _progress(prepared: Prepared) -> str:
    records = [TaskRecords.of(prepared.storage, phase) for phase in prepared.phases[prepared.done :]]
    learned = prepared.done + sum(record.learned is not None for record in records)
    return f"{learned} of {len(prepared.phases)} tasks are learned"


class _Groups:
    """The threads of this process that start worker groups and wait for them.

    Attributes:
        errors: part -> the error that it failed with.
    """

    def __init__(self, schedule: TaskSchedule, stop: HostStop, work: Work) -> None:
        self._schedule, self._stop, self._work = schedule, stop, work
        self._changed = threading.Condition()
        self.errors: dict[TaskPart, RayclError] = {}

    def serve(self) -> None:
        """Do one part after another, until nothing is left or a stop is requested."""
        while (part := self._next()) is not None:
            with self._recorded(part):
                self._work(part, self._stop)

    @contextmanager
    def _recorded(self, part: TaskPart) -> Iterator[None]:
        """Record how a part ended, whatever it ended with; an error of ours goes no further."""
        failed = True
        try:
            yield
            failed = False
        except RayclError as error:
            self.errors[part] = error
            log.error("%s", _named((part, error)))
        finally:
            with self._changed:
                self._schedule.end(part, failed)
                self._changed.notify_all()

    def _next(self) -> TaskPart | None:
        with self._changed:
            while not self._schedule.is_over:
                if self._stop.is_requested:
                    return None
                if (part := self._schedule.take()) is not None:
                    return part
                self._changed.wait(LOOK_S)
        return None


@dataclass
class TaskSchedule:
    """The parts of a run that are left, those that are being done, and those that failed.

    Attributes:
        waiting: parts that have not begun, in the order in which they are looked at.
        running, failed: parts that have.
    """

    waiting: list[TaskPart]
    running: list[TaskPart] = field(default_factory=list)
    failed: list[TaskPart] = field(default_factory=list)

    @staticmethod
    def of(phases: Iterable[Phase], learned: Collection[int], scored: Collection[int], first: int) -> TaskSchedule:
        """Return what is left of a run.

        Args:
            phases: phases that are not in the run's own records yet.
            learned: index of those whose task is learned. scored: index of those that need no row any more.
            first: index of the first one that groups learn; what comes before it the run does itself.
        """
        listed = list(phases)
        begins = [TaskPart("begin", phase.index, phase.name) for phase in listed if phase.index == first - 1]
        own = [phase for phase in listed if phase.index >= first]
        learn = [TaskPart("learn", phase.index, phase.name) for phase in own if phase.index not in learned]
        score = [TaskPart("score", phase.index, phase.name) for phase in reversed(own) if phase.index not in scored]
        return TaskSchedule([*begins, *learn, *score] if learn or score else [])

    def take(self) -> TaskPart | None:
        """Return a part that a free group does next; None: none can begin now."""
        part = next((part for part in self.waiting if self._is_ready(part)), None)
        if part is not None:
            self.waiting.remove(part)
            self.running.append(part)
        return part

    def _is_ready(self, part: TaskPart) -> bool:
        if part.kind != "score":
            return True
        needed = [other for other in (*self.waiting, *self.running, *self.failed) if other.kind != "score"]
        return all(other.phase > part.phase for other in needed)

    def end(self, part: TaskPart, failed: bool = False) -> None:
        self.running.remove(part)
        if failed:
            self.failed.append(part)

    @property
    def is_over(self) -> bool:
        """Return whether nothing is being done, and nothing can begin."""
        return not self.running and not any(map(self._is_ready, self.waiting))
