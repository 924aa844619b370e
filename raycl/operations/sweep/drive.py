"""A whole sweep: checked, run through Ray Tune, continued, and summed up.

Trials stop early by Tune's ASHA and median rules over tasks; a stopped run ends by itself between two tasks. Tune would
kill a stopped trial in the middle of its next task, and what its workers held stays taken for most of a minute. Here
the rule's decision goes to the run (`raycl.training.records.run_folder`), whose workers wait for it, and Tune gets the
decision to continue: the trial ends as if its stream were over.
"""

import io
import itertools
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from raycl import config as configs
from raycl.bank import Bank
from raycl.bank.object_store import ObjectStoreCache
from raycl.data.stream import open_stream
from raycl.errors import AlreadyExistsError, ConfigError, LaunchError, ResumeError, RunError
from raycl.launch import cluster as clusters
from raycl.launch.ray_train import worker_resources
from raycl.operations.sweep.definition.sweep_config import Settings, SweepConfig, examples, key_of, plain
from raycl.operations.sweep.definition.sweep_folder import SWEEP, SweepFolder
from raycl.operations.sweep.outcome import SweepOutcome, collect
from raycl.operations.sweep.search.searchers import Planned, RecordingSearcher, TpeSearcher
from raycl.operations.sweep.trials.bars import steps_shown
from raycl.operations.sweep.trials.prefix import prefix_keys, shared_keys
from raycl.operations.sweep.trials.trial import FAILED, SCORES, TASKS, TrialWork, run_trial
from raycl.progress import report
from raycl.storage import Storage
from raycl.training.definition.job import Resources
from raycl.training.records.run_folder import read_decision, write_decision
from raycl.training.setup import checks, run_config
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.stopping import HostStop, StopOnSignal, stopped_by

SCORE = f"{SCORES}0"
NEVER = float("inf")

TRIALS = "trials"
"""The name of their bar."""


@dataclass(frozen=True, eq=False)
class EarlierTrial:
    """Replaces Tune's trial of an earlier session; rules distinguish trials by identity and `trial_id`."""

    trial_id: str


def rule_of(sweep: SweepConfig, tasks: int) -> Any:
    """Return Tune's rule, with tasks as time."""
    chosen = sweep.scheduler
    common = {"time_attr": TASKS, "metric": SCORE, "mode": sweep.mode[0]}
    if chosen.name == "asha":
        grace = min(chosen.grace, tasks)
        return ASHAScheduler(max_t=tasks, grace_period=grace, reduction_factor=chosen.reduction, **common)
    if chosen.name == "median":
        return MedianStoppingRule(
            grace_period=chosen.grace, min_samples_required=chosen.least, min_time_slice=NEVER, **common
        )
    return None


class AtTaskEnds(FIFOScheduler):  # type: ignore[misc]
    """Starts trials in order; after each task the rule decides whether a trial continues.

    Attributes:
        over: number of trials that have ended. running: numbers of those that have not, of the ones that Tune has.
        stop: a trial that ends after a request there has not learned all of its tasks, and is not over.
    """

    def __init__(self, folder: SweepFolder, rule: Any, tasks: int, total: int, over: int) -> None:
        """Stop trials by a rule.

        Args:
            rule: Tune's scheduler; None: all continue.
            total: number of all trials, for people. over: those that earlier sessions ended.
        """
        super().__init__()
        self.folder, self.rule, self.tasks, self.total, self.over = folder, rule, tasks, total, over
        self.running: set[int] = set()
        self.stop: HostStop | None = None

    def replay(self, number: int, scores: Sequence[float | None]) -> None:
        """Add a trial of an earlier session to the rule, which compares later ones with it."""
        if self.rule is None:
            return
        trial = EarlierTrial(f"earlier-{number}")
        results = [{TASKS: tasks, SCORE: score} for tasks, score in enumerate(scores, 1) if score is not None]
        self.rule.on_trial_add(None, trial)
        for result in results:
            self.rule.on_trial_result(None, trial, result)
        if results:
            self.rule.on_trial_complete(None, trial, results[-1])

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        self.running.add(trial.config["number"])
        if self.rule is not None:
            self.rule.on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Give the run its word; Tune continues in any case."""
        if FAILED in result or TASKS not in result or result.get("done"):
            return str(TrialScheduler.CONTINUE)
        continues = True
        if self.rule is not None:
            decision = self.rule.on_trial_result(tune_controller, trial, result)
            last = result[TASKS] >= self.tasks
            run = self.folder.run(trial.config["number"])
            # one by an earlier session, or before its process died, holds
            earlier = read_decision(run, int(result[TASKS]))
            continues = decision != TrialScheduler.STOP or last if earlier is None else earlier
            if earlier is None:
                write_decision(run, int(result[TASKS]), continues)
        self._log(trial.config, result, continues)
        return str(TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        self._count(trial)
        if self.rule is not None and SCORE in result:
            self.rule.on_trial_complete(tune_controller, trial, result)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Count it; rules forget it."""
        self._count(trial)

    def _count(self, trial: Any) -> None:
        self.running.discard(trial.config["number"])
        if self.stop is not None and self.stop.is_requested:
            return
        self.over += 1
        report(TRIALS, self.over, self.total, has_lines=True)

    def _log(self, given: dict[str, Any], result: dict[str, Any], continues: bool) -> None:
        scores = [f"{value:.2f}" for key, value in sorted(result.items()) if key.startswith(SCORES)]
        settings = " ".join(f"{path.rpartition('.')[2]}={value}" for path, value in given.get("settings", {}).items())
        stopped = "" if continues else ", stopped"
        values = (given["number"] + 1, self.total, settings, result[TASKS], self.tasks)
        log.info("trial %d of %d (%s): %d of %d tasks, %s%s", *values, " ".join(scores) or "-", stopped)


