"""Attributes and hooks that a library leaves on a backbone's modules, and their removal."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from raycl.backbone import Backbone

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
