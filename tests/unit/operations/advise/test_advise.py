"""Recommendations follow the measured figures and the declared capabilities, and say where they are undecided."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from raycl.backbone.codec import Kind
from raycl.cli import commands
from raycl.cli.main import main
from raycl.errors import ConfigError
from raycl.operations.advise.advice import Case, Study, advise, read_study


@pytest.fixture(scope="module")
def study() -> Study:
    return read_study(commands.INSTALLED)


def names(study: Study, **case: Any) -> list[str]:
    return [row.name for row in advise(study, Case(**case)).best]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_study_is_installed_and_has_all_rows(kind: Any) -> None:
    study = read_study(commands.INSTALLED, kind)
    assert study.kind == kind and len(study.measured) > 25 and study.tasks >= 6
    assert all(row.seeds == 3 or row.ap.std is None for row in study.measured)


def test_one_changed_figure_changes_the_recommendation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(commands.INSTALLED, tmp_path / "files")
    monkeypatch.setattr(commands, "INSTALLED", tmp_path / "files")
    words = ["advise", "--json", "--kind", "decoder"]
    assert main(words) == 0
    before = json.loads(capsys.readouterr().out)
    file = tmp_path / "files/results/methods-superni6-mini-llama.csv"
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    next(row for row in rows if row["run"] == "ewc-s0")["ap"] = "61.5"
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert main(words) == 0
    after = json.loads(capsys.readouterr().out)
    assert [advice["best"][0]["row"] for advice in (before, after)] == ["slm", "ewc"]
    assert after["best"][0]["ap"] == {"mean": 61.5, "std": None}
    assert after["best"][0]["command"].startswith("raycl train 'method={name: ewc, weight: 5000.0}'")


def test_capabilities_are_those_that_methods_declare(study: Study) -> None:
    rows = {row.name: row for row in study.measured}
    assert rows["replay"].keeps_data and not rows["slm"].keeps_data
    assert rows["mocl-task-id"].needs_task and not rows["mocl"].needs_task
    assert rows["lora-own"].needs_task, "its answers are among the labels of the text's own task"
    assert rows["hat"].trains_backbone and "adapts its weights" in rows["mbpa++"].not_served
    assert "lora-third" not in rows and "separate-lora" not in rows


def test_a_case_rules_rows_out_and_says_why(study: Study) -> None:
    assert names(study) == ["epi", "slm", "gem"]
    assert names(study, may_keep_data=False, serves=True)[:2] == ["epi", "slm"]
    assert names(study, task_known=True)[2] == "inflora-own"
    large = advise(study, Case(parameters=7e9, memory_gib=24))
    assert "idbr" in large.left_out["need more than 24 GiB for weights and optimizer alone"]
    assert "replay" in advise(study, Case(may_keep_data=False)).left_out["keep data of earlier tasks"]
    with pytest.raises(ConfigError, match=r"no measured method fits: .* need more than 1 GiB"):
        advise(study, Case(parameters=7e9, memory_gib=1))


def test_an_unknown_kind_is_one_sentence() -> None:
    with pytest.raises(
        ConfigError, match="no study on backbones of kind 'rnn': expected encoder, encoder-decoder, decoder"
    ):
        read_study(commands.INSTALLED, "rnn")


def test_what_the_figures_cannot_tell_is_said(study: Study) -> None:
    shown = str(advise(study, Case(tasks=100, rows=5000, parameters=7e9, words=("backbone.name=mine",))))
    assert "the figures cannot tell epi from slm (53.7 ± 1.6; could tell: more than 100 seeds); of these slm" in shown
    assert "chance makes so large a difference with a probability p of 0.05 or more (p by Holm: corrected" in shown
    assert "rows named -own choose among the labels of the text's own task (eval.labels=task)" in shown
    assert "rows of one seed cannot be told from epi either: gem, agem, mbpa++ and 5 more" in shown
    assert "not measured at your size: 5k rows a task, 100 in the study" in shown and "7B parameters" in shown
    assert "100 tasks, 8 in the study: epi keeps an adapter of each" in shown
    trained = "train.epochs=3 train.batch_size=8 train.lr_scheduler=linear"
    assert (
        f"raycl train 'method={{name: epi, ridge: 0.1}}' train.learning_rate=0.01 {trained} backbone.name=mine" in shown
    )
    assert "not measured at your size" not in str(advise(study, Case(tasks=9, rows=150, parameters=3e7)))


def test_the_guide_shows_what_the_command_prints() -> None:
    case = Case(rows=5000, parameters=7e9, may_keep_data=False, serves=True)
    page = Path(__file__).parents[4] / "docs/guides/which-method.md"
    assert f"```\n{advise(read_study(commands.INSTALLED, 'decoder'), case)}\n```" in page.read_text()


def test_tasks_and_rows_are_read_from_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in (("mail", 40), ("tickets", 400)):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            text = "".join(f'{{"text": "row {n}", "label": "{n % 2}"}}\n' for n in range(count))
            (tmp_path / name / f"{split}.jsonl").write_text(text)
    assert main(["advise", str(tmp_path / "mail"), str(tmp_path / "tickets")]) == 0
    shown = capsys.readouterr().out
    assert "not measured at your size: 400 rows a task" in shown
    assert f'"path": "{tmp_path}/tickets"' in shown


def test_kind_and_size_are_read_from_a_backbone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--backbone", "google-t5/t5-large", "--memory", "8"]) == 0
    shown = capsys.readouterr().out
    assert "mini-t5" in shown and "738M parameters" in shown
    assert "left out, since they need more than 8.0 GiB" in shown and "backbone.name=google-t5/t5-large" in shown


def test_data_with_columns_of_other_names_and_unusable_rows_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("body,team\n" + "a 1,x\nb 2,y\n" * 200 + "only one cell\n")
    task = f"{{name: mail, path: {tmp_path}, columns: {{text: body, label: team}}}}"
    assert main(["advise", task]) == 0
    shown = capsys.readouterr().out
    assert "not measured at your size: 400 rows a task" in shown and '"columns": {"text": "body"' in shown


@pytest.mark.parametrize(("text", "size"), [("7B", 7e9), ("135m", 135e6), ("7e9", 7e9), ("0.5b", 5e8)])
def test_sizes_are_written_as_models_are_named(text: str, size: float) -> None:
    assert commands.parsed("advise", ["--size", text]).size == size


@pytest.mark.parametrize("text", ["big", "B", "-7B", "nan", "inf", ""])
def test_what_is_no_size_is_refused_with_examples(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.parsed("advise", [f"--size={text}"])
    assert f"'{text}' is no number of parameters: expected one such as 7B, 135M or 7e9" in capsys.readouterr().err
