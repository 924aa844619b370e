"""Processor time of a command counts the processes that it starts."""

from __future__ import annotations

import sys

import pytest

from benchmarks.processor_time import spent_by
from raycl.errors import RunError

WORKS = "import time\nwhile time.process_time() < 0.6: pass"
IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKS!r}])"


def test_a_childs_time_counts() -> None:
    spent = spent_by([sys.executable, "-c", IN_A_CHILD])
    assert 0.3 < spent.cpu_s < 1.2 and spent.wall_s > 0.6


def test_a_command_that_fails_is_an_error_with_its_words() -> None:
    with pytest.raises(RunError, match=r"ended with 1: (?s:.*)no such thing"):
        spent_by([sys.executable, "-c", "raise SystemExit('no such thing')"])
