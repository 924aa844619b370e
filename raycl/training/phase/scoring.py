"""Results of an evaluated phase: its row of the matrix, unseen tasks, the method's summary."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from raycl.storage import Storage
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.evaluation import (
    Before,
    Observations,
    evaluate_row,
    evaluate_unseen,
    tasks_with_data,
)
from raycl.training.phase.routing import PublishedRouter, TextAlone
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Phase, Score

log = logging.getLogger("raycl")


@dataclass(frozen=True)
class ScoredRow:
    """A phase's part of the results.

    Attributes:
        row, unseen: task name -> cell; unseen: of the last phase only.
        other_row: the same as `row`, with or without instructions where that is the other way; of the last phase only.
        summary: the method's and the modifiers', on the first worker.
        eval_s: seconds that it took.
    """

    row: dict[str, Any]
    unseen: dict[str, Any]
    summary: dict[str, Any]
    eval_s: float
    other_row: dict[str, Any] = field(default_factory=dict)

    def of_last_phase(self) -> dict[str, Any]:
        """Return the fields of the phase's record that only the last phase has."""
        return {name: cells for name, cells in (("unseen", self.unseen), ("other_row", self.other_row)) if cells}


def score_phase(
    context: TrainingContext,
    phase: Phase,
    world: DistributedContext,
    storage: Storage,
    before: Before,
    done: Checkpoint,
) -> ScoredRow:
    """Evaluate the context's model as it is. Collective.

    Args:
        done: the phase's last checkpoint, with its router.
    """
    began = time.perf_counter()
    router = PublishedRouter.of(context.method, done)
    observations = Observations()
    is_last = phase.index == len(context.phases) - 1
    alone = (
        TextAlone.after(context, storage, done, router)
        if is_last or context.evaluation.instruction != "given"
        else None
    )
    chosen = alone if context.evaluation.instruction == "chosen" else None
    row = evaluate_row(context, phase, world, storage, router, observations, before, chosen)
    unseen = evaluate_unseen(context, world, storage, router, before, chosen) if is_last else {}
    other = _other_row(context, phase, world, storage, before, alone) if is_last and alone is not None else {}
    eval_s = time.perf_counter() - began
    observed = observations.means(world.gather)
    summary = context.method.summary(observed) | context.modifiers.summary() if world.is_first else {}
    return ScoredRow(_cells(row), _cells(unseen), summary, eval_s, other_row=_cells(other))


def _other_row(
    context: TrainingContext,
    phase: Phase,
    world: DistributedContext,
    storage: Storage,
    before: Before,
    alone: TextAlone,
) -> dict[str, Score]:
    """Return the row that `eval.instruction` leaves out; {} where it would be the same."""
    if not context.evaluation.other_row or not alone.differs(tasks_with_data(context, phase)):
        return {}
    is_given = context.evaluation.instruction == "given"
    if world.is_first:
        log.info("    %s:", "by the text alone, without instructions" if is_given else "with each task's instruction")
    folder = "chosen" if is_given else "given"
    chosen = alone if is_given else None
    return evaluate_row(context, phase, world, storage, alone.published, Observations(), before, chosen, folder)


def _cells(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: asdict(cell) for name, cell in scores.items()}
