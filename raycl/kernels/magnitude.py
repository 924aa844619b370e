"""The summed magnitude of every output unit over a layer's real tokens: one read of the layer's output.

Sums are float32 whatever the output's type: a bfloat16 sum of thousands of tokens loses the ranking, and quantiles of
bfloat16 do not exist.
"""

import torch
from torch import Tensor

BLOCK = 2**17
"""Numbers of one block: half a MiB."""


def summed_magnitude(
    y_NO: Tensor, weight_N: Tensor | None = None, rows_K: Tensor | None = None, into_O: Tensor | None = None
) -> Tensor:
    """Return `[O]` float32: sum over the N tokens of `weight * |y|`.

    Args:
        weight_N: float32, 1 for tokens that count and 0 for the others; None: all count.
        rows_K: numbers of the tokens that count, if they are known; finding them waits for a GPU.
        into_O: zeros into which the sum is written.
    """
    if y_NO.device.type == "cpu" and y_NO.dtype == torch.float32:
        sums_O = y_NO.new_zeros(y_NO.shape[1]) if into_O is None else into_O
        return _in_blocks(y_NO, y_NO.new_ones(len(y_NO)) if weight_N is None else weight_N, sums_O)
    if weight_N is not None:
        y_NO = y_NO.index_select(0, weight_N.nonzero().squeeze(1) if rows_K is None else rows_K)
    total: Tensor = torch.linalg.vector_norm(y_NO, 1, dim=0, dtype=torch.float32, out=into_O)
    return total


def _in_blocks(y_NO: Tensor, weight_N: Tensor, sums_O: Tensor) -> Tensor:
    """Sum block by block, so that magnitudes are in the cache when they are summed: about half the time."""
    size = max(1, BLOCK // y_NO.shape[1])
    if len(y_NO) <= size:
        return sums_O.addmv_(y_NO.abs().T, weight_N)
    buffer = y_NO.new_empty(size, y_NO.shape[1])
    for block, weights in zip(y_NO.split(size), weight_N.split(size), strict=True):  # type: ignore[no-untyped-call]
        magnitudes = torch.abs(block, out=buffer[: len(block)])
        sums_O.addmv_(magnitudes.T, weights)
    return sums_O


def summed_gated_magnitude(
    h_BTR: Tensor,
    gate_BR: Tensor,
    weight_BT: Tensor | None = None,
    rows_K: Tensor | None = None,
    into_R: Tensor | None = None,
) -> Tensor:
    """Return `[R]` float32: sum over examples and tokens of `weight * |gate * h|`.

    Args:
        gate_BR: gate of each row for each example, or `[B, T, R]` for each position.
        rows_K, into_R: see `summed_magnitude`.
    """
    if h_BTR.device.type != "cpu":
        return in_few_kernels(h_BTR, gate_BR, weight_BT, rows_K, into_R)
    magnitudes_BTR = h_BTR.abs().float()
    if weight_BT is not None:
        magnitudes_BTR = magnitudes_BTR * weight_BT.unsqueeze(-1)
    if gate_BR.dim() == 3:
        total = (magnitudes_BTR * gate_BR.abs().float()).sum((0, 1))
    else:
        total = (magnitudes_BTR.sum(1) * gate_BR.abs().float()).sum(0)
    return total if into_R is None else into_R.add_(total)


def in_few_kernels(
    h_BTR: Tensor,
    gate_BR: Tensor,
    weight_BT: Tensor | None = None,
    rows_K: Tensor | None = None,
    into_R: Tensor | None = None,
) -> Tensor:
    """Compute `summed_gated_magnitude` in few kernels, which matters on a GPU."""
    gate = gate_BR.float() if gate_BR.dim() == 3 else gate_BR.float().unsqueeze(1)
    gated_NR = (h_BTR * gate).view(-1, h_BTR.shape[-1])
    return summed_magnitude(gated_NR, None if weight_BT is None else weight_BT.reshape(-1), rows_K, into_R)
