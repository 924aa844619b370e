"""Searchers and stopping rules, without a cluster: a resumed sweep proposes and decides as if it had not stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycl import config as configs
from raycl.errors import RayclError, ResumeError
from raycl.operations.sweep.definition.sweep_config import SweepConfig, plain
from raycl.operations.sweep.definition.sweep_folder import SWEEP, SweepFolder
from raycl.operations.sweep.drive import AtTaskEnds, _continued, _numbered, rule_of, run_sweep
from raycl.operations.sweep.search.searchers import Planned, TpeSearcher
from raycl.operations.sweep.trials.trial import FAILED, SCORES, TASKS, separate_key, separate_tree
from raycl.storage import Storage
from raycl.training.records.run_folder import is_stopped, read_decision, write_decision
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.stopping import HostStop, request_stop


def sweep(**changes: Any) -> SweepConfig:
    tree: dict[str, Any] = {
        "name": "s",
        "space": {
            "train.learning_rate": {"loguniform": [1e-5, 1e-1]},
            "method.r": {"choice": [2, 4, 8]},
            "train.weight_decay": {"quniform": [0, 0.5, 0.1]},
            "train.epochs": {"randint": [1, 5]},
            "method.lora_alpha": {"expr": "2 * method.r"},
        },
        "search": {"name": "tpe", "startup": 3},
        "samples": 12,
    }
    return configs.validate(SweepConfig, {**tree, **changes})


def score(settings: dict[str, Any]) -> float:
    """Best at rank 8, decay 0.2 and many epochs."""
    return float(settings["method.r"] - 10 * abs(settings["train.weight_decay"] - 0.2) + settings["train.epochs"])


def go(searcher: Any, count: int) -> list[dict[str, Any]]:
    """Return so many trials, one after another."""
    collected = []
    for number in range(count):
        proposed = searcher.suggest(f"id{number}")
        collected.append(proposed["settings"])
        result = {TASKS: 1, f"{SCORES}0": score(proposed["settings"])}
        searcher.on_trial_result(f"id{number}", result)
        searcher.on_trial_complete(f"id{number}", result)
    return collected


def test_planned_trials_are_handed_out_once_and_written_down(tmp_path: Path) -> None:
    folder = SweepFolder.of(sweep(), str(tmp_path))
    folder.write_failure(3, "before")
    searcher = Planned(sweep(), folder, {1: {"seed": 5}, 3: {"seed": 6}})
    for number, seed in ((1, 5), (3, 6)):
        result = searcher.suggest(f"id{number}")
        assert isinstance(result, dict) and (result["number"], result["settings"]) == (number, {"seed": seed})
        run = configs.validate(RunConfig, json.loads(result["run"]))
        assert (
            run.seed == seed and run.output.name == f"s-000{number}" and str(run.output.dir).startswith(str(tmp_path))
        )
    assert searcher.suggest("c") == "FINISHED"
    assert folder.settings() == {1: {"seed": 5}, 3: {"seed": 6}} and folder.error(3) is None


def test_a_sweep_continues_with_settings_that_an_older_version_did_not_write(tmp_path: Path) -> None:
    """They have their defaults; a value that was written counts as before."""
    result = sweep()
    folder = SweepFolder(Storage.at(tmp_path), "s")
    written = plain(configs.as_tree(result))
    del written["retries"], written["share"]
    folder.storage.write(SWEEP, configs.tree_to_yaml(written).encode())
    _continued(result, folder, resume=True)
    with pytest.raises(ResumeError, match="share was True, now False"):
        _continued(sweep(share=False), folder, resume=True)


def test_trials_keep_their_numbers_with_more_samples_and_in_another_order_of_the_file(tmp_path: Path) -> None:
    """A scheduler shuffles them: with another number of trials their order is another one."""
    draws: dict[str, Any] = {"train.learning_rate": {"loguniform": [1e-5, 1e-1]}, "method.r": {"choice": [2, 4, 8]}}
    planned = {"search": {"name": "random"}, "scheduler": "asha", "space": draws}
    first = sweep(**planned, samples=4)
    folder, recorded = SweepFolder.of(first, str(tmp_path)), dict(enumerate(first.trials()))
    folder.storage.write(SWEEP, configs.to_yaml(first).encode())
    swapped = sweep(**{**planned, "space": dict(reversed(draws.items()))}, samples=6)
    more = _numbered(_continued(swapped, folder, resume=True).trials(), recorded)
    assert {number: more[number] for number in recorded} == recorded
    assert sorted(more) == list(range(6)) and len({str(sorted(trial.items())) for trial in more.values()}) == 6
    twice = [{"seed": 1}, {"seed": 2}, {"seed": 1}]
    assert _numbered(twice, {2: {"seed": 1}}) == {2: {"seed": 1}, 0: {"seed": 2}, 1: {"seed": 1}}


def test_a_sweep_that_cannot_run_takes_no_folder(tmp_path: Path) -> None:
    """The mended file starts under the same name."""
    with pytest.raises(RayclError, match="nowhere"):
        run_sweep(sweep(base={"stream": {"tasks": [str(tmp_path / "nowhere")]}}), str(tmp_path))
    assert not (tmp_path / "s" / SWEEP).exists()


def test_nothing_is_proposed_after_a_request_to_stop(tmp_path: Path) -> None:
    folder = SweepFolder.of(sweep(), str(tmp_path))
    searcher = Planned(sweep(), folder, {1: {"seed": 5}, 3: {"seed": 6}})
    searcher.stop = HostStop(folder.storage.address, "driver")
    assert isinstance(searcher.suggest("a"), dict)
    request_stop(folder.storage, "driver", "SIGTERM")
    assert searcher.suggest("b") == "FINISHED"
    assert list(folder.settings()) == [1]


def test_tpe_keeps_to_the_space_repeats_itself_and_learns(tmp_path: Path) -> None:
    result = go(TpeSearcher(sweep(), SweepFolder.of(sweep(), str(tmp_path / "a")), {}), 12)
    assert result == go(TpeSearcher(sweep(), SweepFolder.of(sweep(), str(tmp_path / "b")), {}), 12)
    for settings in result:
        assert settings["method.lora_alpha"] == 2 * settings["method.r"]
        assert settings["train.weight_decay"] in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
        sweep().config(settings)
    scores = [score(settings) for settings in result]
    assert sum(scores[-4:]) > sum(scores[:4])


def test_tpe_ends_after_its_samples(tmp_path: Path) -> None:
    searcher = TpeSearcher(sweep(samples=2), SweepFolder.of(sweep(), str(tmp_path)), {})
    go(searcher, 2)
    assert searcher.suggest("last") == "FINISHED"


def test_tpe_resumes_with_its_results(tmp_path: Path) -> None:
    """Unfinished trials come first; finished ones count; numbers continue."""
    folder = SweepFolder.of(sweep(), str(tmp_path))
    before = go(TpeSearcher(sweep(), folder, {}), 4)
    again = TpeSearcher(sweep(), folder, {3: before[3]})
    for settings in before[:3]:
        again.tell_finished(settings, [[score(settings)]], stopped=False)
    assert [trial.value for trial in again.study.trials] == [score(settings) for settings in before[:3]]
    unfinished, fresh = again.suggest("x"), again.suggest("y")
    assert isinstance(unfinished, dict) and (unfinished["number"], unfinished["settings"]) == (3, before[3])
    assert isinstance(fresh, dict) and fresh["number"] == 4 and fresh["settings"] not in before


def test_tpe_draws_nothing_again_that_it_has_drawn(tmp_path: Path) -> None:
    """A search that continues among its random first trials proposes what it would have without a stop."""
    random = sweep(search={"name": "tpe"})
    whole = go(TpeSearcher(random, SweepFolder.of(random, str(tmp_path / "whole")), {}), 8)
    folder = SweepFolder.of(random, str(tmp_path / "stopped"))
    before = go(TpeSearcher(random, folder, {}), 4)
    again = TpeSearcher(random, folder, {})
    for settings in before:
        again.tell_finished(settings, [[score(settings)]], stopped=False)
    assert [*before, *go(again, 4)] == whole and len({str(settings) for settings in whole}) == 8


def test_tpe_receives_stopped_and_failed_trials(tmp_path: Path) -> None:
    folder = SweepFolder.of(sweep(), str(tmp_path))
    searcher = TpeSearcher(sweep(), folder, {})
    for name in ("stopped", "failed", "died"):
        searcher.suggest(name)
    write_decision(folder.run(0), 1, continues=False)
    searcher.on_trial_result("stopped", {TASKS: 1, f"{SCORES}0": 1.0})
    searcher.on_trial_complete("stopped", {TASKS: 1, f"{SCORES}0": 1.0})
    searcher.on_trial_complete("failed", {FAILED: "no"})
    searcher.on_trial_complete("died", error=True)
    assert [trial.state.name for trial in searcher.study.trials] == ["PRUNED", "FAIL", "FAIL"]


def test_tpe_with_two_metrics(tmp_path: Path) -> None:
    two = sweep(metric=["ap", "f_ra"], mode=["max", "min"])
    searcher = TpeSearcher(two, SweepFolder.of(two, str(tmp_path)), {})
    for number in range(8):
        outcome = searcher.suggest(str(number))
        assert isinstance(outcome, dict)
        result = {TASKS: 1, f"{SCORES}0": score(outcome["settings"]), f"{SCORES}1": float(number)}
        searcher.on_trial_complete(str(number), result)
    assert 0 in {trial.number for trial in searcher.study.best_trials}


def conditional(**changes: Any) -> SweepConfig:
    """SAPT with and without reflection: its weight acts in half of the trials."""
    space = {"method.arm.weight": {"uniform": [0.1, 2.0]}, "method.ablation": {"choice": ["none", "arm"]}}
    return sweep(base={"method": "sapt"}, space=space, samples=10, **changes)


def finish(searcher: TpeSearcher, name: str, value: float) -> None:
    """The only row of a trial, and its end."""
    result = {TASKS: 1, f"{SCORES}0": value}
    searcher.on_trial_result(name, result)
    searcher.on_trial_complete(name, result)


def open_trials(searcher: TpeSearcher) -> dict[str, dict[str, Any]]:
    """Return all trials, none of which ends: by Tune's id."""
    trials: dict[str, dict[str, Any]] = {}
    while (proposed := searcher.suggest(f"id{len(trials)}")) != "FINISHED":
        assert isinstance(proposed, dict)
        trials[f"id{len(trials)}"] = proposed
    return trials


