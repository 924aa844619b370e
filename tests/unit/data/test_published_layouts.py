"""SLM's LLaMA and T5 benchmarks as their sources are published: files found, formatted, split, scored as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_samples import MiniLMCodec, WriteTask, news
from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value

from raycl.cli.main import main
from raycl.data.benchmarks.knowledge import TASKS
from raycl.data.stream import Stream, StreamConfig, TaskSpec, open_stream
from raycl.errors import ConfigError, DataError, MissingTasksError
from raycl.metrics.per_example import check_labels
from raycl.types import Task

DOCTOR = "If you are a doctor, please answer the medical questions based on the patient's description."
TWEET = "What is the sentiment of this tweet? Please choose an answer from {negative/neutral/positive}"
PLANTS = ("Since green plants make their own food, they are called?", ["predators", "prey", "decomposers", "producers"])
AS_TEXT = f"Question: {PLANTS[0]}\nChoices: [predators, prey, decomposers, producers]"


class Writer(MiniLMCodec):
    """A backbone that writes its answers."""

    def __init__(self) -> None:
        super().__init__(needs_labels=False)


def opened(seed: int = 0, **settings: Any) -> Stream:
    return open_stream(StreamConfig(name="mine", **settings), seed)


def pairs(stream: Stream, task: Task, split: Any = "train") -> list[tuple[str, str]]:
    raw, rows = stream.source(task, split), stream.rows(task, split)
    assert raw is not None
    columns = raw.open()
    references = columns.values("references", rows)
    return [(text, names[0]) for text, names in zip(columns.values("text", rows), references, strict=True)]


def subject(folder: Path, name: str, rows: int, header: bool = False) -> None:
    """Write a CSV file of MMLU; texts with commas are quoted."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["question,A,B,C,D,answer"] if header else []
    choices = ",".join(PLANTS[1])
    lines += [f'"{PLANTS[0]}",{choices},{"ABCD"[number % 4]}' for number in range(rows)]
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("header", [False, True])
def test_mmlu_as_csv_files_of_subjects(tmp_path: Path, header: bool) -> None:
    for split, rows in (("auxiliary_train", 8), ("val", 2), ("test", 4)):
        for name in ("physics", "law"):
            subject(tmp_path / "mmlu" / split, f"{name}_{split}", rows, header)
    stream = opened(root=str(tmp_path), tasks=("mmlu",), dev="file")
    (task,) = stream.tasks
    assert (task.labels, task.metric) == (("A", "B", "C", "D"), "first_word")
    counts = {split: len(stream.rows(task, split)) for split in ("train", "dev", "test")}  # type: ignore[arg-type]
    assert counts == {"train": 16, "dev": 4, "test": 8}
    assert pairs(stream, task)[:2] == [(AS_TEXT, "A"), (AS_TEXT, "B")]
    prompt = stream.prompt(task, Writer())
    assert prompt.around("x") == "[INST] x [/INST] "


def test_mistakes_in_questions_name_their_file_and_row(tmp_path: Path) -> None:
    subject(tmp_path / "mmlu" / "train", "law", 4)
    subject(tmp_path / "mmlu" / "test", "law", 4)
    bad = tmp_path / "mmlu" / "train" / "physics.csv"
    bad.write_text("What?,1,2,3,4,A\nWhat?,1,2,3,4,E\n")
    with pytest.raises(DataError, match=r"physics\.csv, row 2: the answer is 'E': expected a letter from A to D"):
        opened(root=str(tmp_path), tasks=("mmlu",))


def as_hub(folder: Path, named: bool) -> None:
    """A configuration of cais/mmlu: choices in lists, the answer a class or a number."""
    answer = ClassLabel(names=["A", "B", "C", "D"]) if named else Value("int64")
    texts = {"question": Value("string"), "subject": Value("string"), "choices": Sequence(Value("string"))}
    columns = {"question": [PLANTS[0]] * 40, "subject": ["biology"] * 40, "choices": [PLANTS[1]] * 40}
    rows = Dataset.from_dict(
        columns | {"answer": [number % 4 for number in range(40)]}, features=Features(texts | {"answer": answer})
    )
    DatasetDict(train=rows).save_to_disk(folder)


