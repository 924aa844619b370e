"""The rows of loaded adapters on the device: one tensor per shape of linear, all layers of that shape together.

One tensor makes loading an adapter, and picking a batch's rows for all layers, a few copies instead of hundreds. Plain
tensors, no parameters or buffers: engines neither cast, shard, average nor save them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Shape = tuple[int, int, torch.dtype, torch.device]


class RowPool:
    """A `[layers, R, D]` and B `[layers, R, O]` for every shape of linear.

    Args:
        shapes: path -> (inputs, outputs, dtype, device) of the linear.
    """

    def __init__(self, shapes: Mapping[str, Shape], rows: int) -> None:
        self.locations: dict[str, tuple[Shape, int]] = {}
        members: dict[Shape, list[str]] = {}
        for path, shape in shapes.items():
            self.locations[path] = (shape, len(members.setdefault(shape, [])))
            members[shape].append(path)
        self.members = members
        self.a = {s: torch.zeros(len(m), rows, s[0], dtype=s[2], device=s[3]) for s, m in members.items()}
        self.b = {s: torch.zeros(len(m), rows, s[1], dtype=s[2], device=s[3]) for s, m in members.items()}
        self.rows = rows
        self._written: set[int] = set()

    def grow(self, rows: int) -> None:
        """Make room for more rows; those that were written keep their values."""
        written = torch.tensor(sorted(self._written), dtype=torch.long)
        for block in (self.a, self.b):
            for shape, old in block.items():
                index = written.to(shape[3])
                block[shape] = old.new_zeros(old.shape[0], rows, old.shape[2])
                block[shape].index_copy_(1, index, old.index_select(1, index))
        self.rows = rows

    def write(self, rows: list[int], linears: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Put an adapter's A `[r, D]` and B `[O, r]` into `rows`; linears it lacks, and rows beyond r, become 0."""
        if not rows:  # an adapter of a head or a prompt alone
            return
        index = torch.tensor(rows)
        self._written.update(rows)
        for shape, members in self.members.items():
            a = torch.zeros(len(members), len(rows), shape[0])
            b = torch.zeros(len(members), len(rows), shape[1])
            for layer, path in enumerate(members):
                if path in linears:
                    low, high = linears[path]
                    a[layer, : low.shape[0]] = low
                    b[layer, : low.shape[0]] = high.T
            where = index.to(shape[3])
            self.a[shape][:, where] = a.to(shape[3], shape[2])
            self.b[shape][:, where] = b.to(shape[3], shape[2])

    def layer(self, path: str) -> tuple[Tensor, Tensor]:
        """Return all rows of one linear: A `[R, D]`, B `[R, O]`."""
        shape, layer = self.locations[path]
        return self.a[shape][layer], self.b[shape][layer]

    def picked(self, index: Tensor) -> RowPool:
        """Return a smaller pool with copies of the rows `index` only."""
        small = object.__new__(RowPool)
        small.locations, small.members, small.rows = self.locations, self.members, len(index)
        small._written = set(range(len(index)))
        small.a = {shape: block.index_select(1, index.to(shape[3])) for shape, block in self.a.items()}
        small.b = {shape: block.index_select(1, index.to(shape[3])) for shape, block in self.b.items()}
        return small

    @property
    def bytes(self) -> int:
        """Memory held on the device."""
        return sum(block.nbytes for blocks in (self.a, self.b) for block in blocks.values())