def test_tpe_runs_trials_that_differ_in_unused_settings_once(tmp_path: Path) -> None:
    folder = SweepFolder.of(conditional(), str(tmp_path))
    searcher = TpeSearcher(conditional(), folder, {})
    collected: dict[int, dict[str, Any]] = {}
    while (proposed := searcher.suggest(f"id{len(collected)}")) != "FINISHED":
        assert isinstance(proposed, dict)
        settings, name = proposed["settings"], f"id{len(collected)}"
        collected[proposed["number"]] = settings
        assert ("method.arm.weight" in settings) == (settings["method.ablation"] == "none")
        finish(searcher, name, 5.0 if settings["method.ablation"] == "arm" else settings["method.arm.weight"])
    assert list(collected.values()).count({"method.ablation": "arm"}) == 1 and 2 < len(collected) < 10
    assert folder.settings() == collected
    trials = searcher.study.trials
    assert len(trials) == 10 and {trial.state.name for trial in trials} == {"COMPLETE"}
    without = [trial for trial in trials if trial.params["method.ablation"] == 1]
    assert len(without) == 11 - len(collected)
    assert [trial.value for trial in without] == [5.0] * len(without), "each has the result of the one that ran"
    assert [trial.intermediate_values for trial in without] == [{1: 5.0}] * len(without)


