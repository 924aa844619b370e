"""Host memory that writing a checkpoint takes in full fine-tuning, beside what training itself holds.

A random LLaMA-shaped model is trained for some steps by workers over gloo, without Ray, as a run trains it. After each
step a worker returns freed memory to the system and notes its resident memory without files and shared pages; the most
until the next forward pass, or until evaluation begins, is what the checkpoint took. The workers' figures are added up.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.figures import Figure, Report, machine
from benchmarks.streams.memory import ENGINES, GIB, SHAPES, VOCABULARY, WRITE
from raycl import config as configs
from raycl.errors import RunError
from raycl.methods.capabilities import Constraint
from raycl.methods.modifier import Modifiers
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.engines.engine import Engine, OpenEngine, Transform
from raycl.training.setup.run_config import RunConfig
from raycl.training.stream_loop import StreamLoop
from raycl.training.workers.control import Control
from raycl.training.workers.distributed import DistributedContext
from raycl.training.workers.memory import return_freed_memory
from raycl.types import Batch

EVERY_S = 0.002
LIMIT = 0.3
"""The limit for all workers together, relative to one copy of the trained weights."""
INSIDE, END = "inside a task", "at a task's end"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults end within five minutes on two cores, and need 8 GiB."""
    parser.add_argument("--model", choices=list(SHAPES), default="200M", help="size of the random backbone")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), help="engines in turn")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of one task; every second one writes a checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="that computes")


def measure(options: argparse.Namespace) -> Report:
    """Measure for each engine a checkpoint's size, and its host memory over one copy of the trained weights."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        sizes = map(str, (*SHAPES[options.model], VOCABULARY))
        subprocess.run([sys.executable, "-c", WRITE, f"{folder}/model", *sizes, "float32"], check=True)
        copy = sum(file.stat().st_size for file in Path(folder, "model").glob("*.safetensors"))  # trained in float32
        figures = [figure for engine in options.engines for figure in _figures(engine, options, Path(folder), copy)]
    settings = {key: getattr(options, key) for key in ("model", "workers", "steps", "dtype")}
    return Report("checkpoint", settings, figures, machine(load))


def _figures(engine: str, options: argparse.Namespace, folder: Path, copy: int) -> Iterator[Figure]:
    taken = run_workers(tree_of(engine, options.steps, folder, options.dtype), options.workers, folder / engine)
    for when in (INSIDE, END):
        most = max(taken[when])
        detail = f"{most / 2**20:,.0f} MiB, all {options.workers} workers; a copy has {copy / GIB:.2f} GiB"
        yield Figure(f"{engine}: memory for a checkpoint {when}", most / copy, "x", LIMIT, detail=detail)


def tree_of(engine: str, steps: int, folder: Path, dtype: str = "float32") -> dict[str, Any]:
    """Return the config of a run of full fine-tuning on `folder/model`."""
    name, *rest = (word.partition("=")[2] for word in ENGINES[engine])
    stream: dict[str, Any] = {"name": "builtin", "tasks": ["topic"], "train_rows": 4 * steps, "test_rows": 2}
    return {
        "backbone": {"name": f"{folder}/model", "dtype": dtype},
        "engine": {"name": name, **({"zero_stage": int(rest[0])} if rest else {})},
        "method": "finetune",
        "stream": {**stream, "max_source_tokens": 32, "max_target_tokens": 2, "cache_dir": f"{folder}/cache"},
        "train": {"max_steps": steps, "batch_size": 4},
        "checkpoint": {"every_steps": 2, "keep": 1, "asynchronous": False},
    }


def run_workers(tree: dict[str, Any], workers: int, folder: Path) -> dict[str, list[int]]:
    """Run a config in `folder`; when -> bytes that each checkpoint took, added up over the workers.

    Raises:
        RunError: a worker failed.
    """
    folder.mkdir()
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=work, args=(tree, rank, workers, folder)) for rank in range(workers)]
    for process in started:
        process.start()
    while any(process.is_alive() for process in started):
        time.sleep(0.1)
        if any(process.exitcode for process in started):  # the others wait for it
            for process in started:
                process.terminate()
    if failed := [rank for rank, process in enumerate(started) if process.exitcode]:
        raise RunError(f"worker {failed[0]} of {workers} failed: its error is above")
    trees = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]
    return {when: [sum(each) for each in zip(*(item[when] for item in trees), strict=True)] for when in (INSIDE, END)}


def work(tree: dict[str, Any], rank: int, workers: int, folder: Path) -> None:
    """Run one worker, which writes the memory of its checkpoints to `folder/RANK.json`."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(workers))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=workers)
    world, storage = DistributedContext(rank, workers, rank, torch.device("cpu")), Storage.at(folder / "run")
    context, open_engine = build(configs.validate(RunConfig, tree), world)
    taken = Taken()
    loop = StreamLoop(
        context, taken.engines(open_engine), storage, world, control=UntilEvaluation(storage, world, taken)
    )
    loop.run()
    (folder / f"{rank}.json").write_text(json.dumps(taken.found))
    dist.destroy_process_group()


class Taken:
    """Memory that this process took after optimizer steps.

    Attributes:
        found: when -> bytes for each checkpoint.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[int]] = {INSIDE: [], END: []}
        self._level = self._most = 0
        self._over: threading.Event | None = None

    def engines(self, open_engine: OpenEngine) -> OpenEngine:
        """Return the same engines, which tell when a step is done and a forward pass begins."""
        return lambda *phase: cast(Engine, WatchedEngine(open_engine(*phase), self))

    def begin(self, again: bool = False) -> None:
        """Begin measuring; `again`: continue after a pause, with the memory before it."""
        taken = self._most - self._level if again else 0
        return_freed_memory()  # it would hide what is taken next
        self._level = private_bytes()
        self._most = self._level + taken
        self._over = over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), daemon=True).start()

    def pause(self) -> None:
        """Pause measuring."""
        if self._over is not None:
            self._over.set()
            self._over = None

    def end(self, when: str) -> None:
        """End measuring, and keep the result."""
        if self._over is not None:
            self.pause()
            self.found[when].append(self._most - self._level)

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(EVERY_S):
            self._most = max(self._most, private_bytes())


class WatchedEngine:
    """An engine that reports when its steps end and forward passes begin."""

    def __init__(self, engine: Engine, taken: Taken) -> None:
        self.engine, self.taken = engine, taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def forward(self, batch: Batch) -> Any:
        """Begin a step; a checkpoint may have been written since the last one."""
        self.taken.end(INSIDE)
        return self.engine.forward(batch)

    def step(
        self, modifiers: Modifiers, transform: Transform | None = None, constraint: Constraint | None = None
    ) -> float:
        """End a step."""
        norm = self.engine.step(modifiers, transform, constraint)
        self.taken.begin()
        return norm

    def close(self) -> None:
        """Close the engine; its memory for complete parameters does not count for the checkpoint."""
        self.taken.pause()
        self.engine.close()
        self.taken.begin(again=True)


class UntilEvaluation(Control):
    """A run's control that reports when evaluation begins."""

    def __init__(self, storage: Storage, world: DistributedContext, taken: Taken) -> None:
        super().__init__(storage, world)
        self.taken = taken

    def progress(self, activity: str, **values: Any) -> None:
        """Note that the last step's checkpoint is written."""
        if activity == "evaluating":
            self.taken.end(END)
        super().progress(activity, **values)


def private_bytes() -> int:
    """Return the resident memory of this process, without files and what it shares."""
    _, held, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (held - shared) * os.sysconf("SC_PAGE_SIZE")
