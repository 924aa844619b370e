"""Packages as pip installs them, written into a folder: how a test gives raycl a method that is not installed."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from raycl.plugins import Kind, group_of


def write_package(
    folder: Path,
    name: str,
    adds: Mapping[Kind, Mapping[str, str]],
    version: str = "0.0",
    modules: Mapping[str, str] | None = None,
) -> Path:
    """Write the record of an installed package, which names what it adds to raycl, and its modules.

    Args:
        folder: a folder that is on the path, or will be. adds: kind -> name -> `module:attribute`.
        modules: file below the folder -> its text.
    """
    record = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    sections = [
        "\n".join([f"[{group_of(kind)}]", *(f"{key} = {target}" for key, target in entries.items())])
        for kind, entries in adds.items()
    ]
    (record / "entry_points.txt").write_text("\n".join([*sections, ""]))
    for file, text in (modules or {}).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Make packages of a folder importable inside."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
