"""AdamW with averages in eight bits (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization").

Library behaviour this file depends on (bitsandbytes 0.50.2): tensors of fewer than 4,096 values keep float32 averages;
others have a scale for each block of 256. It has kernels for CUDA, ROCm, XPU and CPUs.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raycl.errors import ConfigError
from raycl.training.optimizers.base import Group, OptimizerKind, ParameterSpec, StateTensor

LEAST, BLOCK = 4096, 256
"""Values of the smallest tensor whose averages are in eight bits, and values that have one scale."""


class AdamW8bitKind(OptimizerKind):
    """Two running averages for each value, a byte each."""

    settings = ("betas", "epsilon")

    @classmethod
    def check(cls, device: str) -> None:
        """Check the device, where it is known, by a step on zeros."""
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError(
                "train.optimizer=adamw_8bit needs the package bitsandbytes: pip install 'raycl[quantization]', or use "
                "train.optimizer=adamw"
            )
        if not device:
            return
        zeros = nn.Parameter(torch.zeros(LEAST, device=device))
        zeros.grad = torch.zeros_like(zeros)
        try:
            _library("optim").AdamW8bit([zeros]).step()
        except (RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"train.optimizer=adamw_8bit does not work on this device ('{device}') with the installed bitsandbytes "
                f"({type(error).__name__}): use train.optimizer=adamw, another device, or a newer bitsandbytes"
            ) from error

    def build(self, groups: list[Group]) -> Optimizer:
        """Build the optimizer with AdamW's settings."""
        train = self.train
        settings = {"lr": train.learning_rate, "betas": train.betas, "eps": train.epsilon}
        optimizer: Optimizer = _library("optim").AdamW8bit(groups, weight_decay=train.weight_decay, **settings)
        return optimizer

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        """Return codes of the averages, and their scales."""
        shape = tuple(parameter.shape)
        if parameter.shape.numel() < LEAST:
            return dict.fromkeys(("state1", "state2"), StateTensor(shape))
        scales = StateTensor((-(-parameter.shape.numel() // BLOCK),))
        codes = StateTensor(shape, torch.uint8)
        return {"state1": codes, "state2": codes, "absmax1": scales, "absmax2": scales}

    def counters(self, parameter: Tensor, spec: ParameterSpec, steps: int) -> dict[str, Any]:
        """Return steps, and the values of the codes, which are always the same."""
        if parameter.numel() < LEAST:
            return {"step": steps}
        maps = {name: _library("functional").create_dynamic_map(signed=name == "qmap1") for name in ("qmap1", "qmap2")}
        return {"step": steps, **{name: values.to(parameter.device) for name, values in maps.items()}}


def _library(part: str) -> Any:
    return importlib.import_module(f"bitsandbytes.{part}")
