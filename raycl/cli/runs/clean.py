"""Show what can be removed without losing what was learned, and its size; with --remove, remove it.

raycl clean                     checkpoints of finished runs and first phases of ended sweeps below runs/, and the cache
raycl clean s3://team/runs --only checkpoints --remove

Banks, and runs that are not finished, are never touched.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from raycl.cli.terminal import echo

KINDS = ("checkpoints", "prefixes", "cache")


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command's parser."""
    found = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folder", nargs="?", help="folder or URI of runs (default: as output.dir of a run)")
    found.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="just these (default: all)")
    found.add_argument("--remove", action="store_true", help="remove what is shown")
    return found


def arguments(words: Sequence[str], prog: str | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    return parser(prog).parse_args(words)


def run(options: argparse.Namespace) -> int:
    """Show sizes, then remove."""
    from raycl.operations.sweep.disk import EFFECTS, removable, remove
    from raycl.run import config as run_config
    from raycl.storage import Storage

    found = removable(Storage.at(options.folder or run_config.default_directory()), options.only)
    for one in found:
        echo(f"{one.bytes / 1e6:10,.1f} MB  {one.kind:12} {one.folder.uri}")
    total = sum(one.bytes for one in found)
    if not found:
        echo("nothing to remove")
        return 0
    for kind in dict.fromkeys(one.kind for one in found):
        echo(f"without {kind}: {EFFECTS[kind]}")
    if not options.remove:
        echo(f"{total / 1e6:,.1f} MB in all; nothing was removed: add --remove")
        return 0
    for one in found:
        remove(one)
    echo(f"removed {total / 1e6:,.1f} MB")
    return 0
