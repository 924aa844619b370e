"""Phases of benchmarks that have no stream: their batches are drawn, and methods are given what they ask for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from raycl.data.tokens import Split
from raycl.methods.context import TaskContext
from raycl.types import Phase


def bare_context(phase: Phase, queries: dict[Split, Tensor] | None = None) -> TaskContext:
    """Return the context of a phase without rows, for methods that read none.

    Args:
        queries: queries of the phase's texts, for methods with an encoder.
    """
    nothing: Any = None
    new = (phase,) if queries else ()
    return TaskContext(phase, 1, nothing, nothing, queries={phase.index: queries} if queries else {}, phases=new)
