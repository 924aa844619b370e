"""State of a run on any machine, its progress, and the next command; starts nothing.

raycl status RUN_DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command's parser."""
    found = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("run", metavar="RUN_DIR", help="folder or URI of a run")
    return found


def arguments(words: Sequence[str], prog: str | None = None) -> argparse.Namespace:
    """The parsed command line."""
    return parser(prog).parse_args(words)


def run(options: argparse.Namespace) -> int:
    """Print it."""
    from raycl.launch.status import status_of

    print(status_of(options.run))
    return 0
