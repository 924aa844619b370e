"""The state of an optimizer as named tensors that a checkpoint holds, and updates that must not move some values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raycl.training.optimizers.base import OptimizerKind, ParameterSpec


def state_of(
    kind: OptimizerKind, optimizer: Optimizer, parameter: nn.Parameter, spec: ParameterSpec
) -> dict[str, Tensor]:
    """Return state tensors of a parameter by name; zeros before the first step."""
    state = optimizer.state.get(parameter, {})
    return {
        name: state[name]
        if isinstance(state.get(name), Tensor)
        else torch.zeros(tensor.shape, dtype=tensor.dtype, device=parameter.device)
        for name, tensor in kind.state(spec).items()
    }


def set_state(
    kind: OptimizerKind,
    optimizer: Optimizer,
    parameter: nn.Parameter,
    spec: ParameterSpec,
    tensors: Mapping[str, Tensor],
    steps: int,
) -> None:
    """Put state tensors in place, as after `steps` steps."""
    optimizer.state[parameter] = {**tensors, **kind.counters(parameter, spec, steps)}


def state_bytes(kind: OptimizerKind, parameters: Iterable[ParameterSpec]) -> int:
    """Return what the optimizer keeps for these parameters."""
    return sum(tensor.nbytes for spec in parameters for tensor in kind.state(spec).values())


def hold(
    kind: OptimizerKind, optimizer: Optimizer, parameter: nn.Parameter, spec: ParameterSpec, held: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return what `release` needs to undo a step where `held` (`[O, D]` or broadcast to it) is true: (tensor, mask,
    value).

    State that is not of single values, such as Adafactor's of whole rows and columns, or codes that share a scale,
    moves.
    """
    state = state_of(kind, optimizer, parameter, spec).values()
    same = [value for value in state if value.shape == parameter.shape and value.is_floating_point()]
    return [(tensor, held, tensor.detach().clone()) for tensor in (parameter, *same)]


@torch.no_grad()
def release(kept: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Undo a step where it must not have moved anything."""
    for tensor, held, old in kept:
        tensor.copy_(torch.where(held, old, tensor))
