"""The training loop over tasks: train, evaluate, record.

Every worker runs the same lines. A run that died resumes from its journal; a finished phase is neither trained nor
evaluated again.
"""

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from raycl.scoring.scored_task import line_of
from raycl.storage import Storage
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.engine import OpenEngine
from raycl.training.phase.evaluation import ScoredRow, StreamEvaluation, bare_rows, score_phase, tasks_with_data
from raycl.training.phase.selection import EPOCH
from raycl.training.phase.task_end import join_task, kept_bytes
from raycl.training.phase.trainer import TaskTrainer
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.records.journal import RunState
from raycl.training.records.progress import read_trace
from raycl.training.records.publish import move_branch, open_bank
from raycl.training.records.recorder import Listeners, Recorder
from raycl.training.records.restoration import publish_again, restore_objects
from raycl.training.records.results import BARE, bare_cells
from raycl.training.records.resume import load_checkpoint, newest_resume_point
from raycl.training.records.task_records import TaskRecords
from raycl.training.records.tensor_objects import SharedReader
from raycl.training.workers.control import Control
from raycl.training.workers.distributed import DistributedContext, memory_used
from raycl.training.workers.stopping import StopRequested
from raycl.types import Phase, Score

log: logging.Logger = logging.getLogger("raycl")


class StreamLoop:
    """A run on one worker."""

    def __init__(
        self,
        context: TrainingContext,
        open_engine: OpenEngine,
        storage: Storage,
        world: DistributedContext,
        listeners: Listeners | None = None,
        control: Control | None = None,
        shared: SharedReader | None = None,
    ) -> None:
        """Claim the run; `control` follows the loop's progress, and can stop it; `shared`: see `TensorObjects`."""
        self.context, self.storage, self.world = context, storage, world
        self.control = control or Control(storage, world)
        self.recorder = Recorder(context, storage, world, listeners or Listeners(), self.control.driver, shared)
        self._bare: dict[str, dict[str, Any]] = {}
        self.trainer: TaskTrainer = TaskTrainer(context, open_engine, world, self.recorder, self.control)

    @property
    def state(self) -> RunState:
        """The run so far."""
        return self.recorder.state

    def run(self, stop_after: int | None = None) -> None:
        """Continue from the journal, for `stop_after` phases at most (None: to the end)."""
        last = None if stop_after is None else len(self.state.phases) + stop_after
        try:
            self._evaluate_bare()
            pending = self._restore()
            first = len(self.state.phases)
            for phase in self.context.phases[first:last]:
                self._pause("preparing", phase, phase.name)
                task = TaskRecords.of(self.storage, phase, self.world)
                if pending and pending.is_phase_end:
                    done = pending
                elif pending is None and task.learned is not None:
                    done = self._join(phase, task)
                else:
                    done = self.trainer.train(phase, pending)
                continues = self.recorder.phase(phase, self._record(phase, done, task))
                if task.learned is not None and self.world.is_first:
                    task.delete()
                if not continues:
                    return
                pending = None
        except StopRequested:
            if self.world.is_first:
                log.info("stopped as requested")
        finally:
            self.recorder.close()

    def _evaluate_bare(self) -> None:
        """Evaluate the backbone before any training (`eval.untrained`, `eval.shots`, `eval.general`), for the record of
        the next phase."""
        context = self.context
        self._bare = {kind: bare_cells(self.state, kind) for kind in BARE}
        if len(self.state.phases) == len(context.phases):
            return
        phase = context.phases[len(self.state.phases)]
        elsewhere = TaskRecords.of(self.storage, phase, self.world).scored or {}
        known = {kind: cells | elsewhere.get(kind, {}) for kind, cells in self._bare.items()}
        before = partial(self._pause, "evaluating", phase)
        self._bare = bare_rows(StreamEvaluation(context, self.world, self.storage, before=before), known)

    def _pause(self, activity: str, phase: Phase, task: str) -> None:
        self.control.pause(activity, phase=phase.index, phases=len(self.context.phases), task=task)

    def _restore(self) -> Checkpoint | None:
        """Restore the newest readable checkpoint; returns it if its phase is not recorded yet."""
        restore = partial(restore_objects, self.context, self.storage, self.state)
        resume_point = newest_resume_point(self.storage, self.state, self.world, self.recorder.objects, restore)
        if resume_point.problems:
            self.recorder.go_back(resume_point.checkpoints, resume_point.phases, resume_point.explanation)
        checkpoint = resume_point.checkpoint
        published = checkpoint.published if checkpoint is not None and checkpoint.published else None
        if published is None and self.state.phases:
            published = self.state.phases[-1].get("bank")
        if self.context.bank.publish:
            self._complete_bank(published)
        if checkpoint is None:
            return None
        load_checkpoint(self.context, checkpoint)
        return checkpoint if checkpoint.phase == len(self.state.phases) else None

    def _complete_bank(self, published: dict[str, Any] | None) -> None:
        """Publish what the bank has lost again, on rank 0, before the run continues. Collective: all raise its errors.

        Args:
            published: result of the last `publish`; its branch is moved there if the run ended before that.
        """
        context, storage, continues = self.context, self.storage, len(self.state.phases) < len(self.context.phases)
        with self.world.shared_errors():
            if self.world.is_first:
                bank = open_bank(context.bank, storage)
                publish_again(bank, storage, self.state, continues, context.own_adapters)
                if continues and published:
                    move_branch(context, storage, self.recorder.branch, published, resumed=True)
        if continues and published:
            self.recorder.hold_lease(published)  # it may have been lost or damaged while nothing ran

    def _join(self, phase: Phase, task: TaskRecords) -> Checkpoint:
        """Join a task that a worker group has learned by itself, and write the phase's last checkpoint. Collective."""
        recorder = self.recorder
        learned, done = join_task(self.context, phase, task.checkpoint(self.world, recorder.objects.shared))
        done.spent["kept_bytes"] = kept_bytes(done, self.world)
        if self.world.is_first:
            log.info("[%d/%d] %s: joined", phase.index + 1, len(self.context.phases), phase.name)
            recorder.add_steps(phase, read_trace(task.storage))
        recorder.publish(phase, self.context.schedule.published(phase, self.context.method, learned), done)
        recorder.save(done)
        return done

    def _record(self, phase: Phase, done: Checkpoint, task: TaskRecords) -> dict[str, Any]:
        """Evaluate the phase, unless its own worker group has; returns its record for the journal."""
        context = self.context
        before = partial(self._pause, "evaluating", phase)
        scored = None if task.scored is None else _scored(task.scored)
        score = score_phase(context, phase, self.world, self.storage, before, done, scored)
        if scored is not None and self.world.is_first:
            for evaluated in tasks_with_data(context, phase):
                log.info("%s", line_of(evaluated.name, Score(**scored.row[evaluated.name])))
        row = score.row
        if context.schedule.one_model_per_task and self.state.phases:
            row = {**self.state.phases[-1]["row"], **row}
        times = self._times(phase, done, score.eval_s)
        for elsewhere in (task.learned, task.scored):
            times |= {name: max(times[name], value) for name, value in _memory(elsewhere).items()}
        record = {"phase": phase.index, "row": row, "times": times, "bank": done.published, "summary": score.summary}
        record |= {name: cells for name in ("unseen", "other_row", "general") if (cells := getattr(score, name))}
        if epochs := _epochs(done.spent):
            record["epochs"] = epochs
        for kind, cells in self._bare.items():
            known = bare_cells(self.state, kind)
            if fresh := {name: cell for name, cell in cells.items() if name not in known}:
                record[kind] = fresh
        return {**record, "ended": time.time()}

    def _times(self, phase: Phase, done: Checkpoint, eval_s: float) -> dict[str, Any]:
        context, world = self.context, self.world
        tables = [
            context.stream.table(task, "train", context.backbone.codec)
            for task in phase.tasks
            if context.stream.has_data(task)
        ]
        train_s, tokens = done.spent["train_s"], done.spent["tokens"]
        return {
            "phase": phase.name,
            "steps": done.steps,
            "train_s": train_s,
            "eval_s": eval_s,
            "tokens": int(tokens),
            "truncated_sources": sum(table.truncated_sources for table in tables),
            "truncated_targets": sum(table.truncated_targets for table in tables),
            "tokens_per_s": tokens / train_s if train_s else None,
            "prepare_s": done.spent.get("prepare_s"),
            "kept_bytes": done.spent.get("kept_bytes"),
            "step_bytes": int(done.spent.get("step_bytes", 0)),
            "trained_parameters": int(done.spent.get("trained_parameters", 0)),
            **memory_used(world),
        }


def _scored(record: dict[str, Any]) -> ScoredRow:
    """Return the row that the journal of a task's own folder has."""
    times = record["times"]
    unseen, general = record.get("unseen", {}), record.get("general", {})
    return ScoredRow(record["row"], unseen, {}, record["summary"], times["eval_s"], general)


def _epochs(spent: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the task -> epoch -> score inside the phase (`eval.at_epochs`)."""
    curves: dict[str, dict[str, float]] = {}
    for key, value in spent.items():
        if key.startswith(EPOCH):
            epoch, _, task = key.removeprefix(EPOCH).partition("/")
            curves.setdefault(task, {})[epoch] = value
    return curves


def _memory(record: dict[str, Any] | None) -> dict[str, float]:
    return {} if record is None else {name: record["times"][name] for name in ("peak_memory_mb", "resident_memory_mb")}
