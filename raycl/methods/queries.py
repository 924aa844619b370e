"""Inputs of methods with keys: each text's query, and means over a batch's texts that N workers agree on.

`bare_queries` are those of a phase's texts without their prompts, of which the published router keeps statistics.
"""

import torch
from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone
from raycl.backbone.base import mean_pooled
from raycl.data.tokens import Split, drawn_rows
from raycl.generation.task_prompts import bare_ids, mean_embeddings
from raycl.methods.context import TaskContext
from raycl.routing.statistics import sample_rows
from raycl.types import IGNORE, Batch


class TextQueries:
    """Means of the frozen backbone's last hidden states over each text's tokens.

    They are computed once for the routing and the penalty of a batch.
    """

    def __init__(self, backbone: Backbone, stack: AdapterStack) -> None:
        self._backbone, self._stack = backbone, stack
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """Return queries `[B, D]`."""
        ids_BL, mask_BL = batch.routed
        if self._last is None or self._last[0] is not ids_BL:
            assert self._stack.plan is None, "queries are the frozen model's own: a mixture is active"
            self._last = (ids_BL, mean_pooled(self._backbone.hidden_states(ids_BL, mask_BL), mask_BL))
        return self._last[1]


def mean_by_positions(values_B: Tensor, batch: Batch) -> Tensor:
    """Return the mean of a value of each text, weighted by loss positions as micro-batches are (`Method.penalty`)."""
    labels = batch.target_ids if batch.target_ids.shape[1] else batch.label_ids.unsqueeze(1)
    count_B = (labels != IGNORE).sum(1).to(values_B.dtype)
    mean: Tensor = (values_B * count_B).sum() / count_B.sum().clamp(min=1)
    return mean


SAMPLED = 1000
"""The number of texts of a task, drawn at random, from which statistics are estimated."""


def bare_queries(context: TaskContext, backbone: Backbone, seed: int, split: Split = "train") -> Tensor:
    """Return `[n, d]`, the mean token embeddings of texts of a phase as they are read that come without their tasks.

    They are the same on all workers; of dev rows as many as are kept of a task.
    """
    draw = torch.Generator().manual_seed(seed)
    texts: list[str] = []
    for table in context.tables(split):
        rows = sample_rows(len(table)).tolist() if split == "dev" else drawn_rows(table, SAMPLED, draw)
        texts += [context.router_texts.routed(table.task, text) for text in table.texts(rows)]
    sources = [ids for ids in bare_ids(texts, backbone.codec, context.stream.token_limits[0]) if ids]
    if not sources:
        return torch.zeros(0, int(backbone.model.get_input_embeddings().weight.shape[1]))
    return mean_embeddings(backbone, sources)
