"""TRACE's benchmark as it is published: files found, prompts, scores, and damage named in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_samples import MiniLMCodec
from trace_samples import TASKS, write_trace

from raycl.data.settings import ColumnNames
from raycl.data.stream import Stream, StreamConfig, TaskSpec, open_stream
from raycl.errors import ConfigError, DataError, MissingTasksError

METRICS = {
    "C-STANCE": "accuracy",
    "FOMC": "accuracy",
    "MeetingBank": "rouge_l",
    "Py150": "edit_similarity_py150",
    "ScienceQA": "first_character",
    "NumGLUE-cm": "accuracy",
    "NumGLUE-ds": "accuracy",
    "20Minuten": "sari",
}


class Writer(MiniLMCodec):
    def __init__(self) -> None:
        super().__init__(needs_labels=False)


def opened(root: Path, **settings: Any) -> Stream:
    return open_stream(StreamConfig(**{"name": "trace", "root": str(root), **settings}), 0)


def texts(stream: Stream, name: str, split: Any = "test") -> list[str]:
    task = next(task for task in stream.tasks if task.name == name)
    raw = stream.source(task, split)
    assert raw is not None
    return list(raw.open().values("text", stream.rows(task, split)))


@pytest.mark.parametrize("inside", ["", "TRACE-Benchmark"])
def test_the_tasks_are_found_below_the_release_or_in_its_folder(tmp_path: Path, inside: str) -> None:
    folder = write_trace(tmp_path / inside)
    for root in (tmp_path, folder):
        stream = opened(root)
        assert [task.name for task in stream.tasks] == list(TASKS)
        assert {task.name: task.metric for task in stream.tasks} == METRICS
        labels = {task.name: task.labels for task in stream.tasks if task.labels}
        assert labels == {"C-STANCE": ("A", "B", "C"), "FOMC": ("A", "B", "C")}


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_is_that_of_the_row_and_its_instruction_stands_in_it_once(tmp_path: Path, name: str) -> None:
    folder = write_trace(tmp_path)
    stream = opened(folder)
    task = next(task for task in stream.tasks if task.name == name)
    prompt = stream.prompt(task, Writer())
    rows = json.loads((folder / name / "test.json").read_text())
    assert [prompt.written(text) for text in texts(stream, name)] == [row["prompt"] for row in rows]
    assert prompt.instruction == ("" if name == "Py150" else rows[0]["prompt"].split("\n")[0])


def test_eval_files_are_the_dev_split(tmp_path: Path) -> None:
    write_trace(tmp_path, test=4)
    stream = opened(tmp_path, dev="file")
    assert [len(stream.rows(task, "dev")) for task in stream.tasks] == [4] * 8
    assert [len(stream.rows(task, "train")) for task in stream.tasks] == [12] * 8


def test_the_orders_and_the_small_release(tmp_path: Path) -> None:
    write_trace(tmp_path, train=12)
    small = write_trace(tmp_path, train=6, name="LLM-CL-Benchmark_500")
    (small / "20Minuten" / "eval.json").unlink()  # as in the release
    names = [task.name for task in opened(tmp_path, name="trace-2").tasks]
    assert names == [
        *("NumGLUE-cm", "NumGLUE-ds", "FOMC", "20Minuten", "C-STANCE", "Py150", "MeetingBank", "ScienceQA"),
    ]
    for name, rows in (("trace", 12), ("TRACE-1", 12), ("trace-500", 6)):
        stream = opened(tmp_path, name=name, dev_fraction=0)
        assert [len(stream.rows(task, "train")) for task in stream.tasks] == [rows] * 8
    with pytest.raises(
        ConfigError, match=r"LLM-CL-Benchmark_500', and the rows of stream.name=trace are those of .*5000"
    ):
        opened(small)


def test_a_long_transcript_loses_its_end_and_neither_instruction_nor_cue(tmp_path: Path) -> None:
    folder = write_trace(tmp_path)
    file = folder / "MeetingBank" / "test.json"
    rows = json.loads(file.read_text())
    head, _, tail = rows[0]["prompt"].partition("Thank you.")
    rows[0]["prompt"] = f"{head}{'Thank you. ' * 300}{tail}"
    file.write_text(json.dumps(rows))
    stream = opened(folder, max_source_tokens=64)
    task = next(task for task in stream.tasks if task.name == "MeetingBank")
    codec = Writer()
    source = codec.text(stream.table(task, "test", codec).columns([0]).source_ids[0].tolist())
    assert source.startswith("write a summary of the following meeting transcripts.") and source.endswith("summary :")
    assert "passes" not in source


def test_scores_of_another_rule_are_named_by_task(tmp_path: Path) -> None:
    write_trace(tmp_path)
    stream = opened(tmp_path, metric_by_task={"MeetingBank": "rouge_l_trace", "20Minuten": "sari_trace"})
    metrics = {task.name: task.metric for task in stream.tasks}
    assert metrics == METRICS | {"MeetingBank": "rouge_l_trace", "20Minuten": "sari_trace"}


def test_prompts_as_they_are(tmp_path: Path) -> None:
    folder = write_trace(tmp_path)
    stream = opened(folder, prompt="plain")
    rows = json.loads((folder / "FOMC" / "test.json").read_text())
    assert texts(stream, "FOMC") == [row["prompt"] for row in rows]


def test_an_empty_transcript_is_an_empty_text(tmp_path: Path) -> None:
    """The release has one in the train rows of MeetingBank and one in the test rows."""
    folder = write_trace(tmp_path)
    file = folder / "MeetingBank" / "test.json"
    prompt = "Write a summary of the following meeting transcripts.\nMeeting transcripts:\nSummary:"
    file.write_text(json.dumps([{"prompt": prompt, "answer": "Nothing was said."}]))
    assert texts(opened(folder), "MeetingBank") == [""]


def test_a_task_of_your_own_is_like_one_of_them(tmp_path: Path) -> None:
    folder = write_trace(tmp_path)
    (tmp_path / "rates").mkdir()
    for split in ("train", "test"):
        (tmp_path / "rates" / f"{split}.jsonl").write_text('{"body": "Rates rise.", "stance": "B"}\n' * 4)
    own = TaskSpec(
        name="rates",
        path=str(tmp_path / "rates"),
        like="FOMC",
        columns=ColumnNames(text="body", label="stance"),
    )
    same = TaskSpec(name="fomc-again", path=str(folder / "FOMC"), like="fomc")
    stream = open_stream(StreamConfig(name="mine", tasks=(own, same)), 0)
    prompts = [stream.prompt(task, Writer()).written(texts(stream, task.name)[0]) for task in stream.tasks]
    assert prompts[0] == TASKS["FOMC"](0)["prompt"].replace("In month 0 the committee lowered its rate.", "Rates rise.")
    assert prompts[1] == TASKS["FOMC"](200)["prompt"]


def cut(file: Path) -> None:
    file.write_text(file.read_text()[:-40])


def no_json(file: Path) -> None:
    file.write_text("<html>Quota exceeded</html>")


def other_field(file: Path) -> None:
    file.write_text(json.dumps([{"prompt": TASKS["FOMC"](0)["prompt"], "output": "A"}]))


def other_prompt(file: Path) -> None:
    file.write_text(json.dumps([{"prompt": "What is the stance? Rates rise.", "answer": "A"}]))


def other_label(file: Path) -> None:
    file.write_text(json.dumps([{"prompt": TASKS["FOMC"](0)["prompt"], "answer": "dovish"}]))


def number_as_answer(file: Path) -> None:
    file.write_text(json.dumps([{"prompt": TASKS["FOMC"](0)["prompt"], "answer": 1.5}]))


def empty_list(file: Path) -> None:
    file.write_text("[]")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut, r"FOMC/train\.json, row 12: malformed JSON .*: expected one complete JSON value, repair or re-export"),
        (no_json, r"FOMC/train\.json, row 1: malformed JSON .*: expected one object a line, repair the line"),
        (other_field, r"FOMC/train\.json, row 1: no answer: expected a string or a list of strings"),
        (
            other_prompt,
            r"FOMC/train\.json, row 1: the prompt 'What is the stance\? Rates rise\.' is not the benchmark's",
        ),
        (other_label, r"FOMC/train\.json, row 1: label 'dovish' is outside the label set: expected one of A, B, C"),
        (number_as_answer, r"FOMC/train\.json, row 1: the answer is a float: expected a string"),
        (empty_list, r"FOMC/train\.json.*the split is empty: expected at least one row"),
    ],
)
def test_damage_of_a_file_is_named_in_one_sentence(tmp_path: Path, damage: Any, sentence: str) -> None:
    folder = write_trace(tmp_path)
    damage(folder / "FOMC" / "train.json")
    with pytest.raises(DataError, match=sentence) as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


def test_missing_splits_and_tasks_are_named_together(tmp_path: Path) -> None:
    folder = write_trace(tmp_path)
    (folder / "FOMC" / "test.json").unlink()
    for file in (folder / "Py150").iterdir():
        file.unlink()
    (folder / "Py150").rmdir()
    with pytest.raises(MissingTasksError, match=r"2 of 8 tasks .*FOMC \(no test file\), Py150 \(no folder\).*_5000"):
        opened(tmp_path)


def test_rows_with_another_prompt_are_left_out_if_they_may_be(tmp_path: Path) -> None:
    folder = write_trace(tmp_path)
    file = folder / "FOMC" / "train.json"
    file.write_text(json.dumps([*json.loads(file.read_text()), {"prompt": "Rates rise.", "answer": "A"}]))
    stream = opened(folder, on_bad_row="skip", dev_fraction=0)
    assert len(texts(stream, "FOMC", "train")) == 12
    assert any("FOMC: 1 row of train cannot be used" in note for note in stream.notes)