@pytest.mark.parametrize("named", [True, False])
def test_mmlu_as_the_hub_has_it(tmp_path: Path, named: bool) -> None:
    as_hub(tmp_path / "mmlu", named)
    spec = TaskSpec(name="exam", path=str(tmp_path / "mmlu"), like="mmlu", splits={"test": None})
    stream = opened(tasks=(spec,), test_fraction=0.15, dev_fraction=0)
    (task,) = stream.tasks
    assert (task.labels, task.metric) == (("A", "B", "C", "D"), "first_word")
    assert len(stream.rows(task, "test")) == 6 and len(stream.rows(task, "train")) == 34
    raw = stream.source(task, "train")
    assert raw is not None and raw.open().values("references", [0, 1, 3]) == [["A"], ["B"], ["D"]]
    assert pairs(stream, task)[0][0] == AS_TEXT


def save(file: Path, rows: list[dict[str, Any]], lines: bool = False) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))


def questions(count: int) -> list[dict[str, Any]]:
    return [{"instruction": DOCTOR, "input": f"pain {n}", "output": f"Hi, rest {n}."} for n in range(count)]


def tweets(count: int) -> list[dict[str, Any]]:
    words = ("negative", "neutral", "positive")
    return [{"input": f"shares {n}", "output": words[n % 3], "instruction": TWEET} for n in range(count)]


@pytest.mark.parametrize("file_name", ["medical.json", "chatdoctor200k.json", "medical/HealthCareMagic-100k.json"])
def test_medical_questions_in_one_file(tmp_path: Path, file_name: str) -> None:
    save(tmp_path / file_name, questions(40))
    stream = opened(root=str(tmp_path), tasks=("medical",), test_fraction=0.15)
    (task,) = stream.tasks
    assert (task.labels, task.metric) == (None, "bertscore")
    assert len(stream.rows(task, "test")) == 6
    text, answer = pairs(stream, task)[0]
    assert text.startswith("pain ") and answer == f"Hi, rest {text.removeprefix('pain ')}."  # not the instruction twice
    prompt = stream.prompt(task, Writer())
    assert prompt.around("x") == f"[INST] <<SYS>>\n{DOCTOR}\n<</SYS>>\n\nx [/INST] "


def as_instructions(folder: Path) -> None:
    save(folder / "finance.json", tweets(40))


def as_lines(folder: Path) -> None:
    save(folder / "finance" / "sentiment.jsonl", tweets(40), lines=True)


def as_sentences(folder: Path) -> None:
    save(folder / "finance.json", [{"sentence": row["input"], "label": row["output"]} for row in tweets(40)])


def as_phrasebank(folder: Path) -> None:
    (folder / "finance").mkdir()
    lines = [f"{row['input']} of Mäkelä@{row['output']}\r\n" for row in tweets(40)]
    (folder / "finance" / "Sentences_50Agree.txt").write_bytes("".join(lines).encode("latin-1"))


@pytest.mark.parametrize("write", [as_instructions, as_lines, as_sentences, as_phrasebank])
def test_finance_in_one_file(tmp_path: Path, write: Any) -> None:
    write(tmp_path)
    stream = opened(root=str(tmp_path), tasks=("finance",), test_fraction=0.15)
    (task,) = stream.tasks
    assert (task.labels, task.metric) == (("negative", "neutral", "positive"), "first_word")
    assert stream.prompt(task, Writer()).around("x") == f"[INST] <<SYS>>\n{TWEET}\n<</SYS>>\n\nx [/INST] "
    for text, label in pairs(stream, task, "test"):
        number = int(text.split()[1])
        assert label == ("negative", "neutral", "positive")[number % 3]
        assert ("Mäkelä" in text) == (write is as_phrasebank)


