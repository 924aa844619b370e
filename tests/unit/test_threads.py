"""Importing raycl sets how long threads of OpenMP spin before they sleep, unless the environment does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRINTED = "import raycl, os; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("given", "value"), [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_waiting_threads_sleep_early(given: dict[str, str], value: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    words = [sys.executable, "-c", PRINTED]
    done = subprocess.run(words, env={**clean, **given}, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == value