def test_tpe_shares_the_result_of_an_equal_trial_when_it_ends(tmp_path: Path) -> None:
    searcher = TpeSearcher(conditional(), SweepFolder.of(conditional(), str(tmp_path)), {})
    running = open_trials(searcher)
    alike = [trial for trial in searcher.study.trials if trial.params["method.ablation"] == 1]
    assert len(running) == 11 - len(alike) and {trial.state.name for trial in alike} == {"RUNNING"}
    name = next(key for key, item in running.items() if item["settings"] == {"method.ablation": "arm"})
    searcher.on_trial_complete(name, {FAILED: "no"})
    numbers = [trial.number for trial in alike]
    assert [searcher.study.trials[number].state.name for number in numbers] == ["FAIL"] * len(numbers)


def test_a_resumed_tpe_sweep_keeps_equal_trials(tmp_path: Path) -> None:
    """An equal trial is kept whether the one that ran is over or has to run again; nothing goes beyond the samples."""
    folder = SweepFolder.of(conditional(), str(tmp_path))
    running = open_trials(TpeSearcher(conditional(), folder, {}))
    settings = {setting["number"]: setting["settings"] for setting in running.values()}
    alike = next(number for number, setting in settings.items() if setting == {"method.ablation": "arm"})
    finished = TpeSearcher(conditional(), folder, {})
    for setting in settings.values():
        finished.tell_finished(setting, [[3.0]], stopped=False)
    assert finished.suggest("more") == "FINISHED"
    assert [trial.value for trial in finished.study.trials] == [3.0] * 10
    again = TpeSearcher(conditional(), folder, {alike: settings[alike]})
    for number in settings.keys() - {alike}:
        again.tell_finished(settings[number], [[3.0]], stopped=False)
    proposed = again.suggest("again")
    assert isinstance(proposed, dict) and proposed["settings"] == {"method.ablation": "arm"}
    assert again.suggest("more") == "FINISHED"
    finish(again, "again", 4.0)
    values = sorted(trial.value for trial in again.study.trials)
    assert values == [3.0] * (len(settings) - 1) + [4.0] * (11 - len(settings))


