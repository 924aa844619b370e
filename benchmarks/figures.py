"""Figures: a measured number beside its target, as a table and as JSON."""

from __future__ import annotations

import argparse
import io
import math
import os
import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "transformers", "peft", "ray", "deepspeed")

BUSY = 0.5
"""Load average of the last minute above which a benchmark shares its cores with other work."""


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        unit: written behind the value; "x" for ratios to the peer.
        target: the limit, or None where the number only informs.
        direction: on which side of the target the value must be.
        detail: source of the number, in words.
        spread: first and third quartile of the rounds that `value` is the median of, in the same unit.
        peak_gib: most device memory allocated while it was measured.
    """

    name: str
    value: float
    unit: str = ""
    target: float | None = None
    direction: Literal["<=", ">="] = "<="
    detail: str = ""
    spread: tuple[float, float] | None = None
    peak_gib: float | None = None

    @property
    def ok(self) -> bool | None:
        """Return whether the target is kept (a value that is not a number keeps none); None without a target."""
        if self.target is None:
            return None
        return self.value <= self.target if self.direction == "<=" else self.value >= self.target


@dataclass(frozen=True)
class Report:
    """The result of a benchmark.

    Attributes:
        settings: sizes. notes: omissions and their reasons.
        machine: the machine, with its load before and after.
    """

    name: str
    settings: dict[str, Any]
    figures: Sequence[Figure]
    machine: dict[str, Any]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def missed(self) -> list[str]:
        """Names of the figures that fall short of their target."""
        return [figure.name for figure in self.figures if figure.ok is False]

    def tree(self) -> dict[str, Any]:
        """Return JSON-able, with `ok` of every figure."""
        figures = [{**asdict(figure), "value": _finite(figure.value), "ok": figure.ok} for figure in self.figures]
        return {**asdict(self), "figures": figures, "missed": self.missed}


def _finite(value: float) -> float | None:
    """JSON has no word for other numbers."""
    return value if math.isfinite(value) else None


def measured(
    name: str,
    options: argparse.Namespace,
    shown: Collection[str],
    figures: Callable[[], Iterable[Figure]],
    *,
    threads: int | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Measure now, and return the report.

    Args:
        shown: names of the flags that a reader of the figures needs.
        figures: measures, and may add to `notes`.
        threads: torch threads meanwhile; None: as they are.
    """
    before, usual = os.getloadavg()[0], torch.get_num_threads()
    torch.set_num_threads(threads or usual)
    try:
        result = list(figures())
    finally:
        torch.set_num_threads(usual)
    busy = [f"the load was {before:.1f} when this began: times and their ratios say little"] if before > BUSY else []
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    settings = {key: value for key, value in settings.items() if key in shown}
    return Report(name, settings, result, machine(before), [*notes, *busy])


def machine(load_before: float) -> dict[str, Any]:
    """Describe this machine and its libraries; call it after measuring.

    Args:
        load_before: load average of the last minute when the measuring began.
    """
    return {
        **_accelerator(),
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **_versions(),
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
    }


def _accelerator() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {}
    info = torch.cuda.get_device_properties(0)
    return {"gpu": info.name, "gpu memory": f"{info.total_memory / 2**30:.0f} GiB", "cuda": str(torch.version.cuda)}


@cache
def _versions() -> dict[str, str]:
    """Return the versions of installed packages."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def table(report: Report) -> str:
    """Return a table with one line per figure, then machine, settings and notes."""
    drawn = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    drawn.add_column(report.name)
    for column in ("measured", "target", ""):
        drawn.add_column(column, justify="right")
    drawn.add_column("made from")
    for figure in report.figures:
        drawn.add_row(figure.name, *cells(figure))
    text = io.StringIO()
    Console(file=text, width=10_000, markup=False, highlight=False, emoji=False, color_system=None).print(drawn)
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    info = [_line("machine", report.machine), _line("settings", report.settings)]
    return "\n".join([*lines, "", *info, *(f"note: {note}" for note in report.notes)])


def cells(figure: Figure) -> tuple[str, str, str, str]:
    """Return the cells of a figure in a table: measured, target, whether the target is kept, what it was made from."""
    target = "" if figure.target is None else f"{figure.direction} {number(figure.target)} {figure.unit}".rstrip()
    kept = {None: "", True: "ok", False: "MISSED"}[figure.ok]
    spread = "" if figure.spread is None else f"quartiles {' to '.join(map(number, figure.spread))}"
    memory = "" if figure.peak_gib is None else f"peak {number(figure.peak_gib)} GiB"
    detail = "; ".join(part for part in (figure.detail, spread, memory) if part)
    return f"{number(figure.value)} {figure.unit}".rstrip(), target, kept, detail


def number(value: float) -> str:
    """Format a number briefly, without losing what matters: 1,234 and 56.7 and 1.05 and 3e-06."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}".removesuffix(".0")
    if abs(value) >= 0.01 or value == 0:
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return f"{value:.0e}"


def _line(name: str, info: dict[str, Any]) -> str:
    return f"{name}: {', '.join(f'{key} {value}' for key, value in info.items())}"
