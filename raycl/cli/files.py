"""Configs, comparisons and sweeps that are installed with raycl, by the names that they have in its repository."""

from __future__ import annotations

import argparse
from pathlib import Path

import raycl

FOLDER = Path(raycl.__file__).parent / "files"


def add_allow_env(found: argparse.ArgumentParser) -> None:
    """The option of commands that read a config file."""
    found.add_argument(
        "--allow-env",
        metavar="NAME",
        action="append",
        default=[],
        help="the config file may read this environment variable by ${oc.env:NAME}, beside RAYCL_DATA and RAYCL_MODELS",
    )


def local_or_installed(name: str) -> str:
    """`name` if there is such a file, else raycl's own of that name, such as `sweeps/seeds.yaml`.

    Raises:
        ConfigError: there is neither.
    """
    from raycl.config import require_file  # brings pydantic and OmegaConf, which --help needs not

    own = FOLDER / name
    takes_own = not Path(name).exists() and own.is_file() and not Path(name).is_absolute()
    return str(own) if takes_own else require_file(name)