def decisions(scheduler: AtTaskEnds, curves: dict[int, list[float]]) -> dict[int, int]:
    """Return trials in turn, each until it is stopped: tasks that each learned."""
    learned = {}
    for number, curve in curves.items():
        trial: Any = type("T", (), {"trial_id": f"t{number}", "config": {"number": number}})()
        scheduler.on_trial_add(None, trial)
        for tasks, value in enumerate(curve, 1):
            result = {TASKS: tasks, f"{SCORES}0": value}
            assert scheduler.on_trial_result(None, trial, result) == "CONTINUE", "the run itself stops, not Tune"
            learned[number] = tasks
            if is_stopped(scheduler.folder.run(number), tasks):
                break
        scheduler.on_trial_complete(None, trial, result)
    return learned


CURVES = {number: [float(value)] * 4 for number, value in enumerate((50, 40, 60, 30, 70, 20))}


@pytest.mark.parametrize(
    ("chosen", "mode", "expected"),
    [
        ({"name": "none"}, "max", [4, 4, 4, 4, 4, 4]),
        ({"name": "asha", "reduction": 2}, "max", [4, 1, 4, 1, 4, 1]),
        ({"name": "asha", "reduction": 2, "grace": 2}, "max", [4, 2, 4, 2, 4, 2]),
        ({"name": "asha", "reduction": 2}, "min", [4, 4, 1, 4, 1, 4]),
        ({"name": "median", "least": 2}, "max", [4, 4, 4, 1, 4, 1]),
    ],
)
def test_rules_stop_between_tasks(tmp_path: Path, chosen: dict[str, Any], mode: str, expected: list[int]) -> None:
    settings = sweep(scheduler=chosen, mode=mode)
    folder = SweepFolder.of(settings, str(tmp_path))
    scheduler = AtTaskEnds(folder, rule_of(settings, 4), 4, 6, 0)
    assert list(decisions(scheduler, CURVES).values()) == expected
    told = read_decision(folder.run(0), 4)
    assert told is (None if chosen["name"] == "none" else True), "the last task is never stopped"


