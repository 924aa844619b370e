"""A whole table with one command: several runs on the same stream, one or more at a time, resumable run by run.

A comparison is honest only if every row shares data, backbone and training; so they share one base config here, and
each run adds overrides in the language of the command line. Finished runs are read, not repeated. Ray and what trains
are imported when the first run starts: all configs are checked before.
"""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from raycl import config as configs
from raycl.backbone.markup.chat_templates import with_template_files
from raycl.config import Section, Tree, trust
from raycl.config.names import FolderName
from raycl.config.unused import found_in, leaves, refuse, setting, unused_in
from raycl.errors import ConfigError, RayclError, StoppedError
from raycl.launch.status import status_of
from raycl.methods.registry import method_class
from raycl.metrics.run_results import FOLDER, RESULT_FILE, Published, read_results
from raycl.operations.report.matrix_picture import draw_matrix
from raycl.operations.sweep.fused_rows import FusedRow, fused_run
from raycl.progress import counted_off
from raycl.storage import Storage
from raycl.training.records.run_folder import CONFIG
from raycl.training.setup.checks import check_singles, data_log
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.stopping import HostStop, StopOnSignal, left_at_once, stopped_by

if TYPE_CHECKING:
    from raycl.launch.driver import RunOptions

log: logging.Logger = logging.getLogger("raycl")


class ComparisonEntry(Section):
    """One row of the table."""

    set: tuple[str, ...] = Field((), description="overrides, as on the command line")
    singles: str | None = Field(None, description="the entry (a `separate` run) that FWT compares with")
    seeds: tuple[int, ...] | None = Field(
        None, min_length=1, description="the row runs with these of the comparison's seeds only; default: with all"
    )
    fused: FusedRow | None = Field(
        None, description="the row trains nothing: it is the adapters of another row, fused to one after the stream"
    )

    @property
    def needs(self) -> str | None:
        """The row whose run with the same seed comes first."""
        return self.singles if self.fused is None else self.fused.of


class ComparisonConfig(Section):
    """Runs that differ only in what is named."""

    name: FolderName = Field(description="name of the comparison and of its folder")
    base: dict[str, Any] = Field(default_factory=dict, description="config tree that all runs share")
    runs: dict[str, ComparisonEntry] = Field(min_length=1, description="name of a row -> what it sets")
    seeds: tuple[int, ...] = Field(
        (42,),
        min_length=1,
        description="every run is repeated with each of these seeds (a row's own `seeds` can name fewer)",
    )
    at_once: int | None = Field(
        None,
        ge=1,
        description="runs at a time; small models gain more from this than from workers. null: as many as the nodes of "
        "the cluster hold that launch.address or RAY_ADDRESS names, else 1",
    )
    published: Published | None = Field(
        None, description="numbers of a paper for some rows, shown in columns of their own"
    )

    @model_validator(mode="after")
    def _published_rows_exist(self) -> ComparisonConfig:
        unknown = [row for row in (self.published.rows if self.published else ()) if row not in self.runs]
        if unknown:
            raise ValueError(f"published.rows names '{unknown[0]}': expected some of {', '.join(self.runs)}")
        return self

    @model_validator(mode="after")
    def _needed_rows_come_first(self) -> ComparisonConfig:
        names = list(self.runs)
        for position, (name, entry) in enumerate(self.runs.items()):
            setting = "singles" if entry.fused is None else "fused.of"
            if entry.needs is not None and entry.needs not in names[:position]:
                raise ValueError(f"runs.{name}.{setting} is '{entry.needs}': expected a run that is listed before it")
            if entry.needs is not None and self.runs[entry.needs].fused is not None:
                raise ValueError(
                    f"runs.{name}.{setting} is '{entry.needs}', which is fused itself: name a row that trains"
                )
            if entry.fused is not None and (entry.set or entry.singles):
                raise ValueError(f"runs.{name} has `fused`, so it trains nothing: leave set and singles out")
        return self

    @model_validator(mode="after")
    def _rows_have_seeds_of_the_comparison(self) -> ComparisonConfig:
        for name, entry in self.runs.items():
            if other := [seed for seed in self.seeds_of(entry) if seed not in self.seeds]:
                raise ValueError(f"runs.{name}.seeds has {other[0]}: expected some of seeds, {list(self.seeds)}")
            first = self.runs[entry.needs] if entry.needs is not None else entry
            if missing := [seed for seed in self.seeds_of(entry) if seed not in self.seeds_of(first)]:
                raise ValueError(
                    f"runs.{name} runs with seed {missing[0]}, and '{entry.needs}', which it needs, does not: add it "
                    f"to runs.{entry.needs}.seeds"
                )
        return self

    def seeds_of(self, entry: ComparisonEntry) -> tuple[int, ...]:
        """Seeds with which a row runs."""
        if entry.seeds is None and entry.fused is not None:
            return self.seeds_of(self.runs[entry.fused.of])
        return self.seeds if entry.seeds is None else entry.seeds

    def entry_of(self, run: str) -> ComparisonEntry:
        """Return the row of a run."""
        return self.runs[run.rpartition("-s")[0]]


