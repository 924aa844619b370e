"""Records of a run: the journal, checkpoints, published adapters, results, the trace of steps, trackers.

Rank 0 writes; on other workers every call returns at once.
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raycl.bank.branches import Branch, explain_empty
from raycl.bank.pruning import hold_lease, release_lease
from raycl.errors import StorageError
from raycl.methods.base import Learned
from raycl.metrics.matrix import AccuracyMatrix
from raycl.metrics.run_results import METRICS
from raycl.storage import Storage
from raycl.storage.records import hashed
from raycl.training.definition.inputs import versions
from raycl.training.definition.job import Draw
from raycl.training.definition.training_context import TrainingContext
from raycl.training.records import checkpoint as checkpoints
from raycl.training.records.checkpoint import Checkpoint, WrittenFile
from raycl.training.records.journal import Journal, RunState
from raycl.training.records.progress import Progress, StepResult, Trace, clock
from raycl.training.records.publish import branch_of, move_branch, open_bank, publish
from raycl.training.records.results import build_results, metrics_so_far
from raycl.training.records.tensor_objects import SharedReader, TensorObjects
from raycl.training.tracking.trackers import Tracker
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Phase

log: logging.Logger = logging.getLogger("raycl")

OnPhase = Callable[[dict[str, Any]], bool | None]
"""Called on every worker after each phase with its record; False: the run stops there."""


@dataclass(frozen=True)
class Listeners:
    """Objects that follow a run besides its own records.

    Attributes:
        trackers: rank 0's. on_phase: see `OnPhase`. draw: see `TrainingJob`.
    """

    trackers: Sequence[Tracker] = ()
    on_phase: OnPhase | None = None
    draw: Draw | None = None


@dataclass(frozen=True)
class _Saving:
    """A checkpoint whose files are being written: name of its folder, and the manifest so far (on the first worker)."""

    name: str
    checkpoint: Checkpoint
    manifest: dict[str, Any]
    files: Future[dict[str, WrittenFile]]


class Recorder:
    """The records of a run by one worker.

    Attributes:
        journal: on rank 0, the claim on the run; None elsewhere.
        state: the run so far, as the journal has it.
        branch: the branch of the bank that the run moves.
    """

    def __init__(
        self,
        context: TrainingContext,
        storage: Storage,
        world: DistributedContext,
        listeners: Listeners,
        driver: str,
        shared: SharedReader | None = None,
    ) -> None:
        """Claim the run. Collective.

        Args:
            shared: see `TensorObjects`.
            driver: the process that started the workers, for the journal.
        """
        self.context = context
        self.storage = storage
        self.listeners = listeners
        bank = open_bank(context.bank, storage).storage if context.bank.publish or context.bank.start else None
        self.objects: TensorObjects = TensorObjects(storage, bank, shared, context.bank.copies)
        nodes = world.gather({"host": socket.gethostname(), "pid": os.getpid()})
        tasks, phases = _names(context)
        summary = {"workers": world.size, "driver": driver, "nodes": nodes, "stream": context.stream.name}
        summary |= {"tasks": tasks, "phases": phases, "versions": versions(context.info.plugins)}
        self.journal: Journal | None = Journal.claim(storage, context.info, **summary) if world.is_first else None
        self.state: RunState = world.broadcast(self.journal.state if self.journal else RunState())
        self.world = world
        self.attempt: int = world.broadcast(self.journal.attempt if self.journal else 0)
        self.trace: Trace | None = Trace(storage, self.journal.attempt) if self.journal else None
        self.branch: Branch = branch_of(context.bank, storage)
        self._saving: _Saving | None = None
        self.progress: Progress = Progress(context.train.log_every_s, len(context.phases))

    def go_back(self, checkpoint_names: list[str], phases: list[dict[str, Any]], reason: str) -> None:
        """Continue from an older checkpoint: what was recorded after it does not count."""
        self.state = replace(self.state, checkpoints=checkpoint_names, phases=phases)
        if self.journal is not None:
            log.warning("%s", reason)
            self.journal.go_back(checkpoint_names, phases)

    def step(self, phase: Phase, step: int, steps: int, result: StepResult, seconds: float) -> None:
        if self.trace is None:
            return
        self.trace.add(phase, step, result, seconds)
        if self.progress.step(phase, step, steps, result, seconds):
            self.trace.flush()
        self._track_step(phase, step, result, seconds)

    def add_steps(self, phase: Phase, steps: Sequence[dict[str, Any]]) -> None:
        """Record the optimizer steps of a phase that another worker group has trained.

        Args:
            steps: records of its trace.
        """
        if self.trace is None:
            return
        for record in steps:
            result = StepResult(**{field.name: record[field.name] for field in fields(StepResult)})
            self.trace.add(phase, record["step"], result, record["seconds"])
            self._track_step(phase, record["step"], result, record["seconds"])

    def _track_step(self, phase: Phase, step: int, result: StepResult, seconds: float) -> None:
        if self.listeners.trackers:
            names = ("loss", "grad_norm", "learning_rate")
            values = {f"train/{name}": getattr(result, name) for name in names}
            values["train/tokens_per_second"] = result.tokens / max(seconds, 1e-9)
            steps_before = sum(int(record["times"]["steps"]) for record in self.state.phases[: phase.index])
            for tracker in self.listeners.trackers:
                tracker.log("step", steps_before + step, values)

    def publish(self, phase: Phase, learned: Learned, done: Checkpoint) -> None:
        """Adapters go to the bank, whole models to a folder of the run. Collective where workers share weights out."""
        if self.journal is not None:
            self.journal.ensure_current()
        context = self.context
        is_last = phase.index == len(context.phases) - 1
        wanted = context.checkpoint.export
        if learned.model and (wanted == "each" or (wanted == "last" and is_last)):
            name, files = f"{phase.index:03d}-{phase.name}", context.backbone.model_files() if self.journal else {}
            checkpoints.write_model(self.storage if self.journal else None, name, learned, files)
        if self.journal is None or not context.bank.publish:
            return
        if learned.not_served:
            explain_empty(open_bank(context.bank, self.storage), learned.not_served)
        elif learned.adapters:
            done.published, done.snapshot = publish(context, phase, learned, done, self.state, self.objects)

    def save(self, checkpoint: Checkpoint, beside: bool = False) -> None:
        """Write a checkpoint: files, then the journal's record, then checkpoints that are not needed are deleted.

        Collective where each worker has a share.

        Args:
            beside: files are written in a thread, and what is trained must not change until `finish_saving`, without
                which the checkpoint does not exist.
        """
        self.finish_saving()
        if self.journal is None and not checkpoint.is_part:
            return
        name, manifest = checkpoint.name(self.attempt), {}
        if self.journal is not None and self.trace is not None:
            self.trace.flush()
            self.journal.ensure_current()
            manifest = checkpoints.begin_checkpoint(self.storage, name, checkpoint, self.objects)
        write = partial(checkpoints.write_share, self.storage, name, checkpoint, self.world.rank)
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving = _Saving(name, checkpoint, manifest, pool.submit(write))
        pool.shutdown(wait=False)  # the thread ends with its work
        if not beside:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, and record it; without one nothing is done.

        Collective where each worker has a share.

        Raises:
            StorageError: a worker could not write its share.
        """
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        name, checkpoint = saving.name, saving.checkpoint
        written, error = {}, None
        try:
            written = saving.files.result()
        except StorageError as raised:
            error = raised
        if checkpoint.is_part:
            self.world.raise_any(error)
        elif error is not None:
            raise error
        for others in self.world.gather(written) if checkpoint.is_part else ():
            written |= others
        if self.journal is None:
            return
        self.journal.ensure_current()
        sha256 = checkpoints.commit_checkpoint(self.storage, name, saving.manifest, written)
        unneeded = self.journal.checkpoint(name, sha256, self.context.checkpoint.keep)
        self.journal.ensure_current()  # a newer attempt may have started on one of them just now
        checkpoints.delete_checkpoints(self.storage, unneeded, self.journal.state.manifests, self.objects)
        if checkpoint.published:  # only now: what the branch points at is never lost with a crash
            move_branch(self.context, self.storage, self.branch, checkpoint.published)
            self.hold_lease(checkpoint.published)
            self.objects.delete_copies()

    def close(self) -> None:
        """Wait until nothing is written any more; a checkpoint that is not recorded by now will not exist."""
        if self._saving is not None:
            wait([self._saving.files])

    def hold_lease(self, newest: dict[str, Any]) -> None:
        """Hold a lease of the snapshots that the run's checkpoints continue from; only rank 0 writes it.

        Args:
            newest: snapshot that was published last.
        """
        if self.journal is None:
            return
        published = [record["bank"] for record in self.state.phases if record["bank"]]
        kept = [*published[-self.context.checkpoint.keep :], newest]
        bank = open_bank(self.context.bank, self.storage)
        hold_lease(bank.storage, self.storage.address, [record["snapshot"] for record in kept])

    def phase(self, phase: Phase, record: dict[str, Any]) -> bool:
        """Record a trained and evaluated phase, and return whether to continue."""
        self.state = replace(self.state, phases=[*self.state.phases, record])  # the journal has a state of its own
        if self.listeners.trackers:  # before the journal: a phase that it has is not tracked again after a crash
            self._track(record)
        if self.journal is not None:
            self.journal.phase_done(record)
            self.storage.write_json("results.json", hashed(self.results()))
            if len(self.state.phases) == len(self.context.phases) and (record["bank"] or self.context.bank.start):
                release_lease(open_bank(self.context.bank, self.storage).storage, self.storage.address)
            times = record["times"]
            moved = times["step_bytes"] / 2**20
            between = f", {moved:.3g} MiB a step between workers" if moved else ""
            log.info("    trained %s, evaluated %s%s", clock(times["train_s"]), clock(times["eval_s"]), between)
        on_phase = self.listeners.on_phase
        return on_phase is None or on_phase(record) is not False

    def _track(self, record: dict[str, Any]) -> None:
        done = len(self.state.phases)
        stream = self.context.stream
        metric = {task.name: task.metric for task in (*stream.tasks, *stream.unseen)}
        scores = {
            f"eval/{prefix}{task}/{name}": float(value)
            for prefix, kind in (("", "row"), ("", "unseen"), ("other_instruction/", "other_row"))
            for task, cell in record.get(kind, {}).items()
            for name, value in {metric[task]: cell["value"], **cell["extra"]}.items()
        }
        matrix = AccuracyMatrix.of_records(*_names(self.context), self.state.phases)
        metrics = metrics_so_far(matrix, done, self.context.info.singles)
        scores |= {f"cl/{METRICS.get(name, name)}": value for name, value in metrics.items()}
        rows = [[name, *values] for name, values in zip(matrix.phases, matrix.values(), strict=True)]
        with TemporaryDirectory() as folder:
            picture = Path(folder) / "matrix.png"
            if self.listeners.draw is not None:
                self.listeners.draw(self.results(), picture)
            for tracker in self.listeners.trackers:
                tracker.log("task", done, scores)
                tracker.table(done, "matrix", ["after", *matrix.tasks], rows)
                if picture.exists():
                    tracker.picture(done, "matrix_picture", picture)

    def results(self) -> dict[str, Any]:
        """Return the result tree so far, from the journal and, where it does not have it yet, the newest phase; on the
        first worker only."""
        assert self.journal is not None, "the first worker has the journal"
        context, state = self.context, replace(self.journal.state, phases=self.state.phases)
        return build_results(context.info, context.stream, context.phases, state)


def _names(context: TrainingContext) -> tuple[list[str], list[str]]:
    return [task.name for task in context.stream.tasks], [phase.name for phase in context.phases]
