"""Linears that share weights with another layer, as output words often do with the input embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from raycl.errors import BackboneError


def untie(model: Any, paths: Iterable[str]) -> bool:
    """Give those linears at `paths` whose weights are shared a copy of their own; the model's config says so.

    Returns:
        whether there was such a linear.

    Raises:
        BackboneError: an encoder-decoder model, since some of them scale what shared output words read, and no other.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    shared = [path for path in paths if len(owners.get(id(model.get_submodule(path).weight), ())) > 1]
    if shared and model.config.is_encoder_decoder:
        others = [name for name in owners[id(model.get_submodule(shared[0]).weight)] if name != f"{shared[0]}.weight"]
        raise BackboneError(
            f"the adapter changes '{shared[0]}', whose weights {type(model).__name__} shares with {', '.join(others)}: "
            "export the adapter itself, without --merged, or leave that linear out of method.targets"
        )
    for path in shared:
        linear = model.get_submodule(path)
        linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=linear.weight.requires_grad)
        model.config.tie_word_embeddings = False
    return bool(shared)
