"""Sweep files: every wrong path and value is an error before anything starts; what a file plans is always the same."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from raycl import config as configs
from raycl.errors import ConfigError
from raycl.operations.sweep.definition.sweep_config import Draw, SweepConfig, check_space, load_sweep
from raycl.operations.sweep.definition.sweep_folder import SweepFolder

REPO = Path(__file__).resolve().parents[4]
READY = sorted((REPO / "sweeps").glob("*.yaml"))


def sweep(**changes: Any) -> SweepConfig:
    """Return a small sweep with changes."""
    tree = {
        "name": "s",
        "base": {"method": "lora", "modifiers": ["migu"], "train": {"epochs": 2}},
        "space": {"modifiers.migu.threshold": {"grid": [0.0, 0.5]}},
        "search": "grid",
    }
    result = configs.validate(SweepConfig, {**tree, **changes})
    check_space(result)
    return result


def space(**draws: Any) -> dict[str, Any]:
    """Keyword `train__epochs` stands for the path `train.epochs`."""
    return {"space": {path.replace("__", "."): draw for path, draw in draws.items()}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            space(modifiers__migu__treshold={"grid": [0.5]}),
            r"did you mean 'modifiers.migu.threshold'",
        ),
        (space(train__batch_sise={"grid": [8]}), "did you mean 'train.batch_size'"),
        (space(method={"grid": ["lora", "olra"]}), r"space\.method = 'olra'.*did you mean 'olora'"),
        (space(method__r={"grid": [4, "many"]}), r"space\.method\.r = 'many'.*valid integer"),
        (space(modifiers__migu__threshold={"grid": [0.1, 1.5]}), r"threshold = 1\.5.*less than or equal to 1"),
        (space(train__epochs={"uniform": [1, 3.5]}) | {"search": "random"}, r"space\.train\.epochs = 3\.5.*integer"),
        (space(train__epochs={"grid": [1], "choice": [2]}), "exactly one of"),
        (space(train__learning_rate={"loguniform": [0, 1]}) | {"search": "random"}, "low < high"),
        (space(train__weight_decay={"quniform": [0, 1, 0.3]}) | {"search": "random"}, "whole steps"),
        (space(train__learning_rate={"uniform": [0.1, 0.2]}), "search is grid, but 'train.learning_rate' is a range"),
        (space(train__epochs={"expr": "train.epoch + 1"}), "names 'train.epoch', which does not exist"),
        (space(seed={"expr": "open('x')"}), "not allowed"),
        (
            space(seed={"expr": "train.epochs"}, train__epochs={"expr": "seed"}),
            "seed reads .*: expected expressions in",
        ),
        ({"metric": "app"}, "metric 'app' names 'app'"),
        ({"metric": ["ap", "f_ra"]}, "mode has 1 entries and metric 2"),
        ({"metric": ["ap", "f_ra"], "mode": ["max", "min"], "scheduler": "asha"}, "compares one metric"),
        ({"metric": "fwt"}, "set singles=true"),
        ({"over": ["seed"]}, r"over names 'seed': expected some of modifiers\.migu\.threshold"),
        ({"base": {"train": {"epoch": 1}}}, "did you mean 'train.epochs'"),
        ({"samples": 0}, "samples"),
        ({"serach": "grid"}, "did you mean 'search'"),
        ({"name": "a/b"}, "name"),
    ],
)
def test_errors_are_reported_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep(**changes)


def test_a_grid_is_every_combination_and_settings_follow() -> None:
    result = sweep(
        **space(
            method={"grid": ["finetune", {"name": "lora", "r": 4}]},
            seed={"grid": [1, 2]},
            train__learning_rate={"expr": "1e-4 if method == 'finetune' else 1e-3"},
        )
    )
    trials = result.trials()
    assert [trial["seed"] for trial in trials] == [1, 2, 1, 2]
    assert [trial["train.learning_rate"] for trial in trials] == [1e-4, 1e-4, 1e-3, 1e-3]
    config = result.config(trials[2])
    assert config.method.name == "lora" and config.method.r == 4 and config.train.learning_rate == 1e-3
    assert config.launch.workers == 1 and config.launch.cpus_per_worker == 1


def test_an_expression_is_computed_after_those_that_it_reads() -> None:
    """They may come after it in the file."""
    draws = space(
        train__learning_rate={"expr": "method.lora_alpha * 1e-5"},
        method__lora_alpha={"expr": "2 * method.r"},
        method__r={"grid": [4, 16]},
    )
    rates = [(trial["method.lora_alpha"], trial["train.learning_rate"]) for trial in sweep(**draws).trials()]
    assert rates == [(8, pytest.approx(8e-5)), (32, pytest.approx(32e-5))]


def test_random_trials_repeat_the_grid_and_are_functions_of_the_file() -> None:
    changes = space(
        seed={"grid": [0, 1]},
        train__learning_rate={"loguniform": [1e-5, 1e-1]},
        train__weight_decay={"quniform": [0, 0.5, 0.1]},
        method__r={"randint": [1, 3]},
        train__epochs={"choice": [1, 5]},
    )
    trials = sweep(**changes, search="random", samples=40).trials()
    assert len(trials) == 80 and [trial["seed"] for trial in trials[:4]] == [0, 1, 0, 1]
    assert trials[:20] == sweep(**changes, search="random", samples=10).trials()
    assert trials != sweep(**changes, search={"name": "random", "seed": 1}, samples=40).trials()
    logs = [math.log10(trial["train.learning_rate"]) for trial in trials]
    assert min(logs) >= -5 and max(logs) <= -1 and sum(value < -3 for value in logs) in range(25, 56)
    assert {trial["train.weight_decay"] for trial in trials} == {0.0, 0.1, 0.2, 0.3, 0.4, 0.5}
    assert {trial["method.r"] for trial in trials} == {1, 2, 3}
    assert {trial["train.epochs"] for trial in trials} == {1, 5}


def test_a_scheduler_gets_a_shuffled_grid() -> None:
    """ASHA over trials that only get better would stop none."""
    values = [round(0.05 * number, 2) for number in range(20)]
    changes = space(modifiers__migu__threshold={"grid": values})
    result = [trial["modifiers.migu.threshold"] for trial in sweep(**changes, scheduler="asha").trials()]
    assert sorted(result) == values != result
    assert [trial["modifiers.migu.threshold"] for trial in sweep(**changes).trials()] == values
    assert sweep(**changes, scheduler="asha").trials() == sweep(**changes, scheduler="median").trials()


def test_a_node_is_set_before_what_is_in_it() -> None:
    result = sweep(**space(method__r={"grid": [3]}, method={"grid": ["inclora"]}))
    assert result.config(result.trials()[0]).method.model_dump()["r"] == 3


def test_overrides_reach_into_the_space(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("name: s\nspace:\n  train.epochs: {grid: [1]}\nsearch: grid\n")
    sweep = load_sweep(
        str(file), ["space.train.epochs={grid: [2, 3]}", "space.seed={grid: [7]}", "base.train.epochs=9"]
    )
    assert sweep.trials() == [{"train.epochs": 2, "seed": 7}, {"train.epochs": 3, "seed": 7}]
    assert load_sweep(str(file), ["space.seed={grid: [7]}", "space.train.epochs=null"]).trials() == [{"seed": 7}]
    assert load_sweep(str(file), ["space.train.epochs.grid=[4]"]).trials() == [{"train.epochs": 4}]


@pytest.mark.parametrize("draw", [Draw(uniform=(0, 1)), Draw(grid=(1, 2)), Draw(expr="1 + 1")])
def test_the_kind_of_a_draw_follows_from_its_keys(draw: Draw) -> None:
    assert getattr(draw, draw.kind) is not None
    assert draw.corners == {"uniform": (0, 1), "grid": (1, 2), "expr": ()}[draw.kind]


@pytest.mark.parametrize("path", READY, ids=lambda path: path.name)
def test_ready_sweeps_are_valid_and_hold_no_unused_settings(path: Path) -> None:
    sweep = load_sweep(str(path))
    assert sweep.space and sweep.name == path.stem.replace("_", "-")
    assert path.read_text().startswith("# "), "begins with its purpose"
    if sweep.plans:
        trials = sweep.trials()
        assert len({str(trial) for trial in trials}) == len(trials) > 1
        stated = {int(count) for count in re.findall(r"^#.*\b(\d+) trials\b", path.read_text(), re.MULTILINE)}
        assert stated <= {len(trials)}, "its head counts other trials than it has"


def test_there_are_ready_sweeps() -> None:
    assert {path.stem for path in READY} >= {
        "migu_threshold",
        "slm_groups_topk",
        "learning_rate_rank",
        "olora_lambdas",
        "sapt_lambda",
        "task_orders",
        "seeds",
        "pareto",
    }


def test_trials_of_a_sweep_are_one_group_in_the_tracker(tmp_path: Path) -> None:
    result = sweep(**space(seed={"grid": [0, 1]}))
    folder = SweepFolder.of(result, str(tmp_path))
    trackings = [folder.config(result, number, settings).tracking for number, settings in enumerate(result.trials())]
    assert [tracking.group for tracking in trackings] == [result.name, result.name]
    own = sweep(**space(seed={"grid": [0]}), base={"tracking": {"group": "mine"}})
    assert folder.config(own, 0, {"seed": 0}).tracking.group == "mine"


@pytest.mark.parametrize(
    ("changes", "in_process"),
    [
        ({}, True),
        ({"resources": {"isolated": True}}, False),
        ({"resources": {"workers": 2}}, False),
        ({"base": {"engine": "deepspeed"}, **space(seed={"grid": [1]})}, False),
        ({"base": {"engine": {"name": "deepspeed", "zero_stage": 2}}, **space(seed={"grid": [1]})}, False),
        (space(engine={"grid": ["torch", "deepspeed"]}), False),
    ],
)
def test_only_runs_without_process_state_share_a_process(changes: dict[str, Any], in_process: bool) -> None:
    assert sweep(**changes).in_process is in_process
