"""Times of several contenders on one device, in turn round after round, so that a clock that drifts slows all.

On CUDA, time is measured by events on the stream; elsewhere by the clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

ROUNDS = (3, 30)
"""The least and the most rounds."""

ONCE = (1, 1)
"""Rounds where times mean nothing."""

SAMPLE_S = 0.02
"""A contender is called as often in a round as takes so long: events and the clock are exact to microseconds."""


@dataclass(frozen=True)
class Contender:
    """Something to be timed.

    Attributes:
        prepare: called before every timed call, outside the time; a round then has one call.
    """

    run: Callable[[], Any]
    prepare: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Times:
    """The times of a contender.

    Attributes:
        seconds: seconds of one call, a value for each round.
        peak_gib: most device memory allocated in a call, what was allocated before included; None on a CPU.
    """

    seconds: tuple[float, ...]
    peak_gib: float | None = None

    @property
    def median(self) -> float:
        """The median in seconds."""
        return statistics.median(self.seconds)

    def over(self, other: Times) -> tuple[float, ...]:
        """Return the ratio of each round."""
        return tuple(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))


def quartiles(values: tuple[float, ...]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def take_turns(
    contenders: Mapping[str, Contender], device: torch.device, seconds: float, rounds: tuple[int, int] = ROUNDS
) -> dict[str, Times]:
    """Time every contender, after two calls of each to warm up.

    Args:
        seconds: no round begins after so long, once there are the fewest.
        rounds: at least and at most.
    """
    ends = time.monotonic() + seconds
    peaks, calls = {}, {}
    for name, contender in contenders.items():
        _timed(contender, 1, device)  # compiles, captures, allocates
        reset_peak(device)
        spent = _timed(contender, 1, device)
        peaks[name] = peak_gib(device)
        once = contender.prepare is not None or rounds == ONCE
        calls[name] = 1 if once else max(1, min(1000, math.ceil(SAMPLE_S / max(spent, 1e-6))))
    result: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds[1]):
        if number >= rounds[0] and time.monotonic() > ends:
            break
        for name, contender in contenders.items():
            result[name].append(_timed(contender, calls[name], device))
    return {name: Times(tuple(spent), peaks[name]) for name, spent in result.items()}


def _timed(contender: Contender, calls: int, device: torch.device) -> float:
    """Return seconds of one call."""
    if contender.prepare is not None:
        contender.prepare()
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            contender.run()
        return (time.perf_counter() - began) / calls
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(calls):
        contender.run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def reset_peak(device: torch.device) -> None:
    """Count the peak of device memory from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Return the most device memory allocated since `reset_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
