"""Tests of what a sweep found, from the folders of its trials: written by hand here, as runs leave them."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_records import phase_record

from raycl import config as configs
from raycl.metrics.run_results import read_results
from raycl.operations.report.plots import new_figure, save_png
from raycl.operations.report.sweeps.sweep_plots import (
    draw_setting,
    kinds_of,
    parallel_figure,
    pareto_figure,
    sensitivity_figure,
)
from raycl.operations.report.sweeps.sweep_tables import group_table, sweep_csv, sweep_table, text
from raycl.operations.sweep.definition.sweep_config import Settings, SweepConfig
from raycl.operations.sweep.definition.sweep_folder import SweepFolder
from raycl.operations.sweep.outcome import SweepOutcome, TrialRow, collect, pareto, write_outcome
from raycl.storage.records import hashed
from raycl.training.records.journal import Journal
from raycl.training.records.run_folder import write_decision
from raycl.training.setup.run_config import RunConfig

TASKS = ["topic", "sentiment"]


class Written:
    """A sweep's folder with trials."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        tree: dict[str, Any] = {
            "name": "mine",
            "base": {"stream": {"tasks": TASKS}},
            "space": {"train.learning_rate": {"grid": [1e-5, 1e-2]}, "seed": {"grid": [0, 1]}},
            "search": "grid",
        }
        self.sweep = configs.validate(SweepConfig, {**tree, **changes})
        self.directory = str(directory)
        self.folder = SweepFolder.of(self.sweep, self.directory)

    def trial(self, number: int, settings: Settings, rows: list[list[float]]) -> None:
        """Write a trial that got as far as `rows`."""
        self.folder.write_settings(number, settings)
        run = self.folder.run(number)
        journal, began = Journal.claim(run, workers=1), time.monotonic()
        for phase, row in enumerate(rows):
            cells = {task: {"value": value, "count": 10, "extra": {}} for task, value in zip(TASKS, row, strict=False)}
            times = {"phase": TASKS[phase], "train_s": 2.0}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    "raycl.training.records.journal.time.monotonic", lambda done=phase + 1: began + 10.0 * done
                )
                journal.phase_done(phase_record(phase, row=cells, times=times))
        metrics = {"ap": sum(rows[-1]) / 2, "f_ra": 1.0, "bwt": -1.0, "fwt": None} if rows else {}
        config = configs.as_tree(self.folder.config(self.sweep, number, settings))
        stream = {"tasks": TASKS}
        cell = {"count": 10, "extra": {}}
        matrix = [[*({"value": value, **cell} for value in row), *[None] * (len(TASKS) - len(row))] for row in rows]
        matrix += [[None] * len(TASKS)] * (len(TASKS) - len(rows))
        results = {"config": config, "stream": stream, "phases": TASKS, "singles": None, "metrics": metrics}
        results |= {"matrix": matrix, "finished": len(rows) == len(TASKS)}
        run.write_json("results.json", hashed(results))

    def outcome(self) -> SweepOutcome:
        return collect(self.sweep, self.folder, len(TASKS))


def at(rate: float, seed: int) -> Settings:
    return {"train.learning_rate": rate, "seed": seed}


@pytest.fixture
def four(tmp_path: Path) -> Written:
    """Done twice, stopped, failed; and one that never got anywhere."""
    written = Written(tmp_path, over=["seed"])
    written.trial(0, at(1e-5, 0), [[50], [40, 60]])
    written.trial(1, at(1e-2, 0), [[80], [60, 80]])
    written.trial(2, at(1e-2, 1), [[70], [50, 80]])
    written.trial(3, at(1e-5, 1), [[20]])
    write_decision(written.folder.run(3), 1, continues=False)
    written.trial(4, at(1e-4, 1), [[30]])
    written.folder.write_failure(4, "the loss is nan")
    written.folder.write_settings(5, at(1e-3, 1))
    return written


def test_states_and_scores_are_read_from_the_folders(four: Written) -> None:
    outcome = four.outcome()
    states = {row.number: (row.state, row.tasks) for row in outcome.rows}
    assert states == {
        0: ("done", 2), 1: ("done", 2), 2: ("done", 2), 3: ("stopped", 1), 4: ("failed", 1), 5: ("unfinished", 0)
    }  # fmt: skip
    assert [row.number for row in outcome.rows] == [1, 2, 0, 3, 5, 4], "best first, then how far they got"
    assert outcome.row(1).curve == [[80.0], [70.0]] and outcome.row(1).scores == [70.0]
    assert outcome.row(0).train_s == 4.0 and outcome.row(0).wall_s == pytest.approx(20.0, abs=0.1)
    assert outcome.failed == {4: "the loss is nan"}


def test_the_best_is_the_best_mean_over_seeds(four: Written) -> None:
    outcome = four.outcome()
    best = next(group for group in outcome.groups if 1 in group.numbers)
    assert best.numbers == [1, 2] and best.means == [67.5] and best.spreads == [pytest.approx(3.5355, abs=1e-3)]
    assert outcome.best == 1


