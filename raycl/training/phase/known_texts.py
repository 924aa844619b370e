"""Statistics of a phase's texts for the published router, by which texts of no task are found.

They are those of bare texts (`raycl.routing.statistics.BareTexts`), kept for every method whose router reads prompts
and chooses by them. A router that knows texts by other statistics keeps these itself (`MethodConfig.own_statistics`).
"""

from __future__ import annotations

from raycl.methods.base import Method
from raycl.methods.context import TaskContext
from raycl.methods.queries import bare_queries


def learn_texts(method: Method, context: TaskContext) -> None:
    """Add the phase's texts to `Method.bare`, where its router is to know them; the same on all workers."""
    config, learner = method.config, method.learner
    if not config.knows_texts or config.own_statistics or learner.task_id_given:
        return
    queries_ND = bare_queries(context, learner.backbone, learner.seed)
    if len(queries_ND):
        dev_MD = bare_queries(context, learner.backbone, learner.seed, "dev")
        learner.bare.add(context.phase.name, queries_ND, dev_MD)
