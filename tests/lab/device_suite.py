"""The suite for GPUs on the pretended device, as a script: importing `pretend_device` changes its process.

Called as `device_suite.py FILE`; writes a line `name<TAB>reached its target` for every figure.
What it does not know: what must be reached (`test_devices.py` does).
"""

from __future__ import annotations

import sys
from pathlib import Path

from pretend_device import DEVICE

from raycl.bench.figures import Figure
from raycl.bench.gpu.setup import Setup
from raycl.bench.gpu.suite import PARTS, run_part

if __name__ == "__main__":
    setup = Setup(DEVICE, tiny=True)
    found: list[Figure] = []
    for part in PARTS:
        if part.name != "streams":  # those are runs, and `device_runs` has them
            run_part(part, setup, 600.0, found.append)
    lines = [f"{figure.name}\t{figure.ok}\t{figure.detail}\n" for figure in found]
    Path(sys.argv[1]).write_text("".join([*lines, *(f"note\tFalse\t{note}\n" for note in setup.notes)]))
