"""`raycl demo --chat`: a chat model learns three skills, and its answers before and after are shown."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml
from chat_samples import chat_codec

from raycl.cli import main
from raycl.cli.runs import chat_demo
from raycl.testing.tiny_models import tiny_model


def test_three_skills_are_learned_and_answers_before_and_after_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of that name is taken instead of the installed one: here the same with few rows, steps and tokens."""
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load((chat_demo.INSTALLED / chat_demo.FILE).read_text())
    tree["stream"] |= {"train_rows": 8, "max_target_tokens": 8}
    tree["method"]["keys"]["steps"], tree["train"]["epochs"] = 20, 1
    own = tmp_path / chat_demo.FILE
    own.parent.mkdir(parents=True)
    own.write_text(yaml.safe_dump(tree))
    model = tmp_path / "Tiny-Chat"
    tokenizer = chat_codec("bytes", "trims").tokenizer
    tokenizer.save_pretrained(model)
    tiny_model("llama", len(tokenizer), positions=512).save_pretrained(model)
    words = ["demo", "--chat", str(model), "--dir", str(tmp_path / "runs")]
    assert main.main(words) == 0
    out = capsys.readouterr().out
    assert f"run {tmp_path}/runs/chat-tiny-chat\n" in out
    heads = ["untrained ", "after shop ", "after teams ", "after orders ", "shop: ", "teams: ", "orders: "]
    lines = [line.strip() for line in out.splitlines()]
    places = [next(number for number, line in enumerate(lines) if line.startswith(head)) for head in heads]
    assert places == sorted(places)
    assert "shop: At what time do you open in the morning?" in lines
    assert main.main([*words, "--json", "--quiet"]) == 0, "a finished run is shown again"
    tree = json.loads(capsys.readouterr().out)
    assert tree["results"]["finished"] and len(tree["answers"]) == 6
    assert set(tree["answers"][0]) == {"skill", "text", "expected", "before", "learned", "last"}
    assert [row["skill"] for row in tree["answers"][::2]] == ["shop", "teams", "orders"]


def test_the_rows_of_the_skills_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data"
    assert main.main(["demo", "--write-skills", str(folder)]) == 0
    assert f"wrote the rows of shop, teams, orders to {folder}" in capsys.readouterr().out
    texts: dict[str, set[str]] = {}
    for split in ("train", "test"):
        texts[split] = {row[0] for row in csv.reader((folder / "teams" / f"{split}.csv").read_text().splitlines()[1:])}
        for skill in ("shop", "orders"):
            for line in (folder / skill / f"{split}.jsonl").read_text().splitlines():
                texts[split].add(json.loads(line)["messages"][0]["content"])
    assert len(texts["test"]) == 32 and not texts["train"] & texts["test"]
    assert main.main(["demo", "--write-skills", str(folder)]) != 0
    assert "is there already: expected none" in capsys.readouterr().err