def test_a_mean_of_all_seeds_comes_before_one_of_fewer(tmp_path: Path) -> None:
    """The second seed of the higher rate was not finished."""
    written = Written(tmp_path, over=["seed"])
    for seed in (0, 1):
        written.trial(seed, at(1e-5, seed), [[50], [40, 60]])
    written.trial(2, at(1e-2, 0), [[80], [80, 80]])
    written.trial(3, at(1e-2, 1), [[10]])
    outcome = written.outcome()
    assert outcome.best == 0 and [group.done for group in outcome.groups] == [2, 1]
    assert "1 of 2" in str(group_table(outcome.tree()))


def test_a_trial_that_lacks_its_results_is_not_over(tmp_path: Path) -> None:
    """Its last task is in the journal, and it was ended before it wrote them; or they are of the task before."""
    written = Written(tmp_path)
    written.trial(0, at(1e-5, 0), [[50], [40, 60]])
    run = written.folder.run(0)
    assert written.folder.state(0, 2)[0] == "done"
    run.write_json("results.json", hashed({**read_results(run.address), "finished": False}))
    assert written.folder.state(0, 2)[0] == "unfinished"
    run.delete("results.json")
    assert written.folder.state(0, 2)[0] == "unfinished" and written.outcome().best is None


def test_the_best_config_starts_from_the_bank_that_its_trial_started_from() -> None:
    """What the bank's run had is taken over from there, and is not in the file."""
    started = {"stream": {"tasks": ["topic"]}, "bank": {"start": "runs/a/bank@main", "branch": "mine"}}
    sweep = configs.validate(SweepConfig, {"name": "s", "base": started, "space": {"seed": {"grid": [3]}}})
    config = configs.validate(RunConfig, {**started, "seed": 3})
    row = TrialRow(0, {"seed": 3}, "done", 1)
    best_yaml = SweepOutcome(sweep, 1, [row], [], [], 0, config).best_yaml()
    assert best_yaml is not None
    tree = configs.from_yaml(best_yaml, "best")
    assert tree["bank"] == {"start": "runs/a/bank@main"} and tree["seed"] == 3 and "method" not in tree


def test_a_trial_without_the_metrics_value_has_no_score_and_the_others_are_kept(tmp_path: Path) -> None:
    """Nothing is forgotten in trial 1, so `ap / f_ra` has no value there."""
    written = Written(tmp_path, metric="ap / f_ra")
    written.trial(0, at(1e-5, 0), [[50], [40, 60]])
    written.trial(1, at(1e-2, 0), [[80], [80, 80]])
    outcome = written.outcome()
    assert outcome.best == 0 and {row.number: row.scores for row in outcome.rows} == {0: [5.0], 1: [None]}
    assert list(outcome.unscored) == [1] and "metric 'ap / f_ra' has no value" in outcome.unscored[1]
    assert write_outcome(outcome, written.directory)


