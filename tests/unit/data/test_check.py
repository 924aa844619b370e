"""Tests of what `raycl data check` says of data: counts, lengths and duplicates, and the mistakes that it warns of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_samples import chat_codec
from data_samples import MiniLMCodec

from raycl.cli import main
from raycl.data.check import TaskCheck, check_task
from raycl.data.mistakes import Mistake
from raycl.data.stream import StreamConfig, TaskSpec, open_stream
from raycl.testing.tiny_models import tiny_model


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


def kinds(task_check: TaskCheck) -> dict[str, Mistake]:
    return {mistake.kind: mistake for mistake in task_check.mistakes}


def rows(count: int, start: int = 0, words: int = 1) -> list[tuple[str, str]]:
    return [(f"{'word ' * words}{number}", "ab"[number % 2]) for number in range(start, start + count)]


def test_counts_and_lengths_are_those_of_the_rows(tmp_path: Path, codec: MiniLMCodec) -> None:
    path = task(tmp_path / "t", [*rows(90), *rows(10, 90, words=30)], rows(60, 200))
    result = checked(codec, path, max_source_tokens=16, train_rows=80)
    train, dev, test = (result.splits[split] for split in ("train", "dev", "test"))
    assert (train.rows, train.left_out, dev.rows, test.rows, test.left_out) == (80, 10, 10, 60, 0)
    assert sum(train.labels.values()) == 80 and train.answers == 2 and train.repeated == 0
    assert train.sources is not None and (train.sources.median, train.sources.limit) == (6, 16)
    assert train.sources.longest == 35, "30 words, a number, the prompt and two special tokens"
    assert 0.04 < train.sources.cut < 0.2
    assert not result.mistakes, "lines about cuts say which limit keeps the rows whole, where the backbone has one"
    assert len(result.examples) == 2 and result.examples[0].source.startswith("[CLS]") and result.problem == ""
    assert result.examples[0].source_tokens[:2] == ["[CLS]", "word"] and result.examples[0].target_tokens[-1] == "[SEP]"


def test_duplicates_and_contradictions_are_found_whatever_their_spaces(tmp_path: Path, codec: MiniLMCodec) -> None:
    train = [*rows(40), ("the  same", "a"), ("the same", "b"), ("again", "a"), ("again", "a")]
    result = checked(codec, task(tmp_path / "t", train, [("word  3", "b"), *rows(50, 100)]), dev_fraction=0)
    shared = kinds(result)["test rows with a text that is in train"]
    assert (shared.count, shared.which) == (1, "test 1 = train 4") and "51 test rows in all" in shared.mend
    assert kinds(result)["texts of train with several answers"].count == 1
    assert result.splits["train"].repeated == 2


def test_labels_that_are_rare_unknown_or_too_many_are_warned_of(
    tmp_path: Path, codec: MiniLMCodec, capsys: pytest.CaptureFixture[str]
) -> None:
    rare = [(f"row {number}", "b" if number < 2 else "a") for number in range(100)]
    result = checked(codec, task(tmp_path / "rare", rare, [("x", "a"), ("y", "b")]), dev_fraction=0)
    assert kinds(result)["rare labels"].which == "'b' 2 rows, the most frequent 98"
    assert kinds(result)["few test rows"].which == "a score moves by 50.0 with each"
    many = [(f"row {number}", str(number % 77)) for number in range(616)]
    path = task(tmp_path / "many", many, rows(60))
    result = checked(codec, path, dev_fraction=0)
    assert result.kind == "free text" and kinds(result)["different answers"].count == 77
    (tmp_path / "many" / "test.jsonl").write_text('{"text": "t", "label": "5"}')
    assert main.main(["data", "labels", path]) == 0 and main.main(["data", "labels", path]) == 1
    assert "77 labels" in capsys.readouterr().out
    assert len(checked(codec, path, dev_fraction=0).labels or ()) == 77
    assert main.main(["data", "labels", f"{path}/train.jsonl"]) == 0
    assert capsys.readouterr().out.startswith('labels=["0", "1", "10",')


DIRTY = [*[("x", "A")] * 30, *[("y", "a")] * 3, ("z", "a "), *[("v", "yes")] * 5, *[("w", "True")] * 2]


def test_dirty_labels_are_counted_with_what_mends_them(tmp_path: Path, codec: MiniLMCodec) -> None:
    path = task(tmp_path / "t", [(f"{text} {n}", label) for n, (text, label) in enumerate(DIRTY)], rows(60, 100)[::2])
    result = checked(codec, path, dev_fraction=0)
    assert kinds(result)["rows whose label is written otherwise in most rows"].which == "'A' 30 'a' 3 'a ' 1"
    assert kinds(result)["rows whose label is written otherwise in most rows"].count == 4
    assert kinds(result)["rows with true or false beside yes and no"].count == 2
    assert kinds(result)["labels with one row of train"].which == "'a '"
    assert all(mistake.mend for mistake in result.mistakes)
    labels = ("A", "yes")
    clean = checked(codec, path, {"labels": labels, "test": f"{path}/train.jsonl"}, dev_fraction=0, on_bad_row="skip")
    assert clean.splits["train"].labels == {"A": 30, "yes": 5}, "what mends them does"
    assert kinds(clean)["rows of train that cannot be used"].count == 6


def test_rows_without_a_text_are_warned_of(tmp_path: Path, codec: MiniLMCodec) -> None:
    """Such cells are what tables of pandas have for missing values; they teach a label without a text."""
    train = [*rows(40), ("", "a"), ("   ", "b")]
    found = kinds(checked(codec, task(tmp_path / "t", train, [*rows(60, 100), ("\n", "a")]), dev_fraction=0))
    assert (found["empty texts in train"].count, found["empty texts in train"].which) == (2, "row 41, row 42")
    assert (found["empty texts in test"].count, found["empty texts in test"].which) == (1, "row 61")


def test_rows_that_cannot_be_used_are_counted_and_stop_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, more in (("train", "c,\nd,\n"), ("test", "a,b,c\n")):
        (tmp_path / f"{split}.csv").write_text("text;label\n".replace(";", ",") + "a 1,x\nb 2,y\n" * 30 + more)
    assert main.main(["data", "check", str(tmp_path), "--examples", "0"]) == 1
    out = capsys.readouterr().out
    assert "empty labels in train" in out and "rows of test that cannot be used" in out
    assert "error: a run stops at 3 rows that cannot be used: correct them, or set stream.on_bad_row=skip" in out
    assert main.main(["data", "check", str(tmp_path), "--examples", "0", "stream.on_bad_row=skip"]) == 0


@pytest.mark.parametrize("splits", [{}, {"train": "train[:60]", "test": "train[60:]"}])
def test_a_bad_row_counts_once_in_a_file_of_several_splits(
    tmp_path: Path, codec: MiniLMCodec, splits: dict[str, str]
) -> None:
    items = [{"text": f"text {number}", "label": "ab"[number % 2]} for number in range(130)]
    for number, item in enumerate(items):
        item |= {} if splits else {"split": "train" if number < 65 else "test"}
    for item in (items[7], items[70]):
        del item["label"]
    written = [*map(json.dumps, items), '{"text": "cut']
    (tmp_path / "rows.jsonl").write_text("\n".join(written))
    check = checked(codec, str(tmp_path / "rows.jsonl"), {"splits": splits}, on_bad_row="skip", dev_fraction=0)
    unusable = {split: counts.unusable for split, counts in check.splits.items()}
    assert unusable == ({"train": 3, "test": 0} if splits else {"train": 2, "test": 1}) and check.unusable == 3


def test_turns_of_trained_conversations_and_rows_of_trained_groups_are_counted(
    tmp_path: Path, codec: MiniLMCodec
) -> None:
    def turns(number: int, count: int) -> dict[str, Any]:
        said = [(role, f"{role} {number} {turn}") for turn in range(count) for role in ("user", "assistant")]
        return {"messages": [{"role": role, "content": content} for role, content in said]}

    def write(split: str, items: list[dict[str, Any]]) -> None:
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))

    write("train", [turns(number, 1) for number in range(20)])
    write("test", [turns(number, 2) for number in range(15, 25)])
    chat = MiniLMCodec(needs_labels=False)
    result = kinds(checked(chat, str(tmp_path), {"labels": None}, prompt="plain"))
    assert result["test rows of a conversation that is trained on"].count == 5, "the second turns of five of them"
    assert result["test rows with a text that is in train"].count == 5
    write("train", [{"text": f"t{n}", "label": "ab"[n % 2], "user": n // 2} for n in range(40)])
    write("test", [{"text": f"s{n}", "label": "ab"[n % 2], "user": n} for n in range(18, 30)])
    result = kinds(checked(codec, str(tmp_path), group="user"))
    assert (
        result["test rows of a group that is trained on"].count,
        result.get("test rows with a text that is in train"),
    ) == (2, None)


def test_what_a_run_would_refuse_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    path = task(tmp_path / "t", [("a", "one long answer"), ("b", "another")] * 40, rows(50))
    result = checked(MiniLMCodec(needs_labels=True), path, {"labels": None})
    assert "has free-text answers: an encoder-only backbone needs a closed label set" in result.problem
    assert result.splits["train"].rows == 72 and result.examples == []


def test_examples_of_conversations_show_which_tokens_carry_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A turn of weight 0 is among those without loss of a later one."""
    tokenizer = chat_codec("words", "trims").tokenizer
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model("llama", len(tokenizer)).save_pretrained(tmp_path / "model")
    turns = [("user", "the sky is"), ("assistant", "blue"), ("user", "the fire is"), ("assistant", "red")]
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
    messages[1]["weight"] = 0
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    words = ["data", "check", str(tmp_path / "chats.jsonl"), f"backbone.name={tmp_path / 'model'}"]
    assert main.main([*words, "stream.dev_fraction=0"]) == 0
    out = capsys.readouterr().out
    without = "the | sky | is | <|end|> | <|turn|> | assistant | <|head|> | blue | <|end|> | <|turn|> | user"
    assert "tokens without loss: " in out and without in out and "3 tokens with loss: red | <|end|> | </s>" in out


