"""The config files of published rows against what papers and their code say (`tests/lab/published_*.py`).

Whether a row's score is reached is not tested; that takes the weights, the data and GPUs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from published_das import DAS_ROWS
from published_epi_lfpt5 import EPI_LFPT5
from published_gainlora import GAINLORA
from published_others import OTHERS
from published_prompts import PROMPTS
from published_replay import REPLAY
from published_sapt import SAPT
from published_trace import TRACE

from raycl import config as configs
from raycl.data.benchmarks.orders import find
from raycl.training.setup.run_config import RunConfig, load_config

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "jobs/configs/paper"
GUIDE = REPO / "docs/guides/reproduce.md"
ROWS = SAPT | OTHERS | PROMPTS | DAS_ROWS | REPLAY | EPI_LFPT5 | GAINLORA | TRACE
MODELS = {
    "bert": {"model_type": "bert", "architectures": ["BertModel"]},
    "roberta": {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
}


def load(name: str, *overrides: str) -> RunConfig:
    return load_config(str(FOLDER / f"{name}.yaml"), overrides)


def text(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text()


def header(name: str) -> str:
    """Return the comment at the top, on one line."""
    lines = [line for line in text(name).splitlines() if line.startswith("#")]
    return " ".join(line.removeprefix("#").strip() for line in lines)


def test_every_file_is_a_row_and_every_row_a_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_one_command_with_the_published_settings_and_a_known_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYCL_DATA", "/data")
    config = load(name)
    assert config.stream.tasks is not None or find(config.stream.name) is not None
    assert f"raycl train jobs/configs/paper/{name}.yaml" in header(name)
    tree = configs.as_tree(config)
    wrong = {}
    for path, (value, source) in ROWS[name].settings.items():
        result = tree
        for part in path.split("."):
            result = result[part]
        if result != value:
            wrong[path] = f"{result!r} instead of {value!r} ({source})"
    assert wrong == {}


@pytest.mark.parametrize("name", ROWS)
def test_no_setting_of_a_row_is_without_effect_on_its_kind_of_backbone(name: str, tmp_path: Path) -> None:
    """The hub ids are not on this machine, so that kinds are unknown until a model of the kind stands in."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[ROWS[name].kind]))
    assert load(name, f"backbone.name={tmp_path}").backbone.name == str(tmp_path)


@pytest.mark.parametrize("name", ROWS)
def test_what_a_source_does_not_give_is_marked(name: str) -> None:
    marked = re.findall(r"^\s*(\w+):.*#.*not given", text(name), re.MULTILINE)
    assert set(marked) == set(ROWS[name].not_given)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_and_the_guide_show_the_published_scores(name: str) -> None:
    lines = [line for line in GUIDE.read_text().splitlines() if f"jobs/configs/paper/{name}.yaml" in line]
    assert lines, f"docs/guides/reproduce.md does not name {name}.yaml"
    for score in ROWS[name].scores:
        assert score in header(name)
        assert any(score.replace(" / ", " | ") in line for line in lines), score


def test_files_that_share_settings_extend_one_another() -> None:
    """A row that differs in the model alone is a few lines: what it has in common stands once."""
    settings = [len(configs.flatten(yaml.safe_load(text(name)))) for name in ROWS if "extends:" in text(name)]
    assert len(settings) >= 20 and max(settings) <= 16
