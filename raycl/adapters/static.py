"""Rows in use at fixed addresses and of a fixed number, for torch.compile and CUDA graphs.

Activating a mixture copies its rows into preallocated tensors and fills one gate: shapes and addresses never change, so
another mixture, or an adapter learned a minute ago, costs no recompilation and no new graph. Rows beyond those in use
have closed gates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycl.adapters.pool import RowPool
from raycl.errors import AdapterError


class StaticRows:
    """Room for `rows` rows in use and `sequences` rows of a batch.

    Attributes:
        gate: `[sequences, rows]`, rewritten in place.
    """

    def __init__(self, pool: RowPool, rows: int, sequences: int) -> None:
        self.rows = rows
        self.active = pool.picked(torch.zeros(rows, dtype=torch.long))
        dtype, device = next(iter(pool.a))[2:]
        self.gate = torch.zeros(sequences, rows, dtype=dtype, device=device)

    def layer(self, path: str) -> tuple[Tensor, Tensor]:
        """Return all rows of one linear: A `[R, D]`, B `[R, O]`."""
        return self.active.layer(path)

    def fill(self, pool: RowPool, index: Tensor, gate_BR: Tensor) -> None:
        """Copy the rows `index` and their gates in.

        Raises:
            AdapterError: more rows or sequences than there is room for.
        """
        examples, count = gate_BR.shape
        if count > self.gate.shape[1] or examples > self.gate.shape[0]:
            raise AdapterError(
                f"the batch needs {count} rows for {examples} sequences, but the preallocated room is "
                f"{self.gate.shape[1]} rows for {self.gate.shape[0]}: make more room, or split the batch"
            )
        for mine, source in ((self.active.a, pool.a), (self.active.b, pool.b)):
            for shape, block in source.items():
                mine[shape][:, :count].copy_(block.index_select(1, index.to(block.device)))
        self.gate.zero_()
        self.gate[:examples, :count].copy_(gate_BR)

    def clear(self) -> None:
        """Close all gates, so that the bare backbone computes."""
        self.gate.zero_()
