"""The generated reference: every setting is described, and `--print-config` prints a config that loads unchanged."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field
from settings_reference import groups

from raycl.config import Section
from raycl.config.reference import commented_yaml
from raycl.operations.sweep.comparison import ComparisonConfig
from raycl.operations.sweep.definition.sweep_config import SweepConfig
from raycl.serve.settings import ServeConfig, load_serve_config
from raycl.training.setup.run_config import RunConfig, load_config

REPO = Path(__file__).resolve().parents[2]


class Small(Section):
    """One choice."""

    name: Literal["small"] = "small"
    size: int = Field(3, ge=1, lt=9, description="how large")


class Large(Section):
    """Another choice. Not for the faint of heart."""

    name: Literal["large"] = "large"
    parts: tuple[Small, ...] = Field((), description="what it is made of")


class IntegrityCheck(Section):
    """All of it."""

    seed: int = Field(description="where draws begin")
    rates: tuple[float, float] = Field((0.5, 1e-8), description="two rates")
    chosen: Annotated[Small | Large, Field(discriminator="name")] = Field(Small(), description="which one")
    named: dict[str, Small] = Field(default_factory=dict, description="many")
    word: str | None = Field(None, description="any text. Not read.")
    bare: int = 1


def test_settings_are_listed_with_path_type_default_and_description() -> None:
    settings = {setting.path: setting for group in groups(IntegrityCheck) for setting in group.settings}
    rows = {path: (setting.type, setting.default, setting.description) for path, setting in settings.items()}
    assert rows["seed"] == ("integer", "", "where draws begin")
    assert rows["rates"] == ("[number, number]", "[0.5, 1e-08]", "two rates")
    assert rows["chosen"] == ("small or large", "small", "which one")
    assert rows["chosen.name"] == ("large", "large", "Another choice")
    assert rows["chosen.size"] == ("integer >= 1 and < 9", "3", "how large")
    assert rows["chosen.parts"] == ("list of small", "[]", "what it is made of")
    assert rows["word"] == ("string or null", "null", "any text. Not read.")
    assert rows["bare"] == ("integer", "1", "")
    assert [group.choice for group in groups(IntegrityCheck)] == ["", "chosen=small", "chosen=large"]


@pytest.mark.parametrize("model", [RunConfig, ServeConfig, SweepConfig, ComparisonConfig])
def test_every_setting_has_a_description(model: type[Section]) -> None:
    bare = [setting.path for group in groups(model) for setting in group.settings if not setting.description]
    assert bare == [], "add a description to these fields"
    assert [group.path for group in groups(model) if not group.description] == [], "add docstrings to these sections"


def test_a_comment_is_the_first_sentence_and_stands_above_a_value_of_several_lines() -> None:
    text = commented_yaml(IntegrityCheck(seed=1, word="word " * 40, named={"a": Small()}))
    lines = text.splitlines()
    assert "seed: 1                               # where draws begin" in lines
    assert lines.index("# any text") == next(n for n, line in enumerate(lines) if line.startswith("word:")) - 1
    assert "    size: 3                           # how large" in lines


WRITTEN = [
    [],
    ["method=sapt", "modifiers=[migu]", "engine=deepspeed", "launch.workers=2"],
    ["method=replay", "method.learner=olora", "stream.tasks=[topic,{name: mine, path: /data/mine}]", "stream.name=own"],
    ["tracking.tracker=wandb", "tracking.project='a # b: c'", "output.name='${now}'", "tracking.group=" + "x y " * 40],
]


@pytest.mark.parametrize("overrides", WRITTEN, ids=["defaults", "sapt", "tasks", "texts"])
def test_a_printed_config_loads_unchanged(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = [word.replace("${", "\\${") for word in overrides]
    printed = _printed("jobs/train_stream.py", [*written, "--print-config"], monkeypatch, capsys)
    file = tmp_path / "printed.yaml"
    file.write_text(printed)
    assert load_config(str(file), []) == load_config(None, written)
    assert "# learning rate at its highest" in printed


def test_the_printed_config_of_the_endpoint_loads_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["port=9000", "gate.stream=[stream.root=/data]"]
    printed = _printed("jobs/serve.py", ["runs/x/bank", *words, "--print-config"], monkeypatch, capsys)
    file = tmp_path / "printed.yaml"
    file.write_text(printed)
    assert load_serve_config(str(file), []) == load_serve_config(None, ["bank=runs/x/bank", *words])
    unnamed = _printed("jobs/serve.py", [*words, "--print-config"], monkeypatch, capsys)
    assert unnamed.splitlines()[1].startswith("bank: ") and "/RUN_DIR" in unnamed and "port: 9000" in unnamed


def _printed(job: str, words: list[str], patch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str]) -> str:
    main: Callable[[], int] = runpy.run_path(str(REPO / job))["main"]
    patch.setattr("sys.argv", [job, *words])
    assert main() == 0
    return captured.readouterr().out
