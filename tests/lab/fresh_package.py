"""Code in a copy of pytest's process (`fork_server`): what a new interpreter does, without its seconds of imports."""

from __future__ import annotations

import sys

OURS = ("raycl", "benchmarks")


def forget(*packages: str) -> None:
    """Let this process import these packages anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


def main(code: str) -> None:
    """Do what `python -c` does; raycl, which the tests have imported, is imported anew."""
    forget(*OURS)
    exec(code, {"__name__": "__main__"})
