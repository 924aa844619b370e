"""The one formula: `y += gate * (x A^T) B`, in the two shapes that are worth computing.

Shared: all rows of all adapters in use, each example closes the gates it does not want (two GEMMs). Own: every example
brings the few rows it wants (two batched GEMMs), cheaper when an example uses a small part of what the batch uses, as
under SLM's retrieval. Both give the exact sum of weighted adapter outputs: A and B are never averaged. With an
activation f between the two GEMMs, `y += gate * f(x A^T) B`, an adapter is no weight increment but a bottleneck
(Houlsby et al. 2019, without biases) in parallel to its linear (He et al. 2022, "parallel adapter"). `relu_` works in
place under autograd too: nothing else reads what the first GEMM gave. A prefix is attention from each token to learned
keys and values beside that to the tokens (prefix tuning, Li and Liang 2021), with a softmax of its own whose result is
added, as in LLaMA-Adapter (Zhang et al. 2023). Keys in the place of A and values in that of B make it the same formula
with f = softmax, in each head (He et al. 2022, section 3.1).

Self-activation: the rows of all active adapters are keys and values of one memory, and each position uses a few.

    z = A x,  s = z / |z|,  w = softmax over the k largest s of s / temperature,  y += B (scale * w * z)

A row of A is a key and its column of B the value (MoRAM: Lu et al. 2026, arXiv:2506.21035). Outside of training, rows
with s below the threshold add nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from raycl.types import Activation

OWN_GAIN = 3
"""An example's own rows must be this many times fewer than the shared ones, since small batched GEMMs are slower."""

OWN_TOKENS = 8
"""From this many positions per example, copying its own rows pays."""


def add_shared(
    y: Tensor, x: Tensor, a_RD: Tensor, b_RO: Tensor, gate_BR: Tensor, activation: Activation = ""
) -> Tensor:
    """Return `y + (gate * f(x A^T)) B`.

    Args:
        y: `[B, ..., O]`, changed in place where autograd allows it.
        x: `[B, ..., D]`.
        gate_BR: weight times scale of each row for each example, or `[B, T, R]` for each position.
        activation: f; "" for none.
    """
    h = linear(x, a_RD)
    if activation == "relu":
        h.relu_()
    gate = spread(gate_BR, h)
    if torch.is_grad_enabled():
        return y + linear(h * gate, b_RO.T)
    h.mul_(gate)
    if y.dtype == h.dtype == b_RO.dtype and y.is_contiguous():
        y.view(-1, y.shape[-1]).addmm_(h.view(-1, h.shape[-1]), b_RO)
        return y
    return y + linear(h, b_RO.T)


def spread(gate: Tensor, h: Tensor) -> Tensor:
    """Return a gate of each example `[B, R]`, or of each position, shaped to broadcast to h `[B, ..., R]`."""
    gate = gate.to(h.dtype)
    return gate if gate.dim() == h.dim() else gate.view(gate.shape[0], *(1,) * (h.dim() - 2), -1)


def add_own(y: Tensor, x: Tensor, a_BKD: Tensor, b_BKO: Tensor, gate_BK: Tensor, activation: Activation = "") -> Tensor:
    """Return the same with rows of each example's own: `a_BKD` and `b_BKO` are its K rows; x is `[B, T, D]`."""
    gate = gate_BK.to(x.dtype)
    if torch.is_grad_enabled() or y.dtype != x.dtype:
        h = torch.bmm(x, a_BKD.transpose(1, 2))
        if activation == "relu":
            h.relu_()
        return y + torch.bmm(h * gate[:, None, :], b_BKO)
    h_BKT = torch.bmm(a_BKD, x.transpose(1, 2))  # fewer rows first, which is faster than x A^T
    if activation == "relu":
        h_BKT.relu_()
    return y.baddbmm_(h_BKT.mul_(gate[:, :, None]).transpose(1, 2), b_BKO)


