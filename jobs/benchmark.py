"""Measured figures beside their targets: `python jobs/benchmark.py NAME` (benchmarks/ is not part of the package)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

REPO = str(Path(__file__).resolve().parents[1])


def main() -> int:
    """Run the command of benchmarks/, which Ray's workers and other processes find by the environment."""
    sys.path.insert(0, REPO)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (REPO, os.environ.get("PYTHONPATH"))))
    from benchmarks import command

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
