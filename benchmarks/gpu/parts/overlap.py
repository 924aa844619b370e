"""A short stream with `eval.mode=overlap` beside the same stream with evaluation inline, both on one device.

The real training loop, checkpoints and scoring, with a LLaMA of drawn weights whose answers never end, so that each
takes as long. The process that scores is started once, as in a run, and imports before any time is taken. It computes
on the device that trains: what is won is what one process leaves idle. The limit is an estimate: it has not been
measured on a GPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.figures import Figure
from benchmarks.gpu.battery import cache_in
from benchmarks.gpu.models import FIRST_WORD, decoder, sizes_of
from benchmarks.gpu.scorer import ProcessScorer
from benchmarks.gpu.setup import Case, Setup, check_equal, ratio
from benchmarks.gpu.timing import Times
from raycl import config as configs
from raycl.data.benchmarks import builtin
from raycl.errors import WrongResultError
from raycl.run.assembly import build
from raycl.run.config import RunConfig
from raycl.storage import Storage
from raycl.testing.tiny_models import word_tokenizer
from raycl.training.distributed import DistributedContext
from raycl.training.phase.scoring import score_checkpoint
from raycl.training.records.journal import read_state
from raycl.training.stream_loop import StreamLoop

SIZE = "1B"
TASKS = ("topic", "sentiment", "intent")
LIMIT = 0.95
"""Of wall-clock over inline's; an estimate."""
SIZES, TINY_SIZES = (30, 96, 24), (2, 6, 3)
"""Steps of eight rows and test rows of each task, and tokens of an answer."""
ROUNDS = 3
MODES = ("inline", "overlap")
DIFFERENT = 0.01
"""Share of answers that may differ between two processes on a GPU; on a CPU none may."""


def cases(setup: Setup) -> Iterator[Case]:
    """One."""
    disable_progress_bar()
    yield Case("stream", Overlap(setup).figures)


class Overlap:
    """Runs in a temporary folder."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.number = setup, 0
        self.world = DistributedContext.alone(setup.device)

    @cached_property
    def folder(self) -> Path:
        """With the model; what is cached is there too."""
        folder = Path(self.setup.closing.enter_context(tempfile.TemporaryDirectory()))
        self.setup.closing.enter_context(cache_in(folder / "cache"))
        size = sizes_of(self.setup, SIZE).vocabulary - FIRST_WORD
        texts = [text for task in TASKS for text, _ in builtin.rows(task, "train", 40, 0)]
        words = sorted({word for text in texts for word in text.lower().split()})
        known = [*words, *(f"w{number}" for number in range(size))][:size]
        decoder(self.setup, SIZE).model.save_pretrained(folder / "model")
        word_tokenizer("llama", known).save_pretrained(folder / "model")
        self.setup.free()
        return folder

    @cached_property
    def scorer(self) -> ProcessScorer:
        """Until the part ends."""
        found = ProcessScorer()
        self.setup.closing.callback(found.close)
        return found

    def config(self, mode: str, is_warm_up: bool = False) -> RunConfig:
        """Of a run."""
        steps, rows, tokens = TINY_SIZES if self.setup.tiny or is_warm_up else SIZES
        limits = {"max_source_tokens": 64, "max_target_tokens": tokens}
        tree = {
            "stream": {"tasks": list(TASKS), "train_rows": 64, "test_rows": rows, "dev_fraction": 0, **limits},
            "backbone": {"name": str(self.folder / "model"), "dtype": str(self.setup.dtype).removeprefix("torch.")},
            "method": {"name": "lora"},
            "train": {"max_steps": steps, "epochs": 1000, "batch_size": 8, "log_every_s": 1000},
            "checkpoint": {"keep": len(TASKS) + 1},
            "eval": {"mode": mode},
        }
        return configs.validate(RunConfig, tree)

    def figures(self, seconds: float) -> Iterator[Figure]:
        """As many rounds as there is time for, one at least."""
        ends, spent = time.monotonic() + seconds, {mode: list[float]() for mode in MODES}
        self._run("overlap", is_warm_up=True)  # both processes load their kernels
        latest = 0.0
        while not spent["inline"] or (len(spent["inline"]) < ROUNDS and time.monotonic() + latest < ends):
            began = time.monotonic()
            for mode in MODES:
                spent[mode].append(self._run(mode))
            latest = time.monotonic() - began
            if self.setup.tiny:
                break
        differ, count = self._answers_that_differ()
        times = {mode: Times(tuple(values)) for mode, values in spent.items()}
        detail = f"{len(TASKS)} tasks, {differ} of {count} answers differ from those of this process"
        yield ratio("wall-clock over inline's", times["overlap"], times["inline"], LIMIT, detail)

    def _run(self, mode: str, is_warm_up: bool = False) -> float:
        """Seconds of the loop, without loading."""
        self.number += 1
        storage, config = Storage.at(self.folder / f"run{self.number}-{mode}"), self.config(mode, is_warm_up)
        context, open_engine = build(config, self.world)
        if mode == "overlap":
            self.scorer.take(self._job(config, storage))
        scorer = self.scorer if mode == "overlap" else None
        loop = StreamLoop(context, open_engine, storage, self.world, scorer=scorer)
        began = time.perf_counter()
        loop.run()
        self.setup.synchronize()
        took = time.perf_counter() - began
        check_equal(f"rows of the run with eval.mode={mode}", read_state(storage).scored, len(TASKS))
        del context, open_engine, loop
        self.setup.free()
        return took

    def _job(self, config: RunConfig, storage: Storage) -> dict[str, Any]:
        resources = {"CPU": 1.0, "GPU": 1.0 if self.setup.is_cuda else 0.0}
        named = {"singles": None, "replaces": "", "commit": None, "retry_s": 0.0}
        return {"config": configs.as_tree(config), "folder": storage.address, "scorer": resources, **named}

    def _answers_that_differ(self) -> tuple[int, int]:
        """Rows that were scored beside training, scored again here from the same checkpoints.

        Raises:
            WrongResultError: more answers differ than rounding explains.
        """
        storage, config = Storage.at(self.folder / f"run{self.number}-overlap"), self.config("overlap")
        checkpoints = read_state(storage).checkpoints
        differ = count = 0
        for phase, task in enumerate(TASKS[:-1]):
            files = [f"predictions/{phase:03d}-{task}/{seen}.jsonl" for seen in TASKS[: phase + 1]]
            theirs = [row for file in files for row in storage.read_json_lines(file)]
            name = max(one for one in checkpoints if one.startswith(f"phase{phase:03d}"))
            score_checkpoint(build(config, self.world)[0], storage, name, self.world, lambda task: None)
            mine = [row for file in files for row in storage.read_json_lines(file)]
            differ += sum(one != other for one, other in zip(mine, theirs, strict=True))
            count += len(mine)
            self.setup.free()
        if differ > (DIFFERENT * count if self.setup.is_cuda else 0):
            raise WrongResultError(
                f"rows scored beside training: {differ} of {count} answers differ from those of the same checkpoints "
                "in this process: the figures of this case are left out"
            )
        return differ, count
