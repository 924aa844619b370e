"""Pages for users of other libraries: their commands run as printed, and the settings in their tables are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tutorial_page import blocks

from raycl.cli.main import main
from raycl.config.trainer_names import PATHS
from raycl.testing.runs import save_model, save_tasks
from raycl.training.setup.run_config import load_config

PAGES = sorted((Path(__file__).parents[2] / "docs/coming-from").glob("*.md"))
DECODERS = ("peft", "trl", "llama-factory")
SETTING = re.compile(r"^[a-z_]+(?:\.[a-z_]+)*=")
WRITES = {"NAME": "my-model", "FILE": "template.jinja"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_run_as_they_are_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYCL_CACHE", str(tmp_path / "cache"))
    save_model("llama" if page.stem in DECODERS else "bert", tmp_path / "my-model")
    for spec, name in zip(save_tasks(tmp_path / "data"), ("mail", "tickets"), strict=True):
        Path(spec["path"]).rename(tmp_path / "data" / name)
    found = blocks(page.read_text())
    for block in found:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    ran = [
        line for block in found if block.language == "sh" for line in re.sub(r"\\\n\s*", "", block.text).splitlines()
    ]
    assert ran
    for line in ran:
        assert main(shlex.split(line)[1:]) == 0, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_settings_of_the_right_column_are_accepted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12 and all(len(row) == 2 for row in rows)
    for _, ours in rows:
        for span in re.findall(r"`([^`]+)`", ours):
            if SETTING.match(span):
                words = re.findall(r"\S+=(?:\[.*\]|\{.*\}|\S+)", span)
                words = [re.sub(r"\b(NAME|FILE)$", lambda match: WRITES[match[1]], word) for word in words]
                load_config(None, words)


def test_every_name_of_training_arguments_is_in_its_page() -> None:
    text = next(page for page in PAGES if page.stem == "trainer").read_text()
    assert [name for name in PATHS if name not in text] == []
