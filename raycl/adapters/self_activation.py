"""Self-activation: the rows of all active adapters are keys and values of one memory, and each position uses a few.

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
