"""The beginning that the prompts of a task have in common, such as its definition, read once for all of them.

Of a prompt with an instruction, the text itself is often the smaller part. Keys and values of a token depend on nothing
behind it, so rows with the same mixture of adapters can share those of a common beginning. For decoder-only backbones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raycl.backbone.base import Backbone
from raycl.generation.dynamic_cache import DynamicKVCache, begin, read_on
from raycl.generation.static_cache import MODELS
from raycl.types import Mixture

LEAST_TOKENS = 8
"""Shorter beginnings are read with their rows: reading them apart costs a forward pass."""


class SharedPrompt:
    """A common beginning and its keys and values."""

    def __init__(self, backbone: Backbone, start: Sequence[int], mixture: Mixture | None) -> None:
        """Read the beginning; its mixture of one row must be active.

        Args:
            start: ids of the beginning with special tokens.
        """
        self._backbone, self._start, self._mixture = backbone, list(start), mixture
        self._state = begin(backbone, [self._start])

    @staticmethod
    def helps(backbone: Backbone, start: Sequence[int], mixture: Mixture | None, rows: int) -> bool:
        """Return whether this many rows of the mixture can share a beginning, and it saves time."""
        if backbone.suffix is not None:
            return False  # a suffix is read together with its text
        if rows < 2 or len(start) < LEAST_TOKENS or not backbone.capabilities.one_sequence:
            return False
        if backbone.model.config.model_type not in MODELS:
            return False
        return mixture is None or bool((mixture.weights == mixture.weights[:1]).all())

    def is_of(self, start: Sequence[int], mixture: Mixture | None) -> bool:
        """Return whether the beginning has these ids under this mixture of one row."""
        if mixture is None or self._mixture is None:
            return self._start == list(start) and mixture is self._mixture
        same = mixture.names == self._mixture.names and torch.equal(mixture.weights, self._mixture.weights)
        return same and self._start == list(start)

    def followed_by(self, rests: Sequence[Sequence[int]]) -> DynamicKVCache:
        """Read the rest of each prompt, at least one token; the mixture of all rows must be active."""
        count, longest = len(rests), max(map(len, rests))
        device, pad_id = self._backbone.device, self._backbone.codec.pad_id
        ids = torch.tensor([[*[pad_id] * (longest - len(rest)), *rest] for rest in rests], device=device)
        mask = torch.tensor([[0] * (longest - len(rest)) + [1] * len(rest) for rest in rests], device=device)
        layers = [(_repeated(keys, count), _repeated(values, count)) for keys, values in self._state.layers]
        return read_on(self._backbone, layers, self._state.mask.expand(count, -1), ids, mask)


def _repeated(tensor: Tensor, rows: int) -> Tensor:
    return tensor.expand(rows, -1, -1, -1)
