"""What scores rows of the matrix in a process beside training (`eval.mode=overlap`), one after another.

Each row is scored by parts that are built anew, as a worker's are, with the state of the phase's last checkpoint:
nothing of an earlier row is left. They are built ahead, while the next task is trained, so that a row need not wait for
weights.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from raycl import config as configs
from raycl.run import assembly
from raycl.run.config import RunConfig
from raycl.storage import Storage
from raycl.training.distributed import DistributedContext
from raycl.training.memory import return_freed_memory
from raycl.training.phase.scoring import ScoredRow, score_checkpoint
from raycl.training.training_context import TrainingContext

log = logging.getLogger("raycl")

NICENESS = 5
"""Of the process: where cores are short, training goes first, and workers that wait for a row leave it their cores."""


class Lines(logging.Handler):
    """Keeps raycl's log lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line."""
        self.lines.append(self.format(record))


def own_process() -> Lines:
    """This process only scores: it gives way to training, and its log lines are kept."""
    lines = Lines()
    log.handlers, log.propagate = [lines], False
    log.setLevel(logging.INFO)
    os.nice(NICENESS)
    return lines


class ScoringProcess:
    """What runs in the process; `score` and `progress` may be called in threads of their own."""

    def __init__(self, job: dict[str, Any], lines: Lines) -> None:
        """Begin to build the first parts.

        Args:
            job: `config`, `folder`, `retry_s`, `singles`, `replaces` and `commit` of `raycl.launch.driver.job_of`, and
                `scorer`: `CPU` and `GPU` of this process. lines: gets raycl's log lines.
        """
        self._job, self._tasks, self._lines = job, 0, lines
        self._builder = ThreadPoolExecutor(max_workers=1)
        self._next: Future[TrainingContext] | None = self._builder.submit(self._built)

    def wait(self) -> None:
        """Until the next row's parts are built.

        Raises:
            RayclError: they cannot be.
        """
        if self._next is not None:
            self._next.result()

    def progress(self) -> int:
        """Tasks whose evaluation has begun."""
        return self._tasks

    def score(self, checkpoint: str) -> ScoredRow:
        """The row of the phase that ends with this checkpoint."""
        found = self._scored(self._parts(), checkpoint)
        lines, self._lines.lines = self._lines.lines, []
        return_freed_memory()  # before the next parts are there
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()
        self._next = self._builder.submit(self._built)
        return replace(found, lines=tuple(lines))

    @property
    def _world(self) -> DistributedContext:
        return DistributedContext.alone(torch.device("cuda" if self._job["scorer"]["GPU"] else "cpu"))

    def _parts(self) -> TrainingContext:
        """Those that were built ahead, which belong to the caller alone; new ones after an error."""
        ahead, self._next = self._next, None
        return self._built() if ahead is None else ahead.result()

    def _built(self) -> TrainingContext:
        job = self._job
        self._set_threads()
        config = configs.validate(RunConfig, {**job["config"], "engine": {"name": "torch"}})
        return assembly.build(config, self._world, job["singles"], job["replaces"], job["commit"])[0]

    def _scored(self, context: TrainingContext, checkpoint: str) -> ScoredRow:
        self._set_threads()
        storage = Storage.at(self._job["folder"]).with_retries(self._job["retry_s"])
        return score_checkpoint(context, storage, checkpoint, self._world, self._begin_task)

    def _set_threads(self) -> None:
        """Each thread of a process has its own number of torch's."""
        torch.set_num_threads(max(1, int(self._job["scorer"]["CPU"])))

    def _begin_task(self, task: str) -> None:
        self._tasks += 1
