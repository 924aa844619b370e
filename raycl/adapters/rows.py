"""The rows of the pool that belong to each loaded adapter: allocation, least-recently-used eviction, pins.

A bank may hold 10,000 adapters, a device keeps the few that are in use. Rows, not fixed-size slots, are handed out, so
adapters of any rank share one pool.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection

from raycl.errors import AdapterError


class RowTable:
    """Owners of `capacity` rows.

    Attributes:
        rows: adapter -> its rows; least recently used first.
        evicted: number of adapters that were evicted so far.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: OrderedDict[str, list[int]] = OrderedDict()
        self.evicted = 0
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

    def touch(self, name: str) -> None:
        """Mark an adapter as just used."""
        self.rows.move_to_end(name)

    def pin(self, name: str) -> None:
        """Never evict an adapter until it is unpinned as often as it was pinned."""
        self._pins[name] += 1

    def unpin(self, name: str) -> None:
        """Remove a pin."""
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
            self._make_room(name, count, set(keep))
        self.rows[name] = [heapq.heappop(self._free) for _ in range(count)]
        return self.rows[name]

    def _make_room(self, name: str, count: int, keep: set[str]) -> None:
        losers = [other for other in self.rows if not self._pins[other] and other not in keep]
        most = self.free + sum(len(self.rows[other]) for other in losers)
        if most < count:
            raise AdapterError(
                f"adapter '{name}' needs {count} rows, but pinned adapters and those of this batch leave {most} of "
                f"{self.capacity}: raise max_loaded_rows, or split the batch"
            )
        for other in losers:
            if self.free >= count:
                break
            self.remove(other)
            self.evicted += 1

    def remove(self, name: str) -> None:
        """Free the rows of an adapter."""
        for row in self.rows.pop(name):
            heapq.heappush(self._free, row)
