"""Stochastic gradient descent, torch's, with `train.momentum`."""

from __future__ import annotations

from torch.optim import SGD, Optimizer

from raycl.training.optimizers.base import Group, OptimizerKind, ParameterSpec, StateTensor


class SGDKind(OptimizerKind):
    """SGD: with momentum it keeps one running sum for each value, else nothing."""

    settings = ("momentum",)
    elementwise = True

    def build(self, groups: list[Group]) -> Optimizer:
        """Weight decay is added to the gradient."""
        train = self.train
        return SGD(groups, lr=train.learning_rate, momentum=train.momentum or 0.0, weight_decay=train.weight_decay)

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        """Return the sum of gradients, in which old ones fade."""
        return {"momentum_buffer": StateTensor(tuple(parameter.shape))} if self.train.momentum else {}

    def first_moment(self) -> tuple[str, float] | None:
        """Return that sum, unless it includes weight decay."""
        train = self.train
        return ("momentum_buffer", train.momentum) if train.momentum and not train.weight_decay else None
