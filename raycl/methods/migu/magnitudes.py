"""Output magnitudes of observed layers: the sum of |output| of each unit over the real tokens of forward passes.

What it does not know: what the magnitudes decide, and whether the model is in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from raycl.backbone import Backbone
from raycl.errors import RunError
from raycl.kernels.magnitude import summed_gated_magnitude, summed_magnitude
from raycl.methods.migu.clusters import CoMagnitude
from raycl.methods.migu.observed_layers import LayerUnits, Layout
from raycl.methods.migu.row_selection import Rule, by_size
from raycl.types import Batch

T = TypeVar("T")


class Magnitudes:
    """Sums over the passes that `observe` runs; other passes do not count, nor does recomputation.

    Attributes:
        sums: `[F]` float32, of every unit of the layout.
        co_magnitude: gets the outputs in place of the sums, while it is set.
    """

    def __init__(
        self, backbone: Backbone, layout: Layout, layers: Mapping[str, nn.Module], count_pads: bool = False
    ) -> None:
        """Attach hooks of its own to the layers of the layout; whatever hooks there are stay.

        Args:
            count_pads: padding of real examples counts too.
        """
        self.sums = torch.zeros(layout.size, device=backbone.device)
        self.co_magnitude: CoMagnitude | None = None
        self._backbone, self._count_pads = backbone, count_pads
        head = backbone.model.get_output_embeddings()
        self._observes_head = head is not None and any(layers[path] is head for path, _ in layout.units)
        self._counts = False
        self._real: Mapping[Any, Tensor] = {}
        self._weights: dict[tuple[str, int], Tensor | None] = {}
        self._tokens: dict[tuple[str, int], Tensor] = {}
        self._hook_removers: list[Callable[[], None]] = []
        for (path, part), units in layout.units.items():
            layer: Any = layers[path]
            if part == "low":
                layer.low_observer = partial(self._observe_low, units)
                self._hook_removers.append(partial(setattr, layer, "low_observer", None))
            else:
                handle = layer.register_forward_hook(partial(self._observe_output, units))
                self._hook_removers.append(handle.remove)

    def observe(self, forward: Callable[[Batch], T], batch: Batch) -> T:
        """`forward(batch)`, whose outputs are added up."""
        self._real, self._counts = self._backbone.real_tokens(batch), True
        if self._count_pads:
            of_example = (batch.weight > 0).unsqueeze(1)
            self._real = {side: of_example.expand(real.shape) for side, real in self._real.items()}
        self._backbone.every_position = self._observes_head
        try:
            return forward(batch)
        finally:
            self._counts = self._backbone.every_position = False
            self._weights.clear()
            self._tokens.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for remove in self._hook_removers:
            remove()
        self._hook_removers.clear()

    def _observe_output(self, units: LayerUnits, layer: nn.Module, given: Any, y: Tensor) -> None:
        """Forward hook: `y` is `[B, S, O]`."""
        if self._counts and self.co_magnitude is not None:
            self.co_magnitude.add((units.path, "output"), y, self._weight(units, y))
        elif self._counts:
            weight = self._weight(units, y)
            flat = None if weight is None else weight.reshape(-1)
            rows = None if flat is None or y.device.type == "cpu" else self._rows_of(units, y, flat)
            self.sums[units.place] += summed_magnitude(y.detach().reshape(-1, y.shape[-1]), flat, rows)

    def _observe_low(self, units: LayerUnits, h: Tensor, gate_BR: Tensor) -> None:
        """`h` is `[B, S, R]`."""
        if self._counts and self.co_magnitude is not None:
            self.co_magnitude.add((units.path, "low"), h, self._weight(units, h))
        elif self._counts:
            weight = self._weight(units, h)
            self.sums[units.place] += summed_gated_magnitude(h.detach(), gate_BR.detach(), weight)

    def _weight(self, units: LayerUnits, y: Tensor) -> Tensor | None:
        """`[B, S]` float32, 1 on real tokens; None where all are. A prefix in front of the text is no text."""
        real_BS = self._real[units.side]
        before = y.shape[1] - real_BS.shape[1] if y.dim() == 3 else -1
        if before < 0 or y.shape[0] != real_BS.shape[0]:
            raise RunError(
                f"modifiers.migu: layer '{units.path}' gives {tuple(y.shape)} for a batch of {tuple(real_BS.shape)} "
                "tokens, so padding cannot be identified: leave it out of modifiers.migu.layers"
            )
        key = (units.side, before)
        if key not in self._weights:
            whole = bool(real_BS.all()) and not before
            self._weights[key] = None if whole else nn.functional.pad(real_BS.float(), (before, 0))
        return self._weights[key]

    def _rows_of(self, units: LayerUnits, y: Tensor, weight_N: Tensor) -> Tensor:
        """Tokens that count, found once for all layers of a pass."""
        key = (units.side, y.shape[1])
        if key not in self._tokens:
            self._tokens[key] = weight_N.nonzero().squeeze(1)
        return self._tokens[key]


def large_units(layout: Layout, sums_F: Tensor, threshold: float, rule: Rule) -> dict[str, Tensor]:
    """Path -> `[O]` bool on the CPU: the outputs whose rows would be updated by these magnitudes.

    Args:
        layout: of outputs alone. threshold, rule: see `kept`.
    """
    kept_F = torch.zeros(layout.size, dtype=torch.bool, device=sums_F.device)
    for groups in by_size([size for units in layout.units.values() for size in units.groups], sums_F.device):
        groups.choose(sums_F, threshold, rule, kept_F)
    return {units.path: kept_F[units.place].cpu() for units in layout.units.values()}
