"""Tests that a sweep computes `separate` once per settings, and that every trial that compares with it accepts it.

In this process; that workers make it is the sweep's business (tests/ray/test_sweep.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import KINDS, damaged
from tiny import Lab, run, trace

from raycl import config as configs
from raycl.errors import ConfigError, RunError
from raycl.launch import driver
from raycl.metrics.run_results import read_results
from raycl.operations.sweep.trials import trial
from raycl.operations.sweep.trials.trial import FOLDER, separate_key, separate_tree, singles_of, write_pointer
from raycl.storage import Storage
from raycl.storage.records import hashed, seal
from raycl.training.setup.checks import check, read_singles
from raycl.training.setup.run_config import RunConfig


@pytest.mark.parametrize(
    ("method", "modifiers"),
    [
        ("lora", []),
        ("lora", [{"name": "migu", "layers": ["attention", "ffn"], "threshold": 0.5, "skip_first_task": False}]),
        ({"name": "replay", "learner": "lora"}, []),
        ("sapt", []),
    ],
    ids=["lora", "migu", "replay", "sapt"],
)
def test_single_task_scores_are_reused(lab: Lab, tmp_path: Path, method: Any, modifiers: list[Any]) -> None:
    trial = lab.config("bert", method, modifiers=modifiers)
    tree = separate_tree(trial)
    root = Storage.at(tmp_path / FOLDER)
    run(configs.validate(RunConfig, tree), root.sub("alone"))
    write_pointer(root, separate_key(tree), "alone")

    singles = read_singles(singles_of(trial, str(tmp_path)))
    assert singles is not None and set(singles) == {str(task["name"]) for task in lab.tasks}
    orders = configs.as_tree(trial)
    orders["stream"]["tasks"] = orders["stream"]["tasks"][::-1]
    if not modifiers:
        assert read_singles(singles_of(configs.validate(RunConfig, orders), str(tmp_path))) == singles


def test_a_task_alone_needs_nothing_that_a_router_chooses(lab: Lab) -> None:
    """A trial may be evaluated by the text alone, and find texts of no task."""
    evaluation = {"instruction": "chosen", "unknown": "refuse", "false_alarms": 0.3}
    stream = {"dev_fraction": 0.3, "prompt": "chat", "max_source_tokens": 60}
    trial = lab.config("llama", "sapt", backbone={"chat_template": "chatml"}, stream=stream, eval=evaluation)
    check(trial)
    check(configs.validate(RunConfig, separate_tree(trial)))


@pytest.mark.parametrize("kind", [*KINDS, "newer"])
def test_a_damaged_pointer_is_written_again(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """One of other settings would give other trials' scores, and so another FWT."""
    trained: list[Any] = []
    monkeypatch.setattr(trial, "prepare", lambda config: config)
    monkeypatch.setattr(driver, "train", lambda config, options: trained.append(config.output.name))
    trials = [lab.config("bert", "lora", seed=seed) for seed in range(2)]
    runs = [singles_of(trial, str(tmp_path)).eval.singles for trial in trials]
    root = Storage.at(tmp_path / FOLDER)
    path, other = (Path(root.path(f"{separate_key(separate_tree(trial))}.json")) for trial in trials)
    whole = path.read_bytes()
    newer = seal({**json.loads(whole)["record"], "format": 99})
    bad = newer if kind == "newer" else damaged(whole, kind, other.read_bytes())
    path.unlink()
    if bad is not None:
        path.write_bytes(bad)
    assert singles_of(trials[0], str(tmp_path)).eval.singles == runs[0] != runs[1]
    assert len(trained) == 3 and path.read_bytes() == whole and len(caplog.messages) == (kind != "gone")
    assert singles_of(trials[0], str(tmp_path)).eval.singles == runs[0] and len(trained) == 3


@pytest.fixture(scope="module")
def alone(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Storage]:
    """Return the single-task run of a method with its own settings."""

    @functools.cache
    def made(method: str) -> Storage:
        storage = Storage.at(tmp_path_factory.mktemp("alone"))
        run(configs.validate(RunConfig, separate_tree(lab.config("bert", method))), storage)
        return storage

    return made


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sapt", "ablation": "arm"},
        {"name": "sapt", "ablation": "replay"},
        {"name": "sapt", "ablation": "alignment"},
        {"name": "sapt", "ablation": "shared_attention"},
        {"name": "sapt", "attention": {"standardize": True, "width": 7}, "arm": {"fraction": 0.5, "weight": 3.0}},
        {"name": "olora", "lambda_1": 5.0},
        {"name": "inflora", "threshold": 0.5, "threshold_tasks": 2},
    ],
    ids=["arm", "replay", "alignment", "shared_attention", "attention", "overlap", "subspace"],
)
def test_settings_that_do_not_affect_single_tasks_are_not_compared(
    lab: Lab, alone: Callable[[str], Storage], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Rightly so: the very same scores and losses come of them."""
    method, own = settings["name"], alone(settings["name"])
    trial = lab.config("bert", settings)
    plain, tree = (separate_tree(item) for item in (lab.config("bert", method), trial))
    assert separate_key(plain) == separate_key(tree)
    other = Storage.at(tmp_path)
    run(configs.validate(RunConfig, tree), other)
    assert trace(own) == trace(other)
    scores = [
        read_singles(trial.model_copy(update={"eval": trial.eval.model_copy(update={"singles": storage.address})}))
        for storage in (own, other)
    ]
    assert scores[0] is not None and scores[0] == scores[1]


def test_a_task_alone_begins_with_the_backbone(lab: Lab) -> None:
    """Even where the trial starts from a snapshot, whose adapters know other tasks."""
    trial = lab.config("bert", "lora", bank={"start": "runs/a/bank@main", "revise": "colour"})
    bank = separate_tree(trial)["bank"]
    assert bank["start"] is None and bank["revise"] is None


def test_a_run_of_tasks_alone_that_is_not_finished_is_no_reference(
    lab: Lab, alone: Callable[[str], Storage], tmp_path: Path
) -> None:
    whole = read_results(alone("sapt").address)
    rows = [whole["matrix"][0], *[[None] * len(row) for row in whole["matrix"][1:]]]
    Storage.at(tmp_path).write_json("results.json", hashed({**whole, "finished": False, "matrix": rows}))
    with pytest.raises(RunError, match="has learned 1 of 2 phases: let it finish first"):
        read_singles(lab.config("bert", "sapt", eval={"singles": str(tmp_path)}))


def test_settings_that_affect_single_tasks_are_compared(lab: Lab, alone: Callable[[str], Storage]) -> None:
    trial = lab.config("bert", {"name": "sapt", "r": 3}, eval={"singles": alone("sapt").address})
    with pytest.raises(ConfigError, match=r"is another setting; it differs in method\.r: "):
        read_singles(trial)
