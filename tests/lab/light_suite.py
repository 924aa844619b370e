"""The suite for GPUs, tiny, in a process of its own in which heavy packages are not installed."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

JOB = Path(__file__).resolve().parents[2] / "jobs" / "benchmark.py"


def main(file: Path, missing: Collection[str]) -> None:
    """Write its figures into a file.

    Args:
        missing: packages that are not found, and cannot be imported.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] in ("raycl", "benchmarks", *missing)]:
        del sys.modules[name]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(missing))
    os.chdir(file.parent)
    sys.argv = ["benchmark.py", "gpu", "--tiny", "--device", "cpu", "--minutes", "60", "--check", "--json", str(file)]
    try:
        runpy.run_path(str(JOB), run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, end.code
