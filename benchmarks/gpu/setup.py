"""Shared parts of the suite: the device, the sizes, cases, and checks of results."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import Figure
from benchmarks.gpu.timing import ONCE, ROUNDS, Contender, Times, quartiles, take_turns
from raycl.errors import WrongResultError
from raycl.generation.static_cache import captured

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference to a float32 reference, as a share of the reference's largest value."""

RANK, DENSE = 8, 16
"""Rank of every drawn adapter, and how many of them the mixture has that targets are about."""

TARGETS = {"q, v": ("attention.query", "attention.value"), "all linears": ("attention", "ffn")}
LIMITS = {"q, v": 1.10, "all linears": 1.25}
"""Time of a model with `DENSE` adapters for every example over the bare model's, in prefill and in decoding."""


@dataclass(frozen=True)
class MachineLimits:
    """The measured limits of the device.

    Attributes:
        flops: operations of a bfloat16 matrix product per second. bytes: bytes read and written by a copy per second.
    """

    flops: float
    bytes: float


@dataclass
class Setup:
    """The device and the sizes of a run.

    Attributes:
        tiny: sizes at which every part ends in seconds on a CPU: its results are checked, its times mean nothing.
        notes: omissions and their reasons.
        limits: once they are known (`benchmarks.gpu.parts.limits`).
        closing: resources that are closed when a part ends.
    """

    device: torch.device
    tiny: bool = False
    notes: list[str] = field(default_factory=list)
    limits: MachineLimits | None = None
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16; float32 where results, not times, are what is looked at."""
        return torch.float32 if self.tiny else torch.bfloat16

    @property
    def is_cuda(self) -> bool:
        """Return whether there are graphs, events and memory statistics."""
        return self.device.type == "cuda"

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal random numbers on the device, in its type unless another is given."""
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)

    def replayed(self, run: Callable[[], None]) -> Callable[[], Any]:
        """Return `run` as a CUDA graph where there are such; it must write its results where it wrote them before."""
        return captured(run).replay if self.is_cuda else run

    def turns(self, runs: Mapping[str, Callable[[], Any] | Contender], seconds: float) -> dict[str, Times]:
        """See `take_turns`."""
        contenders = {name: run if isinstance(run, Contender) else Contender(run) for name, run in runs.items()}
        return take_turns(contenders, self.device, seconds, ONCE if self.tiny else ROUNDS)

    def free(self) -> None:
        """Give back the memory of what nothing refers to any more."""
        gc.collect()
        if self.is_cuda:
            with suppress(RuntimeError):  # after some errors every call fails; see `is_alive`
                torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for what the device still computes."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def is_alive(self) -> bool:
        """Return whether the device still answers: after an illegal access it does not, until the process ends."""
        try:
            self.synchronize()
        except RuntimeError:
            return False
        return True


@dataclass(frozen=True)
class Case:
    """Something that a part measures.

    Attributes:
        figures: the figures, each as soon as it is known, within about so many seconds.
        needs: packages without which it cannot run.
    """

    name: str
    figures: Callable[[float], Iterable[Figure]]
    needs: tuple[str, ...] = ()


def ratio(name: str, mine: Times, base: Times, target: float | None = None, detail: str = "") -> Figure:
    """Return a figure of how much longer one contender takes than the other: the median over rounds."""
    over = mine.over(base)
    times = f"{mine.median * 1e3:.3g} ms against {base.median * 1e3:.3g} ms"
    words = "; ".join(filter(None, (times, detail)))
    return Figure(name, statistics.median(over), "x", target, "<=", words, quartiles(over), mine.peak_gib)


def check_close(what: str, result: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Check that a result is close to the reference's.

    Args:
        tolerance: None: that of the type of `result`.

    Raises:
        WrongResultError: it differs by more than the tolerance, as a share of the reference's largest value.
    """
    tolerance = TOLERANCE[result.dtype] if tolerance is None else tolerance
    expected = expected.float()
    difference = float((result.detach().float().to(expected.device) - expected).abs().max())
    share = difference / max(float(expected.abs().max()), 1e-30)
    if not share <= tolerance:
        raise WrongResultError(
            f"{what}: the largest difference to the reference is {share:.2g} of its largest value, expected at most "
            f"{tolerance:g}: the figures of this case are left out"
        )


def check_equal(what: str, result: object, expected: object) -> None:
    """Check that a result equals the reference's.

    Raises:
        WrongResultError: it is not.
    """
    if result != expected:
        raise WrongResultError(
            f"{what}: found {str(result)[:200]}, the reference gives {str(expected)[:200]}: the figures of this case "
            "are left out"
        )
