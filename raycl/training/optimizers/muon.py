"""Muon (Jordan et al. 2024), torch's, for weight matrices, and AdamW for all other parameters.

The rate of matrices is scaled by their size (Liu et al. 2025, "Muon is scalable for LLM training", section 2.2), so
that both parts learn at a rate that suits AdamW. Embeddings, output words, soft prompts and label heads are AdamW's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from raycl.errors import ConfigError
from raycl.training.optimizers.adamw import AdamWKind
from raycl.training.optimizers.base import Group, OptimizerKind, ParameterSpec, StateTensor

MOMENTUM = 0.95
"""Momentum where `train.momentum` is null: the authors'."""


class MuonKind(OptimizerKind):
    """A running average of gradients for each matrix; AdamW's two for the rest."""

    settings = ("momentum", "betas", "epsilon")
    separates_matrices = True

    @classmethod
    def check(cls, device: str) -> None:
        """Torch has it since 2.9."""
        _muon()

    def build(self, groups: list[Group]) -> Optimizer:
        """Build both as one optimizer."""
        train = self.train
        momentum = MOMENTUM if train.momentum is None else train.momentum
        settings = {"lr": train.learning_rate, "weight_decay": train.weight_decay, "momentum": momentum}
        muon = _muon()
        return Parts(
            groups,
            lambda matrices: muon(matrices, adjust_lr_fn="match_rms_adamw", **settings),
            AdamWKind(train).build,
        )

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        """Return the state of the part that has the parameter."""
        if parameter.is_matrix:
            return {"momentum_buffer": StateTensor(tuple(parameter.shape))}
        return AdamWKind(self.train).state(parameter)

    def counters(self, parameter: Tensor, spec: ParameterSpec, steps: int) -> dict[str, Any]:
        """Return AdamW's steps; Muon counts none."""
        return {} if spec.is_matrix else AdamWKind(self.train).counters(parameter, spec, steps)


class Parts(Optimizer):
    """Two optimizers with one list of groups and one state, so that schedules and checkpoints see one."""

    def __init__(
        self,
        groups: list[Group],
        of_matrices: Callable[[list[Group]], Optimizer],
        of_others: Callable[[list[Group]], Optimizer],
    ) -> None:
        super().__init__(groups, {})
        self.parts = []
        for wanted, build in ((True, of_matrices), (False, of_others)):
            if own := [group for group in self.param_groups if group["is_matrix"] is wanted]:
                self.parts.append(build(own))
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step both optimizers."""
        for part in self.parts:
            part.step()


def _muon() -> Any:
    try:
        from torch.optim import Muon
    except ImportError as error:
        raise ConfigError(
            f"train.optimizer=muon needs torch 2.9 or newer, and this is {torch.__version__}: pip install "
            "'torch>=2.9', or use train.optimizer=adamw"
        ) from error
    return Muon
