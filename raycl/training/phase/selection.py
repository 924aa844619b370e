"""`eval.select=best_dev`: of a phase's epochs, the weights with the best dev score are what it has learned.

Published runs choose a checkpoint by its dev score; the last one is what most methods here mean.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from torch import Tensor

from raycl.methods.base import trained_names
from raycl.scoring.general_ability import ability
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.engine import Engine, Share
from raycl.training.phase.evaluation import StreamEvaluation, dev_score
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Phase

log: logging.Logger = logging.getLogger("raycl")

KEPT = "selected"
"""`<parameter>/selected` in a checkpoint inside a task: the best weights, beside the moments of the optimizer."""

EPOCH = "epoch/"
"""Begins the keys `epoch/NUMBER/TASK` of scores inside a task (`eval.at_epochs`) in a checkpoint's `spent`."""

SCORE, STEP = "selected_score", "selected_step"
"""Keys of the best score so far, and the step that had it, in a checkpoint's `spent`."""


class Selection:
    """The best weights of one phase so far.

    Attributes:
        spent: score and step of the best, and scores of epochs, for the checkpoint; {} before the first score.
        best: on the CPU, this worker's part of them, as it writes them to checkpoints; None: the last ones count.
    """

    def __init__(
        self,
        context: TrainingContext,
        phase: Phase,
        world: DistributedContext,
        steps_per_epoch: int,
        engine: Engine,
        resume: Checkpoint | None,
    ) -> None:
        """Go on from what a checkpoint inside the phase has."""
        self._context, self._phase, self._world, self._engine = context, phase, world, engine
        self._every = steps_per_epoch * context.evaluation.select_epochs
        self.spent: dict[str, float] = {}
        self.best: Share | None = None
        self._steps_per_epoch = steps_per_epoch
        if resume is not None:
            self.spent |= {key: value for key, value in resume.spent.items() if key.startswith(EPOCH)}
        if resume is not None and SCORE in resume.spent:
            self.spent |= {key: resume.spent[key] for key in (SCORE, STEP)}
            self.best = self._own({name: resume.optimizer[f"{name}/{KEPT}"] for name in resume.parameters})

    def after_step(self, step: int, steps: int) -> None:
        """Score the dev rows where an epoch ends, and keep the weights if they are better; score the rows of
        `eval.at_epochs`. Collective."""
        self._note_epoch(step)
        if self._context.evaluation.select == "last" or (step % self._every and step < steps):
            return
        context = self._context
        score = fmean(dev_score(context, task, self._world) for task in self._phase.tasks)
        context.backbone.train()
        is_best = score > self.spent.get(SCORE, float("-inf"))
        if self._world.is_first:
            log.info("    dev after step %-6d %18.1f%s", step, score, "  (best so far)" if is_best else "")
        if is_best:
            self.spent |= {SCORE: score, STEP: float(step)}
            self.best = None  # its memory is free before the next takes as much
            self.best = self._own()

    def _note_epoch(self, step: int) -> None:
        """Score the phase's tasks, and general ability if asked, by the model in training where an epoch of
        `eval.at_epochs` ends."""
        every = self._context.evaluation.at_epochs
        if every is None or step % (every * self._steps_per_epoch):
            return
        epoch = step // self._steps_per_epoch
        evaluation = StreamEvaluation(self._context, self._world)
        scores = {name: score.value for name, score in evaluation.scores(self._phase.tasks).items()}
        if self._context.evaluation.general.at == "epochs":
            general = evaluation.general(learning=self._phase.tasks[0].name)
            scores[f"{self._phase.name}: general"] = ability(general)
        for name, value in scores.items():
            self.spent[f"{EPOCH}{epoch}/{name}"] = value
            if self._world.is_first:
                log.info("    after epoch %-6d %-16s %5.1f", epoch, name, value)
        self._context.backbone.train()

    def _own(self, values: Mapping[str, Tensor] | None = None) -> Share:
        """Copy this worker's part of the weights, or of complete `values` for them."""
        now = self._engine.share(trained_names(self._context.backbone))
        parts = dict(now.parameters)
        if values is not None:
            for name, part in now.parameters.items():
                parts[name] = values[name]
                if (extent := now.places.get(name)) is not None:  # as many rows or elements as are its own
                    first, of = extent
                    whole = values[name] if isinstance(of, int) else values[name].view(-1)
                    parts[name] = whole[first : first + len(part)]
        return replace(now, parameters={name: part.to("cpu", copy=True) for name, part in parts.items()}, optimizer={})

    def tensors(self) -> dict[str, Tensor]:
        """Return what this worker writes of them to a checkpoint inside the phase."""
        return {f"{name}/{KEPT}": part for name, part in (self.best or Share()).parameters.items()}
