"""The interface of an optimizer: how it is built, its state, and the parts of parameters that it updates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from raycl.training.optimizers.settings import TrainConfig

Group = dict[str, Any]
"""A parameter group as `torch.optim` takes it: `params`, and `lr` and `weight_decay` where they are its own."""


@dataclass(frozen=True)
class ParameterSpec:
    """The properties of a parameter that an optimizer updates.

    Attributes:
        shape: shape of the parameter, or of the part that this worker updates.
        is_matrix: it is a weight matrix inside the model: no vector, embedding, soft prompt, or head.
        decays: weight decay acts on it.
        learning_rate: its own; None: `train.learning_rate`.
    """

    shape: torch.Size
    is_matrix: bool = False
    decays: bool = True
    learning_rate: float | None = None


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for a parameter, as a checkpoint holds it; it is zero before the first step."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class OptimizerKind(ABC):
    """An optimizer of the table, with the settings of a run. Subclasses give `build` and `state`.

    Class attributes:
        settings: the settings of `train` that it reads in addition to `learning_rate` and `weight_decay`, each with
            its value where the user sets none.
        elementwise: each value is updated by its own gradient and state alone, and every state tensor has the
            parameter's shape, so that an engine may give it parts of parameters (fsdp, ZeRO).
        updates_rows: it has `step_rows`, by which a modifier's held rows cost nothing.
        separates_matrices: weight matrices are in groups of their own (`is_matrix` in the group).

    Attributes:
        train: settings of the run. values: those of `settings`, the user's or its own.
    """

    settings: ClassVar[Mapping[str, Any]] = {}
    elementwise: ClassVar[bool] = False
    updates_rows: ClassVar[bool] = False
    separates_matrices: ClassVar[bool] = False

    def __init__(self, train: TrainConfig) -> None:
        self.train = train
        given = {name: getattr(train, name) for name in self.settings}
        self.values: dict[str, Any] = {
            name: own if given[name] is None else given[name] for name, own in self.settings.items()
        }

    @classmethod
    def check(cls, device: str) -> None:
        """Check that the optimizer works here.

        Args:
            device: type of the workers' device, such as cuda; "": not known yet.

        Raises:
            ConfigError: a package is missing, or does not support the device.
        """
        del device  # torch's own optimizers work on every device

    @abstractmethod
    def build(self, groups: list[Group]) -> Optimizer:
        """Return the optimizer; groups without `lr` or `weight_decay` have the configured ones."""

    @abstractmethod
    def state(self, parameter: ParameterSpec) -> Mapping[str, StateTensor]:
        """Return names and shapes of the tensors that it keeps for a parameter, by the library's names."""

    def counters(self, parameter: Tensor, spec: ParameterSpec, steps: int) -> dict[str, Any]:
        """Return what else it keeps for a parameter after `steps` steps: step counts, and constants.

        Args:
            parameter: the updated parameter, or the part for which elementwise optimizers keep state.
        """
        return {}

    def first_moment(self) -> tuple[str, float] | None:
        """Return the name and decay rate of a running average of gradients and nothing else; None: there is none."""
        return None

    def step_rows(self, optimizer: Optimizer, parameter: nn.Parameter, rows: Tensor, axis: int) -> None:
        """Update chosen rows of a parameter by its gradient; the others and their state do not move.

        Args:
            rows: numbers of the rows along `axis`.
        """
        raise NotImplementedError(f"{type(self).__name__} updates whole parameters")