@dataclass(frozen=True)
class ComparisonOutcome:
    """The outcome of the runs: result trees by run name, and the error of each failed run."""

    results: dict[str, dict[str, Any]]
    failed: dict[str, str]


def load_comparison(path: str, overrides: Sequence[str] = ()) -> ComparisonConfig:
    """Read a comparison file and check every row's config.

    Raises:
        ConfigError: something is wrong, has no effect (`raycl.config.unused`), or is requested that only the
            command may allow (`raycl.config.trust`); a row's `singles` is not its own run with each task alone.
    """
    comparison = configs.load(ComparisonConfig, path, overrides)
    source, planned = f"comparison file '{path}'", plan(comparison, ".")
    refuse(_ignored(comparison), source)
    unused = {name: unused_in(config) for name, config in planned.items()}
    shared = leaves(comparison.base)
    everywhere = [found_in(shared, unused_settings) for unused_settings in unused.values()]
    refuse({f"base.{name}": everywhere[0][name] for name in set.intersection(*map(set, everywhere))}, source)
    for name, reasons in unused.items():
        entry = name.rpartition("-s")[0]
        refuse(found_in(leaves(_tree(comparison.runs[entry].set)), reasons), f"{source}, runs.{entry}")
    for name, config in planned.items():
        entry = name.rpartition("-s")[0]
        if (single := comparison.runs[entry].singles) is not None:
            theirs = configs.as_tree(planned[str(_needed(comparison, name))])
            check_singles(config, theirs, f"{source}, runs.{entry}.singles: '{single}'")
        if (fused := comparison.runs[entry].fused) is not None and not _has_adapters(config):
            raise ConfigError(
                f"{source}, runs.{entry}.fused.of: '{fused.of}' publishes no adapter for each task: expected a row "
                "that does, such as one with method=lora and stream.schedule=separate"
            )
    for config in planned.values():
        trust.require(trust.requested(configs.as_tree(config)), overrides, source, "base.")
    return comparison


def _has_adapters(config: RunConfig) -> bool:
    """Return whether a run publishes an adapter for each task."""
    method = method_class(config.method.name)
    is_apart = config.stream.schedule == "separate" or method.own_adapters
    return is_apart and not method.trains_backbone and config.bank.publish


def _tree(overrides: Sequence[str]) -> Tree:
    tree: Tree = {}
    for override in overrides:
        configs.apply_override(tree, override)
    return tree


def _ignored(comparison: ComparisonConfig) -> dict[str, str]:
    """Return settings of runs that a comparison sets itself -> its own setting instead."""
    instead = {"output": "--dir and the run's name", "seed": "seeds"}
    sources = {path: f"base.{setting(path, value)}" for path, value in leaves(comparison.base).items()}
    for name, entry in comparison.runs.items():
        given = leaves(_tree(entry.set))
        sources |= {path: f"runs.{name}.set of {setting(path, value)}" for path, value in given.items()}
    return {source: instead[key] for path, source in sources.items() if (key := path.partition(".")[0]) in instead}


