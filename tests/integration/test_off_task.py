"""`eval.off_task`: answers that are a label of another task score 0, or are counted only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import Lab, run

from raycl.bank import Bank
from raycl.cli.main import main
from raycl.operations.banks.unlearning import evaluate
from raycl.storage import Storage

RULES: dict[str, dict[str, str]] = {
    "wrong": {"off_task": "wrong"},
    "count": {"off_task": "count"},
    "own labels": {"labels": "task"},
}


def rows(labels: dict[str, str]) -> str:
    lines = [{"text": f"{text} a", "label": label} for label, text in labels.items()]
    return "\n".join(map(json.dumps, lines * 7)) + "\n"


def test_off_task_answers_score_nothing_or_are_counted(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second task has the texts of the first, and labels that begin with those of the first."""
    tasks = [
        {"name": "short", "metric": "first_word", "labels": ["red", "blue"]},
        {"name": "long", "labels": ["red cat", "blue dog"]},
    ]
    for task in tasks:
        folder = tmp_path / str(task["name"])
        folder.mkdir()
        texts = dict(zip(task["labels"], ("fire is warm", "sea is cold"), strict=True))
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text(rows(texts))
        task["path"] = str(folder)
    cells = {}
    for rule, settings in RULES.items():
        result = Storage.at(tmp_path / rule)
        run(lab.config("bert", "lora", stream={"tasks": tasks}, eval=settings, train={"epochs": 5}), result)
        cells[rule] = result.read_json("results.json")["matrix"][-1][0]
        bank = Bank(result.sub("bank"))
        given = [bank.storage.uri, str(tmp_path / "short" / "test.jsonl"), "--task", "short"]
        capsys.readouterr()
        assert main(["evaluate", *given, "--json"]) == 0
        commanded = json.loads(capsys.readouterr().out)["score"]["value"]
        newest = bank.newest()
        assert newest is not None
        assert commanded == evaluate(bank, newest)["short"].value == cells[rule]["value"], "by every command alike"
    result = Storage.at(tmp_path / "count")
    assert cells["own labels"]["extra"]["off_task"] == 0
    for rule, cell in cells.items():
        kept = Storage.at(tmp_path / rule).read("predictions/001-long/short.jsonl").decode().splitlines()
        scores = [json.loads(line)["score"] for line in kept]
        assert cell["value"] == pytest.approx(sum(scores) / len(scores)), "scores of rows are judged by the same rule"
    lines = result.read("predictions/001-long/short.jsonl").decode().splitlines()
    answers = [(line["answer"], line["references"][0]) for line in map(json.loads, lines)]
    off_task = sum(answer in ("red cat", "blue dog") for answer, _ in answers)
    first = sum(answer.split()[0] == reference for answer, reference in answers)
    whole = sum(answer == reference for answer, reference in answers)
    assert cells["count"]["extra"]["off_task"] == cells["wrong"]["extra"]["off_task"] == off_task > 0
    assert cells["count"]["value"] == pytest.approx(100 * first / len(answers))
    assert cells["wrong"]["value"] == pytest.approx(100 * whole / len(answers))
    assert first > whole
