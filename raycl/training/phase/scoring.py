"""Results of an evaluated phase: its row of the matrix, unseen tasks, the method's summary."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from raycl.storage import Storage
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.evaluation import Before, Observations, StreamEvaluation, tasks_with_data
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
        other_row: the row that `eval.instruction` leaves out; {} where it would be the same, and before the last phase.
        summary: the method's and the modifiers', on the first worker.
        eval_s: seconds that it took.
    """

    row: dict[str, Any]
    unseen: dict[str, Any]
    other_row: dict[str, Any]
    summary: dict[str, Any]
    eval_s: float


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
    is_last, is_given = phase.index == len(context.phases) - 1, context.evaluation.instruction == "given"
    alone = TextAlone.after(context, storage, done, router) if is_last or not is_given else None
    evaluation = StreamEvaluation(context, world, storage, router, before, None if is_given else alone)
    row = evaluation.row(phase)
    unseen = evaluation.unseen() if is_last else {}
    other: dict[str, Score] = {}
    wants_other = is_last and context.evaluation.other_row
    if wants_other and alone is not None and alone.differs(tasks_with_data(context, phase)):
        if world.is_first:
            way = "by the text alone, without instructions" if is_given else "with each task's instruction"
            log.info("    %s:", way)
        folder = "chosen" if is_given else "given"
        chosen = alone if is_given else None
        other = replace(evaluation, alone=chosen, folder=folder, observations=Observations()).row(phase)
    eval_s = time.perf_counter() - began
    observed = evaluation.observations.means(world.gather)
    summary = context.method.summary(observed) | context.modifiers.summary() if world.is_first else {}
    return ScoredRow(_cells(row), _cells(unseen), _cells(other), summary, eval_s)


def _cells(scores: dict[str, Score]) -> dict[str, Any]:
    return {name: asdict(score) for name, score in scores.items()}