def attend(q: Tensor, keys: Tensor, values: Tensor, gate: Tensor, heads: int, scaling: float) -> Tensor:
    """Return the attention of each token to the prefix positions that its example uses: `softmax(scaling q K^T + log
    gate) V`.

    Positions of all prefixes with a gate above 0 compete in one softmax, as if they stood one after another; equal
    gates leave that to the queries alone. Others, and examples without any, add nothing.

    Args:
        q: `[B, T, D]` queries of all heads side by side.
        keys: `[R, D]`, or `[B, R, D]` where each example has its own. values: the same.
        gate: `[B, R]`, or `[B, T, R]` for each position.

    Returns:
        `[B, T, D]`, which is added to the input of the layer's output projection.
    """
    gate = gate if gate.dim() == 3 else gate[:, None]
    closed = gate <= 0
    idle = closed.all(2, keepdim=True)
    prior = gate.clamp_min(torch.finfo(gate.dtype).tiny).log().masked_fill(closed & ~idle, float("-inf"))
    scores = _of_heads(q, heads) @ _of_heads(keys, heads).mT * scaling
    shares = (scores + prior.to(scores.dtype)[:, None]).softmax(-1)
    attended = (shares @ _of_heads(values, heads)).transpose(1, 2).flatten(2)
    return attended.masked_fill(idle, 0.0)


def _of_heads(rows: Tensor, heads: int) -> Tensor:
    """Reshape `[..., R, D]` to `[..., H, R, D / H]`."""
    return rows.reshape(*rows.shape[:-1], heads, -1).transpose(-3, -2)


WRITTEN = re.compile(r"self\(top_k=(\d+),temperature=([\d.e+-]+),threshold=([\d.e+-]+)\)")
"""The activation of an adapter, as banks hold it."""


@dataclass(frozen=True)
class SelfActivation:
    """The function of one memory's rows.

    Attributes:
        top_k: number of rows that a position uses at most. temperature: divides scores before their softmax.
        threshold: smallest score of a row that is used outside of training; 0: any.
    """

    top_k: int
    temperature: float
    threshold: float

    def __str__(self) -> Activation:
        """Return it as banks hold it."""
        return f"self(top_k={self.top_k},temperature={self.temperature:g},threshold={self.threshold:g})"

    @staticmethod
    def of(activation: Activation) -> SelfActivation | None:
        """Invert `str`; None for another activation."""
        found = WRITTEN.fullmatch(activation)
        return None if found is None else SelfActivation(int(found[1]), float(found[2]), float(found[3]))

    def weights(self, z: Tensor, gate: Tensor, training: bool) -> Tensor:
        """Return the weight of each row at each position, in float32 or better.

        Args:
            z: `[..., R]`, A x. gate: the same, or broadcasts to it; a row whose gate is 0 belongs to an adapter that is
                not active, and one whose z is 0 has no key for this linear: neither takes part.
            training: rows below the threshold take part.

        Returns:
            `[..., R]`; the weights of a position add up to 1 in training, to 0 where no row takes part.
        """
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        absent = (gate == 0) | (z == 0)
        scores = normalize(z.masked_fill(absent, 0.0), dim=-1, eps=1e-8)
        scores = scores.masked_fill(absent, float("-inf"))
        top, rows = scores.topk(min(self.top_k, z.shape[-1]), dim=-1)
        shares = (top / self.temperature).softmax(-1)
        if not training and self.threshold:
            shares = shares * (top >= self.threshold)
        shares = shares.masked_fill(top.isneginf(), 0.0)  # without any row they are no numbers
        return torch.zeros_like(z).scatter(-1, rows, shares)

    def add(self, y: Tensor, parts: Sequence[tuple[Tensor, Tensor, Tensor]], training: bool = False) -> Tensor:
        """Return y with what the memory adds.

        Args:
            y: `[..., O]`.
            parts: A x `[..., R]`, the gates of its rows, which broadcast to it, and B `[O, R]`; all rows compete with
                each other.
        """
        z = torch.cat([part[0] for part in parts], dim=-1)
        gate = torch.cat([gate.expand(low.shape) for low, gate, _ in parts], dim=-1)
        weighted = z * gate.to(z.dtype) * self.weights(z, gate, training).to(z.dtype)
        pieces = torch.split(weighted, [part[0].shape[-1] for part in parts], dim=-1)
        for piece, (_, _, high) in zip(pieces, parts, strict=True):
            y = y + linear(piece, high)
        return y
