"""Checks that a run's backbone and data exist, before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence

from raycl.backbone.model_files import resolve as resolve_backbone
from raycl.data.resolve import resolve
from raycl.data.sources.source import SourceFile
from raycl.training.setup.run_config import RunConfig, read_config, refuse_unused


def load_present(path: str | None, overrides: Sequence[str]) -> RunConfig:
    """Load a config of a run whose backbone and data must exist; see `load_config`.

    Raises:
        ConfigError: see `load_config`. BackboneError, DataError: see `check_places`.
    """
    config = read_config(path, overrides)
    check_places(config)
    refuse_unused(config, path, overrides)  # reads the backbone's config, which takes a second
    return config


def check_places(config: RunConfig) -> None:
    """Look for the folder of the backbone and for every file of the stream; nothing is read or fetched.

    Raises:
        BackboneError: there is no such folder. ConfigError, DataError: a task or one of its files is not there.
    """
    resolve_backbone(config.backbone.name)
    plan = resolve(config.stream)
    for task in (*plan.tasks, *plan.unseen):
        for file in task.files.values():
            if isinstance(file, SourceFile):
                file.require()
