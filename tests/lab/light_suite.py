"""The suite for GPUs, tiny, in a process of its own in which heavy packages are not installed."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from fresh_package import OURS, forget

LARGE_BANK = 1_001
"""Tasks whose keys are just too many for a CPU to look at each (`raycl.routing.code_index.EXACT_UP_TO`)."""
JOB = Path(__file__).resolve().parents[2] / "jobs" / "benchmark.py"


def main(file: Path, missing: Collection[str]) -> None:
    """Write its figures into a file.

    Args:
        missing: packages that are not found, and cannot be imported.
    """
    forget(*OURS, *missing)
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(missing))
    import_module("benchmarks.gpu.parts.routing").TINY_TASKS = LARGE_BANK
    streams = import_module("benchmarks.gpu.battery")
    streams.TEST_ROWS, streams.KINDS = 3, streams.KINDS[:1]
    streams.Battery.run = _once(streams.Battery.run)
    os.chdir(file.parent)
    sys.argv = ["benchmark.py", "gpu", "--tiny", "--device", "cpu", "--minutes", "60", "--check", "--json", str(file)]
    try:
        runpy.run_path(str(JOB), run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, end.code


def _once(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what does a run of streams once: here the device that is held against the CPU is the CPU."""
    done: dict[tuple[str, str, int | None], Any] = {}

    def kept(self: Any, config: Any, device: Any, after: int | None = None) -> Any:
        key = (config.model_dump_json(), str(device), after)
        if key not in done:
            done[key] = run(self, config, device, after)
        return done[key]

    return kept
