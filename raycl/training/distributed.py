"""The workers of a run as one object: rank, world size, and the few collectives the loop needs.

Why it exists: everything above works the same with one process (no process group) and with many.
What it does not know: how the workers were started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from raycl.errors import RayclError

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """This worker among `size` workers.

    Attributes:
        rank: 0 .. size - 1; rank 0 writes files.
        local_rank: 0 on the first worker of each node.
        device: where this worker computes.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @staticmethod
    def alone(device: torch.device | None = None) -> DistributedContext:
        """One process by itself."""
        return DistributedContext(0, 1, 0, device or default_device(0))

    @property
    def is_first(self) -> bool:
        """Whether this worker writes for all."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over workers, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def total(self, *values: float) -> list[float]:
        """Sum of each number over workers (float64)."""
        return [float(value) for value in self.sum(torch.tensor(values, dtype=torch.float64, device=self.device))]

    def gather(self, value: T) -> list[T]:
        """Every worker's value, by rank, on every worker."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every worker."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]  # type: ignore[no-any-return]

    def raise_any(self, error: RayclError | None) -> None:
        """Raise the first error of any worker on every worker, so that none waits for one that has stopped. Collective.

        Args:
            error: this worker's own, if any.
        """
        found = next((one for one in self.gather(error) if one is not None), None)
        if found is not None and found is error:
            raise found
        if found is not None:
            raise found from error

    def barrier(self) -> None:
        """Wait for all workers."""
        if self.size > 1:
            dist.barrier()


def default_device(local_rank: int) -> torch.device:
    """The GPU of this local rank, or the CPU."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
