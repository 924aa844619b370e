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
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

import torch

from raycl.backbone.encoder import EncoderBackbone
from raycl.data.loader import GlobalOrder, Loader
from raycl.data.selection import Indices
from raycl.data.tokens import Split
from raycl.methods.base import Learned, stage_labels
from raycl.methods.context import StageRows
from raycl.retrieval.encoder import SentenceEncoder
from raycl.storage import Storage
from raycl.training.control import Control
from raycl.training.distributed import World
from raycl.training.engines.engine import Engine, load_parameters
from raycl.training.evaluation import evaluate_row, evaluate_unseen
from raycl.training.gradient_check import Proof
from raycl.training.memory import peak_memory_mb, resident_memory_mb
from raycl.training.records import checkpoint as checkpoints
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.records.journal import Ledger, RunState, read_state
from raycl.training.records.progress import Progress, Trace, clock
from raycl.training.records.publish import complete_bank, publish
from raycl.training.records.results import build_results, curves, matrix_of
from raycl.training.records.resume import newest_place
from raycl.training.records.stop_request import StopRequested
from raycl.training.step import StepResult, train_step
from raycl.training.training_context import Parts
from raycl.types import Score, Stage, Task

log = logging.getLogger("raycl")

OpenEngine = Callable[[int, int], Engine]
"""(accumulation, steps) -> the engine of one stage."""


