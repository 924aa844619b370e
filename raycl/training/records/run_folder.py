"""The folder of a run: whether there is one, before anything heavy is imported."""

from __future__ import annotations

import shlex

from raycl.config import Tree, trust
from raycl.errors import ResumeError
from raycl.storage import Storage

CONFIG = "config.yaml"
"""The first file that a run writes."""


def run_at(folder: str) -> Storage:
    """Return the folder of a run that is there.

    Raises:
        ResumeError: there is none. StorageError: it is out of reach.
    """
    storage = Storage.at(folder)
    if not storage.exists(CONFIG):
        raise ResumeError(f"'{folder}' holds no run (no {CONFIG}): give the run directory that an earlier run printed")
    return storage


def resume_arguments(storage: Storage, tree: Tree) -> str:
    """Return arguments of `raycl train` that resume a run.

    Args:
        tree: its config, which need not be validated.
    """
    return " ".join(["--resume", shlex.quote(storage.address), *trust.as_overrides(tree)])
