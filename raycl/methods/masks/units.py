"""The units of a transformer's layers: attention heads, inner units of feed-forward blocks, and outputs of both.

Heads and inner units are gated where the linear behind them reads them, which is behind the activation, and where a
gated feed-forward block has one value for each. Their weights are the rows of the linears that compute them and the
columns of the linear that reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from raycl.backbone.gates import GatePoint, GateSide
from raycl.backbone.roles import linear_names, linear_shapes, shared_parts
from raycl.errors import BackboneError, ConfigError

QKV = ("attention.query", "attention.key", "attention.value")


@dataclass(frozen=True)
class Units:
    """Units that one linear reads or gives.

    Attributes:
        path: path of the linear. side: its side. count: number of units. width: number of values of each.
        writers: linear whose outputs they are made of -> how many it has.
    """

    path: str
    side: GateSide
    count: int
    width: int
    writers: Mapping[str, int]

    @property
    def gate_point(self) -> GatePoint:
        return self.path, self.side

    def spread(self, values_U: Tensor) -> Tensor:
        """Return a value of each unit for each value of the linear, `[..., U]` to `[..., U width]`."""
        return values_U.repeat_interleave(self.width, dim=-1) if self.width > 1 else values_U

    def over_rows(self, values_U: Tensor, outputs: int) -> Tensor:
        """Return a value for each of a writer's outputs: its unit's.

        Where fewer outputs serve several units (keys and values of grouped heads), the largest; where more, each unit
        has as many (gate and inner units in one linear).
        """
        values = self.spread(values_U)
        if outputs >= len(values):
            return values.repeat(outputs // len(values))
        return values_U.view(outputs // self.width, -1).amax(1).repeat_interleave(self.width)


@dataclass(frozen=True)
class Sides:
    """The units on both sides of a parameter: of its rows, and of its columns; None: there are none.

    Attributes:
        rows_are_written: its rows compute the units, which another linear reads.
    """

    rows: Units | None = None
    columns: Units | None = None
    rows_are_written: bool = False

    def of_rows(self, values_U: Tensor, outputs: int) -> Tensor:
        """Return a value for each row."""
        assert self.rows is not None
        return self.rows.over_rows(values_U, outputs) if self.rows_are_written else values_U


def units_of(model: Any, attention_outputs: bool) -> list[Units]:
    """Return heads, inner units, and outputs of feed-forward blocks.

    Args:
        attention_outputs: outputs of attention layers too.

    Raises:
        ConfigError: the model computes queries, keys and values in one linear, or its layers have other names.
    """
    shapes = linear_shapes(model)
    try:
        projections, readers = linear_names(model, QKV), linear_names(model, ["attention.out"])
        widening, narrowing = linear_names(model, ["ffn.in"]), linear_names(model, ["ffn.out"])
    except BackboneError as error:
        raise ConfigError(
            "masks over heads and inner units need a backbone whose queries, keys, values and feed-forward blocks have "
            f"linears of their own: {error}"
        ) from error
    units = []
    for path in readers:
        inputs, outputs = shapes[path]
        heads = int(model.config.num_attention_heads)
        units.append(Units(path, "input", heads, inputs // heads, _nearest(projections, path, shapes)))
        if attention_outputs:
            units.append(Units(path, "output", outputs, 1, {}))
    for path in narrowing:
        inputs, outputs = shapes[path]
        units.append(Units(path, "input", inputs, 1, _nearest(widening, path, shapes)))
        units.append(Units(path, "output", outputs, 1, {}))
    return units


def parameters_of(model: nn.Module, units: Sequence[Units]) -> dict[str, Sides]:
    """Return the path of a parameter in the model -> the units on its sides; others have none."""
    result: dict[str, Sides] = {}
    columns = {unit.path: unit for unit in units if unit.side == "input"}
    rows = {unit.path: unit for unit in units if unit.side == "output"}
    for path in columns.keys() | rows.keys():
        result[f"{path}.weight"] = Sides(rows.get(path), columns.get(path))
        result[f"{path}.bias"] = Sides(rows.get(path))
    for unit in units:
        for path in unit.writers:
            result |= {f"{path}.{part}": Sides(unit, None, True) for part in ("weight", "bias")}
    own = {name for name, _ in model.named_parameters()}
    return {name: sides for name, sides in result.items() if name in own and (sides.rows or sides.columns)}


def _nearest(paths: Sequence[str], path: str, shapes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return those that share most of `path`, with their numbers of outputs."""
    shared = {candidate: len(shared_parts(candidate, path)) for candidate in paths}
    return {name: shapes[name][1] for name, count in shared.items() if count == max(shared.values())}
