"""The outcome of a sweep: a row for each trial, means over seeds or orders, the best trials, and their files."""

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raycl import config as configs
from raycl.config import Tree
from raycl.metrics.run_results import FOLDER
from raycl.operations.report.page.report_page import report_page
from raycl.operations.report.page.sections import PageSection
from raycl.operations.report.plots import save_png
from raycl.operations.report.sweeps.sweep_plots import figures_of, sensitivity_figure
from raycl.operations.report.sweeps.sweep_tables import group_table, sweep_csv, sweep_table
from raycl.operations.report.tables import Page
from raycl.operations.sweep.definition.expressions import measured
from raycl.operations.sweep.definition.sweep_config import Settings, SweepConfig, plain
from raycl.operations.sweep.definition.sweep_folder import State, SweepFolder
from raycl.storage import Storage
from raycl.training.records.results import wall_seconds
from raycl.training.setup.run_config import RunConfig

NUMBERS = ("ap", "f_ra", "bwt", "fwt")
"""Numbers of every run, in addition to the sweep's own metrics."""
MOST_TRIALS = 12
"""Trials whose runs the page shows, the best ones."""


@dataclass(frozen=True)
class TrialRow:
    """One trial.

    Attributes:
        tasks: learned, of all. curve: each metric after each of them. numbers: AP and the others at the end.
        forked_tasks: tasks that another trial learned for it. train_s: time that its own workers trained.
    """

    number: int
    settings: Settings
    state: State
    tasks: int
    curve: list[list[float | None]] = field(default_factory=list)
    numbers: dict[str, float | None] = field(default_factory=dict)
    forked_tasks: int = 0
    train_s: float = 0.0
    wall_s: float | None = None
    error: str | None = None

    @property
    def scores(self) -> list[float | None]:
        """Each metric as it is now."""
        return self.curve[-1] if self.curve else []


@dataclass(frozen=True)
class TrialGroup:
    """Trials that differ in `over` alone.

    Attributes:
        done: how many of them are finished.
        means, spreads: means and standard deviations of each metric over finished trials; None below one (two) of them.
    """

    settings: Settings
    numbers: list[int]
    done: int
    means: list[float | None]
    spreads: list[float | None]


@dataclass(frozen=True)
class SweepOutcome:
    """All trials so far, best first (several metrics: the front first)."""

    sweep: SweepConfig
    tasks: int
    rows: list[TrialRow]
    groups: list[TrialGroup]
    front: list[int]
    best: int | None
    best_config: RunConfig | None = field(default=None, repr=False)

    def row(self, number: int) -> TrialRow:
        return next(row for row in self.rows if row.number == number)

    @property
    def failed(self) -> dict[int, str]:
        return {row.number: row.error or "" for row in self.rows if row.state == "failed"}

    @property
    def unscored(self) -> dict[int, str]:
        """Trials that are done and lack a metric's value -> which metric, and the numbers that it had."""
        reasons: dict[int, str] = {}
        for row in self.rows:
            lacking = [text for text, score in zip(self.sweep.metric, row.scores, strict=False) if score is None]
            if row.state == "done" and lacking:
                known = ", ".join(f"{name} {value:.2f}" for name, value in row.numbers.items() if value is not None)
                reasons[row.number] = f"metric '{lacking[0]}' has no value with {known}"
        return reasons

    def tree(self) -> Tree:
        """Return the JSON-able content of `summary.json`."""
        return {
            "name": self.sweep.name,
            "paths": list(self.sweep.space),
            "over": list(self.sweep.over),
            "metric": list(self.sweep.metric),
            "mode": list(self.sweep.mode),
            "tasks": self.tasks,
            "best": self.best,
            "front": self.front,
            "rows": [asdict(row) | {"scores": row.scores} for row in self.rows],
            "groups": [asdict(group) for group in self.groups],
        }

    def best_yaml(self) -> str | None:
        """Return the best trial's config, ready for `train_stream.py --config`; None: no trial is done.

        A run that starts from a bank starts from it again; where it publishes to was the sweep's own.
        """
        config = self.best_config
        if self.best is None or config is None:
            return None
        tree = configs.as_tree(config)
        if config.bank.start:  # the rest of its config is taken over from there
            tree = plain(self.sweep.tree(self.row(self.best).settings))
            tree["eval"] = {**tree.get("eval", {}), "singles": config.eval.singles}
        for path in ("output", "bank.dir", "bank.branch", "tracking.group"):
            section, _, name = path.rpartition(".")
            (tree.get(section, {}) if section else tree).pop(name, None)
        return configs.tree_to_yaml(tree) if config.bank.start else configs.to_yaml(configs.validate(RunConfig, tree))


def collect(sweep: SweepConfig, folder: SweepFolder, tasks: int) -> SweepOutcome:
    """Read what became of every trial."""
    settings = folder.settings()
    rows = [read_row(sweep, folder, number, of_trial, tasks) for number, of_trial in settings.items()]
    groups = grouped(sweep, rows)
    front = pareto([row for row in rows if row.state == "done"], sweep.mode)
    best = _best(sweep, rows, groups)
    ordered = sorted(rows, key=lambda row: _rank(row, sweep, front))
    config = None if best is None else folder.config(sweep, best, settings[best])
    if best is not None and sweep.singles:
        results = folder.results(best)
        assert results is not None, "a trial that is done has results"
        config = configs.validate(RunConfig, results["config"])
    return SweepOutcome(sweep, tasks, ordered, groups, front, best, config)


