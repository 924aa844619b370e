"""Virtual gates: factors on inputs or outputs of chosen linears, for masks over units and for their gradients.

    with gated(model, {(path, "output"): lambda rows: ones}):   # open until backward has ended: recomputation reads it
        (gradient,) = torch.autograd.grad(loss(model), ones)

Layers without an open gate are unchanged; a gate is called in each pass with the number of the layer's examples.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

GateSide = Literal["input", "output"]

GatePoint = tuple[str, GateSide]
"""Path of a linear in the model, and its gated side."""

Gate = Callable[[int], Tensor | None]
"""Rows of the batch -> factors `[O]`, `[rows, O]`, or of each position `[rows, T, O]`; None: the layer computes as
without a gate."""


def attach(model: nn.Module, gates: Mapping[GatePoint, Gate]) -> list[RemovableHandle]:
    """Add gates that stay until their handles are removed."""
    return [_hooked(model.get_submodule(path), side, gate) for (path, side), gate in gates.items()]


@contextmanager
def gated(model: nn.Module, gates: Mapping[GatePoint, Gate]) -> Iterator[None]:
    """Open gates for everything that runs inside: forward, backward with its recomputation, generation."""
    with ExitStack() as hooks:
        for handle in attach(model, gates):
            hooks.enter_context(handle)
        yield


def _hooked(module: nn.Module, side: GateSide, gate: Gate) -> RemovableHandle:
    def on_input(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        factor = gate(given[0].shape[0])
        return None if factor is None else (_times(given[0], factor), *given[1:])

    def on_output(_: nn.Module, given: Any, output: Tensor) -> Tensor | None:
        factor = gate(output.shape[0])
        return None if factor is None else _times(output, factor)

    return module.register_forward_pre_hook(on_input) if side == "input" else module.register_forward_hook(on_output)


def _times(values: Tensor, factor: Tensor) -> Tensor:
    """Return values `[B, ..., O]` times a factor of all positions, of each example's, or of each."""
    factor = factor.to(values.dtype)
    if factor.dim() == 2 and values.dim() > 2:
        factor = factor.view(factor.shape[0], *(1,) * (values.dim() - 2), -1)
    return values * factor
