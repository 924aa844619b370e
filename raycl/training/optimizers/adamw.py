"""AdamW (Loshchilov and Hutter 2019), torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from raycl.kernels.row_gradient import adamw_rows
from raycl.training.optimizers.base import Group, OptimizerKind, ParameterSpec, StateTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state tensors, by torch's names; DeepSpeed uses the same."""


class AdamWKind(OptimizerKind):
    """Two running averages for each value."""

    settings = ("betas", "epsilon")
    elementwise = True
    updates_rows = True

    def build(self, groups: list[Group]) -> Optimizer:
        """Build AdamW, on a CPU with torch's fused kernel: one pass over memory instead of ten, a sixth of the time."""
        train = self.train
        return AdamW(
            groups,
            lr=train.learning_rate,
            betas=train.betas,
            eps=train.epsilon,
            weight_decay=train.weight_decay,
            fused=True if all(p.device.type == "cpu" for group in groups for p in group["params"]) else None,
        )

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        """Return the means of gradients and of their squares."""
        return dict.fromkeys(MOMENTS, StateTensor(tuple(parameter.shape)))

    def counters(self, parameter: Tensor, spec: ParameterSpec, steps: int) -> dict[str, Any]:
        """Return steps, as torch counts them."""
        return {"step": torch.tensor(float(steps))}

    def first_moment(self) -> tuple[str, float]:
        """Return the mean of gradients."""
        return MOMENTS[0], self.train.betas[0]

    def step_rows(self, optimizer: Optimizer, parameter: nn.Parameter, rows: Tensor, axis: int) -> None:
        """Update rows by the kernel for rows, with the averages of these rows."""
        state = optimizer.state[parameter]
        if not state:  # as Adam itself begins
            state |= {"step": torch.tensor(0.0), **{moment: torch.zeros_like(parameter) for moment in MOMENTS}}
        state["step"] += 1
        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        adamw_rows(parameter, (state["exp_avg"], state["exp_avg_sq"]), rows, axis, int(state["step"]), group)
