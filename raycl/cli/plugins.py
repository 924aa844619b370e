"""List what installed packages add to raycl: methods, routers, modifiers, metrics, file formats, orders of tasks.

raycl plugins

Exits with 1 if something of a package cannot be used; the reasons are on standard error.
"""

import argparse
import sys

from raycl.cli.commands import echo, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def run(options: argparse.Namespace) -> int:
    """Print a line for each."""
    from raycl.training.setup.plugins_list import plugins_list

    usable, problems = plugins_list()
    lines = [f"{plugin.kind:9} {plugin.name:24} {plugin.source}" for plugin in usable]
    if not usable and not problems:
        lines = ["no installed package adds anything: see docs/extending for how one does"]
    if lines or options.json:
        tree = [{"kind": plugin.kind, "name": plugin.name, "source": plugin.source} for plugin in usable]
        show(options, "\n".join(lines), tree)
    for problem in problems:
        echo(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0
