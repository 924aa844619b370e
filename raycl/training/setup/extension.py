"""More tasks for a run that is there already: what makes a deployed model learn something new this week.

A task that is added is learned as if it had been in the stream from the start: order, draws and seeds of a phase depend
on its place and its own name alone, so the matrix is the one of a run that knew all tasks (a property test).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import yaml

from raycl import config as configs
from raycl.backbone import load_codec, load_skeleton
from raycl.data.stream import open_stream
from raycl.errors import ConfigError, ResumeError
from raycl.methods.registry import method_class
from raycl.training.setup.run_config import RunConfig
from raycl.training.setup.snapshot_start import changes_beside_tasks, keep_limits, name_of


def with_tasks(config: RunConfig, added: Sequence[str], learned: Collection[str] = ()) -> RunConfig:
    """Return the config with tasks at the end of its stream.

    Args:
        added: names below the stream's root, or tasks of your own as YAML (`{name: tickets, path: data/tickets}`).
        learned: tasks that the run has learned. Others that are in its stream already, because an earlier attempt to
            add them has failed, may be added again as they are.

    Raises:
        ConfigError: no such task, or it is no YAML. ResumeError: the method cannot take more tasks.
    """
    check_takes_more_tasks(config)
    tree = configs.as_tree(config)
    given = tree["stream"]["tasks"]
    known = given if given is not None else [task.name for task in open_stream(config.stream, config.seed).tasks]
    new = list(map(task_of, added))
    names = list(map(name_of, new))
    if list(map(name_of, known[-len(new) :])) == names and not set(names) & set(learned):
        tree["stream"]["tasks"] = [*known[: -len(new)], *new]
        if configs.validate(RunConfig, tree) == config:
            return config
    tree["stream"]["tasks"] = [*known, *new]
    return configs.validate(RunConfig, tree)


def task_of(text: str) -> Any:
    """Return a task as it was written on the command line.

    Raises:
        ConfigError: it is neither a name nor YAML.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"'{text}' is neither a task's name nor YAML such as '{{name: tickets, path: data/tickets}}': {reason}"
        ) from error


def check_takes_more_tasks(config: RunConfig) -> None:
    """Check that a run that has learned some of its tasks can learn further ones.

    Raises:
        ResumeError: its method or schedule used all tasks from the start.
    """
    codec = load_codec(config.backbone, *config.stream.token_limits)
    kind = method_class(config.method.name)
    if config.stream.schedule == "joint":
        raise ResumeError("stream.schedule=joint trains all tasks in one phase: start a new run instead")
    kind(config.method, load_skeleton(config.backbone, codec), config.seed)
    if config.method.fits_ahead:
        raise ResumeError("this run read its whole stream before the first task: start a new run instead")


def with_own_limits(old: RunConfig, new: RunConfig, count: int) -> tuple[RunConfig, dict[str, tuple[Any, Any]]]:
    """Return the config with token limits that were changed as those of its last `count` tasks alone, and what differs
    besides these tasks and their own settings; dotted key -> (old, new)."""
    fresh = [task if isinstance(task, str) else task.name for task in (new.stream.tasks or ())[-count:]]
    before, after = configs.as_tree(old), configs.as_tree(new)
    keep_limits(before["stream"], after["stream"], fresh)
    config = configs.validate(RunConfig, after)
    return config, changes_beside_tasks(before, configs.as_tree(config), fresh)
