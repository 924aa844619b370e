"""Adafactor (Shazeer and Stern 2018), Transformers', as its trainer configures it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from raycl.training.optimizers.base import Group, OptimizerKind, ParameterSpec, StateTensor


class AdafactorKind(OptimizerKind):
    """Means of squared gradients, for matrices of rows and of columns alone."""

    def build(self, groups: list[Group]) -> Optimizer:
        """Build Adafactor as the Hugging Face trainer does, which the papers' code uses: the rate is the configured
        one."""
        from transformers.optimization import Adafactor  # a second of imports

        optimizer: Optimizer = Adafactor(
            groups,
            lr=self.train.learning_rate,
            scale_parameter=False,
            relative_step=False,
            warmup_init=False,
            weight_decay=self.train.weight_decay,
        )
        return optimizer

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        """Return the mean of each value of a vector, or else those of rows and columns."""
        shape = tuple(parameter.shape)
        if len(shape) < 2:
            return {"exp_avg_sq": StateTensor(shape)}
        return {"exp_avg_sq_row": StateTensor(shape[:-1]), "exp_avg_sq_col": StateTensor(shape[:-2] + shape[-1:])}

    def counters(self, parameter: Tensor, spec: ParameterSpec, steps: int) -> dict[str, Any]:
        """Return the counters; the size of the parameter is measured anew in each step, so it is not needed."""
        return {"step": steps, "RMS": 0.0}
