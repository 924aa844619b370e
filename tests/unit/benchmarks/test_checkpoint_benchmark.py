"""Tests of what the checkpoint benchmark counts: memory in use, whatever was freed before; its runs are valid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.streams.checkpoint import tree_of
from benchmarks.streams.memory import ENGINES
from raycl import config as configs
from raycl.training.setup.run_config import RunConfig

MIB = 2**20


FREED = """
import time
import numpy as np
from benchmarks.streams.checkpoint import END, INSIDE, Taken
taken = Taken()
freed = [np.ones(2**17) for _ in range(64)]
last = np.ones(8)
del freed
taken.begin()
held = [np.ones(2**17) for _ in range(48)]
time.sleep(0.2)
del held
taken.end(INSIDE)
taken.end(END)
assert last.all() and taken.found[END] == []
print(taken.found[INSIDE][0])
"""
"""Takes 48 MiB after 64 were freed."""


def test_what_was_freed_hides_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert 40 * MIB < float(done.stdout) < 60 * MIB


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_has_a_valid_run(engine: str, tmp_path: Path) -> None:
    result = configs.validate(RunConfig, tree_of(engine, 4, tmp_path))
    assert result.engine.name == ENGINES[engine][0].partition("=")[2] and result.checkpoint.every_steps == 2
