"""A scorer of rows in the test's own process, whose rows are late: they come when the run waits for them, or never."""

from __future__ import annotations

import torch

from raycl.errors import RunError
from raycl.run.assembly import build
from raycl.run.config import RunConfig
from raycl.storage import Storage
from raycl.training.distributed import DistributedContext
from raycl.training.phase.scoring import ScoredRow, score_checkpoint


class LateScorer:
    """As `raycl.launch.scoring.ScoringActor`, without Ray.

    Attributes:
        begun: checkpoints that were to be scored, in order.
    """

    def __init__(self, config: RunConfig, storage: Storage, fails_at: int | None = None) -> None:
        """Args:
        fails_at: number of the row, from 0, that cannot be scored.
        """
        self.config, self.storage, self.fails_at = config, storage, fails_at
        self.begun: list[str] = []

    def begin(self, checkpoint: str, phase: str) -> None:
        self.begun.append(checkpoint)

    def result(self, wait_s: float) -> ScoredRow | None:
        """The row, when it is waited for."""
        if not wait_s:
            return None
        if len(self.begun) - 1 == self.fails_at:
            raise RunError("the process that scores died")
        alone = DistributedContext.alone(torch.device("cpu"))
        context, _ = build(self.config, alone)
        return score_checkpoint(context, self.storage, self.begun[-1], alone, lambda task: None)

    def progress(self) -> int:
        return len(self.begun)
