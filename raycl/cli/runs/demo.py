"""Learn five short tasks, one after another, in two ways on this machine: one LoRA forgets, SLM does not.

raycl demo
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from raycl.cli.runs import compare

FILE = "jobs/configs/compare/demo.yaml"


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command's parser."""
    argument_parser = argparse.ArgumentParser(
        prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    argument_parser.add_argument("--dir", default="runs", help="folder or URI for its runs (default: runs)")
    argument_parser.add_argument(
        "--png", metavar="FILE", default="runs/demo.png", help="picture (default: runs/demo.png)"
    )
    return argument_parser


def arguments(words: Sequence[str], prog: str | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    return parser(prog).parse_args(words)


def run(options: argparse.Namespace) -> int:
    """Run `raycl compare` with a file that is installed with raycl."""
    return compare.run(compare.arguments([FILE, "--dir", options.dir, "--png", options.png]))