def run_comparison(comparison: ComparisonConfig, directory: str, only: tuple[str, ...] = ()) -> ComparisonOutcome:
    """Run every row for every seed on one cluster, or the rows and runs in `only`; a failed run does not stop others.

    Raises:
        ConfigError: `only` names no row or run, or lacks one that another needs; or any row's config is wrong; all are
            checked before the first one starts.
    """
    planned = _planned(comparison, directory, only)
    if not planned:
        return ComparisonOutcome({}, {})
    _check_needed(comparison, planned, Storage.at(directory).sub(comparison.name))
    if comparison.published is not None:
        comparison.published.write(Storage.at(directory).sub(comparison.name))
    with _data_lines_once():
        if all(config.launch.mode == "local" for config in planned.values()):  # one after another, in this process
            outcome = _outcome({name: partial(_run, comparison, name, config) for name, config in planned.items()})
        else:
            outcome = _on_ray(comparison, planned, directory)
    folder = Storage.at(directory).sub(comparison.name)
    shown = {name: tree | {FOLDER: folder.sub(name).address} for name, tree in outcome.results.items()}
    if comparison.published is not None:
        shown = {name: comparison.published.beside(tree) for name, tree in shown.items()}
    return ComparisonOutcome(shown, outcome.failed)


@contextmanager
def _data_lines_once() -> Iterator[None]:
    """Log a line about data for the first run that it is about, and not for each other run of the same data."""
    logged = set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        line = record.getMessage()
        if line in logged:
            return False
        logged.add(line)
        return True

    data_log.addFilter(is_new)
    try:
        yield
    finally:
        data_log.removeFilter(is_new)


def states(comparison: ComparisonConfig, directory: str, only: tuple[str, ...] = ()) -> dict[str, str]:
    """Run -> its state in a sentence, from its files alone; nothing is started.

    Raises:
        ConfigError: `only` names no row, and no run of one.
    """
    folder = Storage.at(directory).sub(comparison.name)
    return {name: _state(folder.sub(name)) for name in _planned(comparison, directory, only)}


def _state(run: Storage) -> str:
    if not run.exists(CONFIG):
        return "finished" if run.exists(RESULT_FILE) else "not started"  # a row that is fused has results alone
    status = status_of(run.address)
    return f"{status.state}: {status.message}; {status.details['tasks']}"


def rows_of(comparison: ComparisonConfig, only: tuple[str, ...]) -> list[str]:
    """Return the rows that run, where `only` names rows and runs; (): all."""
    named = set(only)
    return [
        row for row in comparison.runs if not named or named & {row, *(f"{row}-s{seed}" for seed in comparison.seeds)}
    ]


def _planned(comparison: ComparisonConfig, directory: str, only: tuple[str, ...]) -> dict[str, RunConfig]:
    planned = plan(comparison, directory)
    unknown = [name for name in only if name not in comparison.runs and name not in planned]
    if unknown:
        raise ConfigError(
            f"the comparison has no row {', '.join(map(repr, unknown))}: expected some of "
            f"{', '.join(comparison.runs)}, or runs of them as {next(iter(planned))}"
        )
    return {
        name: config for name, config in planned.items() if not only or {name, name.rpartition("-s")[0]} & set(only)
    }


def _check_needed(comparison: ComparisonConfig, planned: Mapping[str, RunConfig], folder: Storage) -> None:
    """Check that the runs which others need are planned or there: of tasks alone, or whose adapters are fused."""
    missing = {
        str(comparison.entry_of(name).needs)
        for name in planned
        if (run := _needed(comparison, name)) is not None
        and run not in planned
        and not (folder.sub(run).exists(RESULT_FILE) and read_results(folder.path(run)).get("finished", True))
    }
    if missing:
        names = ", ".join(map(repr, sorted(missing)))
        raise ConfigError(f"--only leaves out {names}, which its rows need and which is not finished: add it")


