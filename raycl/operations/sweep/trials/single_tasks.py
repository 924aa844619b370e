"""Each task trained alone by a trial's own method and settings, once for all trials that it fits: what FWT needs.

The upper reference costs as much as the trial itself, and does not depend on the order of tasks; so it is looked up by
all that it does depend on, in a folder that sweeps of one directory share.
"""

import hashlib
import json
import logging
from dataclasses import dataclass

from raycl import __version__
from raycl import config as configs
from raycl.config import Tree
from raycl.config.names import FolderName
from raycl.errors import DamagedError, FormatError
from raycl.launch import driver
from raycl.launch.prepared_run import prepare
from raycl.methods.registry import method_class
from raycl.metrics.settings import GeneralConfig
from raycl.storage import Storage
from raycl.storage.records import read_fields, seal
from raycl.training.setup.run_config import RunConfig, plugins_of

log: logging.Logger = logging.getLogger("raycl")

FOLDER = "separate"
FORMAT = 1


@dataclass(frozen=True)
class _Pointer:
    key: str
    run: FolderName


def separate_tree(config: RunConfig) -> Tree:
    """Return the run under schedule `separate`, with sorted tasks, since their order does not matter to it."""
    tree = configs.as_tree(config)
    tree["method"] = configs.as_tree(config.method.innermost)
    tree["stream"]["schedule"] = "separate"
    tree["eval"]["singles"] = tree["stream"]["unseen"] = None
    tree["eval"]["untrained"], tree["eval"]["shots"] = False, 0
    tree["eval"]["general"] = configs.as_tree(GeneralConfig())  # texts of no task find no model
    tree["eval"] |= {"instruction": "given", "unknown": "nearest"}  # each text comes with its task: no router chooses
    tree["bank"]["publish"] = False
    tree["checkpoint"]["export"] = "none"
    tree["launch"]["parallel_tasks"] = 1
    if tree["stream"]["tasks"] is not None and not tree["modifiers"]:  # a modifier may leave the first task out
        tree["stream"]["tasks"] = sorted(tree["stream"]["tasks"], key=json.dumps)
    return tree


def separate_key(tree: Tree) -> str:
    """Return the same for settings that give the same scores."""
    kept = {key: tree[key] for key in ("seed", "stream", "backbone", "method", "modifiers", "train", "engine", "eval")}
    unused = method_class(kept["method"]["name"]).Config.unused_for_single_task
    kept["method"] = configs.remaining(kept["method"], unused)
    workers = {key: tree["launch"][key] for key in ("workers", "cpus_per_worker", "gpus_per_worker")}
    used = plugins_of(configs.validate(RunConfig, tree))
    return hashlib.sha256(json.dumps([kept, workers, __version__, used], sort_keys=True).encode()).hexdigest()[:24]


def singles_of(config: RunConfig, directory: str, options: driver.RunOptions | None = None) -> RunConfig:
    """Return the config with `eval.singles` at the finished run of schedule `separate`, which runs first if there is
    none.

    Args:
        options: options of the run.

    Two trials that need it at the same moment both make it; the last to finish is the one that counts. A damaged
    pointer, or one of other settings, is written again.

    Raises:
        RayclError: it fails.
    """
    tree = separate_tree(config)
    root = Storage.at(directory).sub(FOLDER)
    key = separate_key(tree)
    run = _known(root, key)
    if run is None:
        name = f"{key}-{config.output.name}"
        tree["output"] = {"dir": root.address, "name": name, "exists": "resume"}
        driver.train(prepare(configs.validate(RunConfig, tree)), options)
        write_pointer(root, key, name)
        run = name
    config_tree = configs.as_tree(config)
    config_tree["eval"]["singles"] = root.sub(run).address
    return configs.validate(RunConfig, config_tree)


def write_pointer(root: Storage, key: str, run: str) -> None:
    """Record the finished run for settings of this key: the name of its folder beside the pointer."""
    root.write(f"{key}.json", seal({"format": FORMAT, "key": key, "run": run}))


def _known(root: Storage, key: str) -> str | None:
    """Return the name of the run that was made for these settings; None: there is no whole pointer to one."""
    pointer = f"{key}.json"
    try:
        record = read_fields(root, pointer, FORMAT, _Pointer) if root.exists(pointer) else None
        if record is not None and record.key != key:
            raise DamagedError(f"'{root.uri}/{pointer}' is of other settings: it was moved")
    except (DamagedError, FormatError) as error:
        log.warning("tasks are trained alone again: %s", error)
        return None
    return None if record is None else record.run
