"""Learn five short tasks, one after another, in two ways on this machine: one LoRA forgets, SLM does not.

raycl demo
"""

import argparse

from raycl.cli.commands import parsed
from raycl.cli.runs import compare

FILE = "jobs/configs/compare/demo.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--dir", default="runs", help="folder or URI for its runs (default: runs)")
    parser.add_argument("--png", metavar="FILE", default="runs/demo.png", help="picture (default: runs/demo.png)")


def run(options: argparse.Namespace) -> int:
    """Run `raycl compare` with a file that is installed with raycl."""
    flags = [f"--{name}" for name in ("json", "quiet") if vars(options)[name]]
    return compare.run(parsed("compare", [FILE, "--dir", options.dir, "--png", options.png, *flags]))
