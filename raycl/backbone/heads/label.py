"""A label head that grows with the labels seen so far and is read without a task id.

An encoder-only model cannot write its answer. One linear row per label *text*, shared by all tasks that use the text;
prediction is the argmax over every label seen so far, so the model has no task id of a request (class-incremental
protocol). Differs from SLM's released code, which picks the head by the true number of labels at test.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class LabelHead(nn.Module):
    """Linear head with named rows.

    Attributes:
        labels: row order, by first appearance.
        weight: `[C, D]`. bias: `[C]`. New rows start at zero, so a new label changes no old logit.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.labels: list[str] = []
        self.weight = nn.Parameter(torch.zeros(0, width))
        self.bias = nn.Parameter(torch.zeros(0))

    def grow(self, labels: Sequence[str]) -> None:
        """Append a zero row for each label not yet known; old rows keep their values bit for bit."""
        new = [label for label in dict.fromkeys(labels) if label not in self.labels]
        if new:
            self.weight, self.bias = grown(self.weight, len(new)), grown(self.bias, len(new))
            self.labels.extend(new)

    def clear(self) -> None:
        """Forget every label (a new model begins)."""
        self.labels = []
        self.weight, self.bias = grown(self.weight, 0, kept=0), grown(self.bias, 0, kept=0)

    def forward(self, pooled_BD: Tensor) -> Tensor:
        """Return logits `[B, C]` over all labels seen so far."""
        return nn.functional.linear(pooled_BD, self.weight, self.bias)


def grown(rows: nn.Parameter, more: int, kept: int | None = None) -> nn.Parameter:
    """Return a parameter of the first `kept` of these rows (None: of all) and so many zero rows."""
    old = rows.detach()[:kept]
    return nn.Parameter(torch.cat([old, old.new_zeros(more, *old.shape[1:])]), requires_grad=rows.requires_grad)
