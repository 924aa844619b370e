"""The stream, told stage by stage: train, remember, evaluate, record.

Every worker runs the same lines; rank 0 also writes. A run that died goes on from its ledger, and a finished
stage is neither trained nor evaluated again.
What it does not know: which method, which engine, who started the workers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

import torch

from raycl.data.loader import GlobalOrder, Loader, eval_batches
from raycl.eval.evaluator import merge, predict_share, score_task
from raycl.storage import Storage
from raycl.train.checkpoint import Checkpoint, read_checkpoint, write_checkpoint, write_learned
from raycl.train.checkpoint import FOLDER as CHECKPOINTS
from raycl.train.engine import Engine, load_parameters
from raycl.train.ledger import Ledger
from raycl.train.parts import Parts
from raycl.train.progress import Progress, Trace, clock
from raycl.train.results import build_results
from raycl.train.step import StepResult, train_step
from raycl.train.world import World
from raycl.types import Score, Stage, Task

log = logging.getLogger("raycl")


class Tracker(Protocol):
    """Where metrics also go (wandb, TensorBoard)."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record `metrics` at a step counted over the whole run."""
        ...


OpenEngine = Callable[[int, int], Engine]
"""(accumulation, steps) -> the engine of one stage."""


class StreamLoop:
    """One worker's life on a stream."""

    def __init__(
        self,
        parts: Parts,
        open_engine: OpenEngine,
        storage: Storage,
        world: World,
        tracker: Tracker | None = None,
        on_stage: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Claim the run.

        Args:
            on_stage: called on every worker after each stage with its record (Ray Train's report).
        """
        self.parts = parts
        self.open_engine = open_engine
        self.storage = storage
        self.world = world
        self.tracker = tracker
        self.on_stage = on_stage
        self.ledger = Ledger.claim(storage, world.size) if world.is_first else None
        self.state = world.broadcast(self.ledger.state if self.ledger else None)
        assert self.state is not None
        self.trace = Trace(storage, self.ledger.attempt) if self.ledger else None
        self.progress = Progress(parts.train.log_every_s, len(parts.stages))

    def run(self, stop_after: int | None = None) -> None:
        """Go on from where the ledger says, for `stop_after` stages at most (None: to the end)."""
        pending = self._restore()
        first = len(self.state.stages)
        last = len(self.parts.stages) if stop_after is None else min(first + stop_after, len(self.parts.stages))
        for stage in self.parts.stages[first:last]:
            if pending is None or not pending.is_stage_end:
                pending = self._train(stage, pending)
            record = self._evaluate(stage, pending)
            self._record(stage, record)
            pending = None
        if self.trace is not None:
            self.trace.flush()

    def _restore(self) -> Checkpoint | None:
        """Give the model the shape and values of the last checkpoint; returns it if its stage is not recorded."""
        if not self.state.checkpoints:
            return None
        checkpoint = read_checkpoint(self.storage, self.state.checkpoints[-1])
        self.parts.method.load_state_dict(checkpoint.method)
        if checkpoint.is_stage_end:
            load_parameters(self.parts.backbone, checkpoint.parameters)
        return checkpoint if checkpoint.stage == len(self.state.stages) else None

    def _train(self, stage: Stage, resume: Checkpoint | None) -> Checkpoint:
        parts, train = self.parts, self.parts.train
        parts.method.begin_task(stage, resumed=resume is not None)
        loader, order = self._loader(stage)
        engine = self.open_engine(loader.accumulation, order.steps)
        spent = {"train_s": 0.0, "tokens": 0.0}
        start = 0
        if resume is not None:
            engine.restore(resume.parameters, resume.optimizer, resume.step)
            start, spent = resume.step, dict(resume.spent)
        if self.world.is_first:
            self.progress.begin(stage.index, stage.name, order.count, order.steps, start)
        parts.backbone.train()
        for step in range(start, order.steps):
            began = time.perf_counter()
            seed = _seed(parts.info.seed, "step", stage.index, step)
            result = train_step(engine, parts.method, loader.micro_batches(step), self.world, seed)
            seconds = time.perf_counter() - began
            spent = {"train_s": spent["train_s"] + seconds, "tokens": spent["tokens"] + result.tokens}
            self._say(stage, step + 1, order.steps, result, seconds)
            if train_due(step + 1, order.steps, parts.checkpoint.every_steps):
                self._save(self._snapshot(stage, engine, step + 1, order.steps, spent))
        done = self._snapshot(stage, engine, order.steps, order.steps, spent)
        engine.close()
        self._finish(stage, done)
        return done

    def _loader(self, stage: Stage) -> tuple[Loader, GlobalOrder]:
        parts, train = self.parts, self.parts.train
        tables = [parts.stream.table(task, "train", parts.backbone.codec) for task in stage.tasks]
        seed = _seed(parts.info.seed, "order", stage.index)
        order = GlobalOrder(sum(map(len, tables)), train.batch_size, train.epochs_of(stage.name), seed, train.max_steps)
        micro = micro_batch_size(train.batch_size, train.micro_batch_size, self.world.size)
        codec = parts.backbone.codec
        labels = parts.backbone.label_ids() if codec.needs_labels else None
        loader = Loader(tables, labels, order, self.world.rank, self.world.size, micro, train.batch_size, codec.pad_id)
        return loader, order

    def _snapshot(self, stage: Stage, engine: Engine, step: int, steps: int, spent: dict[str, float]) -> Checkpoint:
        """A checkpoint of now; collective."""
        method = self.parts.method
        return Checkpoint(
            stage.index,
            step,
            steps,
            method.state_dict(),
            engine.parameters(method.learned_names()),
            {} if step == steps else engine.optimizer_state(),
            spent,
        )

    def _finish(self, stage: Stage, done: Checkpoint) -> None:
        """End of training: what the method remembers, then the checkpoint that carries it, then the export."""
        learned = self.parts.method.end_task(stage, done.parameters)
        done.method = self.parts.method.state_dict()
        self._save(done)
        wanted = self.parts.checkpoint.export
        is_last = stage.index == len(self.parts.stages) - 1
        if learned and self.ledger and (wanted == "each" or (wanted == "last" and is_last)):
            files = self.parts.backbone.model_files() if learned.kind == "model" else {}
            write_learned(self.storage, f"{stage.index:03d}-{stage.name}", learned, files)

    def _save(self, checkpoint: Checkpoint) -> None:
        if self.ledger is None:
            return
        if self.trace is not None:
            self.trace.flush()
        self.ledger.ensure_current()
        name = checkpoint.name(self.ledger.attempt)
        write_checkpoint(self.storage, name, checkpoint)
        for old in self.ledger.checkpoint(name, self.parts.checkpoint.keep):
            self.storage.delete(f"{CHECKPOINTS}/{old}")

    def _evaluate(self, stage: Stage, done: Checkpoint) -> dict[str, Any]:
        began = time.perf_counter()
        self.parts.backbone.eval()
        row: dict[str, Score] = {}
        for task in self._tasks_to_score(stage):
            row[task.name] = self._score(stage, task)
        eval_s = time.perf_counter() - began
        if self.parts.method.one_model_per_task and self.state.stages:
            earlier = self.state.stages[-1]["row"]
            row = {**{name: Score(**cell) for name, cell in earlier.items()}, **row}
        train_s = done.spent["train_s"]
        times = {
            "stage": stage.name,
            "train_s": train_s,
            "eval_s": eval_s,
            "tokens": int(done.spent["tokens"]),
            "tokens_per_s": done.spent["tokens"] / train_s if train_s else None,
            "steps": done.steps,
            "peak_memory_mb": max(self.world.gather(peak_memory_mb())),
        }
        return {"stage": stage.index, "row": {name: asdict(cell) for name, cell in row.items()}, "times": times}

    def _tasks_to_score(self, stage: Stage) -> list[Task]:
        """The stage's own tasks, every task seen, or all."""
        if self.parts.method.one_model_per_task:
            return list(stage.tasks)
        if self.parts.evaluation.tasks == "all":
            return list(self.parts.stream.tasks)
        return [task for seen in self.parts.stages[: stage.index + 1] for task in seen.tasks]

    def _score(self, stage: Stage, task: Task) -> Score:
        parts = self.parts
        backbone, settings, codec = parts.backbone, parts.evaluation, parts.backbone.codec
        table = parts.stream.table(task, settings.split, codec)
        limit = settings.max_new_tokens or codec.max_target_tokens
        batches = eval_batches(table, None, self.world.rank, self.world.size, settings.batch_size, codec.pad_id)
        share = predict_share(batches, lambda batch: backbone.predict(batch.to(self.world.device), limit))
        answers = merge(self.world.gather(share), len(table))
        references = table.references(range(len(table)))
        others = {label for other in parts.stream.tasks if other is not task for label in other.labels or ()}
        cell = score_task(task, answers, references, others)
        if self.world.is_first:
            log.info("    %-32s %6.1f  (%d examples)", task.name, cell.value, cell.count)
            if settings.save_predictions:
                self._save_answers(stage, task, table.texts(range(len(table))), references, answers)
        return cell

    def _save_answers(self, stage: Stage, task: Task, texts: Any, references: Any, answers: list[str]) -> None:
        lines = [
            json.dumps({"text": text, "references": list(reference), "answer": answer}, ensure_ascii=False)
            for text, reference, answer in zip(texts, references, answers, strict=True)
        ]
        name = f"predictions/{stage.index:03d}-{stage.name}/{task.name}.jsonl"
        self.storage.write(name, ("\n".join(lines) + "\n").encode())

    def _record(self, stage: Stage, record: dict[str, Any]) -> None:
        if self.ledger is not None:
            self.ledger.stage_done(record)
            self.storage.write_json("results.json", self.results())
        self.state.stages = [*self.state.stages, record]
        if self.world.is_first:
            times = record["times"]
            log.info("    trained %s, evaluated %s", clock(times["train_s"]), clock(times["eval_s"]))
            if self.tracker:
                scores = {f"score/{name}": float(cell["value"]) for name, cell in record["row"].items()}
                self.tracker.log(self._steps_done(stage, times["steps"]), scores)
        if self.on_stage:
            self.on_stage(record)

    def results(self) -> dict[str, Any]:
        """The result tree so far (rank 0)."""
        assert self.ledger is not None
        parts = self.parts
        return build_results(
            parts.info, parts.stream.name, parts.stream.notes, parts.stream.tasks, parts.stages, self.ledger.state
        )

    def _say(self, stage: Stage, step: int, steps: int, result: StepResult, seconds: float) -> None:
        if self.trace is None:
            return
        self.trace.add(stage.index, stage.name, step, result, seconds)
        if self.progress.step(stage.index, stage.name, step, steps, result, seconds):
            self.trace.flush()
        if self.tracker:
            values = {"loss": result.loss, "grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
            values["tokens_per_s"] = result.tokens / max(seconds, 1e-9)
            self.tracker.log(self._steps_done(stage, step), values)

    def _steps_done(self, stage: Stage, step: int) -> int:
        """Optimizer steps of the whole run."""
        return step + sum(record["times"]["steps"] for record in self.state.stages[: stage.index])


def train_due(step: int, steps: int, every: int | None) -> bool:
    """Whether a checkpoint is due inside a stage (its end has one of its own)."""
    return every is not None and step < steps and step % every == 0


def micro_batch_size(batch_size: int, micro: int | None, workers: int) -> int:
    """The configured size, or a worker's whole share of the batch."""
    return micro or max(1, batch_size // workers)


def peak_memory_mb() -> float:
    """The most memory this process held so far: GPU memory on a GPU, else resident memory, in MB."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _seed(*parts: int | str) -> int:
    """A stable 62-bit seed for these words."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 2
