"""Configs, comparisons and sweeps that are installed with raycl, by the names that they have in its repository."""

from __future__ import annotations

from pathlib import Path

import raycl
from raycl.config import require_file

FOLDER = Path(raycl.__file__).parent / "files"


def local_or_installed(name: str) -> str:
    """`name` if there is such a file, else raycl's own of that name, such as `sweeps/seeds.yaml`.

    Raises:
        ConfigError: there is neither.
    """
    own = FOLDER / name
    takes_own = not Path(name).exists() and own.is_file() and not Path(name).is_absolute()
    return str(own) if takes_own else require_file(name)
