"""Each task trained alone by a trial's own method and settings, once for all trials that it fits: what FWT needs.

Why it exists: the upper reference costs as much as the trial itself, and does not depend on the order of tasks; so it
is looked up by all that it does depend on, in a folder that sweeps of one directory share.
What it does not know: what FWT is (`raycl.eval.matrix`).
"""

from __future__ import annotations

import hashlib
import json

from raycl import __version__
from raycl import config as configs
from raycl.config import Tree
from raycl.launch import driver
from raycl.methods.registry import WRAPPERS, method_class
from raycl.run.config import RunConfig
from raycl.storage import Storage

FOLDER = "separate"


def separate_tree(config: RunConfig) -> Tree:
    """The run under schedule `separate`, else as in `config`; tasks sorted, since their order does not matter to it."""
    tree = configs.as_tree(config)
    tree["method"] = tree["method"]["learner"] if config.method.name in WRAPPERS else tree["method"]
    tree["stream"]["schedule"] = "separate"
    tree["eval"]["singles"] = tree["stream"]["unseen"] = None
    tree["eval"]["untrained"] = False
    tree["bank"]["publish"] = False
    tree["checkpoint"]["export"] = "none"
    if tree["stream"]["tasks"] is not None and not tree["modifiers"]:  # a modifier may leave the first task out
        tree["stream"]["tasks"] = sorted(tree["stream"]["tasks"], key=json.dumps)
    return tree


def separate_key(tree: Tree) -> str:
    """The same for settings that give the same scores."""
    kept = {key: tree[key] for key in ("seed", "stream", "backbone", "method", "modifiers", "train", "engine", "eval")}
    unused = method_class(kept["method"]["name"]).Config.unused_for_single_task
    kept["method"] = configs.remaining(kept["method"], unused)
    workers = {key: tree["launch"][key] for key in ("workers", "cpus_per_worker", "gpus_per_worker")}
    return hashlib.sha256(json.dumps([kept, workers, __version__], sort_keys=True).encode()).hexdigest()[:24]


def singles_of(config: RunConfig, directory: str, options: driver.RunOptions | None = None) -> RunConfig:
    """The config with `eval.singles` at the finished run of schedule `separate`, which runs first if there is none.

    Args:
        options: where it runs.

    Two trials that need it at the same moment both make it; the first to finish is the one that counts.

    Raises:
        RayclError: it fails.
    """
    tree = separate_tree(config)
    root = Storage.at(directory).sub(FOLDER)
    pointer = f"{separate_key(tree)}.json"
    if not root.exists(pointer):
        name = f"{separate_key(tree)}-{config.output.name}"
        tree["output"] = {"dir": root.address, "name": name, "exists": "resume"}
        driver.train(driver.prepare(configs.validate(RunConfig, tree)), options)
        root.write_json(pointer, {"run": name})
    found = configs.as_tree(config)
    found["eval"]["singles"] = root.sub(str(root.read_json(pointer)["run"])).address  # beside it, whatever it says
    return configs.validate(RunConfig, found)
