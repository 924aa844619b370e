"""The rows of loaded adapters: their owners, the tensors on the device, and rows at fixed addresses.

A bank may hold 10,000 adapters, a device keeps the few that are in use. Rows, not fixed-size slots, are handed out, so
adapters of any rank share one pool.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from raycl.errors import AdapterError


class RowTable:
    """Owners of `capacity` rows.

    Attributes:
        rows: adapter -> its rows; least recently used first.
        evicted: number of adapters that were evicted so far.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity: int = capacity
        self.rows: OrderedDict[str, list[int]] = OrderedDict()
        self.evicted: int = 0
        self._free = list(range(capacity))  # a heap: the lowest rows first, so that rows in use are contiguous
        self._pins: Counter[str] = Counter()

    def grow(self, capacity: int) -> None:
        """Add rows at the end."""
        for row in range(self.capacity, capacity):
            heapq.heappush(self._free, row)
        self.capacity = max(self.capacity, capacity)

    @property
    def free(self) -> int:
        """The number of rows without an owner."""
        return len(self._free)

    def pin(self, name: str) -> None:
        """Never evict an adapter until it is unpinned as often as it was pinned."""
        self._pins[name] += 1

    def unpin(self, name: str) -> None:
        assert self._pins[name] > 0, f"'{name}' is not pinned"
        self._pins[name] -= 1

    def allocate(self, name: str, count: int, keep: Collection[str] = ()) -> list[int]:
        """Give `name` `count` rows, evicting others least recently used first.

        Args:
            keep: adapters that must stay although they are not pinned (the current batch uses them).

        Raises:
            AdapterError: pinned and kept adapters leave too few rows.
        """
        assert name not in self.rows, f"'{name}' has rows already"
        if self.free < count:
            kept = set(keep)
            losers = [other for other in self.rows if not self._pins[other] and other not in kept]
            most = self.free + sum(len(self.rows[other]) for other in losers)
            if most < count:
                raise AdapterError(
                    f"adapter '{name}' needs {count} rows, but pinned adapters and those of this batch leave {most} of "
                    f"{self.capacity}: raise max_loaded_rows, or split the batch"
                )
            while self.free < count:
                self.remove(losers.pop(0))
                self.evicted += 1
        self.rows[name] = [heapq.heappop(self._free) for _ in range(count)]
        return self.rows[name]

    def remove(self, name: str) -> None:
        """Free the rows of an adapter."""
        for row in self.rows.pop(name):
            heapq.heappush(self._free, row)


Shape = tuple[int, int, torch.dtype, torch.device]


class RowPool:
    """A `[layers, R, D]` and B `[layers, R, O]` for every shape of linear.

    One tensor for all layers of a shape makes loading an adapter, and picking a batch's rows for all layers, a few
    copies instead of hundreds. Plain tensors, no parameters or buffers: engines neither cast, shard, average nor save
    them.

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
        self.a: dict[Shape, Tensor] = {
            s: torch.zeros(len(m), rows, s[0], dtype=s[2], device=s[3]) for s, m in members.items()
        }
        self.b: dict[Shape, Tensor] = {
            s: torch.zeros(len(m), rows, s[1], dtype=s[2], device=s[3]) for s, m in members.items()
        }
        self.rows: int = rows
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


class StaticRows:
    """Room for `rows` rows in use and `sequences` rows of a batch, for torch.compile and CUDA graphs.

    Activating a mixture copies its rows into preallocated tensors and fills one gate: shapes and addresses never
    change, so another mixture, or an adapter learned a minute ago, costs no recompilation and no new graph. Rows beyond
    those in use have closed gates.

    Attributes:
        gate: `[sequences, rows]`, rewritten in place.
        alone: adapter with copies of modules -> `[sequences, 1]` its weight, 0 or 1, rewritten in place.
        ratios: path of a linear -> `[sequences, O]` factors of its outputs without bias, rewritten in place.
    """

    def __init__(
        self, pool: RowPool, rows: int, sequences: int, scaled: Sequence[str] = (), copying: Sequence[str] = ()
    ) -> None:
        """Allocate.

        Args:
            scaled: linears whose outputs adapters with magnitudes (DoRA) may scale.
            copying: adapters with copies of modules.
        """
        self.rows = rows
        self.active: RowPool = pool.picked(torch.zeros(rows, dtype=torch.long))
        dtype, device = next(iter(pool.a))[2:]
        self.gate: Tensor = torch.zeros(sequences, rows, dtype=dtype, device=device)
        self.alone: dict[str, Tensor] = {
            name: torch.zeros(sequences, 1, dtype=dtype, device=device) for name in copying
        }
        shapes = {path: pool.locations[path][0] for path in scaled}
        self.ratios: dict[str, Tensor] = {
            path: torch.ones(sequences, s[1], dtype=s[2], device=s[3]) for path, s in shapes.items()
        }

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
        for ratio_SO in self.ratios.values():
            ratio_SO.fill_(1)
        for weight_S1 in self.alone.values():
            weight_S1.zero_()
