"""The search space: settings of a run by dotted path, each with its possible values.

Grids, random draws and Optuna read the same description, and trial number i of a planned sweep is a function of the
file and i alone, so a sweep that continues plans what it had planned.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from pydantic import Field, field_validator, model_validator

from raycl.config import Section
from raycl.errors import ConfigError
from raycl.operations.sweep.definition.expressions import parse

Settings = dict[str, Any]
"""Dotted path -> value, of one trial."""


class Draw(Section):
    """The values of one setting; exactly one of these is given. Both ends of a range belong to it."""

    grid: tuple[Any, ...] | None = Field(
        None, min_length=1, description="each of these values, with each value of every other grid"
    )
    choice: tuple[Any, ...] | None = Field(None, min_length=1, description="one of these values")
    uniform: tuple[float, float] | None = Field(None, description="[low, high], drawn evenly")
    loguniform: tuple[float, float] | None = Field(None, description="[low, high], drawn evenly in the logarithm")
    quniform: tuple[float, float, float] | None = Field(None, description="[low, high, step], drawn from low + k step")
    randint: tuple[int, int] | None = Field(None, description="[low, high], drawn from the whole numbers")
    expr: str | None = Field(None, description="computed from other settings by their paths: 10 * train.learning_rate")

    @model_validator(mode="after")
    def _is_one(self) -> Draw:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(type(self).model_fields)
            raise ValueError(f"expected exactly one of {names}, found {', '.join(given) or 'none'}")
        low, high, *step = [*self.range, 1.0][:3] if self.range else (0.0, 1.0)
        if low >= high or (step and step[0] <= 0) or (self.loguniform and low <= 0):
            raise ValueError(f"{self.kind} is {list(self.range)}: expected low < high, and above 0 where it must be")
        if self.quniform and not math.isclose(high, low + round((high - low) / step[0]) * step[0], rel_tol=1e-9):
            raise ValueError(f"quniform is {list(self.range)}: high is not low plus whole steps")
        return self

    @field_validator("expr")
    @classmethod
    def _is_readable(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                parse(text)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return text

    @property
    def kind(self) -> str:
        """The kind of draw that is given."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def range(self) -> tuple[float, ...]:
        """Low, high and perhaps step; empty for lists and expressions."""
        return self.uniform or self.loguniform or self.quniform or self.randint or ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The listed values; empty for ranges and expressions."""
        return self.grid or self.choice or ()

    @property
    def corners(self) -> tuple[Any, ...]:
        """Values to check before anything starts: all that are listed, or both ends."""
        return self.values or self.range[:2]

    def drawn(self, draw: np.random.Generator) -> Any:
        """Return a random value."""
        if self.values:
            return self.values[int(draw.integers(len(self.values)))]
        low, high = self.range[:2]
        if self.randint:
            return int(draw.integers(int(low), int(high), endpoint=True))
        if self.loguniform:
            return min(high, max(low, math.exp(float(draw.uniform(math.log(low), math.log(high))))))
        if self.quniform:
            step = self.range[2]
            return step_value(low, step, int(draw.integers(round((high - low) / step), endpoint=True)))
        return float(draw.uniform(low, high))


Space = Mapping[str, Draw]


def step_value(low: float, step: float, number: int) -> float:
    """Return `low + number step` in its shortest form: 0.3, not 0.30000000000000004."""
    return float(f"{low + number * step:.12g}")


def planned(space: Space, samples: int, seed: int, follow: Callable[[Settings], Settings]) -> list[Settings]:
    """Return all trials: every combination of the grids, `samples` times, with fresh draws each time.

    Args:
        follow: adds the settings that follow from others (`expr`).
    """
    grids = {path: draw.grid for path, draw in space.items() if draw.grid is not None}
    rest = {path: draw for path, draw in space.items() if draw.grid is None and draw.expr is None}
    combinations = [dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values())]
    trials = []
    for number in range(samples):
        for index, chosen in enumerate(combinations):
            draw = np.random.default_rng([seed, number, index])
            settings = chosen | {path: draw_rule.drawn(draw) for path, draw_rule in rest.items()}
            trials.append(follow(in_order(settings, space)))
    return trials


def crossed(space: Space, follow: Callable[[Settings], Settings]) -> list[Settings]:
    """Return every combination of all listed values (search `grid`)."""
    listed = {path: draw.values for path, draw in space.items() if draw.expr is None}
    return [follow(dict(zip(listed, values, strict=True))) for values in itertools.product(*listed.values())]


def key_of(settings: Settings) -> str:
    """Return the same key for equal settings, read from a file or not."""
    return json.dumps(settings, sort_keys=True, default=list)


def in_order(settings: Settings, space: Space) -> Settings:
    """Return settings in the order of the file."""
    return {path: settings[path] for path in space if path in settings}
