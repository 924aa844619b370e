"""The run that `raycl train` starts or continues.

Settings and places are checked before torch is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import yaml

from raycl import config as configs
from raycl.data.settings import as_spec
from raycl.errors import ConfigError
from raycl.storage import Storage
from raycl.training.records.publish import is_elsewhere, open_bank
from raycl.training.setup import run_config
from raycl.training.setup.run_config import RunConfig

if TYPE_CHECKING:
    from raycl.launch.prepared_run import Prepared

log: logging.Logger = logging.getLogger("raycl")


def prepared(
    file: str | None, overrides: Sequence[str], resume: str | None, added: Sequence[str], revised: str | None
) -> Prepared:
    """Return the run that these options describe, checked.

    Args:
        file: a config file. resume: folder of a run.
        added: tasks that the run in `resume` learns next.
        revised: a task that is learned again, by its name or as YAML with its new data.

    Raises:
        RayclError: bad input.
    """
    if added and not resume:
        raise ConfigError("--add names the next tasks of a run: name the run with --resume RUN_DIR")
    if revised and added:
        raise ConfigError("--revise learns one task again and --add a new one: use one after the other")
    config = None
    if revised or not resume:
        of_run = [*(_revision(revised, resume) if revised else []), *overrides]
        config = run_config.load_config(file, of_run, present=True)
    log.info("checking the backbone and the data")
    from raycl.launch import prepared_run

    if config is not None:
        return prepared_run.prepare(config)
    assert resume, "without a config, a run is continued"
    return _extended(resume, added, overrides) if added else prepared_run.reopen(resume, overrides=tuple(overrides))


def _extended(folder: str, added: Sequence[str], overrides: Sequence[str]) -> Prepared:
    """Return the run with more tasks; a new one, where its branch was moved behind it, that starts at the branch."""
    from raycl.launch import prepared_run

    storage, config, state = prepared_run.run_in(folder)
    names_branch = any(override.startswith("bank.branch=") for override in overrides)
    if names_branch or not is_elsewhere(config.bank, storage, state):
        return prepared_run.extend(folder, added, tuple(overrides))
    start = _start_at_branch(storage, config)
    log.info("branch '%s' was moved since this run: a new one starts from its head", config.bank.branch)
    tasks = _override("stream.tasks", list(map(prepared_run.task_of, added)))
    return prepared_run.prepare(run_config.load_config(None, [*start, tasks, *overrides]))


def _start_at_branch(storage: Storage, config: RunConfig) -> list[str]:
    """Return overrides of a new run that starts from the head of this run's branch, beside it and launched alike."""
    bank, branch = open_bank(config.bank, storage).storage.address, config.bank.branch
    given = {"bank.start": f"{bank}@{branch}", "bank.branch": branch, "launch.mode": config.launch.mode}
    beside = {"output.dir": config.output.dir} if config.output.dir else {}
    return [_override(key, value) for key, value in {**given, **beside}.items()]


def _override(key: str, value: object) -> str:
    """Return an override whose value is the same when it is read as YAML: a folder may be called `1e3` or `a: b`."""
    return f"{key}={configs.inline_yaml(value)}"


def _revision(task: str, resume: str | None) -> list[str]:
    """Return overrides of a new run that starts from the head of the run's branch and learns the task again."""
    try:
        spec = as_spec(yaml.safe_load(task))
    except yaml.YAMLError as error:
        raise ConfigError(f"--revise '{task}' is neither a task's name nor YAML: {error}") from error
    if not isinstance(spec, str) and not (isinstance(spec, dict) and spec.get("name")):
        raise ConfigError(
            f"--revise '{task}' names no task: expected a name, or YAML such as '{{name: tickets, path: data/tickets}}'"
        )
    overrides = [_override("bank.revise", spec if isinstance(spec, str) else spec["name"])]
    if isinstance(spec, dict):
        overrides.append(_override("stream.tasks", [spec]))
    if resume:
        from raycl.launch import prepared_run

        storage, config, _ = prepared_run.run_in(resume)
        overrides += _start_at_branch(storage, config)
    return overrides
