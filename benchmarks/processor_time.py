"""Processor time of a command and of all processes that it starts."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from raycl.errors import RunError
from raycl.launch.console import repeating

EVERY_S = 0.3
"""Seconds between two looks at the processes: what one does after the last look at it does not count."""


@dataclass(frozen=True)
class Spent:
    """Seconds that a command took, and those that processors worked for it (user and system)."""

    wall_s: float
    cpu_s: float


def spent_by(words: Sequence[str], imports: Path | None = None) -> Spent:
    """Return what a command took.

    Args:
        imports: folder from which it and its descendants import first.

    Raises:
        RunError: the command failed; with the end of what it printed.
    """
    environment = None if imports is None else {**os.environ, "PYTHONPATH": str(imports.resolve())}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        command = subprocess.Popen(words, stdout=output, stderr=output, env=environment, cwd=imports)
        seconds: dict[tuple[int, float], float] = {}
        with repeating(partial(_look, psutil.Process(command.pid), seconds), EVERY_S, "processor-time"):
            status = command.wait()
        if status:
            output.seek(0)
            raise RunError(f"'{' '.join(words)}' ended with {status}: {output.read().decode()[-2000:]}")
    return Spent(time.perf_counter() - began, sum(seconds.values()))


def _look(root: psutil.Process, seconds: dict[tuple[int, float], float]) -> None:
    """Keep the last processor time of each process; Ray's are descendants of the command that starts it."""
    with suppress(psutil.NoSuchProcess):
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds[process.pid, process.create_time()] = times.user + times.system
