"""The mixture of texts by a router that reads the texts themselves, or the backbone's states of their prompts.

Evaluation and serving share this code.
"""

from __future__ import annotations

from collections.abc import Sequence

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone
from raycl.routing.router import Router
from raycl.types import Batch, Mixture


def route_batch(
    router: Router, backbone: Backbone, stack: AdapterStack, batch: Batch, tasks: Sequence[str] | None = None
) -> Mixture:
    """Return the mixture of each text of a batch.

    Other texts may be decoded under their mixture meanwhile, which must not affect the states that a router reads.

    Args:
        batch: a batch, with its texts for routers that read them.
        tasks: tasks of the texts where they are known.

    Raises:
        BankError: the router needs the tasks, or does not know one. RetrievalError: it is of another backbone.
    """
    if not {"embeddings", "hidden_states"} & router.needs:
        return router.route(batch.texts or ("",) * len(batch), tasks)
    ids_BL, mask_BL, is_deep = batch.source_ids, batch.source_mask, "hidden_states" in router.needs
    with stack.mixture_aside():
        embeddings = backbone.hidden_states(ids_BL, mask_BL) if is_deep else backbone.embedded(ids_BL)
    return router.route_embeddings(embeddings, mask_BL, tasks)