def test_a_broken_line_of_the_phrasebank_is_named(tmp_path: Path) -> None:
    file = tmp_path / "finance.txt"
    file.write_bytes(b"good year@positive\nbad year\n")
    with pytest.raises(DataError, match=r"finance\.txt, row 2: 'bad year' is no end of a line"):
        opened(root=str(tmp_path), tasks=("finance",), test_fraction=0.5)


def test_test_rows_of_one_file_are_drawn_by_seed_and_never_trained_on(tmp_path: Path) -> None:
    save(tmp_path / "finance.json", tweets(200))
    settings: dict[str, Any] = {"root": str(tmp_path), "tasks": ("finance",), "test_fraction": 0.15}
    stream = opened(**settings)
    (task,) = stream.tasks
    rows = {split: set(stream.rows(task, split).tolist()) for split in ("train", "dev", "test")}  # type: ignore[arg-type]
    assert [len(rows[split]) for split in ("train", "dev", "test")] == [153, 17, 30]
    assert set.union(*rows.values()) == set(range(200))
    assert rows["test"] == set(opened(**settings, train_rows=10, dev_fraction=0.5).rows(task, "test").tolist())
    assert rows["test"] != set(opened(seed=1, **settings).rows(task, "test").tolist())
    assert set(opened(**settings, test_rows=5).rows(task, "test").tolist()) < rows["test"]
    assert "finance: comes as one file, 30 of its 200 rows are set aside as test" in stream.notes


def test_tasks_with_test_files_keep_them(write_task: WriteTask) -> None:
    root = write_task("agnews", news(40), news(10, 40))
    stream = opened(root=str(root), tasks=("agnews",), test_fraction=0.5)
    assert len(stream.rows(stream.tasks[0], "test")) == 10
    assert len(stream.rows(stream.tasks[0], "train")) == 36


def test_one_file_needs_a_fraction(tmp_path: Path) -> None:
    save(tmp_path / "finance.json", tweets(40))
    with pytest.raises(
        MissingTasksError, match=r"finance \(one file, from which stream\.test_fraction takes test rows\)"
    ):
        opened(root=str(tmp_path), tasks=("finance",))
    with pytest.raises(
        ConfigError, match=r"has no test file: set its 'test' to a file or stream\.test_fraction to take test rows from"
    ):
        opened(tasks=(TaskSpec(name="mine", train=str(tmp_path / "finance.json")),))
    stream = opened(tasks=(TaskSpec(name="mine", train=str(tmp_path / "finance.json")),), test_fraction=0.25)
    assert len(stream.rows(stream.tasks[0], "test")) == 10


def test_data_check_counts_the_parts_of_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "finance.json", tweets(200))
    file = str(tmp_path / "finance.json")
    main(["data", "check", file, "like=finance", "stream.test_fraction=0.15", "--json"])
    (trees,) = json.loads(capsys.readouterr().out)
    assert [trees["splits"][split]["rows"] for split in ("train", "dev", "test")] == [153, 17, 30]
    assert [trees["splits"][split]["left_out"] for split in ("train", "dev", "test")] == [0, 0, 0]
    assert not any("train's" in item["kind"] for item in trees["mistakes"])


def test_words_stand_for_labels(write_task: WriteTask) -> None:
    root = write_task("agnews", news(40), news(8, 40))
    stream = opened(root=str(root), tasks=("agnews",), answers="words")
    (task,) = stream.tasks
    assert (task.labels, task.metric) == (("world", "sports", "business", "science"), "first_word")
    for split in ("train", "test"):
        assert {label for _, label in pairs(stream, task, split)} == set(task.labels or ())
    plain = opened(root=str(root), tasks=("agnews",))
    assert (plain.tasks[0].metric, (plain.tasks[0].labels or ())[3]) == ("exact_match", "Science or Technology")


