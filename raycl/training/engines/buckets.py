"""Gradients of parameters that every worker holds, summed over the workers in buckets during the backward pass.

One sum after the backward pass leaves the network idle while gradients are computed, and the processor idle while they
are sent. torch's DistributedDataParallel does the same around a module of fixed parameters; here they change with every
task, and a step's micro-batches share one sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raycl.training.workers.distributed import DistributedContext

BUCKET_BYTES = 25 * 2**20
"""The number of bytes that are at least summed in one collective, as in torch's DistributedDataParallel."""


@dataclass
class _Bucket:
    """Parameters whose gradients are summed in one collective.

    Attributes:
        waiting: those without a gradient yet. flat: their gradients, while they are summed.
    """

    parameters: list[nn.Parameter] = field(default_factory=list)
    waiting: set[nn.Parameter] = field(default_factory=set)
    flat: Tensor | None = None
    work: Any = None

    @property
    def bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    def launch(self, group: dist.ProcessGroup | None) -> None:
        """Begin the sum; a parameter without a gradient counts as zero."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def finish(self) -> None:
        assert self.flat is not None, "the sum was not begun"
        self.work.wait()
        parts = torch.split(self.flat, [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.flat = self.work = None


class GradientBuckets:
    """The gradients of one task's parameters.

    Attributes:
        step_bytes: bytes of gradients that a step sums over workers; 0 with one worker.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: DistributedContext, accumulation: int) -> None:
        """Watch the parameters.

        Args:
            parameters: parameters of one dtype in the order of the forward pass.
            accumulation: backward passes in a step; the sum is begun in the last.
        """
        self._group = world.background
        self._accumulation = accumulation
        self._passes = 0
        self._buckets: list[_Bucket] = []
        self._next = 0
        self._handles: list[Any] = []
        self.step_bytes: int = 0
        if world.size == 1:
            return
        for parameter in reversed(parameters):
            if not self._buckets or self._buckets[-1].bytes >= BUCKET_BYTES:
                self._buckets.append(_Bucket())
            self._buckets[-1].parameters.append(parameter)
        of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        for parameter in parameters:
            hook = parameter.register_post_accumulate_grad_hook(lambda p: self._arrived(of[p], p))  # type: ignore[no-untyped-call]
            self._handles.append(hook)
        self.step_bytes = sum(bucket.bytes for bucket in self._buckets)

    def before_backward(self) -> None:
        """Begin a backward pass of the step."""
        if not self._buckets:
            return
        self._passes += 1
        assert self._passes <= self._accumulation, "more micro-batches than the accumulation"
        for bucket in self._buckets:
            bucket.waiting = set(bucket.parameters)

    def _arrived(self, bucket: _Bucket, parameter: nn.Parameter) -> None:
        """Count a complete gradient. Buckets are sent in the same order on every worker, as collectives must."""
        if self._passes < self._accumulation:
            return
        bucket.waiting.discard(parameter)
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._buckets[self._next].launch(self._group)
            self._next += 1

    def finish(self) -> None:
        """Complete the sums over workers; gradients that the last pass did not compute are summed now."""
        for bucket in self._buckets[self._next :]:
            bucket.launch(self._group)
        for bucket in self._buckets:
            bucket.finish()
        self._passes = self._next = 0

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
