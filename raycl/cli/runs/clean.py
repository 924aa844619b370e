"""Show what can be removed without losing what was learned, and its size; with --remove, remove it.

raycl clean                     checkpoints of finished runs and first phases of ended sweeps below runs/, and the cache
raycl clean s3://team/runs --only checkpoints --remove

Banks, and runs that are not finished, are never touched.
"""

import argparse

from raycl.cli.commands import echo, show
from raycl.errors import StorageError

KINDS = ("checkpoints", "prefixes", "cache")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", help="folder or URI of runs (default: as output.dir of a run)")
    parser.add_argument(
        "--only", nargs="+", action="extend", choices=KINDS, default=[], help="just these (default: all)"
    )
    parser.add_argument("--remove", action="store_true", help="remove what is shown")


def run(options: argparse.Namespace) -> int:
    """Show sizes, then remove."""
    from raycl.operations.sweep.disk import EFFECTS, removable
    from raycl.progress import counted_off
    from raycl.storage import Storage
    from raycl.training.setup import run_config

    folder = Storage.at(options.folder or run_config.default_directory())
    if options.folder and not folder.exists():
        raise StorageError(f"'{folder.uri}' does not exist: expected the folder or URI of runs, check the path")
    items = removable(folder, options.only or KINDS)
    lines = [f"{item.bytes / 1e6:10,.1f} MB  {item.kind:12} {item.folder.uri}" for item in items]
    total = sum(item.bytes for item in items)
    lines += [f"without {kind}: {EFFECTS[kind]}" for kind in dict.fromkeys(item.kind for item in items)]
    if not options.json:
        echo("\n".join(lines) if items else "nothing to remove")
    removed = options.remove and bool(items)
    for item in counted_off(items if removed else [], "removing folders"):
        item.folder.delete("")
    found = [{"kind": item.kind, "folder": item.folder.uri, "bytes": item.bytes} for item in items]
    end = (
        f"removed {total / 1e6:,.1f} MB"
        if removed
        else f"{total / 1e6:,.1f} MB in all; nothing was removed: add --remove"
    )
    if items or options.json:
        show(options, end, {"items": found, "bytes": total, "removed": removed})
    return 0
