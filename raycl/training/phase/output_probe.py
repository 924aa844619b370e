"""The large outputs of each layer for the texts of each task, in a model under evaluation (MIGU's figure 5).

The magnitudes are those of the modifier `migu`, by the same code: |output| summed over the real tokens of a task's test
rows, of source and answer. The rows of a weight that it would update for all of these texts are the large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raycl.data.loader import Collate, eval_batches
from raycl.errors import RunError
from raycl.methods.base import activate
from raycl.methods.migu.magnitudes import OutputMagnitudes, large_units
from raycl.methods.migu.observed_layers import layout_of_outputs, observed_layers
from raycl.methods.migu.summary import packed_rows
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.evaluation import OBJECTIVE_SEED
from raycl.training.phase.routing import PublishedRouter
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Task


def large_outputs(
    context: TrainingContext,
    tasks: Sequence[Task],
    rows: int,
    threshold: float,
    layers: Sequence[str],
    router: PublishedRouter | None = None,
) -> dict[str, Any]:
    """Return layer -> for each task, the large outputs as `packed_rows`; the model's weights stay as they are.

    Args:
        rows: test rows of each task, the first ones. threshold: share of outputs that are not large.
        layers: roles or regular expressions, as `modifiers.migu.layers`.
        router: router of the last phase; None: the backbone is measured without adapters.

    Raises:
        ConfigError: `layers` names none. RunError: a task has no test rows.
    """
    backbone = context.backbone
    backbone.eval()
    result = observed_layers(backbone, layers, include_lm_head=False)
    layout = layout_of_outputs(backbone, result)
    magnitudes = OutputMagnitudes(backbone, layout, result)
    try:
        sums = [_measured(context, task, rows, magnitudes, router) for task in tasks]
    finally:
        magnitudes.close()
    kept = [large_units(layout, sums_F, threshold, "floor") for sums_F in sums]
    return {path: [packed_rows(of_task[path]) for of_task in kept] for path in result}


@torch.no_grad()
def _measured(
    context: TrainingContext, task: Task, rows: int, magnitudes: OutputMagnitudes, router: PublishedRouter | None
) -> Tensor:
    """Return `[F]` magnitudes of all outputs for the texts of a task."""
    backbone, method, codec = context.backbone, context.method, context.backbone.codec
    table = context.stream.table(task, "test", codec)
    if not len(table):
        raise RunError(f"task '{task.name}' has no test rows: give a run whose tasks all have some")
    table = table.part(np.arange(min(rows, len(table))))
    alone = DistributedContext.alone(backbone.device)
    if method.encoder is not None and router is not None:
        method.encoder.embed_all(table.texts(range(len(table))), (alone.rank, alone.size), alone.gather)
    objective = context.stream.text_objective(codec, OBJECTIVE_SEED)
    read: Callable[[Batch], object] = backbone.score_labels if codec.needs_labels and objective is None else backbone
    collate = Collate([table], codec.pad_id, texts=method.needs_texts, text_objective=objective)
    magnitudes.clear()
    for batch in eval_batches(collate, context.evaluation.batch_size):
        batch = batch.to(backbone.device)
        with activate(method, None if router is None else router.mixture(batch, task.name)):
            magnitudes.observe(read, batch)
    return magnitudes.sums.clone()