def test_the_command_describes_a_file_a_folder_and_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = task(tmp_path / "tickets", rows(100), rows(60, 200))
    assert main.main(["data", "check", path, "stream.max_source_tokens=32"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tickets: labels, 2 labels, metric exact_match") and "nothing to warn of" in out
    assert "labels of train: " in out and "row " in out and "tokens: [CLS] | word | " in out
    assert main.main(["data", "check", path, "stream.max_source_tokens=32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["splits"]["test"]["rows"] == 60
    longer = task(tmp_path / "cut", [*rows(190), *rows(10, 190, words=30)], rows(60, 300))
    assert main.main(["data", "check", longer, "stream.max_source_tokens=16"]) == 0
    out = capsys.readouterr().out
    assert " of train are cut to 16 tokens: " in out and "to keep them whole set stream.max_source_tokens_by_" in out
    assert "nothing to warn of" not in out and "probably wrong" not in out
    (tmp_path / "rows.csv").write_text("body,team\nhello,a\nworld,b\n")
    words = ["data", "check", str(tmp_path / "rows.csv"), "columns.text=body", "columns.label=team"]
    assert main.main(words) == 0
    assert "name other rows for test" in capsys.readouterr().out
    assert main.main(["data", "check", path, "labels=null"]) == 1
    assert "error: task 'tickets' has free-text answers" in capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(json.dumps({"stream": {"tasks": [{"name": "one", "path": path}]}}))
    assert main.main(["data", "check", "--config", str(tmp_path / "run.yaml"), "--examples", "1"]) == 0
    assert capsys.readouterr().out.startswith("one: labels")
    assert main.main(["data", "check", f"stream.tasks=[{{name: two, path: {path}}}]", "--examples", "0"]) == 0
    assert capsys.readouterr().out.startswith("two: labels")
    assert main.main(["data", "check", str(tmp_path / "none")]) == 1
    missing = f"error: task 'none': '{tmp_path / 'none'}' does not exist: expected a file or a folder of rows"
    assert missing in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert main.main(["data", "check", str(tmp_path / "none")]) == 1
    assert "error: task 'none' has no train file" in capsys.readouterr().err


def test_a_metric_that_a_run_would_refuse_is_the_problem_of_its_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", "check", task(tmp_path / "tickets", rows(100), rows(60, 200)), "--examples", "0"]
    assert main.main([*words, "metric=acc"]) == 1
    assert "error: unknown metric 'acc': did you mean 'accuracy'?" in capsys.readouterr().out
    assert main.main([*words, "metric=accuracy"]) == 0


@pytest.mark.parametrize(("written", "meant"), [("colums.text", "columns"), ("bakcbone.name", "backbone")])
def test_a_mistyped_setting_gets_the_nearest_of_task_and_run(
    tmp_path: Path, written: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["data", "check", task(tmp_path / "t", rows(9), rows(9)), f"{written}=x"]) == 1
    assert f"unknown config key '{written.split('.')[0]}': did you mean '{meant}'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["seed=7"], ["a", "b"], ["a", "--config", "run.yaml"]])
def test_what_is_checked_is_named_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["data", "check", *words])
    assert "expected one PATH, --config FILE, or stream.name=ORDER" in capsys.readouterr().err


def test_a_dev_file_that_is_not_read_is_named(
    tmp_path: Path, codec: MiniLMCodec, capsys: pytest.CaptureFixture[str]
) -> None:
    path = task(tmp_path / "t", rows(60), rows(60, 100))
    assert main.main(["data", "check", path, "--examples", "0"]) == 0
    assert "not read" not in capsys.readouterr().out, "there is none"
    file = Path(path, "validation.jsonl")
    file.write_text(Path(path, "test.jsonl").read_text())
    assert main.main(["data", "check", path, "--examples", "0"]) == 0
    said = f"not read: {file} is read under stream.dev=file only; dev rows are those of train"
    assert said in " ".join(capsys.readouterr().out.split())
    assert main.main(["data", "check", path, "--examples", "0", "stream.dev=file"]) == 0
    assert "not read" not in capsys.readouterr().out
    assert checked(codec, path, {"dev": str(file)}).unread == "", "a file that is named is read"
    released = StreamConfig(root=str(tmp_path), tasks=("t",))
    stream = open_stream(released, seed=0)
    assert check_task(stream, stream.tasks[0], codec, seed=0).unread == str(file), "by its name in a folder of tasks"
