"""Prefix keys: two trials with the same key are the same run up to some task.

Trials whose settings agree on the first tasks train them once. A wrong key would give a trial the numbers of another
run, so it holds the whole resolved config, and the rules below only remove what provably has no effect on the first
phases; settings classes remove what a method or modifier does not use yet (`cache_key`).

Removed: tasks to come (their names stay, as a set: answers are also compared with the labels of all other tasks),
epochs and learning rates of tasks to come, `stream.unseen` (evaluated after the last phase, and before the first with
`eval.untrained`), `eval.singles` (it is read when results are written), sections about where a run writes and is
followed. Kept besides the config: versions of raycl and of packages that add to it, the number of phases, workers and
their CPUs (sums of floats depend on both).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from raycl import __version__
from raycl import config as configs
from raycl.config import Tree
from raycl.training.definition.settings import EXEMPT
from raycl.training.setup.run_config import RunConfig, plugins_of

BY_PHASE = ("epochs", "epochs_by_task", "learning_rate", "learning_rate_by_task")
"""Settings of training that act in each phase by its name."""


def prefix_keys(config: RunConfig, tasks: Sequence[str]) -> list[str]:
    """Return keys of the run after 1, 2, ... phases, without the last, after which no run continues.

    Args:
        tasks: tasks of the stream in order.
    """
    if config.stream.schedule == "joint":
        return []
    keys = []
    parts: list[Any] = [_whole(config, tasks)]
    for index in range(len(tasks) - 1):
        parts.append(_phase(config, index, tasks))
        keys.append(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24])
    return keys


def _whole(config: RunConfig, tasks: Sequence[str]) -> Tree:
    """Return what acts from the first phase on."""
    tree = configs.as_tree(config)
    kept = configs.remaining(tree, (*EXEMPT, "method", "modifiers"))
    kept = {**kept, "stream": dict(kept["stream"]), "eval": dict(kept["eval"])}
    given = kept["stream"].pop("tasks")
    unseen = kept["stream"].pop("unseen")
    if config.eval.untrained:  # the first phase's record has their scores
        kept["stream"]["untrained"] = unseen
    specs = [json.dumps(task, sort_keys=True) for task in given or tasks]
    ordered = config.method.fits_ahead or config.eval.tasks == "all"
    kept["stream"]["all"] = specs if ordered else sorted(specs)
    kept["train"] = {key: value for key, value in kept["train"].items() if key not in BY_PHASE}
    kept["eval"].pop("singles")
    workers = {key: tree["launch"][key] for key in ("workers", "cpus_per_worker", "gpus_per_worker")}
    return {**kept, "raycl": __version__, "plugins": plugins_of(config), "workers": workers}


def _phase(config: RunConfig, index: int, tasks: Sequence[str]) -> Tree:
    """Return what acts in one phase beside that."""
    texts = config.stream.objective != "answer"
    return {
        "task": tasks[index],
        "epochs": config.train.chosen_epochs(tasks[index]),  # auto: by the rows
        "learning_rate": config.train.of_task(tasks[index]).learning_rate,
        "method": config.method.cache_key(index, tasks, texts),
        "modifiers": {name: chosen.cache_key(index, tasks, texts) for name, chosen in config.modifiers.items()},
    }


def shared_keys(keys: Sequence[Sequence[str]]) -> set[str]:
    """Return keys that more than one trial has."""
    return {key for key, count in Counter(key for trial in keys for key in set(trial)).items() if count > 1}


def fork_records(records: list[Tree], source_modifiers: Tree, target_modifiers: Tree) -> list[Tree]:
    """Return journal records for a run that starts at a fork point: without summaries of other modifier settings.

    A modifier that does not act yet may still report what it would have done (MIGU's rows on an unmasked task).
    """
    if source_modifiers == target_modifiers:
        return records
    return [
        {**record, "summary": {key: value for key, value in record["summary"].items() if key != "modifiers"}}
        for record in records
    ]
