"""Config files that extend other ones: what is laid over what, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_origin

import pytest
from pydantic import BaseModel

from raycl import config as configs
from raycl.config import Section
from raycl.config.assignment import CHOICES, overlay
from raycl.config.sections import sections_in
from raycl.errors import ConfigError
from raycl.operations.sweep.comparison import ComparisonConfig
from raycl.operations.sweep.definition.sweep_config import SweepConfig
from raycl.serve.settings import ServeConfig
from raycl.training.setup.run_config import RunConfig, load_config

BASE = """
seed: 1
method: {name: slm, r: 4, keys: {groups: 3, slots: 2}}
modifiers: [migu]
train: {epochs: 2, epochs_by_task: {topic: 5}}
"""
PROMPT = "method: {name: sapt, value: prompt, prompt_length: 3}\n"


def files(folder: Path, **texts: str) -> str:
    """Return files of these names; returns the path of the first."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return str(folder / f"{next(iter(texts))}.yaml")


def test_a_file_is_laid_over_the_one_that_it_extends(tmp_path: Path) -> None:
    own = "extends: base.yaml\nseed: 2\nmethod: {keys: {slots: 3}}\ntrain: {epochs_by_task: {intent: 1}}\n"
    config = load_config(files(tmp_path, own=own, base=BASE), ["method.keys.groups=6"])
    assert config.seed == 2 and config.train.epochs == 2
    assert config.train.epochs_by_task == {"topic": 5, "intent": 1}
    assert (config.method.name, config.method.r) == ("slm", 4)
    assert (config.method.keys.groups, config.method.keys.slots) == (6, 3)
    assert list(config.modifiers) == ["migu"]


@pytest.mark.parametrize("method", ["lora", "{name: lora}"])
def test_another_name_drops_the_keys_of_the_former(method: str, tmp_path: Path) -> None:
    config = load_config(files(tmp_path, own=f"extends: base.yaml\nmethod: {method}\n", base=BASE), [])
    assert configs.as_tree(config)["method"] == configs.as_tree(load_config(None, ["method=lora"]))["method"]


@pytest.mark.parametrize("method", ["slm", "{name: slm}"])
def test_the_same_name_keeps_them(method: str, tmp_path: Path) -> None:
    assert load_config(files(tmp_path, own=f"extends: base.yaml\nmethod: {method}\n", base=BASE), []).method.r == 4


def test_a_modifier_of_the_base_gets_settings_and_can_be_taken_away(tmp_path: Path) -> None:
    own = files(tmp_path, own="extends: base.yaml\nmodifiers: {migu: {threshold: 0.4}}\n", base=BASE)
    assert load_config(own, []).modifiers["migu"].threshold == 0.4
    assert load_config(own, ["modifiers.migu=null"]).modifiers == {}


def test_a_chain_is_read_from_its_end_and_relative_to_each_file(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below/own.yaml").write_text("extends: ../middle.yaml\nseed: 3\n")
    files(tmp_path, middle="extends: below/base.yaml\nseed: 2\ntrain: {epochs: 7}\n")
    (tmp_path / "below/base.yaml").write_text(BASE)
    config = load_config(str(tmp_path / "below/own.yaml"), [])
    assert (config.seed, config.train.epochs, config.method.name) == (3, 7, "slm")


def test_settings_of_the_base_without_effect_are_refused_too(tmp_path: Path) -> None:
    own = files(tmp_path, own="extends: base.yaml\nmethod: {value: lora}\n", base=PROMPT)
    with pytest.raises(ConfigError, match=r"own\.yaml': method\.prompt_length=3 acts on nothing"):
        load_config(own, [])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"own": "extends: none.yaml"}, r"extends 'none\.yaml', and '.*none\.yaml' does not exist"),
        ({"own": "extends: 3"}, r"extends 3: expected the path of a YAML file from its folder"),
        ({"own": "extends: own.yaml"}, r"extends 'own\.yaml', which extends it in turn"),
        ({"own": "extends: b.yaml", "b": "extends: own.yaml"}, r"b\.yaml' extends 'own\.yaml', which extends it"),
        ({"own": "extends: b.yaml", "b": "- 1"}, r"b\.yaml' holds a list: expected a mapping"),
    ],
)
def test_what_cannot_be_extended(texts: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(files(tmp_path, **texts), [])


def test_overlay_replaces_lists_and_values() -> None:
    tree = {"a": [1, 2], "b": {"c": 1}, "d": {"e": 1}, "f": 2}
    overlay(tree, {"a": [3], "b": 4, "d": {"g": 5}, "f": {"h": 6}})
    assert tree == {"a": [3], "b": 4, "d": {"e": 1, "g": 5}, "f": {"h": 6}}


def test_a_name_that_chooses_nothing_leaves_the_keys_beside_it(tmp_path: Path) -> None:
    base = "stream: {name: long-A, root: /data}\nbackbone: {name: a/b, dropout: 0.1}\n"
    own = "extends: base.yaml\nstream: {name: long-C}\nbackbone: {name: c/d}\n"
    config = load_config(files(tmp_path, own=own, base=base), [])
    assert (config.stream.name, config.stream.root) == ("long-C", "/data")
    assert (config.backbone.name, config.backbone.dropout) == ("c/d", 0.1)


def choices(model: type[BaseModel]) -> Iterator[str]:
    """Yield keys of single nodes below a model whose `name` is one of several."""
    for key, field in model.model_fields.items():
        for section in sections_in(field.annotation):
            name = section.model_fields.get("name")
            if name is not None and get_origin(name.annotation) is Literal and get_origin(field.annotation) is not dict:
                yield key
            yield from choices(section)


@pytest.mark.parametrize("model", [RunConfig, SweepConfig, ComparisonConfig, ServeConfig])
def test_all_nodes_with_a_choice_are_known(model: type[Section]) -> None:
    assert set(choices(model)) <= CHOICES


def test_only_nodes_with_a_choice_are_known() -> None:
    assert {*choices(RunConfig), *choices(SweepConfig)} == CHOICES