def read_row(sweep: SweepConfig, folder: SweepFolder, number: int, settings: Settings, tasks: int) -> TrialRow:
    state, reached = folder.state(number, tasks)
    results, records = folder.results(number), reached.phases
    error = folder.error(number) if state == "failed" else None
    if results is None or not records:
        return TrialRow(number, settings, state, len(records), error=error)
    names, phases, singles = results["stream"]["tasks"], results["phases"], results["singles"]
    curve = [measured(sweep.metrics, names, phases, records[:done], singles) for done in range(1, len(records) + 1)]
    forked_tasks = sum(attempt.get("inherited", 0) for attempt in reached.attempts)
    return TrialRow(
        number,
        settings,
        state,
        len(records),
        curve,
        {name: results["metrics"].get(name) for name in NUMBERS} if state == "done" else {},
        forked_tasks,
        sum(record["times"]["train_s"] for record in records[forked_tasks:]),
        wall_seconds(reached) if len(records) > forked_tasks else None,
        error,
    )


def grouped(sweep: SweepConfig, rows: Sequence[TrialRow]) -> list[TrialGroup]:
    """Return trials by their settings without `over`; one a trial where that is empty."""
    groups: dict[str, list[TrialRow]] = {}
    for row in rows:
        kept = {path: value for path, value in row.settings.items() if path not in sweep.over}
        groups.setdefault(json.dumps(kept, sort_keys=True), []).append(row)
    group_list = []
    for key, members in groups.items():
        columns = [
            [row.scores[index] for row in members if row.state == "done" and row.scores]
            for index in range(len(sweep.metric))
        ]
        known = [[value for value in column if value is not None] for column in columns]
        means = [statistics.fmean(column) if column else None for column in known]
        spreads = [statistics.stdev(column) if len(column) > 1 else None for column in known]
        done = sum(row.state == "done" for row in members)
        group_list.append(TrialGroup(json.loads(key), [row.number for row in members], done, means, spreads))
    return group_list


def pareto(rows: Sequence[TrialRow], modes: Sequence[str]) -> list[int]:
    """Return numbers of trials that no other beats in one metric without being worse in another."""
    points = {
        row.number: [
            value if mode == "max" else -value
            for value, mode in zip(row.scores, modes, strict=True)
            if value is not None
        ]
        for row in rows
    }
    points = {number: point for number, point in points.items() if len(point) == len(modes)}

    def beats(scores: list[float], other: list[float]) -> bool:
        return scores != other and all(a >= b for a, b in zip(scores, other, strict=True))

    return [number for number, point in points.items() if not any(beats(other, point) for other in points.values())]


def _best(sweep: SweepConfig, rows: Sequence[TrialRow], groups: Sequence[TrialGroup]) -> int | None:
    """Return the first finished trial of the group with the best mean of the first metric; ties go to the earlier.

    Groups of which all trials are finished come before others: a mean of fewer seeds is no mean of the same kind.
    """
    done = {row.number for row in rows if row.state == "done"}
    sign = 1 if sweep.mode[0] == "max" else -1
    known = [
        ((group.done == len(group.numbers), sign * group.means[0]), group)
        for group in groups
        if group.means[0] is not None
    ]
    if not known:
        return None
    _, group = max(known, key=lambda pair: pair[0])
    return next(number for number in group.numbers if number in done)


def _rank(row: TrialRow, sweep: SweepConfig, front: Sequence[int]) -> tuple[Any, ...]:
    """Return the key of sorting: done, stopped, the rest; then the front (several metrics), then the first metric."""
    score = row.scores[0] if row.scores and row.scores[0] is not None else None
    sign = -1 if sweep.mode[0] == "max" else 1
    state = ("done", "stopped", "unfinished", "failed").index(row.state)
    behind = len(sweep.metric) > 1 and row.number not in front
    return state, behind, -row.tasks, float("inf") if score is None else sign * score, row.number


def write_outcome(outcome: SweepOutcome, directory: str) -> tuple[str, list[str]]:
    """Write all files; the tables, and addresses of what was written."""
    storage = SweepFolder.of(outcome.sweep, directory).storage
    summary = outcome.tree()
    tables = [sweep_table(summary), *([group_table(summary)] if outcome.sweep.over else [])]
    text = "\n\n".join(map(str, tables))
    files = {"summary.txt": f"{text}\n".encode(), "summary.csv": sweep_csv(summary).encode()}
    best = outcome.best_yaml()
    if best is not None:
        files["best.yaml"] = best.encode()
        files["report.html"] = _page(outcome, directory, tables).encode()
    storage.write_json("summary.json", summary)
    for name, data in files.items():
        storage.write(name, data)
    drawn = _draw(summary, storage) if outcome.front else []
    return text, [f"{storage.uri}/{name}" for name in (*files, *drawn)]


def _page(outcome: SweepOutcome, directory: str, tables: Sequence[Page]) -> str:
    """Return the page about all trials, and about the runs of the best ones."""
    folder = SweepFolder.of(outcome.sweep, directory)
    done = [row.number for row in outcome.rows if row.state == "done"][:MOST_TRIALS]
    results = [
        tree | {FOLDER: folder.run(number).address} for number in done if (tree := folder.results(number)) is not None
    ]
    figure = sensitivity_figure(outcome.tree()) if outcome.front else None
    trials = PageSection("Trials", figure, tables=tables)
    lead = [f"Below are the runs of the {len(results)} best trials."] if len(done) == MOST_TRIALS else []
    return report_page(results, outcome.sweep.name, more=[replace(trials, lead=lead)])


def _draw(summary: Tree, storage: Storage) -> list[str]:
    figures = figures_of(summary)
    with tempfile.TemporaryDirectory() as folder:
        for name, figure in figures.items():
            storage.write(name, save_png(figure, f"{folder}/{name}").read_bytes())
    return list(figures)
