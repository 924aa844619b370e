"""Output magnitudes of observed layers: the sum of |output| of each unit over the real tokens of forward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from raycl.backbone import Backbone
from raycl.errors import RunError
from raycl.kernels.magnitude import summed_gated_magnitude, summed_magnitude
from raycl.methods.migu.clusters import CoMagnitude
from raycl.methods.migu.observed_layers import LayerUnits, Layout, layout_of_outputs, observed_layers
from raycl.methods.migu.row_selection import by_size, packed_rows
from raycl.types import Batch

T = TypeVar("T")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a layer's output that count, computed once for all layers of a pass.

    Attributes:
        weight_BS: float32, 1 on those that count; None: all do. rows_K: their numbers; None: all.
    """

    weight_BS: Tensor | None = None
    weight_N: Tensor | None = None
    rows_K: Tensor | None = None

    @staticmethod
    def of(real_BS: Tensor, before: int) -> Tokens:
        """Find the tokens that count where so many positions stand before them; this waits for a GPU."""
        weight_BS = nn.functional.pad(real_BS.float(), (before, 0))
        weight_N = weight_BS.reshape(-1)
        rows_K = weight_N.nonzero().squeeze(1)
        return Tokens() if len(rows_K) == len(weight_N) else Tokens(weight_BS, weight_N, rows_K)


class OutputMagnitudes:
    """Sums over the passes that `observe` runs; other passes do not count, nor does recomputation.

    Attributes:
        sums: `[F]` float32, of every unit of the layout; changed in place only.
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
        self._sides = {units.side for units in layout.units.values()}
        self._counts = False
        self._real: Mapping[Any, Tensor] = {}
        self._tokens: dict[tuple[str, torch.Size], Tokens] = {}
        self._added: set[int] = set()
        self._hook_removers: list[Callable[[], None]] = []
        for (path, part), units in layout.units.items():
            layer: Any = layers[path]
            own = self.sums[units.span]
            if part == "low":
                layer.low_observer = partial(self._observe_low, units, own)
                self._hook_removers.append(partial(setattr, layer, "low_observer", None))
            else:
                handle = layer.register_forward_hook(partial(self._observe_output, units, own))
                self._hook_removers.append(handle.remove)

    def clear(self) -> None:
        """Begin new sums."""
        self.sums.zero_()
        self._added.clear()

    def observe(self, forward: Callable[[Batch], T], batch: Batch) -> T:
        """Run `forward(batch)` and add up its outputs."""
        self._real, self._counts = self._backbone.real_tokens(batch), True
        if self._count_pads:
            of_example = (batch.weight > 0).unsqueeze(1)
            self._real = {side: of_example.expand(real.shape) for side, real in self._real.items()}
        for side in self._sides & self._real.keys():  # here a GPU has little to do yet
            self._tokens[side, self._real[side].shape] = Tokens.of(self._real[side], 0)
        self._backbone.every_position = self._observes_head
        try:
            return forward(batch)
        finally:
            self._counts = self._backbone.every_position = False
            self._tokens.clear()

    def close(self) -> None:
        for remove in self._hook_removers:
            remove()
        self._hook_removers.clear()

    def _observe_output(self, units: LayerUnits, own_O: Tensor, layer: nn.Module, given: Any, y: Tensor) -> None:
        """Forward hook: `y` is `[B, S, O]`."""
        if not self._counts:
            return
        tokens, y = self._tokens_of(units, y), y.detach()
        if self.co_magnitude is not None:
            self.co_magnitude.add((units.path, "output"), y, tokens.weight_BS)
            return
        self._add(units, own_O, partial(summed_magnitude, y.reshape(-1, y.shape[-1]), tokens.weight_N, tokens.rows_K))

    def _observe_low(self, units: LayerUnits, own_R: Tensor, h: Tensor, gate_BR: Tensor) -> None:
        """Add the magnitudes of `h`, `[B, S, R]`."""
        if not self._counts:
            return
        tokens, h, gate_BR = self._tokens_of(units, h), h.detach(), gate_BR.detach()
        if self.co_magnitude is not None:
            self.co_magnitude.add((units.path, "low"), h, tokens.weight_BS)
            return
        self._add(units, own_R, partial(summed_gated_magnitude, h, gate_BR, tokens.weight_BS, tokens.rows_K))

    def _add(self, units: LayerUnits, own: Tensor, summed: Callable[..., Tensor]) -> None:
        """Add sums to those of a layer; the first ones are written in their place."""
        if units.span.start in self._added:
            own += summed()
        else:
            self._added.add(units.span.start)
            summed(own)

    def _tokens_of(self, units: LayerUnits, y: Tensor) -> Tokens:
        """Return those of an output `[B, S, units]`. A prefix in front of the text is no text."""
        key = (units.side, y.shape[:-1])
        tokens = self._tokens.get(key)
        if tokens is None:
            real_BS = self._real[units.side]
            before = y.shape[1] - real_BS.shape[1] if y.dim() == 3 else -1
            if before < 0 or y.shape[0] != real_BS.shape[0]:
                raise RunError(
                    f"modifiers.migu: layer '{units.path}' gives {tuple(y.shape)} for a batch of "
                    f"{tuple(real_BS.shape)} tokens, so padding cannot be identified: leave it out of "
                    "modifiers.migu.layers"
                )
            tokens = self._tokens[key] = Tokens.of(real_BS, before)
        return tokens


class LargeOutputs(OutputMagnitudes):
    """The outputs of layers, trained or not, whose rows MIGU would update."""

    def __init__(self, backbone: Backbone, layers: Sequence[str], threshold: float) -> None:
        """Observe all outputs of the layers.

        Args:
            layers: roles or regular expressions. threshold: share of a layer's outputs that are not large.

        Raises:
            ConfigError: `layers` names none.
        """
        found = observed_layers(backbone, layers, include_lm_head=False)
        self._layout, self._threshold = layout_of_outputs(backbone, found), threshold
        super().__init__(backbone, self._layout, found)

    def large(self) -> dict[str, dict[str, Any]]:
        """Return the path of each layer -> its outputs that are large by the present sums, as `packed_rows`."""
        kept_F = torch.zeros(self._layout.size, dtype=torch.bool, device=self.sums.device)
        units_of_layers = self._layout.units.values()
        for groups in by_size([size for units in units_of_layers for size in units.groups], self.sums.device):
            groups.choose(self.sums, self._threshold, "floor", kept_F)
        return {units.path: packed_rows(kept_F[units.span].cpu()) for units in units_of_layers}
