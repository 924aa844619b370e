"""IDBR's heads: two projections of a sentence state, a label head on both, and heads for the order and the task.

    g = tanh(W_g h + b_g)    s = tanh(W_s h + b_s)    scores = W [g; s] + b    order = O g + o    task = T s + t

h is `[B, D]`, g and s are `[B, F]`. Label and task rows grow and start at zero; projections and the order's rows start
as torch's linear layers do, drawn by the seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from raycl.backbone.encoder import NamedRows, grown


@dataclass(frozen=True)
class Features:
    """The features of one forward pass.

    Attributes:
        state: `[B, D]`, what was projected. generic, specific: `[B, F]`.
        order: `[B, 2]`, scores of the order of halves. task: `[B, T]`, of the tasks.
    """

    state: Tensor
    generic: Tensor
    specific: Tensor
    order: Tensor
    task: Tensor

    def both(self) -> Tensor:
        """Return `[B, 2 F]` float32."""
        return torch.cat([self.generic, self.specific], dim=1).float()


class DisentangledHead(NamedRows):
    """A label head with named rows over two projections.

    Attributes:
        labels: row order, by first appearance.
        weight: `[C, 2 F]`. bias: `[C]`.
        features: features of the last forward pass; None before. All scores are computed in it, since engines that
            share weights out have them whole there.
    """

    def __init__(self, states: int, width: int, seed: int, device: torch.device, task_head: TaskHead) -> None:
        """Create heads on D `states` with F (`width`) features; `task_head` is the backbone's own module."""
        super().__init__()
        self.labels: list[str] = []
        self.features: Features | None = None
        self._seed = seed
        self._task_head = (task_head,)  # in a tuple: not a module of this one
        self.generic: nn.Linear = _linear(states, width, device)
        self.specific: nn.Linear = _linear(states, width, device)
        self.order: nn.Linear = _linear(width, 2, device)
        self.weight = nn.Parameter(torch.zeros(0, 2 * width, device=device))
        self.bias = nn.Parameter(torch.zeros(0, device=device))
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        draw = torch.Generator().manual_seed(self._seed)
        for layer in (self.generic, self.specific, self.order):
            bound = layer.in_features**-0.5
            for parameter in (layer.weight, layer.bias):
                parameter.copy_((torch.rand(parameter.shape, generator=draw) * 2 - 1) * bound)

    def clear(self) -> None:
        """Forget every label, and draw the projections anew (a new model begins)."""
        super().clear()
        self._draw()

    def forward(self, pooled_BD: Tensor) -> Tensor:
        """Return scores `[B, C]` over all labels seen so far."""
        generic_BF, specific_BF = self.generic(pooled_BD).tanh(), self.specific(pooled_BD).tanh()
        order_B2, task_BT = self.order(generic_BF), self._task_head[0](specific_BF)
        self.features = Features(pooled_BD, generic_BF, specific_BF, order_B2, task_BT)
        return linear(torch.cat([generic_BF, specific_BF], dim=1), self.weight, self.bias)


class TaskHead(nn.Module):
    """Scores over the tasks seen so far; a module of its own, since it has a learning rate of its own."""

    def __init__(self, width: int, device: torch.device) -> None:
        """Create a head on F (`width`) features."""
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.zeros(0, width, device=device))
        self.bias: nn.Parameter = nn.Parameter(torch.zeros(0, device=device))

    def resize(self, tasks: int) -> None:
        """Resize to one row per task: zero rows are appended, or the last ones dropped."""
        more = max(tasks - len(self.bias), 0)
        self.weight = grown(self.weight, more, tasks)
        self.bias = grown(self.bias, more, tasks)

    def forward(self, specific_BF: Tensor) -> Tensor:
        """Map `[B, F]` to `[B, T]`."""
        return linear(specific_BF, self.weight, self.bias)


def _linear(inputs: int, outputs: int, device: torch.device) -> nn.Linear:
    """Return a linear without values, since each kind of device would draw other numbers."""
    return nn.Linear(inputs, outputs, device="meta").to_empty(device=device)