def test_trials_that_share_the_best_score_are_marked_as_equal(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.trial(0, at(1e-5, 0), [[50], [40, 50]])
    for number in (1, 2):
        written.trial(number, at(1e-2, number), [[80], [60, 80]])
    shown = str(sweep_table(written.outcome().tree()))
    assert shown.count("equal\n") == 2 and " best\n" not in shown
    assert "equal: all of these score best; best.yaml has trial 2, the first of them" in shown


def test_less_can_be_better(tmp_path: Path) -> None:
    written = Written(tmp_path, metric="f_ra", mode="min")
    written.trial(0, at(1e-5, 0), [[50], [40, 60]])
    written.trial(1, at(1e-2, 0), [[80], [60, 80]])
    outcome = written.outcome()
    assert outcome.best == 0 and [row.scores for row in outcome.rows] == [[10.0], [20.0]]


def test_the_best_config_is_the_trials_own_without_its_place(four: Written) -> None:
    best_yaml = four.outcome().best_yaml()
    assert best_yaml is not None
    config = configs.validate(RunConfig, configs.from_yaml(best_yaml, "best"))
    trial = four.folder.config(four.sweep, 1, at(1e-2, 0))
    assert config.train.learning_rate == 1e-2 and config.launch == trial.launch
    assert config.output.name is None and config.bank.dir is None and config.tracking.group is None
    assert configs.fingerprint(config, ("output", "bank", "tracking")) == configs.fingerprint(
        trial, ("output", "bank", "tracking")
    )


def test_the_front_is_pareto_optimal() -> None:
    points = {0: (70.0, 5.0), 1: (60.0, 1.0), 2: (65.0, 6.0), 3: (70.0, 5.0), 4: (50.0, 0.5)}
    rows = [TrialRow(number, {}, "done", 2, [list(point)]) for number, point in points.items()]
    assert pareto(rows, ["max", "min"]) == [0, 1, 3, 4]
    assert pareto(rows, ["max", "max"]) == [0, 2, 3]
    assert pareto([TrialRow(0, {}, "done", 2, [[1.0, None]])], ["max", "min"]) == []


def test_all_files_are_written(four: Written) -> None:
    said, files = write_outcome(four.outcome(), four.directory)
    names = {file.rpartition("/")[2] for file in files}
    assert names == {"summary.txt", "summary.csv", "best.yaml", "report.html", "parallel.png", "sensitivity.png"}
    assert "67.50 ± 3.54" in said and "failed" in said and "stopped" in said and "best" in said
    rows = list(csv.DictReader(io.StringIO(four.folder.storage.read("summary.csv").decode())))
    assert len(rows[0]) == len(four.folder.storage.read("summary.csv").decode().splitlines()[0].split(",")), (
        "no name twice"
    )
    assert [row["trial"] for row in rows] == ["2", "3", "1", "4", "6", "5"]
    assert float(rows[0]["ap"]) == 70.0 and rows[0]["train.learning_rate"] == "0.01"
    assert rows[-1]["error"] == "the loss is nan"
    assert json.loads(four.folder.storage.read("summary.json"))["best"] == 1
    assert yaml.safe_load(four.folder.storage.read("best.yaml"))["train"]["learning_rate"] == 0.01


def test_a_sweep_without_a_finished_trial_has_a_table_all_the_same(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.trial(0, at(1e-5, 0), [])
    said, files = write_outcome(written.outcome(), written.directory)
    assert "unfinished" in said and {file.rpartition("/")[2] for file in files} == {"summary.txt", "summary.csv"}


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    """Return two metrics, settings of all kinds."""
    space = {
        "train.learning_rate": {"loguniform": [1e-5, 1e-2]},
        "method": {"choice": ["lora", {"name": "lora", "r": 4}]},
        "stream.tasks": {"choice": [TASKS, TASKS[::-1]]},
    }
    written = Written(tmp_path, space=space, metric=["ap", "f_ra"], mode=["max", "min"], search="tpe", samples=9)
    kinds = ["lora", {"name": "lora", "r": 4}]
    for number in range(4):
        settings = {"train.learning_rate": 10.0 ** -(number + 2), "method": kinds[number % 2], "stream.tasks": TASKS}
        written.trial(number, settings, [[90 - number], [60 + 5 * number, 70]])
    return written.outcome().tree()


def test_pictures_of_all_kinds_of_settings(summary: dict[str, Any], tmp_path: Path) -> None:
    for draw in (parallel_figure, sensitivity_figure, pareto_figure):
        written = save_png(draw(summary), tmp_path / f"{draw.__name__}.png")
        assert written.read_bytes().startswith(b"\x89PNG") and written.stat().st_size > 5000


def test_each_method_has_a_curve_of_its_own() -> None:
    rows = [{"settings": {"method": name, "t": t}} for name in ("lora", "olora") for t in (0.1, 0.7)]
    assert kinds_of(["t", "method"], rows) == ["lora", "lora", "olora", "olora"]
    assert kinds_of(["t"], rows) is None and kinds_of(["method"], rows[:2]) is None
    panel = new_figure(3, 3).subplots()
    draw_setting(panel, [0.1, 0.7, 0.1, 0.7], [1.0, 2.0, 3.0, 4.0], kinds_of(["method"], rows))
    assert [(line.get_label(), list(line.get_ydata())) for line in panel.lines] == [("lora", [1, 2]), ("olora", [3, 4])]


def test_tables_of_all_kinds_of_settings(summary: dict[str, Any]) -> None:
    said = str(sweep_table(summary))
    assert "lora (r=4)" in said and "topic>sentiment" in said and "front" in said and "1e-05" in said
    assert len(list(csv.reader(io.StringIO(sweep_csv(summary))))) == 5
    assert "over stream.tasks" in str(group_table({**summary, "over": ["stream.tasks"]}))


@pytest.mark.parametrize(
    ("value", "shown"), [(0.1, "0.1"), (1e-5, "1e-05"), (True, "true"), (None, "-"), ([1, 2], "[1, 2]"), ("x", "x")]
)
def test_settings_in_a_cell(value: Any, shown: str) -> None:
    assert text(value) == shown


def test_a_sweep_whose_second_metric_has_no_value_in_any_trial_has_its_tables_and_no_pictures(tmp_path: Path) -> None:
    """Nothing is forgotten in both trials, so `ap / f_ra` has no value there."""
    written = Written(tmp_path, metric=["ap", "ap / f_ra"], mode=["max", "max"])
    written.trial(0, at(1e-5, 0), [[50], [50, 60]])
    written.trial(1, at(1e-2, 0), [[80], [80, 80]])
    outcome = written.outcome()
    assert outcome.best == 1 and outcome.front == []
    _, files = write_outcome(outcome, written.directory)
    assert {Path(file).name for file in files} == {"summary.txt", "summary.csv", "best.yaml", "report.html"}
