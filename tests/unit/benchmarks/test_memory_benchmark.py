"""Tests of what the memory benchmark counts: a command and its descendants, shared pages once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.streams.memory import peak_of
from raycl.errors import RunError

MIB = 2**20
SHARING = """
import mmap, os, time
shared, own = mmap.mmap(-1, 64 * 2**20), bytearray(64 * 2**20)
shared.write(b"x" * len(shared)); own[:] = b"x" * len(own)
child = os.fork()
if child == 0:
    sum(shared[place] for place in range(0, len(shared), 4096)); own[::4096] = b"y" * (len(own) // 4096)
time.sleep(2)
if child:
    os.waitpid(child, 0)
else:
    os._exit(0)
"""
"""Two processes with 64 MiB in common and 64 MiB each of their own."""


def test_a_command_counts_with_its_descendants_and_shared_pages_once() -> None:
    peak, seconds = peak_of([sys.executable, "-c", SHARING])
    assert 190 * MIB < peak < 250 * MIB and seconds > 2


def test_a_command_that_fails_is_an_error_with_its_output() -> None:
    with pytest.raises(RunError, match=r"(?s)ended with 1: .*ZeroDivisionError"):
        peak_of([sys.executable, "-c", "1 / 0"])


def test_a_command_imports_from_another_checkout_first(tmp_path: Path) -> None:
    (tmp_path / "raycl").mkdir()
    (tmp_path / "raycl" / "__init__.py").write_text("raise SystemExit('the other checkout')")
    with pytest.raises(RunError, match=r"(?s)ended with 1: .*the other checkout"):
        peak_of([sys.executable, "-c", "import raycl"], tmp_path)