class MetricsSink(Protocol):
    """Where metrics also go (wandb, TensorBoard)."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record `metrics` at an optimizer step counted over the whole run."""
        ...

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table at such a step; None where a cell is empty."""
        ...


class StreamLoop:
    """One worker's life on a stream.

    Attributes:
        ledger: on rank 0, the claim on the run; None elsewhere.
    """

    def __init__(
        self,
        parts: Parts,
        open_engine: OpenEngine,
        storage: Storage,
        world: World,
        sink: MetricsSink | None = None,
        on_stage: Callable[[dict[str, Any]], bool | None] | None = None,
        driver: str = "",
        control: Control | None = None,
    ) -> None:
        """Claim the run.

        Args:
            sink: rank 0's tracker, if any.
            on_stage: called on every worker after each stage with its record; False: the run stops there.
            driver: who started the workers, for the ledger.
            control: hears of the loop's progress, and stops it; None: nothing stops it.
        """
        self.parts, self.open_engine = parts, open_engine
        self.storage, self.world = storage, world
        self.sink, self.on_stage, self.control = sink, on_stage, control or Control(storage, world)
        nodes = world.gather({"host": socket.gethostname(), "pid": os.getpid()})
        claims = partial(Ledger.claim, storage, parts.info, workers=world.size, driver=driver, nodes=nodes)
        self.ledger = claims() if world.is_first else None
        self.state: RunState = world.broadcast(self.ledger.state if self.ledger else RunState())
        self.trace = Trace(storage, self.ledger.attempt) if self.ledger else None
        self.progress = Progress(parts.train.log_every_s, len(parts.stages))

    def run(self, stop_after: int | None = None) -> None:
        """Go on from where the ledger says, for `stop_after` stages at most (None: to the end)."""
        last = None if stop_after is None else len(self.state.stages) + stop_after
        pending = self._restore()
        first = len(self.state.stages)
        try:
            for stage in self.parts.stages[first:last]:
                self._pause("preparing", stage, stage.name)
                done = pending if pending and pending.is_stage_end else self._train(stage, pending)
                if not self._record(stage, self._evaluate(stage, done)):
                    return
                pending = None
        except StopRequested:
            if self.ledger is not None:
                log.info("stopped, as asked")

    def _pause(self, activity: str, stage: Stage, task: str) -> None:
        """Between two steps that are no optimizer steps. Collective.

        Raises:
            StopRequested: the run is to stop here; there is nothing to write.
        """
        self.control.progress(activity, stage=stage.index, stages=len(self.parts.stages), task=task)
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
            self.state = replace(self.state, checkpoints=place.checkpoints, stages=place.stages)
        if place.problems and self.ledger is not None:
            log.warning("%s", place.told)
            self.ledger.go_back(place.checkpoints, place.stages)
        complete_bank(self.parts, self.storage, self.state, self.world)
        if (found := place.checkpoint) is None:
            return None
        self.parts.method.load_state_dict(found.method, found.carried)
        self.parts.modifiers.load_state(found.modifiers, found.carried)
        if found.is_stage_end:
            load_parameters(self.parts.backbone, found.parameters)
        return found if found.stage == len(self.state.stages) else None

    def _train(self, stage: Stage, resume: Checkpoint | None) -> Checkpoint:
        parts = self.parts
        self._prepare(stage, resumed=resume is not None)
        parts.method.show(StageRows(stage, parts.train.batch_size, parts.stream, parts.backbone.codec))
        parts.method.begin_task(stage, resumed=resume is not None)
        if isinstance(parts.backbone, EncoderBackbone):
            parts.backbone.rivals = tuple(stage_labels(stage)) if parts.train.label_loss == "task" else ()
        parts.modifiers.begin_task(stage, only=len(parts.stages) == 1, resumed=resume is not None)
        loader, order = self._loader(stage)
        if resume is None:
            parts.modifiers.study(partial(self._show, loader, order), self.world.sum)
        engine = self.open_engine(loader.accumulation, order.steps)
        start, spent = 0, {"train_s": 0.0, "tokens": 0.0}
        if resume is not None:
            with parts.method.all_live(1):
                engine.restore(resume.parameters, resume.optimizer, resume.step)
            start, spent = resume.step, dict(resume.spent)
        if self.world.is_first:
            later = sum(self._order(other, self._rows(other)).steps for other in parts.stages[stage.index + 1 :])
            self.progress.begin(stage.index, stage.name, order.count, order.steps, start, later)
        self.control.progress("training", step=start, steps=order.steps)
        parts.backbone.train()
        proof = Proof(engine, parts.modifiers, parts.train.betas[0])
        for step in range(start, order.steps):
            began = time.perf_counter()
            seed = stable_seed(parts.info.seed, "step", stage.index, step)
            proof.before_step()
            batches = loader.micro_batches(step)
            parts.method.begin_step(step, seed, len(batches))
            result = train_step(engine, parts.method, batches, self.world, seed, parts.modifiers)
            proof.after_step()
            seconds = time.perf_counter() - began
            spent = {"train_s": spent["train_s"] + seconds, "tokens": spent["tokens"] + result.tokens}
            self._say(stage, step + 1, order.steps, result, seconds)
            stops = step + 1 < order.steps and self.control.stop_requested()
            if stops or is_due(step + 1, order.steps, parts.checkpoint.every_steps):
                self._save(self._snapshot(stage, engine, step + 1, order.steps, spent))
            if stops:
                engine.close()
                raise StopRequested
        done = self._snapshot(stage, engine, order.steps, order.steps, spent)
        parts.modifiers.end_task()
        engine.close()
        self._finish(stage, done)
        return done

    def _show(self, loader: Loader, order: GlobalOrder, examples: int) -> None:
        """The first training examples, run through the model before anything is learned, for modifiers to look at."""
        parts, rows = self.parts, min(examples, order.count)
        parts.backbone.eval()
        for step in range(min(order.steps, -(-rows // parts.train.batch_size))):
            for batch in loader.micro_batches(step):
                now = batch.to(self.world.device)
                with torch.no_grad(), parts.method.speaking(now):
                    parts.modifiers.watched(parts.backbone, now)

    def _prepare(self, stage: Stage, resumed: bool) -> None:
        """The preparation stage of methods that route by texts; of all stages at once for those that look ahead."""
        method = self.parts.method
        if method.encoder is None:
            return
        studied = (stage,) if not method.studies_ahead else self.parts.stages if stage.index == 0 else ()
        for one in studied or (stage,):
            self._study(one, method.encoder, learn=one in studied and not resumed)

    def _study(self, stage: Stage, encoder: SentenceEncoder, learn: bool) -> None:
        """Every text is encoded once, shared by the workers."""
        world = self.world
        began = time.perf_counter()
        texts = {split: self._texts(stage, split) for split in ("train", "dev")}
        queries = {
            split: encoder.embed_all(found, (world.rank, world.size), world.gather) for split, found in texts.items()
        }
        encoded = time.perf_counter() - began
        if learn:
            self.parts.method.study(stage, queries["train"], queries["dev"])
        if self.ledger is not None:
            spent = time.perf_counter() - began - encoded
            count = sum(map(len, texts.values()))
            log.info("    %d texts encoded in %.1f s, keys learned in %.1f s", count, encoded, spent)

    def _texts(self, stage: Stage, split: Split) -> list[str]:
        """Input texts of a split of all the stage's tasks; none where a task has none."""
        stream, codec = self.parts.stream, self.parts.backbone.codec
        tables = [stream.table(task, split, codec) for task in stage.tasks if len(stream.rows(task, split))]
        return [text for table in tables for text in table.texts(range(len(table)))]

    def _loader(self, stage: Stage) -> tuple[Loader, GlobalOrder]:
        parts, train, codec, world = self.parts, self.parts.train, self.parts.backbone.codec, self.world
        tables = [parts.stream.table(task, "train", codec) for task in stage.tasks]
        tables += [parts.stream.table(task, "train", codec).part(rows) for task, rows in self._stored(stage)]
        order = self._order(stage, sum(map(len, tables)))
        micro = micro_batch_size(train.batch_size, train.micro_batch_size, world.size)
        labels = parts.backbone.label_ids() if codec.needs_labels else None
        reads = parts.method.reads_batches
        exercise = parts.stream.exercise(codec, stable_seed(parts.info.seed, "exercise", stage.index))
        sizes = (world.rank, world.size, micro, train.batch_size)
        loader = Loader(tables, labels, order, *sizes, codec.pad_id, reads, exercise)
        return loader, order

    def _order(self, stage: Stage, rows: int) -> GlobalOrder:
        """In which order the rows of a stage are learned; depends on nothing but the config."""
        train, seed = self.parts.train, stable_seed(self.parts.info.seed, "order", stage.index)
        return GlobalOrder(rows, train.batch_size, train.epochs_of(stage.name), seed, train.max_steps)

    def _rows(self, stage: Stage) -> int:
        own = sum(len(self.parts.stream.rows(task, "train")) for task in stage.tasks)
        return own + sum(len(rows) for _, rows in self._stored(stage))

    def _stored(self, stage: Stage) -> list[tuple[Task, Indices]]:
        """Earlier tasks and their rows that are learned again in this stage."""
        share = self.parts.method.memory_share
        before = self.parts.stages[: stage.index] if share else ()
        return [(task, self.parts.stream.stored(task, share)) for done in before for task in done.tasks]

    def _snapshot(self, stage: Stage, engine: Engine, step: int, steps: int, spent: dict[str, float]) -> Checkpoint:
        """A checkpoint of now; collective."""
        method, modifiers = self.parts.method, self.parts.modifiers
        parameters = engine.parameters(method.learned_names())
        optimizer = {} if step == steps else engine.optimizer_state()
        state, carried = method.state_dict(), method.carried() | modifiers.tensors()
        return Checkpoint(
            stage.index, step, steps, state, parameters, optimizer, spent, carried=carried, modifiers=modifiers.state()
        )

    def _finish(self, stage: Stage, done: Checkpoint) -> None:
        """End of training: what the method remembers, its export, then the checkpoint: with it, training is over."""
        learned = self.parts.method.end_task(stage, done.parameters)
        method = self.parts.method
        done.method, done.carried = method.state_dict(), method.carried()
        done.modifiers = self.parts.modifiers.state()
        done.parameters = {name: done.parameters[name] for name in method.learned_names()}
        if learned and self.ledger:
            self.ledger.ensure_current()
            self._leave(stage, learned, done)
        self._save(done)

    def _leave(self, stage: Stage, learned: Learned, done: Checkpoint) -> None:
        """Adapters to the bank, whole models to a folder of the run."""
        parts = self.parts
        is_last = stage.index == len(parts.stages) - 1
        wanted = parts.checkpoint.export
        if learned.model and (wanted == "each" or (wanted == "last" and is_last)):
            name = f"{stage.index:03d}-{stage.name}"
            checkpoints.write_model(self.storage, name, learned, parts.backbone.model_files())
        if learned.adapters and parts.bank.publish:
            before = self.state.stages[-1].get("bank") if self.state.stages else None
            done.published, done.snapshot = publish(parts, stage, learned, self.storage, before)

    def _save(self, checkpoint: Checkpoint) -> None:
        """Files first, then the ledger's record, then what is no longer needed goes."""
        if self.ledger is None or self.trace is None:
            return
        self.trace.flush()
        self.ledger.ensure_current()
        name = checkpoint.name(self.ledger.attempt)
        checkpoints.write_checkpoint(self.storage, name, checkpoint)
        unneeded = self.ledger.checkpoint(name, self.parts.checkpoint.keep)
        self.ledger.ensure_current()  # a newer attempt may have started on one of them just now
        for old in unneeded:
            self.storage.delete(f"{checkpoints.FOLDER}/{old}")

    def _evaluate(self, stage: Stage, done: Checkpoint) -> dict[str, Any]:
        """The stage's record for the ledger."""
        began = time.perf_counter()
        before = partial(self._pause, "evaluating", stage)
        row = evaluate_row(self.parts, stage, self.world, self.storage, before)
        is_last = stage.index == len(self.parts.stages) - 1
        unseen = evaluate_unseen(self.parts, self.world, self.storage, before) if is_last else {}
        eval_s = time.perf_counter() - began
        if self.parts.method.one_model_per_task and self.state.stages:
            row = {**{name: Score(**cell) for name, cell in self.state.stages[-1]["row"].items()}, **row}
        tables = [self.parts.stream.table(task, "train", self.parts.backbone.codec) for task in stage.tasks]
        train_s, tokens = done.spent["train_s"], done.spent["tokens"]
        times = {
            "stage": stage.name,
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
        self.parts.method.put_together(self.world.gather)
        facts = self.parts.method.facts() | self.parts.modifiers.facts() if self.ledger else {}
        record = {"stage": stage.index, "row": cells, "times": times, "bank": done.published, "facts": facts}
        if unseen:
            record["unseen"] = {name: asdict(cell) for name, cell in unseen.items()}
        return {**record, "ended": time.time()}

    def _record(self, stage: Stage, record: dict[str, Any]) -> bool:
        """Whether to go on."""
        self.state = replace(self.state, stages=[*self.state.stages, record])  # the ledger's own state stays its own
        if self.ledger is not None:
            self.ledger.stage_done(record)
            self.storage.write_json("results.json", self.results())
            times = record["times"]
            log.info("    trained %s, evaluated %s", clock(times["train_s"]), clock(times["eval_s"]))
        if self.sink:
            scores = {f"score/{name}": float(cell["value"]) for name, cell in record["row"].items()}
            scores |= {f"unseen/{name}": float(cell["value"]) for name, cell in record.get("unseen", {}).items()}
            sofar = matrix_of(self.parts.stream.tasks, self.parts.stages, self.state)
            step = self._steps_done(stage, record["times"]["steps"])
            self.sink.log(step, scores | curves(sofar, len(self.state.stages), self.parts.info.singles))
            rows = [[name, *values] for name, values in zip(sofar.stages, sofar.values(), strict=True)]
            self.sink.table(step, "matrix", ["after", *sofar.tasks], rows)
        return self.on_stage is None or self.on_stage(record) is not False

    def results(self) -> dict[str, Any]:
        """The result tree so far, from the ledger."""
        parts = self.parts
        state = read_state(self.storage)
        return build_results(parts.info, parts.stream.name, parts.stream.notes, parts.stream.tasks, parts.stages, state)

    def _say(self, stage: Stage, step: int, steps: int, result: StepResult, seconds: float) -> None:
        self.control.progress("training", step=step, steps=steps, loss=result.loss)
        if self.trace is None:
            return
        self.trace.add(stage.index, stage.name, step, result, seconds)
        if self.progress.step(stage.index, stage.name, step, steps, result, seconds):
            self.trace.flush()
        if self.sink:
            speed = result.tokens / max(seconds, 1e-9)
            rates = {"learning_rate": result.learning_rate, "tokens_per_s": speed}
            values = {"loss": result.loss, "grad_norm": result.grad_norm, **rates}
            self.sink.log(self._steps_done(stage, step), values)

    def _steps_done(self, stage: Stage, step: int) -> int:
        """Optimizer steps of the whole run."""
        return step + sum(int(record["times"]["steps"]) for record in self.state.stages[: stage.index])


def is_due(step: int, steps: int, every: int | None) -> bool:
    """Whether a checkpoint is due inside a stage (its end has one of its own)."""
    return every is not None and step < steps and step % every == 0


def micro_batch_size(batch_size: int, micro: int | None, workers: int) -> int:
    """The configured size, or a worker's whole share of the batch."""
    return micro or max(1, batch_size // workers)


def stable_seed(*parts: int | str) -> int:
    """A 62-bit seed that these words always give."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 2
