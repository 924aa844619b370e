"""List what installed packages add to raycl: methods, routers, modifiers, metrics, file formats, orders of tasks.

raycl plugins

Exits with 1 if something of a package cannot be used; the reasons are on standard error.
"""

from __future__ import annotations

import argparse
import sys

from raycl.cli.commands import echo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def run(options: argparse.Namespace) -> int:
    """Print a line for each."""
    from raycl.training.setup.plugins_list import plugins_list

    usable, problems = plugins_list()
    for plugin in usable:
        echo(f"{plugin.kind:9} {plugin.name:24} {plugin.source}")
    if not usable and not problems:
        echo("no installed package adds anything: see docs/extending for how one does")
    for problem in problems:
        echo(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0
