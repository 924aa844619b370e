"""The workers of a run as one object: rank, world size, and the few collectives the loop needs.

Everything above works the same with one process (no process group) and with many.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raycl.errors import RayclError
from raycl.training.workers.memory import peak_memory_mb, resident_memory_mb

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """The position of this worker among `size` workers.

    Attributes:
        rank: 0 .. size - 1; rank 0 writes files.
        local_rank: 0 on the first worker of each node.
        device: device of this worker.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @staticmethod
    def alone(device: torch.device | None = None) -> DistributedContext:
        """Return the context of a single process."""
        gpu = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        return DistributedContext(0, 1, 0, device or gpu)

    @property
    def is_first(self) -> bool:
        """Return whether this worker writes for all."""
        return self.rank == 0

    @cached_property
    def background(self) -> dist.ProcessGroup | None:
        """A second group of all workers, for sums during a backward pass. Collective at its first use."""
        return dist.new_group() if self.size > 1 else None

    @cached_property
    def sharding(self) -> dist.ProcessGroup:
        """One more, for weights that workers share out."""
        group: dist.ProcessGroup = dist.new_group()
        return group

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over workers, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def total(self, *values: float) -> list[float]:
        """Return the sum of each number over workers (float64); a device is waited for where there are several."""
        if self.size == 1:
            return [float(value) for value in values]
        return [float(value) for value in self.sum(torch.tensor(values, dtype=torch.float64, device=self.device))]

    def gather(self, value: T) -> list[T]:
        """Return every worker's value, by rank, on every worker."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every worker."""
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
        first_error = next((failure for failure in self.gather(error) if failure is not None), None)
        if first_error is not None and first_error is error:
            raise first_error
        if first_error is not None:
            raise first_error from error

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Raise an error of ours that comes inside on any worker on every worker (`raise_any`). Collective."""
        error = None
        try:
            yield
        except RayclError as raised:
            error = raised
        self.raise_any(error)


def memory_used(world: DistributedContext) -> dict[str, float]:
    """Return the most memory that a worker has held so far, and the most that one holds now, in MiB. Collective."""
    return {
        "peak_memory_mb": max(world.gather(peak_memory_mb(world.device))),
        "resident_memory_mb": max(world.gather(resident_memory_mb())),
    }


def ensure_process_group(world: DistributedContext) -> None:
    """Create a group of this process alone, for libraries that need one, unless there is a group of several."""
    if dist.is_initialized():
        return
    assert world.size == 1, "several workers, but no process group"
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    documented: Any = dist  # its types leave this class out
    dist.init_process_group(backend, store=documented.HashStore(), rank=0, world_size=1)


class Scattered(Tensor):
    """A tensor whose elements lie on several workers: each has some that follow one another, or none.

    It has a shape and a dtype, and no values to compute with: `whole` puts them together.

    Attributes:
        part: this worker's elements, flat. first: the place of the first of them.
    """

    part: Tensor
    first: int
    world: DistributedContext

    @staticmethod
    def __new__(cls, part: Tensor, first: int, shape: Sequence[int], world: DistributedContext) -> Scattered:
        """Describe it; nothing is copied."""
        tensor: Scattered = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=part.dtype, device=part.device)
        tensor.part, tensor.first, tensor.world = part, first, world
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{function} needs the parts of all workers: put them together first")

    def joined(self) -> Tensor:
        """Return all elements, on this worker's device, bit for bit. Collective."""
        joined = torch.empty(self.shape, dtype=self.dtype, device=self.world.device)
        flat = joined.view(-1)
        flat[self.first : self.first + self.part.numel()] = self.part.to(joined.device)
        for rank, (first, count) in enumerate(self.world.gather((self.first, self.part.numel()))):
            if self.world.size > 1 and count:
                dist.broadcast(flat[first : first + count], rank)
        return joined


def is_shared_out(tensor: Tensor) -> bool:
    """Return whether workers have parts of a tensor."""
    return isinstance(tensor, Scattered) or is_dtensor(tensor)


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether torch shares a tensor out.

    The module of its class takes half a second to import; where nothing has imported it, there is no such tensor.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor with the parts of all workers, where they share it out. Collective."""
    if isinstance(tensor, Scattered):
        return tensor.joined()
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def own_part(shared: DTensor, value: Tensor) -> Tensor:
    """Return this worker's part of a full `value`, laid out as `shared`; nothing is communicated."""
    from torch.distributed.tensor import distribute_tensor

    distributed = distribute_tensor(value.to(shared.device), shared.device_mesh, shared.placements, src_data_rank=None)
    return distributed.to_local()


def load_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Copy whole values into the module's parameters of those names."""
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in parameters.items():
            parameter = own[name]
            if is_dtensor(parameter):
                parameter.to_local().copy_(own_part(parameter, value))
            else:
                parameter.copy_(value)
