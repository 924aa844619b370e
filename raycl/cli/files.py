"""Configs, comparisons and sweeps that are installed with raycl, by the names that they have in its repository."""

from __future__ import annotations

from pathlib import Path

import raycl

FOLDER = Path(raycl.__file__).parent / "files"


def local_or_installed(name: str) -> str:
    """`name` if there is such a file, else raycl's own of that name, such as `sweeps/seeds.yaml`, if there is one."""
    own = FOLDER / name
    return str(own) if not Path(name).exists() and own.is_file() and not Path(name).is_absolute() else name
