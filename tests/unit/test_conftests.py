"""pytest imports the conftest of a folder that its command names before it starts the processes that get tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PATHS = [str(path) for path in (TESTS / "lab", TESTS.parent)]
LOADED = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sorted({'ray', 'raycl'} & {*sys.modules}))"


@pytest.mark.parametrize("file", sorted(TESTS.rglob("conftest.py")), ids=lambda file: str(file.relative_to(TESTS)))
def test_a_conftest_leaves_raycl_to_its_fixtures(file: Path) -> None:
    """`pytest -n 2 FOLDER` did not start: what it copies for each process must not have raycl or Ray yet."""
    words = [sys.executable, "-c", LOADED, str(file)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
    done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