@pytest.mark.parametrize("chosen", [{"name": "asha", "reduction": 2}, {"name": "median", "least": 2}])
def test_a_resumed_sweep_decides_as_an_uninterrupted_one(tmp_path: Path, chosen: dict[str, Any]) -> None:
    settings = sweep(scheduler=chosen)
    whole = decisions(AtTaskEnds(SweepFolder.of(settings, str(tmp_path / "a")), rule_of(settings, 4), 4, 6, 0), CURVES)
    resumed = AtTaskEnds(SweepFolder.of(settings, str(tmp_path / "b")), rule_of(settings, 4), 4, 6, 0)
    for number in range(3):
        resumed.replay(number, CURVES[number][: whole[number]])
    later = decisions(resumed, {number: CURVES[number] for number in range(3, 6)})
    assert later == {number: whole[number] for number in range(3, 6)}


def test_missing_metrics_stop_no_trial(tmp_path: Path) -> None:
    settings = sweep(scheduler="asha")
    scheduler = AtTaskEnds(SweepFolder.of(settings, str(tmp_path)), rule_of(settings, 4), 4, 1, 0)
    trial: Any = type("T", (), {"trial_id": "t", "config": {"number": 0}})()
    scheduler.on_trial_add(None, trial)
    scheduler.on_trial_result(None, trial, {TASKS: 1})
    assert read_decision(scheduler.folder.run(0), 1) is True


def test_a_stop_decision_is_kept(tmp_path: Path) -> None:
    """The trial's process died after it, and what it has learned is reported again."""
    settings = sweep(scheduler={"name": "asha", "reduction": 2})
    folder = SweepFolder.of(settings, str(tmp_path))
    scheduler = AtTaskEnds(folder, rule_of(settings, 4), 4, 2, 0)
    write_decision(folder.run(1), 1, continues=True)
    assert decisions(scheduler, {0: [50.0] * 4, 1: [40.0] * 4}) == {0: 4, 1: 2}


def test_a_trial_that_ends_because_the_sweep_is_stopped_is_not_over(tmp_path: Path) -> None:
    folder = SweepFolder.of(sweep(), str(tmp_path))
    scheduler = AtTaskEnds(folder, None, 4, 2, 0)
    scheduler.stop = HostStop(folder.storage.address, "driver")
    trials: list[Any] = [type("T", (), {"trial_id": str(n), "config": {"number": n}})() for n in range(2)]
    for trial in trials:
        scheduler.on_trial_add(None, trial)
    scheduler.on_trial_complete(None, trials[0], {})
    request_stop(folder.storage, "driver", "Ctrl-C")
    scheduler.on_trial_complete(None, trials[1], {})
    assert (scheduler.over, scheduler.running) == (1, set())


def run_config(**sections: Any) -> RunConfig:
    return configs.validate(RunConfig, {"stream": {"tasks": ["topic", "intent"]}, **sections})


@pytest.mark.parametrize(
    ("sections", "same"),
    [
        ({"stream": {"tasks": ["intent", "topic"]}}, True),
        ({"output": {"name": "x"}, "bank": {"dir": "b"}}, True),
        ({"train": {"learning_rate": 0.5}}, False),
        ({"method": {"name": "lora", "r": 2}}, False),
        ({"modifiers": ["migu"]}, False),
        ({"seed": 7}, False),
    ],
)
def test_tasks_are_trained_alone_once_for_what_it_depends_on(sections: dict[str, Any], same: bool) -> None:
    keys = [separate_key(separate_tree(config)) for config in (run_config(), run_config(**sections))]
    assert (keys[0] == keys[1]) is same
    assert separate_tree(run_config(**sections))["stream"]["schedule"] == "separate"


def test_alone_a_wrapper_is_its_learner() -> None:
    learner = {"name": "lora", "r": 2}
    tree = separate_tree(run_config(method={"name": "replay", "learner": learner}))
    assert tree["method"]["r"] == 2
    assert separate_key(tree) == separate_key(separate_tree(run_config(method=learner)))
