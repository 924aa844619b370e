"""General ability inside a run (`eval.general`): the backbone before any training, and the model after tasks.

Texts come without a task: the published router selects their adapters as for any text at an endpoint.
"""

import contextlib
import logging

from raycl.methods.base import activate
from raycl.scoring.general_ability import ability, line_of_ability, measure
from raycl.scoring.harness import RoutedModel
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.routing import PublishedRouter
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Mixture, Score

log: logging.Logger = logging.getLogger("raycl")


def general_scores(
    context: TrainingContext, world: DistributedContext, router: PublishedRouter | None, is_bare: bool = False
) -> dict[str, Score]:
    """Return the task and metric -> score. Collective; rank 0 logs each.

    Args:
        router: router of the phase; None: the model has no adapters.
        is_bare: the backbone without adapters answers.
    """
    method = context.method

    def route(batch: Batch) -> Mixture | None:
        if is_bare or router is None:
            return None
        return router.rule.applied(router.mixture(batch.to(world.device)))

    model = RoutedModel(
        context.backbone,
        (lambda mixture: contextlib.nullcontext()) if is_bare else (lambda mixture: activate(method, mixture)),
        route,
        context.evaluation.batch_size,
        share=(world.rank, world.size),
        gather=world.gather,
    )
    scores = measure(model, context.evaluation.general)
    if world.is_first:
        log.info("    general ability %s: %.1f", "before any training" if is_bare else "now", ability(scores))
        for name, score in scores.items():
            log.info("%s", line_of_ability(name, score))
    return scores
