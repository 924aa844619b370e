"""`eval.select=best_dev`: of a phase's epochs, the weights with the best dev score are what it has learned.

Why it exists: published runs choose a checkpoint by its dev score; the last one is what most methods here mean.
What it does not know: how rows are scored (`evaluation`).
"""

from __future__ import annotations

import logging
from statistics import fmean

from torch import Tensor

from raycl.methods.base import trained_names, under
from raycl.training.distributed import DistributedContext, load_parameters
from raycl.training.engines.engine import Engine
from raycl.training.phase.evaluation import dev_score
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.training_context import TrainingContext
from raycl.types import Phase

log = logging.getLogger("raycl")

GROUP = "selection"
SCORE, STEP = "selected_score", "selected_step"
"""Keys of the best score so far, and the step that had it, in a checkpoint's `spent`."""


class Selection:
    """The best weights of one phase so far.

    Attributes:
        spent: score and step of the best, for the checkpoint; {} before the first score.
    """

    def __init__(
        self,
        context: TrainingContext,
        phase: Phase,
        world: DistributedContext,
        steps_per_epoch: int,
        resume: Checkpoint | None,
    ) -> None:
        """Go on from what a checkpoint inside the phase has."""
        self._context, self._phase, self._world = context, phase, world
        self._every = steps_per_epoch * context.evaluation.select_epochs
        self.spent: dict[str, float] = {}
        self._best: dict[str, Tensor] = {}
        if resume is not None and SCORE in resume.spent:
            self.spent = {key: resume.spent[key] for key in (SCORE, STEP)}
            self._best = dict(under(f"{GROUP}/best/", resume.frozen_state))

    def after_step(self, engine: Engine, step: int, steps: int) -> None:
        """Score the dev rows where an epoch ends, and keep the weights if they are better. Collective."""
        if self._context.evaluation.select == "last" or (step % self._every and step < steps):
            return
        context = self._context
        context.backbone.eval()
        score = fmean(dev_score(context, task, self._world) for task in self._phase.tasks)
        context.backbone.train()
        is_best = score > self.spent.get(SCORE, float("-inf"))
        if self._world.is_first:
            log.info("    dev after step %-6d %18.1f%s", step, score, "  (best so far)" if is_best else "")
        if is_best:
            self.spent = {SCORE: score, STEP: float(step)}
            self._best = engine.parameters(trained_names(context.backbone))

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint inside the phase must hold."""
        return {f"{GROUP}/best/{name}": value for name, value in self._best.items()}

    def end(self) -> dict[str, Tensor]:
        """Put the best weights into the backbone, and return them; none: the last ones are kept."""
        load_parameters(self._context.backbone, self._best)
        return self._best
