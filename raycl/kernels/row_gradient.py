"""A linear whose backward forms only chosen rows of the weight gradient, and an Adam that updates only those.

Why it exists: a gradient row that will be masked need not be computed. At T = 0.7 that is 70 % of a weight's gradient,
about a fifth of a fine-tuning step. Which rows are chosen is read when backward runs, so it may be decided as late as
at the end of the forward pass; recomputation reads it again. The gradient keeps its full shape, zero elsewhere, so
every engine reduces and reads it as usual; it equals the masked dense one to rounding.
What it does not know: how rows are chosen, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

WIDTH = 8
"""On a GPU, selections are padded to a multiple of this and the rest is dropped: other GEMM shapes are slow."""


@dataclass
class RowChoice:
    """The rows of one weight that get a gradient; None: all."""

    rows: Tensor | None = None


class _RowLinear(torch.autograd.Function):
    """`linear` with a weight gradient in the chosen rows only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, choice: RowChoice) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.choice = choice
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        flat_NO = g.reshape(-1, g.shape[-1])
        to_x = g @ weight if ctx.needs_input_grad[0] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = weight_gradient(flat_NO, x.reshape(-1, x.shape[-1]), ctx.choice.rows)
        to_bias = flat_NO.sum(0) if ctx.needs_input_grad[2] else None
        return to_x, to_weight, to_bias, None


def weight_gradient(g_NO: Tensor, x_ND: Tensor, rows: Tensor | None) -> Tensor:
    """`[O, D]`: `g^T x` in the given rows, zero in all others; None: all rows."""
    if rows is None:
        return g_NO.T @ x_ND
    count = len(rows)
    if g_NO.is_cuda and count % WIDTH:
        rows = torch.cat([rows, rows[:1].expand(-count % WIDTH)])
    part_KD = g_NO.index_select(1, rows).T @ x_ND
    return x_ND.new_zeros(g_NO.shape[1], x_ND.shape[1]).index_copy_(0, rows[:count], part_KD[:count])


def row_linear(layer: nn.Linear, choice: RowChoice, x: Tensor) -> Tensor:
    """`layer(x)`; under autocast in its type. Partitioned weights (ZeRO 3) take the plain way, gradient whole."""
    weight: Tensor = layer.weight
    bias: Tensor | None = layer.bias
    if hasattr(weight, "ds_id") or not weight.requires_grad or not torch.is_grad_enabled():
        return linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    found: Tensor = _RowLinear.apply(x, weight, bias, choice)  # type: ignore[no-untyped-call]
    return found


def choose_rows(layer: nn.Linear, choice: RowChoice) -> Callable[[], None]:
    """Give the layer's weight the gradient of the rows of `choice` from now on; returns a function that undoes it."""
    before = vars(layer).get("forward")
    layer.forward = partial(row_linear, layer, choice)  # type: ignore[method-assign]
    return partial(delattr, layer, "forward") if before is None else partial(setattr, layer, "forward", before)


def adamw_rows(
    parameter: Tensor, moments: tuple[Tensor, Tensor], rows: Tensor, axis: int, step: int, group: dict[str, Any]
) -> None:
    """One AdamW step (Loshchilov and Hutter 2019, as in torch) of chosen rows, in place; the others do not move.

    Args:
        parameter: with its whole `.grad`. moments: mean of gradients and of their squares, of its shape.
        axis: of the rows. step: number of this step, from 1.
        group: `lr`, `betas`, `eps`, `weight_decay`, as torch's optimizers keep them.
    """
    assert parameter.grad is not None
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    gradient, value, mean, square = (
        tensor.index_select(axis, rows) for tensor in (parameter.grad, parameter.data, *moments)
    )
    value.mul_(1 - rate * group["weight_decay"])
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    size = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    value.addcdiv_(mean, size, value=-rate / (1 - beta1**step))
    for tensor, part in zip((parameter.data, *moments), (value, mean, square), strict=True):
        tensor.index_copy_(axis, rows, part)
