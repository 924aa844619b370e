"""Inputs of methods with keys: each text's query, and means over a batch's texts that N workers agree on."""

from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone
from raycl.backbone.base import mean_pooled
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
