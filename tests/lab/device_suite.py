"""The suite for GPUs on the pretended device, in a process of its own: `pretend_device` changes it."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

from pretend_device import DEVICE

from benchmarks.figures import Figure
from benchmarks.gpu.setup import Case, Setup
from benchmarks.gpu.suite import PARTS, Part, run_part

NO_KERNELS = ("fsdp", "int8", "nf4")
"""Cases of libraries that have none for this device."""


class Supported(Part):
    """A part without those."""

    def cases(self, setup: Setup) -> list[Case]:
        """Return all others."""
        return [case for case in super().cases(setup) if case.name not in NO_KERNELS]


class Sampled(Supported):
    """A part with every third case."""

    def cases(self, setup: Setup) -> list[Case]:
        """Return the second one first: it is smaller."""
        result = super().cases(setup)
        return result[1::3] or result


def main(file: Path, whole: bool) -> None:
    """Write a line `name<TAB>reached its target<TAB>detail` for every figure.

    Args:
        whole: every case of the parts that measure times, and not a sample of those.
    """
    setup = Setup(DEVICE, tiny=True)
    figures: list[Figure] = []
    for part in PARTS:
        if part.name != "streams":  # those are runs, and `device_runs` has them
            kind = Sampled if part.timed and not whole else Supported
            run_part(kind(*astuple(part)), setup, 600.0, figures.append)
    lines = [f"{figure.name}\t{figure.ok}\t{figure.detail}\n" for figure in figures]
    file.write_text("".join([*lines, *(f"note\tFalse\t{note}\n" for note in setup.notes)]))
