"""The parts of a run whose tasks are learned at the same time: one task alone, and one row of the matrix.

A task is learned as in a run of all tasks: seeds, the order of rows and the order of labels follow from its place in
the stream, and a method whose tasks are independent uses nothing else of the others. So its state can be joined with
those of earlier tasks afterwards, as the one worker group of a run has them one after another.
"""

import logging
import time
from typing import Any

from raycl.methods.base import phase_labels
from raycl.storage import Storage
from raycl.training.definition.settings import BankConfig
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.engine import OpenEngine
from raycl.training.phase.evaluation import StreamEvaluation, bare_rows, score_phase
from raycl.training.phase.task_end import join_task
from raycl.training.phase.trainer import TaskTrainer
from raycl.training.records.journal import Journal, read_state
from raycl.training.records.publish import open_bank
from raycl.training.records.recorder import Listeners, Recorder
from raycl.training.records.results import BARE, bare_cells
from raycl.training.records.resume import load_checkpoint, newest_resume_point
from raycl.training.records.task_records import TaskRecords
from raycl.training.records.tensor_objects import SharedReader, TensorObjects
from raycl.training.workers.control import Control
from raycl.training.workers.distributed import DistributedContext, memory_used
from raycl.training.workers.stopping import StopRequested
from raycl.types import Phase

log: logging.Logger = logging.getLogger("raycl")


def begin_alone(
    context: TrainingContext,
    open_engine: OpenEngine,
    storage: Storage,
    phase: Phase,
    world: DistributedContext,
    control: Control,
    shared: SharedReader | None = None,
) -> TaskTrainer:
    """Claim the folder of a task that a worker group learns without any other task; returns its trainer. Collective.

    Args:
        storage: the folder. shared: see `TensorObjects`.
    """
    context.bank = BankConfig(publish=False)  # the run publishes when it joins the task
    context.method.tasks_elsewhere = phase.index
    recorder = Recorder(context, storage, world, Listeners(), control.driver, shared)
    return TaskTrainer(context, open_engine, world, recorder, control, alone=True)


def learn_alone(trainer: TaskTrainer, phase: Phase) -> None:
    """Learn such a task, from its newest checkpoint on, or until a stop is requested. Collective."""
    context, recorder, world, control = trainer.context, trainer.recorder, trainer.world, trainer.control
    if TaskRecords(recorder.storage, recorder.state).learned is not None:
        return
    if recorder.state.phases:
        recorder.go_back([], [], f"'{phase.name}' is learned again: the run has lost what it has joined")
    for earlier in context.phases[: phase.index]:  # rows of scores stand in the order of all labels
        context.backbone.learn_labels(phase_labels(earlier))
    point = newest_resume_point(recorder.storage, recorder.state, world, recorder.objects, elsewhere=phase.index)
    if point.problems:
        recorder.go_back(point.checkpoints, point.phases, point.explanation)
    done = point.checkpoint
    if done is not None:
        load_checkpoint(context, done)
    try:
        control.pause("preparing", phase=phase.index, phases=len(context.phases), task=phase.name)
        if done is None or not done.is_phase_end:
            done = trainer.train(phase, done)
    except StopRequested:
        return
    finally:
        recorder.close()
    times = {"phase": phase.name, "steps": done.steps, **memory_used(world)}
    if recorder.journal is not None:
        recorder.journal.phase_done(_record(phase, times))
    control.progress("learned", learned=True)


def score_row(
    context: TrainingContext,
    run: Storage,
    storage: Storage,
    phase: Phase,
    world: DistributedContext,
    control: Control,
    journal: Journal | None,
    shared: SharedReader | None = None,
) -> None:
    """Score a phase's row of the matrix with the model that the run has after joining its task; it is kept in the
    folder of the task. Collective.

    The backbone before any training is scored beside the run's next row. What reads the phase's published snapshot is
    left to the run: the row without instructions of the last phase.

    Args:
        run: the folder of the run. storage: the folder of the task. journal: its journal, on the first worker.

    Raises:
        RunError: an earlier task is not learned, or a checkpoint is damaged.
    """
    state = world.broadcast(read_state(run) if world.is_first else None)
    assert state is not None, "the first worker has read it"
    bank = open_bank(context.bank, run).storage if context.bank.publish or context.bank.start else None
    done = newest_resume_point(run, state, world, TensorObjects(run, bank, shared)).checkpoint
    joined = 0
    if done is not None:
        load_checkpoint(context, done)
        joined = done.covers
    if joined < len(state.phases):
        if world.is_first:
            log.warning("the row is left to the run, whose last checkpoint is damaged: it learns a task again first")
        return
    for earlier in context.phases[joined : phase.index + 1]:
        _, done = join_task(context, earlier, TaskRecords.of(run, earlier, world).checkpoint(world, shared))
    assert done is not None, "there is a task"

    def before(task: str) -> None:
        control.pause("evaluating", phase=phase.index, phases=len(context.phases), task=task, learned=True)

    bare: dict[str, dict[str, Any]] = {}
    try:
        scored = score_phase(context, phase, world, run, before, done)
        if phase.index == len(state.phases):
            known = {kind: bare_cells(state, kind) for kind in BARE}
            bare = bare_rows(StreamEvaluation(context, world, run, before=before), known)
    except StopRequested:
        return
    times = {"phase": phase.name, "eval_s": scored.eval_s, **memory_used(world)}
    if journal is not None:
        kept = {"row": scored.row, "summary": scored.summary, "unseen": scored.unseen, "general": scored.general}
        journal.phase_done({**_record(phase, times), **kept, **bare})


def _record(phase: Phase, times: dict[str, Any]) -> dict[str, Any]:
    return {"phase": phase.index, "row": {}, "times": times, "bank": {}, "summary": {}, "ended": time.time()}
