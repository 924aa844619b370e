"""Configs, comparisons and sweeps that are installed with raycl, by the names that they have in its repository."""

from __future__ import annotations

import argparse
from pathlib import Path

import raycl

FOLDER = Path(raycl.__file__).parent / "files"


def add_allow_env(argument_parser: argparse.ArgumentParser) -> None:
    """Add the option of commands that read a config file."""
    argument_parser.add_argument(
        "--allow-env",
        metavar="NAME",
        action="append",
        default=[],
        help="the config file may read this variable by ${oc.env:NAME}, besides RAYCL_DATA and RAYCL_MODELS",
    )


def local_or_installed(name: str) -> str:
    """Return `name` if there is such a file, else raycl's file of that name, such as `sweeps/seeds.yaml`.

    Raises:
        ConfigError: neither exists.
    """
    from raycl.config import require_file  # imports pydantic and OmegaConf, which --help does not need

    installed = FOLDER / name
    takes_own = not Path(name).exists() and installed.is_file() and not Path(name).is_absolute()
    return str(installed) if takes_own else require_file(name)