def test_known_words_are_one_for_each_label() -> None:
    """SLM's T5 benchmark: yelp, amazon, ag, dbpedia, yahoo."""
    for name in ("yelp", "amazon", "agnews", "dbpedia", "yahoo"):
        info = TASKS[name]
        assert isinstance(info.labels, tuple) and set(info.words) == set(info.labels)
        check_labels("first_word", name, [info.words[label] for label in info.labels])
        assert len(set(info.words.values())) == len(info.labels)


def test_words_of_an_own_task(tmp_path: Path) -> None:
    rows = [{"text": f"t {n}", "label": ("very good", "bad")[n % 2]} for n in range(20)]
    for split in ("train", "test"):
        save(tmp_path / f"{split}.jsonl", rows, lines=True)
    plain: dict[str, Any] = {"name": "mood", "path": str(tmp_path)}
    with pytest.raises(ConfigError, match="label 'very good' is not one word: give it a word for each of its labels"):
        opened(tasks=(TaskSpec(**plain),), answers="words")
    with pytest.raises(ConfigError, match="several labels have the same word"):
        opened(tasks=(TaskSpec(**plain, labels=("very good", "bad"), words={"very good": "bad"}),), answers="words")
    spec = TaskSpec(**plain, words={"very good": "great"})
    stream = opened(tasks=(spec,), answers="words")
    assert (stream.tasks[0].labels, stream.tasks[0].metric) == (("bad", "great"), "first_word")
    assert pairs(stream, stream.tasks[0], "test")[:2] == [("t 0", "great"), ("t 1", "bad")]
    assert opened(tasks=(spec,)).tasks[0].labels == ("bad", "very good")


def test_first_words_need_labels_of_one_word() -> None:
    with pytest.raises(
        ConfigError, match=r"task 'agnews' is scored by 'first_word' and its label 'Science or Technology'"
    ):
        check_labels("first_word", "agnews", TASKS["agnews"].labels)
    check_labels("exact_match", "agnews", TASKS["agnews"].labels)
    check_labels("first_word", "mmlu", TASKS["mmlu"].labels)


def test_dev_rows_of_each_class(write_task: WriteTask) -> None:
    """SLM's few-shot T5 runs: 16 rows of each class to train on and 16 to validate on."""
    root = write_task("agnews", news(400), news(8, 400), dev=news(100, 500))
    stream = opened(root=str(root), tasks=("agnews",), per_class=16, dev_per_class=16)
    (task,) = stream.tasks
    train, dev = stream.rows(task, "train"), stream.rows(task, "dev")
    raw = stream.source(task, "train")
    assert raw is not None
    for rows in (train, dev):
        assert np.bincount(raw.label_codes(rows)).tolist() == [16] * 4
    assert not set(train.tolist()) & set(dev.tolist())
    files = opened(root=str(root), tasks=("agnews",), per_class=16, dev_per_class=5, dev="file")
    assert len(files.rows(task, "dev")) == 20 and len(files.rows(task, "train")) == 64


def test_dev_rows_of_each_class_need_labels(tmp_path: Path) -> None:
    save(tmp_path / "medical.json", questions(40))
    with pytest.raises(ConfigError, match="dev_per_class is 4, but the answers of task 'medical' are free text"):
        opened(root=str(tmp_path), tasks=("medical",), test_fraction=0.15, dev_per_class=4)


def test_an_unknown_task_to_be_like_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "finance.json", tweets(40))
    spec = TaskSpec(name="mine", train=str(tmp_path / "finance.json"), like="finanze")
    with pytest.raises(ConfigError, match=r"is like 'finanze', which is no known task: .* finance"):
        opened(tasks=(spec,), test_fraction=0.15)


def test_mmlu_in_one_file(tmp_path: Path) -> None:
    subject(tmp_path, "mmlu", 40)
    stream = opened(root=str(tmp_path), tasks=("mmlu",), test_fraction=0.15, dev_fraction=0)
    (task,) = stream.tasks
    assert [len(stream.rows(task, split)) for split in ("train", "test")] == [34, 6]
    assert pairs(stream, task, "test")[0][0] == AS_TEXT
