"""Show what can be removed without losing what was learned, and its size; with --remove, remove it.

raycl clean                     checkpoints of finished runs and first phases of ended sweeps below runs/, and the cache
raycl clean s3://team/runs --only checkpoints --remove

Banks, and runs that are not finished, are never touched.
"""

from __future__ import annotations

import argparse

from raycl.cli.commands import echo

KINDS = ("checkpoints", "prefixes", "cache")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", nargs="?", help="folder or URI of runs (default: as output.dir of a run)")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="just these (default: all)")
    parser.add_argument("--remove", action="store_true", help="remove what is shown")


def run(options: argparse.Namespace) -> int:
    """Show sizes, then remove."""
    from raycl.operations.sweep.disk import EFFECTS, removable, remove
    from raycl.storage import Storage
    from raycl.training.setup import run_config

    items = removable(Storage.at(options.folder or run_config.default_directory()), options.only)
    for item in items:
        echo(f"{item.bytes / 1e6:10,.1f} MB  {item.kind:12} {item.folder.uri}")
    total = sum(item.bytes for item in items)
    if not items:
        echo("nothing to remove")
        return 0
    for kind in dict.fromkeys(item.kind for item in items):
        echo(f"without {kind}: {EFFECTS[kind]}")
    if not options.remove:
        echo(f"{total / 1e6:,.1f} MB in all; nothing was removed: add --remove")
        return 0
    for item in items:
        remove(item)
    echo(f"removed {total / 1e6:,.1f} MB")
    return 0
