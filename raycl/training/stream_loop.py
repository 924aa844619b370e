"""The stream, told stage by stage: train, remember, evaluate, record.

Every worker runs the same lines; rank 0 also writes. A run that died goes on from its ledger, and a finished
stage is neither trained nor evaluated again.
What it does not know: which method, which engine, who started the workers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from raycl.data.loader import GlobalOrder, Loader
from raycl.data.selection import Indices
from raycl.data.tokens import Split
from raycl.methods.base import Learned, phase_labels
from raycl.methods.context import TaskRows
from raycl.retrieval.encoder import SentenceEncoder
from raycl.storage import Storage
from raycl.tracking import MetricsSink
from raycl.training.control import Control
from raycl.training.distributed import DistributedContext
from raycl.training.engines.engine import Engine, load_parameters
from raycl.training.evaluation import evaluate_row, evaluate_unseen
from raycl.training.gradient_check import GradientMaskCheck
from raycl.training.memory import peak_memory_mb, resident_memory_mb
from raycl.training.records import checkpoint as checkpoints
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.records.journal import Journal, RunState, read_state
from raycl.training.records.progress import Progress, Trace, clock
from raycl.training.records.publish import complete_bank, publish
from raycl.training.records.results import build_results, curves, matrix_of
from raycl.training.records.resume import newest_place
from raycl.training.records.stop_request import StopRequested
from raycl.training.step import StepResult, train_step
from raycl.training.training_context import TrainingContext
from raycl.types import Phase, Score, Task

log = logging.getLogger("raycl")

OpenEngine = Callable[[int, int], Engine]
"""(accumulation, steps) -> the engine of one stage."""


class StreamLoop:
    """One worker's life on a stream.

    Attributes:
        journal: on rank 0, the claim on the run; None elsewhere.
    """

    def __init__(
        self,
        context: TrainingContext,
        open_engine: OpenEngine,
        storage: Storage,
        world: DistributedContext,
        sink: MetricsSink | None = None,
        on_phase: Callable[[dict[str, Any]], bool | None] | None = None,
        driver: str = "",
        control: Control | None = None,
    ) -> None:
        """Claim the run.

        Args:
            sink: rank 0's tracker, if any.
            on_phase: called on every worker after each stage with its record; False: the run stops there.
            driver: who started the workers, for the ledger.
            control: hears of the loop's progress, and stops it; None: nothing stops it.
        """
        self.context, self.open_engine = context, open_engine
        self.storage, self.world = storage, world
        self.sink, self.on_phase, self.control = sink, on_phase, control or Control(storage, world)
        nodes = world.gather({"host": socket.gethostname(), "pid": os.getpid()})
        claims = partial(Journal.claim, storage, context.info, workers=world.size, driver=driver, nodes=nodes)
        self.journal = claims() if world.is_first else None
        self.state: RunState = world.broadcast(self.journal.state if self.journal else RunState())
        self.trace = Trace(storage, self.journal.attempt) if self.journal else None
        self.progress = Progress(context.train.log_every_s, len(context.phases))

    def run(self, stop_after: int | None = None) -> None:
        """Go on from where the ledger says, for `stop_after` stages at most (None: to the end)."""
        last = None if stop_after is None else len(self.state.phases) + stop_after
        pending = self._restore()
        first = len(self.state.phases)
        try:
            for phase in self.context.phases[first:last]:
                self._pause("preparing", phase, phase.name)
                done = pending if pending and pending.is_phase_end else self._train(phase, pending)
                if not self._record(phase, self._evaluate(phase, done)):
                    return
                pending = None
        except StopRequested:
            if self.journal is not None:
                log.info("stopped, as asked")

    def _pause(self, activity: str, phase: Phase, task: str) -> None:
        """Between two steps that are no optimizer steps. Collective.

        Raises:
            StopRequested: the run is to stop here; there is nothing to write.
        """
        self.control.progress(activity, phase=phase.index, phases=len(self.context.phases), task=task)
        if self.control.stop_requested(now=True):
            raise StopRequested

    def _restore(self) -> Checkpoint | None:
        """Give the model the shape and values of the last whole checkpoint; returns it if its stage is not recorded.

        Raises:
            RunError: stages are recorded, but no checkpoint can be gone on from.
            BankError: the bank has lost what the next stage needs.
        """
        place = newest_place(self.storage, self.state, self.world)
        if place.problems:
            self.state = replace(self.state, checkpoints=place.checkpoints, phases=place.phases)
        if place.problems and self.journal is not None:
            log.warning("%s", place.told)
            self.journal.go_back(place.checkpoints, place.phases)
        complete_bank(self.context, self.storage, self.state, self.world)
        if (found := place.checkpoint) is None:
            return None
        self.context.method.load_state_dict(found.method, found.frozen_state)
        self.context.modifiers.load_state(found.modifiers, found.frozen_state)
        if found.is_phase_end:
            load_parameters(self.context.backbone, found.parameters)
        return found if found.phase == len(self.state.phases) else None

    def _train(self, phase: Phase, resume: Checkpoint | None) -> Checkpoint:
        context = self.context
        self._prepare(phase, resumed=resume is not None)
        context.method.show(TaskRows(phase, context.train.batch_size, context.stream, context.backbone.codec))
        context.method.begin_task(phase, resumed=resume is not None)
        context.backbone.competing_labels = tuple(phase_labels(phase)) if context.train.label_loss == "task" else ()
        context.modifiers.begin_task(phase, only=len(context.phases) == 1, resumed=resume is not None)
        loader, order = self._loader(phase)
        if resume is None:
            context.modifiers.study(partial(self._show, loader, order), self.world.sum)
        engine = self.open_engine(loader.accumulation, order.steps)
        start, spent = 0, {"train_s": 0.0, "tokens": 0.0}
        if resume is not None:
            with context.method.activate_trainable(1):
                engine.restore(resume.parameters, resume.optimizer, resume.step)
            start, spent = resume.step, dict(resume.spent)
        if self.world.is_first:
            later = sum(self._order(other, self._rows(other)).steps for other in context.phases[phase.index + 1 :])
            self.progress.begin(phase.index, phase.name, order.count, order.steps, start, later)
        self.control.progress("training", step=start, steps=order.steps)
        context.backbone.train()
        mask_check = GradientMaskCheck(engine, context.modifiers, context.train.betas[0])
        for step in range(start, order.steps):
            began = time.perf_counter()
            seed = stable_seed(context.info.seed, "step", phase.index, step)
            mask_check.before_step()
            batches = loader.micro_batches(step)
            context.method.begin_step(step, seed, len(batches))
            result = train_step(engine, context.method, batches, self.world, seed, context.modifiers)
            mask_check.after_step()
            seconds = time.perf_counter() - began
            spent = {"train_s": spent["train_s"] + seconds, "tokens": spent["tokens"] + result.tokens}
            self._say(phase, step + 1, order.steps, result, seconds)
            stops = step + 1 < order.steps and self.control.stop_requested()
            if stops or is_due(step + 1, order.steps, context.checkpoint.every_steps):
                self._save(self._snapshot(phase, engine, step + 1, order.steps, spent))
            if stops:
                engine.close()
                raise StopRequested
        done = self._snapshot(phase, engine, order.steps, order.steps, spent)
        context.modifiers.end_task()
        engine.close()
        self._finish(phase, done)
        return done

    def _show(self, loader: Loader, order: GlobalOrder, examples: int) -> None:
        """The first training examples, run through the model before anything is learned, for modifiers to look at."""
        context, rows = self.context, min(examples, order.count)
        context.backbone.eval()
        for step in range(min(order.steps, -(-rows // context.train.batch_size))):
            for batch in loader.micro_batches(step):
                now = batch.to(self.world.device)
                with torch.no_grad(), context.method.activate(now):
                    context.modifiers.watched(context.backbone, now)

    def _prepare(self, phase: Phase, resumed: bool) -> None:
        """The preparation stage of methods that route by texts; of all stages at once for those that look ahead."""
        method = self.context.method
        if method.encoder is None:
            return
        studied = (phase,) if not method.fits_ahead else self.context.phases if phase.index == 0 else ()
        for one in studied or (phase,):
            self._study(one, method.encoder, learn=one in studied and not resumed)

    def _study(self, phase: Phase, encoder: SentenceEncoder, learn: bool) -> None:
        """Every text is encoded once, shared by the workers."""
        world = self.world
        began = time.perf_counter()
        texts = {split: self._texts(phase, split) for split in ("train", "dev")}
        queries = {
            split: encoder.embed_all(found, (world.rank, world.size), world.gather) for split, found in texts.items()
        }
        encoded = time.perf_counter() - began
        if learn:
            self.context.method.study(phase, queries["train"], queries["dev"])
        if self.journal is not None:
            spent = time.perf_counter() - began - encoded
            count = sum(map(len, texts.values()))
            log.info("    %d texts encoded in %.1f s, keys learned in %.1f s", count, encoded, spent)

    def _texts(self, phase: Phase, split: Split) -> list[str]:
        """Input texts of a split of all the stage's tasks; none where a task has none."""
        stream, codec = self.context.stream, self.context.backbone.codec
        tables = [stream.table(task, split, codec) for task in phase.tasks if len(stream.rows(task, split))]
        return [text for table in tables for text in table.texts(range(len(table)))]

    def _loader(self, phase: Phase) -> tuple[Loader, GlobalOrder]:
        context, train, codec, world = self.context, self.context.train, self.context.backbone.codec, self.world
        tables = [context.stream.table(task, "train", codec) for task in phase.tasks]
        tables += [context.stream.table(task, "train", codec).part(rows) for task, rows in self._stored(phase)]
        order = self._order(phase, sum(map(len, tables)))
        micro = micro_batch_size(train.batch_size, train.micro_batch_size, world.size)
        labels = context.backbone.label_ids() if codec.needs_labels else None
        reads = context.method.reads_batches
        exercise = context.stream.exercise(codec, stable_seed(context.info.seed, "exercise", phase.index))
        sizes = (world.rank, world.size, micro, train.batch_size)
        loader = Loader(tables, labels, order, *sizes, codec.pad_id, reads, exercise)
        return loader, order

    def _order(self, phase: Phase, rows: int) -> GlobalOrder:
        """In which order the rows of a stage are learned; depends on nothing but the config."""
        train, seed = self.context.train, stable_seed(self.context.info.seed, "order", phase.index)
        return GlobalOrder(rows, train.batch_size, train.epochs_of(phase.name), seed, train.max_steps)

    def _rows(self, phase: Phase) -> int:
        own = sum(len(self.context.stream.rows(task, "train")) for task in phase.tasks)
        return own + sum(len(rows) for _, rows in self._stored(phase))

    def _stored(self, phase: Phase) -> list[tuple[Task, Indices]]:
        """Earlier tasks and their rows that are learned again in this stage."""
        share = self.context.method.replay_share
        before = self.context.phases[: phase.index] if share else ()
        return [(task, self.context.stream.stored(task, share)) for done in before for task in done.tasks]

    def _snapshot(self, phase: Phase, engine: Engine, step: int, steps: int, spent: dict[str, float]) -> Checkpoint:
        """A checkpoint of now; collective."""
        method, modifiers = self.context.method, self.context.modifiers
        parameters = engine.parameters(method.learned_names())
        optimizer = {} if step == steps else engine.optimizer_state()
        state, frozen_state = method.state_dict(), method.frozen_state() | modifiers.tensors()
        return Checkpoint(
            phase.index,
            step,
            steps,
            state,
            parameters,
            optimizer,
            spent,
            frozen_state=frozen_state,
            modifiers=modifiers.state(),
        )

    def _finish(self, phase: Phase, done: Checkpoint) -> None:
        """End of training: what the method remembers, its export, then the checkpoint: with it, training is over."""
        learned = self.context.method.end_task(phase, done.parameters)
        method = self.context.method
        done.method, done.frozen_state = method.state_dict(), method.frozen_state()
        done.modifiers = self.context.modifiers.state()
        done.parameters = {name: done.parameters[name] for name in method.learned_names()}
        if learned and self.journal:
            self.journal.ensure_current()
            self._leave(phase, learned, done)
        self._save(done)

    def _leave(self, phase: Phase, learned: Learned, done: Checkpoint) -> None:
        """Adapters to the bank, whole models to a folder of the run."""
        context = self.context
        is_last = phase.index == len(context.phases) - 1
        wanted = context.checkpoint.export
        if learned.model and (wanted == "each" or (wanted == "last" and is_last)):
            name = f"{phase.index:03d}-{phase.name}"
            checkpoints.write_model(self.storage, name, learned, context.backbone.model_files())
        if learned.adapters and context.bank.publish:
            before = self.state.phases[-1].get("bank") if self.state.phases else None
            done.published, done.snapshot = publish(context, phase, learned, self.storage, before)

    def _save(self, checkpoint: Checkpoint) -> None:
        """Files first, then the ledger's record, then what is no longer needed goes."""
        if self.journal is None or self.trace is None:
            return
        self.trace.flush()
        self.journal.ensure_current()
        name = checkpoint.name(self.journal.attempt)
        checkpoints.write_checkpoint(self.storage, name, checkpoint)
        unneeded = self.journal.checkpoint(name, self.context.checkpoint.keep)
        self.journal.ensure_current()  # a newer attempt may have started on one of them just now
        for old in unneeded:
            self.storage.delete(f"{checkpoints.FOLDER}/{old}")

    def _evaluate(self, phase: Phase, done: Checkpoint) -> dict[str, Any]:
        """The stage's record for the ledger."""
        began = time.perf_counter()
        before = partial(self._pause, "evaluating", phase)
        row = evaluate_row(self.context, phase, self.world, self.storage, before)
        is_last = phase.index == len(self.context.phases) - 1
        unseen = evaluate_unseen(self.context, self.world, self.storage, before) if is_last else {}
        eval_s = time.perf_counter() - began
        if self.context.method.one_model_per_task and self.state.phases:
            row = {**{name: Score(**cell) for name, cell in self.state.phases[-1]["row"].items()}, **row}
        tables = [self.context.stream.table(task, "train", self.context.backbone.codec) for task in phase.tasks]
        train_s, tokens = done.spent["train_s"], done.spent["tokens"]
        times = {
            "phase": phase.name,
            "steps": done.steps,
            "train_s": train_s,
            "eval_s": eval_s,
            "tokens": int(tokens),
            "truncated_sources": sum(table.truncated_sources for table in tables),
            "truncated_targets": sum(table.truncated_targets for table in tables),
            "tokens_per_s": tokens / train_s if train_s else None,
            "peak_memory_mb": max(self.world.gather(peak_memory_mb(self.world.device))),
            "resident_memory_mb": max(self.world.gather(resident_memory_mb())),
        }
        cells = {name: asdict(cell) for name, cell in row.items()}
        self.context.method.put_together(self.world.gather)
        summary = self.context.method.summary() | self.context.modifiers.summary() if self.journal else {}
        record = {"phase": phase.index, "row": cells, "times": times, "bank": done.published, "summary": summary}
        if unseen:
            record["unseen"] = {name: asdict(cell) for name, cell in unseen.items()}
        return {**record, "ended": time.time()}

    def _record(self, phase: Phase, record: dict[str, Any]) -> bool:
        """Whether to go on."""
        self.state = replace(self.state, phases=[*self.state.phases, record])  # the ledger's own state stays its own
        if self.journal is not None:
            self.journal.phase_done(record)
            self.storage.write_json("results.json", self.results())
            times = record["times"]
            log.info("    trained %s, evaluated %s", clock(times["train_s"]), clock(times["eval_s"]))
        if self.sink:
            scores = {f"score/{name}": float(cell["value"]) for name, cell in record["row"].items()}
            scores |= {f"unseen/{name}": float(cell["value"]) for name, cell in record.get("unseen", {}).items()}
            sofar = matrix_of(self.context.stream.tasks, self.context.phases, self.state)
            step = self._steps_done(phase, record["times"]["steps"])
            self.sink.log(step, scores | curves(sofar, len(self.state.phases), self.context.info.singles))
            rows = [[name, *values] for name, values in zip(sofar.phases, sofar.values(), strict=True)]
            self.sink.table(step, "matrix", ["after", *sofar.tasks], rows)
        return self.on_phase is None or self.on_phase(record) is not False

    def results(self) -> dict[str, Any]:
        """The result tree so far, from the ledger."""
        context = self.context
        state = read_state(self.storage)
        return build_results(
            context.info, context.stream.name, context.stream.notes, context.stream.tasks, context.phases, state
        )

    def _say(self, phase: Phase, step: int, steps: int, result: StepResult, seconds: float) -> None:
        self.control.progress("training", step=step, steps=steps, loss=result.loss)
        if self.trace is None:
            return
        self.trace.add(phase.index, phase.name, step, result, seconds)
        if self.progress.step(phase.index, phase.name, step, steps, result, seconds):
            self.trace.flush()
        if self.sink:
            speed = result.tokens / max(seconds, 1e-9)
            rates = {"learning_rate": result.learning_rate, "tokens_per_s": speed}
            values = {"loss": result.loss, "grad_norm": result.grad_norm, **rates}
            self.sink.log(self._steps_done(phase, step), values)

    def _steps_done(self, phase: Phase, step: int) -> int:
        """Optimizer steps of the whole run."""
        return step + sum(int(record["times"]["steps"]) for record in self.state.phases[: phase.index])


def is_due(step: int, steps: int, every: int | None) -> bool:
    """Whether a checkpoint is due inside a stage (its end has one of its own)."""
    return every is not None and step < steps and step % every == 0


def micro_batch_size(batch_size: int, micro: int | None, workers: int) -> int:
    """The configured size, or a worker's whole share of the batch."""
    return micro or max(1, batch_size // workers)


def stable_seed(*context: int | str) -> int:
    """A 62-bit seed that these words always give."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, context)).encode()).digest()[:8], "big") >> 2
