"""The time that users wait before anything happens: `import raycl`, `raycl --help`, the help of a command."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

from benchmarks.figures import Figure, Report, machine

CASES: dict[str, tuple[Sequence[str], float | None]] = {
    "python alone": (("-c", "pass"), None),
    "import raycl": (("-c", "import raycl"), 0.1),
    "raycl --help": (("-m", "raycl.cli.main", "--help"), 0.3),
    "raycl train --help": (("-m", "raycl.cli.main", "train", "--help"), 0.3),
    "raycl train --print-config": (("-m", "raycl.cli.main", "train", "--print-config"), None),
}
"""Name -> arguments of Python, and the longest that it may take in seconds."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes."""
    parser.add_argument("--rounds", type=int, default=7, help="starts of each")


def measure(options: argparse.Namespace) -> Report:
    """Median seconds of each start, in turn."""
    load = os.getloadavg()[0]
    spent: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, (words, _) in CASES.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            spent[name].append(time.perf_counter() - began)
    figures = [Figure(name, median(spent[name]), "s", target) for name, (_, target) in CASES.items()]
    return Report("startup", {"rounds": options.rounds}, figures, machine(load))
