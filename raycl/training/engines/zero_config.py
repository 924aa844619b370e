"""DeepSpeed's config for the settings of a run."""

from __future__ import annotations

from typing import Any

import torch

from raycl.backbone import Backbone
from raycl.training.definition.settings import DeepSpeedConfig
from raycl.training.engines.compilation import layers
from raycl.training.optimizers.settings import TrainConfig


def gathered_elements(backbone: Backbone) -> int:
    """Return how many elements ZeRO 3 may gather at a time: of one layer that computes, and the next."""
    return 2 * max(sum(p.numel() for p in layer.parameters()) for layer in layers(backbone.model))


def zero_config(
    train: TrainConfig, config: DeepSpeedConfig, accumulation: int, backbone: Backbone, world_size: int
) -> dict[str, Any]:
    """Return DeepSpeed's own config for these settings (its batch sizes only count micro-batches).

    By its own defaults ZeRO 3 keeps 1e9 weights that were gathered: all of a 1B backbone, on every worker.
    """
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.zero_stage == 3:
        gathered = gathered_elements(backbone)
        zero |= {"stage3_max_live_parameters": gathered, "stage3_max_reuse_distance": gathered}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": accumulation * world_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": train.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own, which it asks for with offloading, compiles for minutes too
        "bf16": {"enabled": backbone.dtype == torch.bfloat16},
        "steps_per_print": 1_000_000_000,
        **config.extra,
    }
