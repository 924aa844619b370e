"""Copies of a model that share its weights, so that contenders of a benchmark hold them once."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor, nn

ModelT = TypeVar("ModelT", bound=nn.Module)


def shared_copy(model: ModelT, own: Iterable[Tensor] = ()) -> ModelT:
    """Return modules of its own over the same weights, so that adapters and modes of one do not touch the other.

    Args:
        own: weights that are copied.
    """
    copied = {id(tensor) for tensor in own}
    held = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in copied]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in held})
