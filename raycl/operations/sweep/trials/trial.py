"""One trial: a run on a whole stream inside a Tune trial, in its process or on workers of its own.

Tune's supported way to try Train runs is a function that builds a trainer and fits it. A trial of one worker learns in
its own process (`raycl.launch.local`), which the next trial finds with everything imported. This one reads the rows of
the accuracy matrix from the run's own journal and reports them; Ray's callback for that would bring them through one
more actor for each trial, two seconds later, and not after a crash.

FWT needs each task trained alone by a trial's own method and settings. This upper reference costs as much as the trial
itself, and does not depend on the order of tasks; so it is made once for all trials that it fits, and looked up by all
that it does depend on, in a folder that sweeps of one directory share.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ray import tune

from raycl import __version__
from raycl import config as configs
from raycl.bank.object_store import shared_readers
from raycl.config import Tree
from raycl.config.names import FolderName
from raycl.errors import ConfigError, DamagedError, DataError, FormatError, RayclError, RunError, StoppedError
from raycl.launch import driver
from raycl.launch.driver import RunOptions
from raycl.launch.prepared_run import Prepared, prepare
from raycl.launch.ray_train import worker_resources
from raycl.methods.registry import method_class
from raycl.metrics.settings import GeneralConfig
from raycl.operations.report.matrix_picture import draw_matrix
from raycl.operations.sweep.definition.expressions import measured
from raycl.operations.sweep.definition.sweep_config import SweepConfig
from raycl.operations.sweep.definition.sweep_folder import SWEEP, SweepFolder
from raycl.operations.sweep.trials.prefix import fork_records, prefix_keys
from raycl.plugins import require
from raycl.storage import Storage
from raycl.storage.records import read_fields, seal
from raycl.training.records.fork_points import read_fork_point, start_from
from raycl.training.records.journal import last_attempt, read_state
from raycl.training.records.publish import open_bank
from raycl.training.records.run_folder import is_stopped
from raycl.training.setup import run_config
from raycl.training.setup.run_config import RunConfig, plugins_of
from raycl.training.workers.stopping import HostStop

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
    tree["bank"] |= {"publish": False, "start": None, "revise": None}  # each task from the backbone
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


log: logging.Logger = logging.getLogger("raycl")

TASKS, SCORES, FAILED = "tasks", "score", "failed"
"""Keys of reports: tasks done, `score0`, `score1`, ... for the metrics in order, and why the trial failed."""

POLL_S, POLL_REMOTE_S = 0.2, 2.0
"""Seconds between two readings of the journal."""

Measure = Callable[[Sequence[Tree]], list[float | None]]
"""Journal records -> value of each metric after them."""


@dataclass(frozen=True)
class TrialWork:
    """The inputs of all trials of a sweep; plain values, since they travel to other processes.

    Attributes:
        sweep: the config. directory: address of the parent of the sweep's folder. stop: file in which its driver
            requests trials to stop.
        shared: prefix keys that several trials have (`raycl.operations.sweep.trials.prefix`).
    """

    sweep: Tree
    directory: str
    stop: HostStop
    shared: frozenset[str] = field(default_factory=frozenset)


def run_trial(config: dict[str, Any], work: TrialWork) -> None:
    """Run, or continue with, a trial; what fails is tried again, then written down and reported.

    Args:
        config: what the searcher proposes: `number`; `run`, the config of its run as JSON, all paths absolute, for
            this process works in a folder of Tune's; `plugins`, parts of other packages that it uses, as the driver
            has them.
    """
    number, tree, plugins = int(config["number"]), json.loads(config["run"]), json.loads(config["plugins"])
    log.handlers = [logging.NullHandler()]  # a run has a log file of its own
    log.propagate = False
    sweep = configs.validate(SweepConfig, work.sweep)
    folder = SweepFolder.of(sweep, work.directory)
    if not folder.storage.exists(SWEEP):
        raise RunError(
            f"the node {socket.gethostname()} does not see '{folder.storage.uri}': use --dir on shared storage"
        )
    for tries in range(1, sweep.retries + 2):
        if work.stop.is_requested:
            return
        try:
            require(plugins)
            Trial(sweep, folder, number, configs.validate(RunConfig, tree), work).learn()
            return
        except RayclError as error:
            if isinstance(error, StoppedError) and work.stop.is_requested:
                return
            if tries > sweep.retries or isinstance(error, ConfigError | DataError):
                message = f"{error} (tried {tries} times)" if tries > 1 else str(error)
                folder.write_failure(number, message)
                tune.report({FAILED: message})
                return


@dataclass
class Trial:
    """A trial while it runs.

    Attributes:
        reported: rows that Tune has got from this process.
    """

    sweep: SweepConfig
    folder: SweepFolder
    number: int
    config: RunConfig
    work: TrialWork
    reported: int = 0

    def learn(self) -> None:
        """Learn to the end of the stream, or until the trial is stopped.

        Raises:
            RayclError: the run failed.
        """
        here = worker_resources(self.config) if self.sweep.in_process else None
        readers = shared_readers() if self.config.bank.start else None
        options = RunOptions(here, readers, stop=self.work.stop, draw=draw_matrix)
        prepared = prepare(singles_of(self.config, self.work.directory, options) if self.sweep.singles else self.config)
        phases = [phase.name for phase in prepared.phases]
        tasks = [task.name for task in prepared.stream.tasks]
        measure = partial(measured, self.sweep.metrics, tasks, phases, singles=prepared.singles)
        keys = prefix_keys(prepared.config, tasks) if self.sweep.share else []
        if not last_attempt(prepared.storage):
            self._start_from_fork_point(prepared.storage, prepared.config, keys)
        self._report(prepared.storage, measure)
        if is_stopped(prepared.storage, self.reported):
            return
        fork_points = {
            done: self.folder.prefix(key).address
            for done, key in enumerate(keys, 1)
            if key in self.work.shared and done > prepared.done
        }
        options = replace(options, awaits_decision=self.sweep.scheduler.name != "none", fork_points=fork_points)
        self._fit(prepared, options, measure)

    def _start_from_fork_point(self, storage: Storage, config: RunConfig, keys: Sequence[str]) -> None:
        """Begin with the longest stretch that another trial has already learned and that is whole."""
        for key in reversed(keys):
            folder = self.folder.prefix(key)
            try:
                fork_point = read_fork_point(folder)
                if fork_point is None:
                    continue
                source_modifiers = read_state(Storage.at(fork_point.run)).config.get("modifiers", {})
                records = fork_records(fork_point.phases, source_modifiers, configs.as_tree(config)["modifiers"])
                bank = open_bank(config.bank, storage).storage if config.bank.publish or config.bank.start else None
                start_from(folder, storage, records, run_config.info_of(config), bank)
            except (DamagedError, RunError) as error:
                log.warning("trial %d trains phases that it could have reused: %s", self.number, error)
                continue
            return

    def _fit(self, prepared: Prepared, options: RunOptions, measure: Measure) -> None:
        """Workers learn; each row is reported as soon as it is in the journal."""
        pause = POLL_S if prepared.storage.is_local else POLL_REMOTE_S
        with ThreadPoolExecutor(1, "fit") as pool:
            fitting = pool.submit(driver.train, prepared, options)
            while not fitting.done():
                self._report(prepared.storage, measure)
                time.sleep(pause)
        fitting.result()
        self._report(prepared.storage, measure)
        if prepared.done < len(prepared.phases) and not is_stopped(prepared.storage, prepared.done):
            raise RunError(f"the run in '{prepared.storage.uri}' ended early: see its log")

    def _report(self, storage: Storage, measure: Measure) -> None:
        """Report the rows that Tune has not got, one by one, with each metric that is defined so far; returns when it
        has decided on the last of them."""
        records = read_state(storage).phases
        while self.reported < len(records) and not is_stopped(storage, self.reported):
            self.reported += 1
            values = measure(records[: self.reported])
            scores = {f"{SCORES}{index}": value for index, value in enumerate(values) if value is not None}
            tune.report({TASKS: self.reported, **scores})