log: logging.Logger = logging.getLogger("raycl")

SMALL = 1.0
"""Bytes of memory that a trial's own process reserves on the cluster: its workers take what it needs, mostly CPUs."""

QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # it saves Tune's state, and no checkpoint of a trial
    "TUNE_WARN_THRESHOLD_S": "60",
}

MAY_CHANGE = ("retries", "concurrency", "resources")
"""Settings of a sweep that may differ when it continues; with other resources, float sums may differ too."""


@dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep before the first trial.

    Attributes:
        trials: trials by number; without planning, those of earlier sessions. tasks: phases of each trial.
        shared: keys of first phases that several trials have. prefixes: number -> those of a planned trial.
    """

    trials: dict[int, Settings]
    tasks: int
    shared: frozenset[str]
    prefixes: dict[int, list[str]]
    total: int


def run_sweep(sweep: SweepConfig, directory: str, resume: bool = False) -> SweepOutcome:
    """Run every trial that is not over yet, and sum up all of them.

    Raises:
        RunError: the folder holds a sweep already and `resume` is not set, or nothing could run.
        ResumeError: the sweep there is another one. ConfigError, DataError: a trial that cannot run.
        StoppedError: SIGTERM or Ctrl-C came; running trials wrote their checkpoints.
    """
    directory = Storage.at(directory).address
    folder = SweepFolder.of(sweep, directory)
    if is_there := folder.storage.exists(SWEEP):
        sweep = _continued(sweep, folder, resume)
    plan = make_plan(sweep, folder)
    _claim(sweep, folder, is_there)
    first = sweep.config(next(iter(plan.trials.values())) if plan.trials else examples(sweep)[0])
    with clusters.joined(first.launch.address, dashboard=True):
        shared = ObjectStoreCache(Bank.at(str(first.bank.dir)), detached=False) if first.bank.start else None
        _tune(sweep, directory, folder, plan)
        del shared  # it kept the bank's cache actor alive, between trials too
    return collect(sweep, folder, plan.tasks)


def _claim(sweep: SweepConfig, folder: SweepFolder, is_there: bool) -> None:
    """Take the folder, or write the sweep there anew, since some of its settings may have changed.

    Raises:
        RunError: another sweep has taken it meanwhile.
    """
    text = configs.to_yaml(sweep).encode()
    if is_there:
        folder.storage.write(SWEEP, text)
        return
    try:
        folder.storage.create(SWEEP, text)
    except AlreadyExistsError as error:
        raise RunError(_taken(folder)) from error


def _taken(folder: SweepFolder) -> str:
    return f"'{folder.storage.uri}' holds a sweep already: continue with --resume, or choose another name or --dir"


def _continued(sweep: SweepConfig, folder: SweepFolder, resume: bool) -> SweepConfig:
    """Return the sweep as it continues the one in the folder, with settings in the order that they had: random draws
    follow it.

    Raises:
        RunError: it is not to continue. ResumeError: that is another sweep.
    """
    if not resume:
        raise RunError(_taken(folder))
    written = configs.from_yaml(folder.storage.read_text(SWEEP), f"{folder.storage.uri}/{SWEEP}")
    old = configs.validate(SweepConfig, written)  # an older one lacks younger settings
    before, now = (plain(configs.as_tree(config)) for config in (old, sweep))
    changed = configs.differences(before, now, without=MAY_CHANGE)
    if sweep.search.name != "grid":
        changed.pop("samples", None)  # more of the same is welcome
    if changed:
        listed = "; ".join(f"{key} was {before!r}, now {after!r}" for key, (before, after) in changed.items())
        raise ResumeError(
            f"'{folder.storage.uri}' cannot continue with a changed sweep: {listed}; give it another name"
        )
    return sweep.model_copy(update={"space": {path: sweep.space[path] for path in old.space}})


def _numbered(trials: Sequence[Settings], recorded: Mapping[int, Settings]) -> dict[int, Settings]:
    """Return planned trials by number, in their order: those that have run keep theirs, whatever the file's order or
    the number of samples is now."""
    known: dict[str, list[int]] = {}
    for number, settings in recorded.items():
        known.setdefault(key_of(settings), []).append(number)
    free = (number for number in itertools.count() if number not in recorded)
    numbers = [known[key].pop(0) if known.get(key := key_of(settings)) else next(free) for settings in trials]
    return dict(zip(numbers, trials, strict=True))


def make_plan(sweep: SweepConfig, folder: SweepFolder) -> SweepPlan:
    """Return all trials that are known, checked as runs are: data, backbone, method.

    Raises:
        RayclError: one of them cannot run.
    """
    recorded = folder.settings()
    trials = _numbered(sweep.trials(), recorded) if sweep.plans else recorded
    known = list(trials.values()) if sweep.plans else examples(sweep)
    run_configs = [folder.config(sweep, 0, settings) for settings in known]
    names, lengths = [], set()
    for config in run_configs:
        stream = open_stream(config.stream, config.seed)
        names.append([task.name for task in stream.tasks])
        lengths.add(len(run_config.phases(config, stream)))
    if len(lengths) > 1 and sweep.scheduler.name != "none":
        raise ConfigError(
            f"trials have between {min(lengths)} and {max(lengths)} phases, so scheduler '{sweep.scheduler.name}' "
            "cannot compare them: leave stream.tasks of one length, or use scheduler=none"
        )
    kinds: dict[tuple[Any, ...], RunConfig] = {}  # a check of all configs would take longer than some sweeps
    for config in run_configs:
        kinds.setdefault(
            (config.method.name, tuple(config.modifiers), config.backbone.name, str(config.stream)), config
        )
    for config in kinds.values():
        checks.check(config)
    if sweep.parallel_tasks > 1 and sweep.scheduler.name != "none":
        raise ConfigError(
            f"scheduler '{sweep.scheduler.name}' stops trials after a task, and with base.launch.parallel_tasks="
            f"{sweep.parallel_tasks} all tasks of a trial are learned before its first row is known: use "
            "scheduler=none, or parallel_tasks=1"
        )
    if any(config.launch.mode == "local" for config in run_configs):
        raise ConfigError(
            "a sweep runs on Ray, in processes of its own, and launch.mode is local: leave launch.mode at ray, or "
            "train each run with raycl train"
        )
    keys = [prefix_keys(config, tasks) for config, tasks in zip(run_configs, names, strict=True)]
    shared = frozenset(shared_keys(keys)) if sweep.share else frozenset()
    total = len(trials) if sweep.plans else sweep.samples
    of_trial = ([key for key in own if key in shared] for own in keys)
    prefixes = dict(zip(trials, of_trial, strict=True)) if sweep.plans else {}
    return SweepPlan(trials, max(lengths), shared, prefixes, total)


def _tune(sweep: SweepConfig, directory: str, folder: SweepFolder, plan: SweepPlan) -> None:
    states = {number: folder.state(number, plan.tasks) for number in plan.trials}
    over = [number for number, (state, _) in states.items() if state in ("done", "stopped")]
    left = {number: settings for number, settings in plan.trials.items() if number not in over}
    todo = (
        len(left) if sweep.plans else len(left) + sweep.samples - len(plan.trials) - len(folder.settings(repeated=True))
    )
    if todo <= 0:
        return
    done = collect(sweep, folder, plan.tasks)
    scheduler = AtTaskEnds(folder, rule_of(sweep, plan.tasks), plan.tasks, plan.total, plan.total - todo)
    searcher: RecordingSearcher = (
        Planned(sweep, folder, left, plan.prefixes) if sweep.plans else TpeSearcher(sweep, folder, left)
    )
    for number in over:
        rows = done.row(number)
        scheduler.replay(number, [values[0] for values in rows.curve])
        if isinstance(searcher, TpeSearcher):
            searcher.tell_finished(plan.trials[number], rows.curve, states[number][0] == "stopped")
    at_once = concurrency(sweep)
    scored = ", ".join(sweep.metric)
    log.info("%s: %d of %d trials to run, %d at a time, by %s", folder.storage.uri, todo, plan.total, at_once, scored)
    stop = HostStop(folder.storage.address, uuid.uuid4().hex[:12])
    work = TrialWork(configs.as_tree(sweep), directory, stop, plan.shared)
    signals = StopOnSignal(folder.storage, stop.driver, _base(sweep).launch.grace_s, has_begun=lambda: True)
    searcher.stop = scheduler.stop = stop
    report(TRIALS, scheduler.over, plan.total, has_lines=True)
    try:
        with signals, steps_shown(folder, scheduler.running):
            errors = _fit(sweep, folder, work, searcher, scheduler, todo, at_once)
    except (SystemExit, KeyboardInterrupt):  # Ray makes the one of the other
        if not signals.reason:
            raise
        errors = {}
    finally:
        report(TRIALS, plan.total, plan.total, has_lines=True)
    for number, error in errors.items():
        folder.write_failure(number, error)
    if signals.reason:
        _refuse_unfinished(folder, plan, signals.reason)


def _refuse_unfinished(folder: SweepFolder, plan: SweepPlan, reason: str) -> None:
    over = [number for number in folder.settings() if folder.state(number, plan.tasks)[0] != "unfinished"]
    total = plan.total - len(folder.settings(repeated=True))
    if len(over) < total:
        raise stopped_by(
            reason,
            f"{len(over)} of {total} trials are over, '{folder.storage.uri}' has the checkpoints of the others; "
            "continue with the same command and --resume",
        )


def _fit(
    sweep: SweepConfig,
    folder: SweepFolder,
    work: TrialWork,
    searcher: RecordingSearcher,
    scheduler: AtTaskEnds,
    todo: int,
    at_once: int,
) -> dict[int, str]:
    """Run Tune to the end; number and error of trials whose own process died too often."""
    storage = folder.storage
    restarts, held = sweep.retries, {"CPU": 0, "memory": SMALL}
    if sweep.in_process:  # where its worker's share is the trial's, and so are its crashes; -1: no limit
        base = _base(sweep)
        crashes, held = base.launch.max_failures, worker_resources(base).named()
        restarts = -1 if crashes < 0 else max(crashes, sweep.retries)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(run_trial, work=work), held),  # `work` travels in the object store
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=scheduler,
            num_samples=todo,
            max_concurrent_trials=at_once,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: f"{trial.config['number']:04d}-{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name=uuid.uuid4().hex[:12],
            storage_path=storage.path("tune"),
            storage_filesystem=None if storage.is_local else storage.filesystem,
            failure_config=tune.FailureConfig(max_failures=restarts),
            verbose=0,
        ),
    )
    requested = {"CPU": sweep.resources.workers * sweep.resources.cpus_per_worker}
    lower = "resources.workers or resources.cpus_per_worker"
    with _quiet(), clusters.log_while_pending(partial(clusters.is_pending, all_of_it=True), requested, lower):
        grid = tuner.fit()
    return {
        int(result.config["number"]): str(result.error).strip().splitlines()[-1]
        for result in grid
        if result.error is not None and result.config
    }


def _base(sweep: SweepConfig) -> RunConfig:
    return configs.validate(RunConfig, {"launch": sweep.tree({})["launch"]})


def concurrency(sweep: SweepConfig) -> int:
    """Return trials at a time: the configured number, or as many as the cluster holds.

    Raises:
        LaunchError: it does not hold one.
    """
    nodes, wanted = clusters.nodes(), sweep.resources
    gpus = wanted.gpus_per_worker
    if gpus is None:
        gpus = float(sum(node.gpus for node in nodes) >= wanted.workers)
    workers = wanted.workers * sweep.parallel_tasks
    held = clusters.held(nodes, Resources(wanted.cpus_per_worker, gpus)) // workers
    if not held:
        raise LaunchError(
            f"a trial needs {workers} x {wanted.cpus_per_worker:g} CPUs and {gpus:g} GPUs, but the cluster's "
            f"nodes have {clusters.described(nodes)}: lower resources.workers, cpus_per_worker or gpus_per_worker, or "
            "base.launch.parallel_tasks"
        )
    return held if sweep.concurrency is None else min(sweep.concurrency, held)


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn Tune's own lines, warnings and files off while it runs; raycl's replace them."""
    logger = logging.getLogger("ray.tune")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with clusters.environment(QUIET), redirect_stdout(io.StringIO()):  # Tune prints trials that end without results
            yield
    finally:
        logger.setLevel(level)
