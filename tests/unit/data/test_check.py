"""What `raycl data check` says of data: counts, lengths and duplicates, and the mistakes that it warns of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_samples import MiniLMCodec

from raycl.cli import main
from raycl.data.check import TaskCheck, check_task
from raycl.data.stream import StreamConfig, TaskSpec, open_stream


def task(folder: Path, train: list[tuple[str, Any]], test: list[tuple[str, Any]]) -> str:
    folder.mkdir()
    for split, rows in (("train", train), ("test", test)):
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return str(folder)


def checked(codec: MiniLMCodec, path: str, spec: dict[str, Any] | None = None, **settings: Any) -> TaskCheck:
    config = StreamConfig(tasks=(TaskSpec(name="mine", path=path, **(spec or {})),), **settings)
    stream = open_stream(config, seed=0)
    return check_task(stream, stream.tasks[0], codec, seed=0, examples=2)


def rows(count: int, start: int = 0, words: int = 1) -> list[tuple[str, str]]:
    return [(f"{'word ' * words}{number}", "ab"[number % 2]) for number in range(start, start + count)]


def test_counts_and_lengths_are_those_of_the_rows(tmp_path: Path, codec: MiniLMCodec) -> None:
    path = task(tmp_path / "t", [*rows(90), *rows(10, 90, words=30)], rows(60, 200))
    found = checked(codec, path, max_source_tokens=16, train_rows=80)
    train, dev, test = (found.splits[split] for split in ("train", "dev", "test"))
    assert (train.rows, train.left_out, dev.rows, test.rows, test.left_out) == (80, 10, 10, 60, 0)
    assert sum(train.labels.values()) == 80 and train.answers == 2 and train.repeated == 0
    assert train.sources is not None and (train.sources.median, train.sources.limit) == (6, 16)
    assert train.sources.longest == 35, "30 words, a number, the prompt and two special tokens"
    assert 0.04 < train.sources.cut < 0.2
    assert [warning for warning in found.warnings if "set stream.max_source_tokens to 35 to keep 99 %" in warning]
    assert len(found.examples) == 2 and found.examples[0].source.startswith("[CLS]") and found.problem == ""
    assert found.examples[0].source_tokens[:2] == ["[CLS]", "word"] and found.examples[0].target_tokens[-1] == "[SEP]"


def test_duplicates_and_contradictions_are_found_whatever_their_spaces(tmp_path: Path, codec: MiniLMCodec) -> None:
    train = [*rows(40), ("the  same", "a"), ("the same", "b"), ("again", "a"), ("again", "a")]
    found = checked(codec, task(tmp_path / "t", train, [("word  3", "b"), *rows(50, 100)]), dev_fraction=0)
    assert (found.shared_rows, found.shared) == (1, [(4, 1)]) and found.contradictions == 1
    assert found.splits["train"].repeated == 2
    text = "\n".join(found.warnings)
    assert "1 of 51 test rows have a text that is in train (rows: test 1 = train 4)" in text
    assert "1 texts of train come with different answers" in text


def test_labels_that_are_rare_unknown_or_too_many_are_warned_of(tmp_path: Path, codec: MiniLMCodec) -> None:
    rare = [(f"row {number}", "b" if number < 2 else "a") for number in range(100)]
    found = checked(codec, task(tmp_path / "rare", rare, [("x", "a"), ("y", "b")]), dev_fraction=0)
    assert any("label 'b' has 2 rows and the most frequent one 98" in warning for warning in found.warnings)
    assert any("split test is small: 2 rows, a score moves by 50.0 with each" in warning for warning in found.warnings)
    many = [(f"row {number}", str(number % 70)) for number in range(1400)]
    found = checked(codec, task(tmp_path / "many", many, rows(60)), dev_fraction=0)
    assert found.kind == "free text"
    assert any("70 different answers for 1,400 rows and counts as free text" in warning for warning in found.warnings)


def test_what_a_run_would_refuse_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    path = task(tmp_path / "t", [("a", "one long answer"), ("b", "another")] * 40, rows(50))
    found = checked(MiniLMCodec(needs_labels=True), path, {"labels": None})
    assert "has free-text answers: an encoder-only backbone needs a closed label set" in found.problem
    assert found.splits["train"].rows == 72 and found.examples == []


def test_the_command_describes_a_file_a_folder_and_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = task(tmp_path / "tickets", rows(100), rows(60, 200))
    assert main.main(["data", "check", path, "stream.max_source_tokens=32", "--json", str(tmp_path / "x.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tickets: labels, 2 labels, metric exact_match") and "nothing to warn of" in out
    assert "labels of train: " in out and "row " in out and "tokens: [CLS] | word | " in out
    assert json.loads((tmp_path / "x.json").read_text())[0]["splits"]["test"]["rows"] == 60
    (tmp_path / "rows.csv").write_text("body,team\nhello,a\nworld,b\n")
    words = ["data", "check", str(tmp_path / "rows.csv"), "columns.text=body", "columns.label=team"]
    assert main.main(words) == 0
    assert "warning: test is the same data as train: give a run other rows to test on" in capsys.readouterr().out
    assert main.main(["data", "check", path, "labels=null"]) == 1
    assert "error: task 'tickets' has free-text answers" in capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(json.dumps({"stream": {"tasks": [{"name": "one", "path": path}]}}))
    assert main.main(["data", "check", "--config", str(tmp_path / "run.yaml"), "--examples", "1"]) == 0
    assert capsys.readouterr().out.startswith("one: labels")
    assert main.main(["data", "check", str(tmp_path / "none")]) == 1
    assert "error: task 'none' has no train file" in capsys.readouterr().err
