"""The table of methods, and how a run's config names one."""

from __future__ import annotations

import pytest

from raycl.config import as_tree, validate
from raycl.errors import ConfigError
from raycl.methods.migu.migu import MiguConfig
from raycl.methods.registry import LEARNERS, METHODS, MODIFIERS, method_class, modifier_class
from raycl.methods.replay.replay import ReplayConfig
from raycl.methods.single_adapter import LoraConfig
from raycl.training.setup.run_config import RunConfig, fingerprint, load_config


@pytest.mark.parametrize("name", METHODS)
def test_every_name_finds_its_class_and_its_config_carries_the_name(name: str) -> None:
    result = method_class(name)
    assert result.Config().name == name
    assert load_config(None, [f"method={name}"]).method == result.Config()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method=lroa"], "config key 'method' names 'lroa': did you mean 'lora'?"),
        (
            ["method=xyzzy"],
            f"config key 'method' names 'xyzzy': expected one of {len(METHODS)}, of which demix, replay, ",
        ),
        (["method=lora", "method.alpha=8"], "unknown config key 'method.alpha': did you mean 'method.lora_alpha'?"),
        (["method=lora", "method.rank=4"], "unknown config key 'method.rank': did you mean 'method.r'?"),
        (["method.targets=x"], "unknown config key 'method.targets': did you mean 'method.target_modules'?"),
        (["method=lora", "method.r=0"], "config key 'method.r' is 0: input should be greater than or equal to 1"),
        (["method=finetune", "method.r=8"], "unknown config key 'method.r': it belongs to method="),
        (
            ["method=replay", "method.learner.dropout=0.1"],
            "unknown config key 'method.learner.dropout': did you mean 'method.learner.lora_dropout'?",
        ),
        (
            ["method=replay", "method.learner=agem"],
            f"config key 'method.learner' names 'agem': expected one of {len(LEARNERS)}, of which ",
        ),
        (
            ["engine=deepsped"],
            "config key 'engine' names 'deepsped': did you mean 'deepspeed'?",
        ),
        (["engine.zero_stage=2"], "unknown config key 'engine.zero_stage': it belongs to engine=deepspeed"),
        (
            ["engine=deepspeed", "engine.zero_stage=5"],
            "config key 'engine.zero_stage' is 5: input should be less than or equal to 3",
        ),
        (
            ["engine=deepspeed", "engine.zero_stage=0", "engine.offload_optimizer=true"],
            "engine.offload_optimizer needs engine.zero_stage 1, 2 or 3, not 0",
        ),
        (["modifiers=[mgu]"], "modifiers: 'mgu' is unknown: did you mean 'migu'?"),
        (["modifiers=[xyzzy]"], "modifiers: 'xyzzy' is unknown: expected one of migu"),
        (["modifiers=[migu,migu]"], "modifiers: 'migu' occurs twice: give each name once"),
        (["modifiers=[{threshold: 0.7}]"], "modifiers: an entry with {'threshold': 0.7} has no name: expected"),
        (["modifiers={migu: {name: x}}"], "modifiers: the settings of 'migu' have the name 'x': expected the same"),
        (
            ["modifiers=[{name: migu, treshold: 0.7}]"],
            "unknown config key 'modifiers.migu.treshold': did you mean 'mod",
        ),
        (
            ["modifiers.migu.threshold=1.5"],
            "config key 'modifiers.migu.threshold' is 1.5: input should be less",
        ),
        (
            ["modifiers=[{name: migu, threshold: -1}]"],
            "config key 'modifiers.migu.threshold' is -1: input should",
        ),
        (
            ["modifiers=[migu]", "modifiers.migu.rule=ceil"],
            "config key 'modifiers.migu.rule' is 'ceil': input should",
        ),
        (["stream.tasks=[{name: a, pth: x}]"], "unknown config key 'stream.tasks.0.pth': did you mean "),
        (
            ["stream.tasks=[{name: a}]"],
            "stream.tasks.0: task 'a' has no data: give 'path', or both 'train' and 'test', or the name without braces",
        ),
    ],
)
def test_errors_of_choices_use_the_users_names(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert str(caught.value).startswith(words)
    assert ";" not in str(caught.value), "one mistake is one sentence"


def test_a_wrapper_takes_its_learners_settings() -> None:
    method = load_config(None, ["method=replay", "method.learner.r=4"]).method
    assert isinstance(method, ReplayConfig) and method.learner == LoraConfig(r=4)


def test_schedules_without_earlier_tasks_refuse_replay() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'replay' needs what is kept of earlier tasks, and under stream.schedule=joint there are none",
    ):
        load_config(None, ["method=replay", "stream.schedule=joint"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["modifiers.migu.threshold=0.1"],
        ["modifiers=[migu]", "modifiers.migu.threshold=0.1"],
        ["modifiers=[{name: migu, threshold: 0.1}]"],
        ["modifiers=[{name: migu, rule: floor}]", "modifiers.migu.threshold=0.1"],
        ["modifiers={migu: {threshold: 0.1}}"],
    ],
)
def test_ways_to_name_a_modifier(overrides: list[str]) -> None:
    assert load_config(None, overrides).modifiers == {"migu": MiguConfig(threshold=0.1)}


@pytest.mark.parametrize("overrides", [[], ["modifiers=[]"], ["modifiers={migu: null}"]])
def test_a_run_without_modifiers_is_the_run_it_was(overrides: list[str]) -> None:
    assert as_tree(load_config(None, overrides))["modifiers"] == {}


@pytest.mark.parametrize("name", MODIFIERS)
def test_every_modifier_finds_its_class(name: str) -> None:
    assert modifier_class(name).Config().name == name
    config = load_config(None, [f"modifiers=[{name}]"])
    assert validate(RunConfig, as_tree(config)) == config
    assert fingerprint(config) != fingerprint(load_config(None, []))