def _on_ray(comparison: ComparisonConfig, planned: Mapping[str, RunConfig], directory: str) -> ComparisonOutcome:
    """Run so many at a time on one cluster; SIGTERM and Ctrl-C stop them as they stop one, with a checkpoint."""
    from raycl.launch.cluster import joined
    from raycl.launch.driver import RunOptions
    from raycl.launch.warm_workers import WarmWorkers, runs_held

    host = Storage.at(directory).sub(comparison.name)
    stop = HostStop(host.address, uuid.uuid4().hex[:12])
    grace_s = max(config.launch.grace_s for config in planned.values())
    with joined(next(iter(planned.values())).launch.address):
        at_once = comparison.at_once or runs_held(planned.values())
        trained = sum(comparison.entry_of(name).fused is None for name in planned)
        pool, running = ThreadPoolExecutor(at_once, "run"), dict[str, Future[Tree]]()
        signals = StopOnSignal(host, stop.driver, grace_s, has_begun=lambda: True)
        with signals, WarmWorkers(trained) as warm, left_at_once(), ExitStack() as stack:
            stack.callback(pool.shutdown, cancel_futures=True)
            with left_at_once():  # without waiting for the threads
                for name, config in planned.items():
                    label = f"{name}: " if at_once > 1 else ""
                    options = RunOptions(share=at_once, label=label, stop=stop, warm=warm, draw=draw_matrix)
                    first = running.get(_needed(comparison, name) or "")
                    running[name] = pool.submit(_run_after, first, comparison, name, config, options)
                return _outcome({name: future.result for name, future in running.items()})


def _needed(comparison: ComparisonConfig, name: str) -> str | None:
    """Return the run that comes before this one; None: it needs none."""
    needs = comparison.entry_of(name).needs
    return None if needs is None else f"{needs}-s{name.rpartition('-s')[2]}"


def _run_after(
    first: Future[Tree] | None, comparison: ComparisonConfig, name: str, config: RunConfig, options: RunOptions
) -> Tree:
    """Run it on the cluster, after the run that it needs."""
    assert options.warm is not None and options.stop is not None, "see _on_ray"
    if first is not None:
        first.exception()  # it is listed before, so is running already
    if options.stop.is_requested:
        raise stopped_by(options.stop.reason, f"'{name}' has not begun")
    with options.warm.next_run() if comparison.entry_of(name).fused is None else nullcontext():
        return _run(comparison, name, config, options)


def _run(comparison: ComparisonConfig, name: str, config: RunConfig, options: RunOptions | None = None) -> Tree:
    from raycl.launch import driver
    from raycl.launch.prepared_run import prepare

    log.info("== %s", name)
    if (fused := comparison.entry_of(name).fused) is not None:
        return fused_run(fused, config, str(_needed(comparison, name)))
    return driver.train(prepare(config), options or driver.RunOptions(draw=draw_matrix))


def _outcome(results: Mapping[str, Callable[[], Tree]]) -> ComparisonOutcome:
    outcome = ComparisonOutcome({}, {})
    for number, (name, result) in enumerate(counted_off(results.items(), "runs"), 1):
        try:
            outcome.results[name] = result()
            log.info("== %s is there (%d of %d)", name, number, len(results))
        except StoppedError as error:
            raise type(error)(f"{error}; the same command continues with all runs") from error
        except RayclError as error:
            log.error("== %s failed: %s", name, error)
            outcome.failed[name] = str(error)
    return outcome


def plan(comparison: ComparisonConfig, directory: str) -> dict[str, RunConfig]:
    """Run name -> validated config, in the order in which they run."""
    folder = Storage.at(directory).sub(comparison.name)
    planned = {}
    for seed in comparison.seeds:
        for name, entry in comparison.runs.items():
            if seed not in comparison.seeds_of(entry):
                continue
            tree = copy.deepcopy(comparison.base)
            source = entry if entry.fused is None else comparison.runs[entry.fused.of]
            for override in source.set:
                configs.apply_override(tree, override)
            tree["seed"] = seed
            tree["output"] = {"dir": folder.address, "name": f"{name}-s{seed}", "exists": "resume"}
            if entry.singles is not None:
                tree.setdefault("eval", {})["singles"] = folder.sub(f"{entry.singles}-s{seed}").address
            planned[f"{name}-s{seed}"] = configs.validate(RunConfig, with_template_files(tree))
    local = [name for name, config in planned.items() if config.launch.mode == "local"]
    if local and (len(local) < len(planned) or (comparison.at_once or 1) > 1):
        raise ConfigError(
            f"'{local[0]}' has launch.mode=local, and such runs of a comparison run one after another in its process: "
            "set base.launch.mode for all of them, and leave at_once out"
        )
    return planned
