"""A linear whose backward forms only chosen rows of the weight gradient, and an Adam that updates only those.

A gradient row that will be masked need not be computed. At T = 0.7 that is 70 % of a weight's gradient, about a fifth
of a fine-tuning step. Which rows are chosen is read when backward runs, so it may be decided as late as at the end of
the forward pass; recomputation reads it again. The gradient keeps its full shape, zero elsewhere, so every engine
reduces and reads it as usual; it equals the masked dense one to rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

WIDTH = 8
"""A GPU multiplies a multiple of this many rows, some of them not chosen, because other shapes are slow."""


class WeightRows(NamedTuple):
    """Rows of a weight `[O, D]`.

    Attributes:
        formed: `[number]` rows whose gradients are computed: the chosen ones, and with a width others.
        places: `[O]` of each row of the weight 1 + its index in `formed`; 0 where it is not chosen.
    """

    formed: Tensor
    places: Tensor
    number: int


def rows_of(kept_KO: Tensor, count: int | None = None, width: int | None = None) -> list[WeightRows]:
    """Return the chosen rows of K weights with O rows each.

    Args:
        kept_KO: bool.
        count: number of rows kept of every weight; None: unknown, and finding it waits for a GPU.
        width: a multiple of this many rows is formed, where there are enough; None: as the device needs.
    """
    width = (WIDTH if kept_KO.is_cuda else 1) if width is None else width
    outputs, upto_KO = kept_KO.shape[1], kept_KO.cumsum(1)
    counts: Any = upto_KO[:, -1:] if count is None else count
    rows_KO = torch.arange(outputs, device=kept_KO.device).expand_as(kept_KO)
    order_KO = torch.where(kept_KO, upto_KO - 1, rows_KO + counts - upto_KO)  # kept rows first
    formed_KO = torch.empty_like(order_KO).scatter_(1, order_KO, rows_KO)
    places = (upto_KO * kept_KO).unbind()
    if count is not None:
        number = min(outputs, -(-count // width) * width)
        return [WeightRows(*both, number) for both in zip(formed_KO[:, :number].unbind(), places, strict=True)]
    widths = [min(outputs, -(-number // width) * width) for number in counts.flatten().tolist()]
    parts = zip(formed_KO.unbind(), places, widths, strict=True)
    return [WeightRows(formed_O[:number], places_O, number) for formed_O, places_O, number in parts]


class Products:
    """Memory for the gradients of chosen rows, below a row of zeros; weights of one width share it."""

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], Tensor] = {}
        self._parts: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def take(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `[1 + rows, columns]`, whose first row is zero, and the rows below it."""
        key = (rows, columns, dtype, device)
        part = self._parts.get(key)
        return self._new(key) if part is None else part

    def _new(self, key: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        rows, *kind = key
        memory = self._memory.get(tuple(kind))
        if memory is None or len(memory) <= rows:
            self._parts = {other: parts for other, parts in self._parts.items() if other[1:] != key[1:]}
            memory = torch.zeros(1 + rows, kind[0], dtype=kind[1], device=kind[2])
            self._memory[tuple(kind)] = memory
        part = self._parts[key] = (memory[: 1 + rows], memory[1 : 1 + rows])
        return part


@dataclass
class RowChoice:
    """The rows of one weight that get a gradient.

    Attributes:
        rows: the chosen rows; None: all. products: memory that may be shared with other weights.
        formed: a gradient of chosen rows was computed; the modifier that chooses rows resets it.
    """

    rows: WeightRows | None = None
    products: Products = field(default_factory=Products)
    formed: bool = False


class _RowLinear(torch.autograd.Function):
    """`linear`, computed in the given type, if any, with a weight gradient in the chosen rows only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, choice: RowChoice, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.choice, ctx.weight_dtype = choice, weight.dtype
        if dtype is not None:
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; autograd converts each to the type of its tensor."""
        (g,) = gradients
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        choice: RowChoice = ctx.choice
        flat_NO = g.reshape(-1, g.shape[-1])
        to_x = g @ weight if needs_x else None
        to_weight = None
        if needs_weight:
            x_ND = x.reshape(-1, x.shape[-1])
            to_weight = weight_gradient(flat_NO, x_ND, choice.rows, choice.products, ctx.weight_dtype)
            choice.formed |= choice.rows is not None
        to_bias = flat_NO.sum(0) if needs_bias else None
        return to_x, to_weight, to_bias, None, None


def widens(x: Tensor, dtype: torch.dtype | None) -> bool:
    """Return whether products of x can be written in float32, in which they are summed: with 16 bits on a GPU, since
    torch 2.8."""
    narrow = x.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32
    return narrow and x.is_cuda and torch.version.cuda is not None and hasattr(torch.ops.aten.mm, "dtype_out")


def weight_gradient(
    g_NO: Tensor,
    x_ND: Tensor,
    rows: WeightRows | None,
    products: Products | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `[O, D]`: `g^T x` in the chosen rows, zero in all others; None: all rows.

    Args:
        products: memory to compute in. dtype: wanted dtype; the result may have that of x.
    """
    if rows is None:
        return g_NO.T @ x_ND
    formed_W, places_O, number = rows
    if not number:
        return x_ND.new_zeros(g_NO.shape[1], x_ND.shape[1])
    wider, held = widens(x_ND, dtype), products or Products()
    memory, product_WD = held.take(number, x_ND.shape[1], torch.float32 if wider else x_ND.dtype, x_ND.device)
    g_WN = g_NO.index_select(1, formed_W).t()
    if wider:
        torch.mm(g_WN, x_ND, out_dtype=torch.float32, out=product_WD)
    else:
        torch.mm(g_WN, x_ND, out=product_WD)
    return memory.index_select(0, places_O)


def row_linear(layer: nn.Linear, choice: RowChoice, x: Tensor) -> Tensor:
    """Return `layer(x)`, under autocast in its type. Partitioned weights (ZeRO 3) get complete gradients as usual."""
    weight, bias = layer.weight, layer.bias
    if not weight.requires_grad or not torch.is_grad_enabled() or hasattr(weight, "ds_id"):
        return linear(x, weight, bias)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    output: Tensor = _RowLinear.apply(x, weight, bias, choice, dtype)  # type: ignore[no-untyped-call]
    return output


def choose_rows(layer: nn.Linear, choice: RowChoice) -> Callable[[], None]:
    """Give the layer's weight the gradient of the rows of `choice` from now on; returns a function that undoes it."""
    before = vars(layer).get("forward")
    layer.forward = partial(row_linear, layer, choice)  # type: ignore[method-assign]
    return partial(delattr, layer, "forward") if before is None else partial(setattr, layer, "forward", before)


def adamw_rows(
    parameter: Tensor, moments: tuple[Tensor, Tensor], rows: Tensor, axis: int, step: int, group: dict[str, Any]
) -> None:
    """Take an AdamW step (Loshchilov and Hutter 2019, as in torch) of chosen rows, in place; the others do not move.

    Args:
        parameter: parameter with its full `.grad`. moments: means of gradients and of their squares, of its shape.
        axis: axis of the rows. step: number of this step, from 1.
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
