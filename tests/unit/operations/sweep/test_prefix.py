"""Tests of which runs are the same up to some task: keys agree only where nothing that acts until then differs."""

from __future__ import annotations

from typing import Any

import pytest

from raycl import config as configs
from raycl.methods.migu.migu import MiguConfig
from raycl.methods.registry import METHODS, MODIFIERS, method_class, modifier_class
from raycl.operations.sweep.trials.prefix import fork_records, prefix_keys, shared_keys
from raycl.training.setup.run_config import RunConfig

TASKS = ["topic", "sentiment", "intent"]


def keys(tasks: list[str] = TASKS, **sections: Any) -> list[str]:
    tree = {"stream": {"tasks": tasks}, **sections}
    return prefix_keys(configs.validate(RunConfig, tree), tasks)


def agree(item: list[str], other: list[str]) -> int:
    """Return the number of phases that two runs share; keys never agree again behind the first difference."""
    same = [a == b for a, b in zip(item, other, strict=True)]
    assert same == sorted(same, reverse=True)
    return sum(same)


MIGU = {"name": "migu"}


@pytest.mark.parametrize(
    ("first", "other", "phases"),
    [
        ({}, {}, 2),
        ({"seed": 1}, {"seed": 2}, 0),
        ({"train": {"learning_rate": 0.1}}, {"train": {"learning_rate": 0.2}}, 0),
        ({"train": {"epochs_by_task": {"intent": 5}}}, {}, 2),
        ({"train": {"epochs_by_task": {"sentiment": 5}}}, {}, 1),
        ({"train": {"epochs_by_task": {"topic": 5, "sentiment": 5}}}, {"train": {"epochs": 5}}, 2),
        ({"train": {"epochs": 5}}, {}, 0),
        ({"train": {"epochs": 3}}, {"train": {"epochs": "auto"}}, 0),
        ({"train": {"learning_rate_by_task": {"intent": 0.5}}}, {}, 2),
        ({"train": {"learning_rate_by_task": {"sentiment": 0.5}}}, {}, 1),
        ({"train": {"learning_rate_by_task": {"topic": 0.5}}}, {}, 0),
        ({"train": {"learning_rate_by_task": {"topic": 0.5, "sentiment": 0.5}}}, {"train": {"learning_rate": 0.5}}, 2),
        ({"output": {"name": "x"}, "tracking": {"group": "g"}, "bank": {"dir": "b"}}, {}, 2),
        ({"launch": {"workers": 2}}, {}, 0),
        ({"launch": {"cpus_per_worker": 2}}, {}, 0),
        ({"eval": {"split": "dev"}}, {}, 0),
        ({"eval": {"singles": "/x"}}, {}, 2),
        ({"engine": "deepspeed"}, {}, 0),
        ({"modifiers": [MIGU | {"threshold": 0.1}]}, {"modifiers": [MIGU | {"threshold": 0.9}]}, 1),
        (
            {"modifiers": [MIGU | {"threshold": 0.1, "skip_first_task": False}]},
            {"modifiers": [MIGU | {"threshold": 0.9, "skip_first_task": False}]},
            0,
        ),
        ({"modifiers": [MIGU]}, {"modifiers": [MIGU | {"skip_first_task": True}]}, 2),
        ({"modifiers": [MIGU]}, {"modifiers": [MIGU | {"layers": ["ffn"]}]}, 0),
        ({"modifiers": [MIGU]}, {}, 0),
        ({"method": {"name": "olora", "lambda_1": 0.1}}, {"method": {"name": "olora", "lambda_1": 2}}, 1),
        ({"method": {"name": "olora", "lambda_2": 0.1}}, {"method": {"name": "olora"}}, 0),
        (
            {"method": {"name": "olora", "lambda_2_by_task": {"sentiment": 1}}},
            {"method": {"name": "olora"}},
            1,
        ),
        ({"method": "olora"}, {"method": "inclora"}, 0),
        ({"method": {"name": "sapt", "arm": {"weight": 0.1, "batch": 4}}}, {"method": "sapt"}, 1),
        ({"method": {"name": "sapt", "arm": {"fraction": 0.1}}}, {"method": "sapt"}, 0),
        ({"method": "slm"}, {"method": {"name": "slm", "router": "keys"}}, 0),
    ],
)
def test_how_far_two_runs_agree(first: dict[str, Any], other: dict[str, Any], phases: int) -> None:
    assert agree(keys(**first), keys(**other)) == phases


@pytest.mark.parametrize(
    ("order", "phases"),
    [(["topic", "intent", "sentiment"], 1), (["sentiment", "topic", "intent"], 0), (TASKS, 2)],
)
def test_orders_that_begin_alike(order: list[str], phases: int) -> None:
    assert agree(keys(), keys(order)) == phases
    assert agree(keys(eval={"tasks": "all"}), keys(order, eval={"tasks": "all"})) == (2 if order == TASKS else 0)
    ahead = {"name": "slm", "train_scope": "all"}
    assert agree(keys(method=ahead), keys(order, method=ahead)) == (2 if order == TASKS else 0)


def test_another_set_of_tasks_is_another_run() -> None:
    """Answers are also compared with the labels of tasks to come."""
    assert agree(keys(), keys(["topic", "sentiment", "entailment"])) == 0


def test_nothing_is_shared_with_all_tasks_at_once() -> None:
    assert keys(stream={"tasks": TASKS, "schedule": "joint"}) == []


def test_keys_that_several_trials_have() -> None:
    assert shared_keys([["a", "b"], ["a", "c"], ["d", "d"]]) == {"a"}


def test_summaries_of_other_modifier_settings_are_dropped() -> None:
    records = [{"phase": 0, "summary": {"modifiers": {"migu": {}}, "router": "keys"}}]
    assert fork_records(records, {"migu": {"threshold": 0.1}}, {"migu": {"threshold": 0.1}}) == records
    records_kept = fork_records(records, {"migu": {"threshold": 0.1}}, {"migu": {"threshold": 0.2}})
    assert records_kept == [{"phase": 0, "summary": {"router": "keys"}}]


@pytest.mark.parametrize("name", METHODS)
def test_cache_keys_name_settings_of_the_method(name: str) -> None:
    """Settings say beforehand what the method does."""
    config = method_class(name).Config(name=name)
    assert config.fits_ahead is False
    assert set(config.cache_key(1, TASKS)) <= {*type(config).model_fields}


@pytest.mark.parametrize("name", MODIFIERS)
def test_modifiers_act_with_all_settings_later(name: str) -> None:
    config = modifier_class(name).Config(name=name)
    assert set(config.cache_key(1, TASKS)) == {*type(config).model_fields}


def test_pre_training_masks_its_first_domain_so_thresholds_are_not_shared() -> None:
    keys = [
        config.cache_key(0, ("a", "b"), learns_texts=texts)
        for config in (MiguConfig(threshold=0.1), MiguConfig(threshold=0.9))
        for texts in (False, True)
    ]
    assert keys[0] == keys[2] and keys[1] != keys[3]
