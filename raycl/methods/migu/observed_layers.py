"""The observed layers, the position of their units in the flat vector of magnitudes, and the rows that they mask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from raycl.adapters.layer import StackedLora, linear_shape
from raycl.backbone import Backbone
from raycl.backbone.base import Side
from raycl.backbone.roles import is_linear, matching
from raycl.errors import BackboneError, ConfigError

LayerPart = Literal["output", "low"]
"""A layer's outputs, or the units between A and B of its adapters in training."""


@dataclass(frozen=True)
class LayerUnits:
    """Units of one layer.

    Attributes:
        path: path in the backbone's model. span: slice of the flat vector. side: text whose tokens the layer
            processes.
        groups: sizes of the sets of units that compete: all outputs; or the units of each slot.
    """

    path: str
    span: slice
    side: Side
    groups: tuple[int, ...]


@dataclass(frozen=True)
class ParameterUnits:
    """A parameter's units: where they lie in the flat vector, and along which of its axes."""

    span: slice
    axis: int
    dims: int

    def on(self, flat_F: Tensor) -> Tensor:
        """Return the part of a flat vector that belongs to the parameter, shaped to broadcast to it."""
        return flat_F[self.span].view([-1 if axis == self.axis else 1 for axis in range(self.dims)])


@dataclass(frozen=True)
class Layout:
    """The flat vector of one task.

    Attributes:
        units: (path, part) -> its units, in their order. rows: parameter's name in the backbone -> its units.
    """

    units: dict[tuple[str, LayerPart], LayerUnits]
    rows: dict[str, ParameterUnits]
    size: int


def observed_layers(backbone: Backbone, targets: Sequence[str], include_lm_head: bool) -> dict[str, nn.Module]:
    """Return the path in the backbone's model -> linear, or the adapted layer that took its place.

    Raises:
        ConfigError: a target matches nothing, or there is no language-model head.
    """
    modules = dict(backbone.model.named_modules())
    bases = {id(module.base) for module in modules.values() if isinstance(module, StackedLora)}
    layers = {
        path: module
        for path, module in modules.items()
        if isinstance(module, StackedLora) or (is_linear(module) and id(module) not in bases)
    }
    try:
        chosen = matching(list(layers), targets)
    except BackboneError as error:
        raise ConfigError(f"modifiers.migu.layers: {error}") from error
    prefixed = [path for path in chosen if isinstance(layer := layers[path], StackedLora) and layer.queries is not None]
    if prefixed:
        raise ConfigError(
            f"modifiers.migu.layers selects '{prefixed[0]}', whose adapters are prefixes (method.value=prefix): MIGU "
            "masks outputs of linears, and a prefix has none; use another method.value, or no MIGU"
        )
    if include_lm_head:
        chosen.append(_lm_head(backbone, layers))
    return {path: layers[path] for path in dict.fromkeys(chosen)}


def _lm_head(backbone: Backbone, layers: Mapping[str, nn.Module]) -> str:
    head = None if backbone.head is not None else backbone.model.get_output_embeddings()
    for path, layer in layers.items():
        if layer is head:
            return path
    raise ConfigError(
        "modifiers.migu.include_lm_head is true, but this backbone has no language-model head: "
        "leave it out for encoder-only backbones"
    )


def layout_of(backbone: Backbone, layers: Mapping[str, nn.Module], bias: bool) -> Layout:
    """Return the units of every layer that trains something, one after another.

    Args:
        bias: biases are masked with their rows.
    """
    names = {id(p): name for name, p in backbone.named_parameters() if p.requires_grad}
    units: dict[tuple[str, LayerPart], LayerUnits] = {}
    rows: dict[str, ParameterUnits] = {}
    size = 0
    for path, layer in layers.items():
        for part, groups, masked in _parts(layer, bias):
            trained = [(names[id(p)], axis, p.dim()) for p, axis in masked if id(p) in names]
            if not trained:
                continue
            span = slice(size, size + sum(groups))
            size = span.stop
            units[path, part] = LayerUnits(path, span, backbone.side(path), groups)
            rows |= {name: ParameterUnits(span, axis, dims) for name, axis, dims in trained if name not in rows}
    return Layout(units, rows, size)


def layout_of_outputs(backbone: Backbone, layers: Mapping[str, nn.Module]) -> Layout:
    """Return all outputs of every layer, one layer after another, whether or not it trains something."""
    units: dict[tuple[str, LayerPart], LayerUnits] = {}
    size = 0
    for path, layer in layers.items():
        part, groups, _ = _parts(layer, bias=False)[-1]
        units[path, part] = LayerUnits(path, slice(size, size + sum(groups)), backbone.side(path), groups)
        size += sum(groups)
    return Layout(units, {}, size)


def _parts(layer: Any, bias: bool) -> list[tuple[LayerPart, tuple[int, ...], list[tuple[Tensor, int]]]]:
    """Return (part, sizes of its groups, parameters that it masks, with the axis of its units); outputs come last."""
    base: Any = layer.base if isinstance(layer, StackedLora) else layer
    axis = 0 if isinstance(base, nn.Linear) else 1  # Conv1D keeps [in, out]
    output: list[tuple[Tensor, int]] = [(base.weight, axis)]
    if bias and base.bias is not None:
        output.append((base.bias, 0))
    if not isinstance(layer, StackedLora):
        return [("output", (linear_shape(base)[1],), output)]
    low: list[tuple[Tensor, int]] = []
    if layer.lora_A is not None and layer.lora_B is not None:
        low.append((layer.lora_A, 0))
        output.append((layer.lora_B, 0))
    return [("low", layer.trainable_ranks, low), ("output", (layer.outputs,), output)]
