"""The config that DeepSpeed's ZeRO gets, and the attributes and hooks that it leaves on modules."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raycl.backbone import Backbone
from raycl.training.definition.settings import DeepSpeedConfig
from raycl.training.engines.compilation import layers
from raycl.training.optimizers.settings import TrainConfig

ATTRIBUTES = frozenset(
    (
        *("_external_params", "_original_parameters", "all_parameters", "applied_pre_backward_ref_cnt"),
        *("ds_external_parameters", "ds_grads_remaining", "ds_id", "ds_inflight_param_registry"),
        *("ds_recompute_parameters", "post_bwd_fn", "pre_bwd_fn"),
    )
)
"""Attributes that ZeRO-3 sets on modules and never removes; some refer to the engine."""

KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Hooks = dict[tuple[int, str], set[int]]
"""(id of a module, kind of hook) -> ids of hooks."""


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


def hooks_of(backbone: Backbone) -> Hooks:
    """Return those on every module."""
    return {(id(module), kind): set(getattr(module, kind)) for module in backbone.modules() for kind in KINDS}


def put_parameters(backbone: Backbone, fresh: Mapping[int, nn.Parameter]) -> None:
    """Replace every parameter, by its id, and what holds them in each module by a plain dict."""
    for module in backbone.modules():
        own = module._parameters.items()
        module._parameters = {name: None if old is None else fresh[id(old)] for name, old in own}


def remove_traces(backbone: Backbone, before: Hooks) -> None:
    """Drop attributes that ZeRO-3 leaves, and hooks that are not among those `before`."""
    for module in backbone.modules():
        for attribute in ATTRIBUTES & vars(module).keys():
            delattr(module, attribute)
        for kind in KINDS:
            hooks = getattr(module, kind)
            for key in set(hooks) - before.get((id(module), kind), set()):
                del hooks[key]
