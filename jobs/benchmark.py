"""Measured figures and their targets: `python jobs/benchmark.py NAME` (benchmarks/ is not part of the package)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

REPO = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, REPO)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (REPO, os.environ.get("PYTHONPATH"))))
"""Ray's workers and other processes that a benchmark starts find the folder by the environment."""

from benchmarks.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
