"""Opening streams: what is found, what is refused, what is remembered; on files of every kind and the real data."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_samples import MiniLMCodec, WriteTask, news, open_agnews

import raycl
from raycl.cli.data import task_at
from raycl.config import as_tree, load, validate
from raycl.data.settings import as_spec, name_at, with_specs
from raycl.data.sources import ingest, source
from raycl.data.sources.hub import HubSplit
from raycl.data.stream import StreamConfig, TaskSpec, open_stream
from raycl.errors import ConfigError, DataError, MissingTasksError
from raycl.serve.offline.prediction_input import files_at
from raycl.training.definition.task_order import Joint, Schedule
from raycl.training.setup.run_config import RunConfig, free_names
from raycl.types import Task


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_a_path_alone_is_a_task_of_your_own(write_task: WriteTask) -> None:
    """Its name is the last part without a suffix; a word without a slash is a known name."""
    root = write_task("mail", [(f"text {n}", "ab"[n % 2]) for n in range(40)], [("text", "a")] * 6)
    folder, file = f"{root}/mail/", f"{root}/mail/train.jsonl"
    stream = open_stream(StreamConfig.model_validate({"tasks": [folder, "topic"]}), seed=0)
    assert [task.name for task in stream.tasks] == ["mail", "topic"] and stream.tasks[0].labels == ("a", "b")
    assert with_specs({"stream": {"unseen": file}}) == {"stream": {"unseen": [{"name": "train", "path": file}]}}
    for setting in ("tasks", "unseen"):
        (task,) = getattr(StreamConfig.model_validate({setting: folder}), setting)
        assert (task.name, task.path) == ("mail", folder.rstrip("/"))


def test_the_name_of_a_path_is_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v1.2").mkdir()
    monkeypatch.chdir(tmp_path / "v1.2")
    local = {"./": "v1.2", "../v1.2": "v1.2", "~/": Path("~").expanduser().name, "data/mail.2024.csv": "mail"}
    others = {
        "hf://org/my.data": "my.data",
        "s3://bucket/mail/?endpoint_override=http://localhost:9000": "mail",
        "s3://bucket": "bucket",
        "sql:postgresql://user:secret@host/desk?password=secret": "desk",
        "sql:sqlite:////data/mail.db": "mail",
    }
    assert {path: name_at(path) for path in local | others} == local | others
    assert as_spec("hf://org/data@main") == {"name": "data", "path": "hf://org/data@main"}


def test_a_dataset_on_the_hub_is_named_with_its_revision_wherever_it_is_named() -> None:
    address = "hf://org/data@v1"
    written = [address, raycl.task("data", address), task_at(address, [], StreamConfig())]
    specs = [StreamConfig.model_validate({"tasks": [task]}).tasks for task in written]
    assert specs == [(TaskSpec(name="data", path="hf://org/data", revision="v1"),)] * 3
    assert files_at([address]) == (HubSplit("hf://org/data", "test", revision="v1"),)
    assert TaskSpec(name="data", path=address, revision="v1") == TaskSpec(name="data", path=address)
    with pytest.raises(ValueError, match="path is 'hf://org/data@v1' and revision is 'v2': expected one revision"):
        TaskSpec(name="data", path=address, revision="v2")


def test_a_named_benchmark_below_its_usual_folder(write_task: WriteTask) -> None:
    for name in ("dbpedia", "amazon", "yahoo"):
        labels = {"dbpedia": "Film", "amazon": "neutral", "yahoo": "Health"}
        root = write_task(name, [("a", labels[name])] * 20, [("b", labels[name])], below="CL_Benchmark/Long_Sequence")
    write_task("ag", news(20), news(4, 20), below="CL_Benchmark/Long_Sequence")
    stream = open_stream(StreamConfig(name="slm-1", root=str(root)), seed=0)
    assert stream.name == "std-1"
    assert [task.name for task in stream.tasks] == ["dbpedia", "amazon", "yahoo", "agnews"]
    assert [(phase.index, phase.name, len(phase.tasks)) for phase in Schedule().phases(stream)][3] == (3, "agnews", 1)
    assert [(phase.name, phase.tasks) for phase in Joint().phases(stream)] == [("joint", stream.tasks)]
    assert stream.tasks[3].labels == ("World", "Sports", "Business", "Science or Technology")


def test_missing_tasks_are_listed_or_dropped_with_a_note(write_task: WriteTask) -> None:
    root = str(write_task("agnews", news(20), news(4)))
    with pytest.raises(MissingTasksError, match=r"dbpedia \(no folder\), amazon .*, yahoo"):
        open_stream(StreamConfig(name="std-1", root=root), seed=0)
    stream = open_stream(StreamConfig(name="std-1", root=root, allow_missing=True), seed=0)
    assert [task.name for task in stream.tasks] == ["agnews"]
    assert "dbpedia, amazon, yahoo" in stream.notes[0]


def test_dev_is_carved_from_train_and_test_stays_whole(agnews: Any, codec: MiniLMCodec) -> None:
    task = agnews.tasks[0]
    train, dev, test = (agnews.table(task, split, codec) for split in ("train", "dev", "test"))
    assert (len(train), len(dev), len(test)) == (90, 10, 10)
    assert not set(train.texts(range(90))) & set(dev.texts(range(10)))
    assert test.texts([0]) == [news(1, 100)[0][0]]
    assert test.row_numbers([0, 9]).tolist() == [1, 10]


def test_limits_and_few_shot(write_task: WriteTask) -> None:
    root = write_task("agnews", news(400), news(40, 400))
    task = open_agnews(root).tasks[0]
    limited = open_agnews(root, train_rows=30, test_rows=7, dev_rows=5)
    assert [len(limited.rows(task, split)) for split in ("train", "dev", "test")] == [30, 5, 7]
    for by_task, rows in (({"agnews": 12}, 12), ({"other": 12}, 30)):
        its_own = open_agnews(root, train_rows=30, train_rows_by_task=by_task)
        assert len(its_own.rows(task, "train")) == rows
    few = open_agnews(root, per_class=16)
    codes = few._open["agnews"].raws["train"].label_codes(few.rows(task, "train"))
    assert np.bincount(codes).tolist() == [16] * 4
    assert not set(few.rows(task, "train")) & set(few.rows(task, "dev"))
    assert len(open_agnews(root, dev_rows=None, dev_fraction=0.5).rows(task, "dev")) == 200


def test_row_selection_depends_on_the_seed_alone(write_task: WriteTask, tmp_path: Path) -> None:
    root = write_task("agnews", news(200), news(10))
    task = open_agnews(root).tasks[0]
    here = open_agnews(root, seed=1, train_rows=20)
    elsewhere = open_agnews(root, seed=1, train_rows=20, cache_dir=str(tmp_path / "other_node"))
    assert np.array_equal(here.rows(task, "train"), elsewhere.rows(task, "train"))
    assert not np.array_equal(here.rows(task, "train"), open_agnews(root, seed=2, train_rows=20).rows(task, "train"))


def test_dev_files_are_used_on_request_only(write_task: WriteTask, codec: MiniLMCodec) -> None:
    root = write_task("agnews", news(20), news(4, 20), dev=news(4, 20))
    task = open_agnews(root).tasks[0]
    assert len(open_agnews(root).rows(task, "dev")) == 2
    official = open_agnews(root, dev="file")
    assert len(official.rows(task, "train")) == 20
    assert official.table(task, "dev", codec).texts([0]) == [news(1, 20)[0][0]]
    assert "test-selected" in official.notes[0]


def test_a_second_opening_reads_nothing(
    write_task: WriteTask, codec: MiniLMCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_task("agnews", news(50), news(5))
    monkeypatch.setattr(source, "_SETTLED_NS", -1)
    stream = open_agnews(root)
    first = stream.table(stream.tasks[0], "train", codec)
    monkeypatch.setattr(ingest, "read_rows", lambda *_: pytest.fail("read again"))
    monkeypatch.setattr(source, "_CHUNK", None)  # hashing the file again would need it
    calls = codec.calls
    again = open_agnews(root)
    second = again.table(again.tasks[0], "train", codec)
    assert codec.calls == calls + 1  # the length of the prompt, no rows
    assert second.texts(range(45)) == first.texts(range(45))
    copied = pickle.loads(pickle.dumps(second))
    assert copied.texts([3]) == first.texts([3])


def test_changed_content_is_noticed(write_task: WriteTask) -> None:
    root = write_task("agnews", news(50), news(5))
    task = open_agnews(root).tasks[0]
    path = root / "agnews" / "test.json"
    path.write_text(path.read_text().replace("Sports", "Worlds").replace("Worlds", "World ").replace("World ", "World"))
    time.sleep(0.01)
    changed = open_agnews(root)
    codes = changed._open["agnews"].raws["test"].label_codes(changed.rows(task, "test"))
    assert 1 not in codes


def test_rows_without_a_label_are_dropped_and_noted(write_task: WriteTask) -> None:
    root = str(write_task("mnli", [("a", "neutral")] * 10, [("b", "neutral"), ("c", "-")]))
    stream = open_stream(StreamConfig(name="x", root=root, tasks=("MNLI",)), seed=0)
    assert len(stream.rows(stream.tasks[0], "test")) == 1
    assert "mnli: rows without a label dropped: 1 test" in stream.notes
    kept = open_stream(StreamConfig(name="x", root=root, tasks=("mnli",), unlabelled="keep"), seed=0)
    assert len(kept.rows(kept.tasks[0], "test")) == 2


def test_a_label_outside_the_set_names_its_row(write_task: WriteTask) -> None:
    root = write_task("agnews", [*news(20), ("text", "Weather")], news(4))
    with pytest.raises(DataError, match=r"train\.json, row 21: label 'Weather' is outside .* World, Sports"):
        open_agnews(root)


def test_an_empty_split_is_refused(write_task: WriteTask) -> None:
    root = write_task("agnews", news(20), [])
    with pytest.raises(DataError, match=r"agnews/test\.json: the split is empty"):
        open_agnews(root)


def test_olora_layout_brings_its_labels_and_instruction(tmp_path: Path, codec: MiniLMCodec) -> None:
    folder = tmp_path / "CL_Benchmark" / "QQP" / "QQP"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.json").write_text(json.dumps([{"label": "True", "sentence": f"{split} it"}] * 20))
    (folder / "labels.json").write_text('["False", "True"]')
    config = StreamConfig(name="x", root=str(tmp_path), tasks=("qqp",))
    stream = open_stream(config, seed=0)
    assert stream.tasks == (Task("qqp", ("False", "True"), "exact_match"),)
    prompt = stream.prompt(stream.tasks[0], codec)
    assert prompt.prefix.startswith('Whether the "first sentence"') and prompt.prefix.endswith("Option: False, True \n")
    named = open_stream(config.model_copy(update={"prompt_names": True}), seed=0).prompt(stream.tasks[0], codec)
    assert named.prefix.startswith("Task:QQP\nDataset:QQP\nWhether")
    (folder / "labels.json").write_text("{}")
    with pytest.raises(DataError, match=r"labels\.json: .*expected the label set as a JSON list"):
        open_stream(config, seed=0)


def test_custom_tasks_gather_their_labels(tmp_path: Path) -> None:
    rows = [{"body": f"t{i}", "class": i % 3} for i in range(30)]
    train, test = lines(tmp_path / "a.jsonl", rows), lines(tmp_path / "b.jsonl", rows[:3])
    tree = {"name": "mine", "train": train, "test": test, "columns": {"text": "body", "label": "class"}}
    stream = open_stream(validate(StreamConfig, {"tasks": [tree]}), seed=0)
    assert stream.name == "mine"
    assert stream.tasks == (Task("mine", ("0", "1", "2"), "exact_match"),)
    named = open_stream(validate(StreamConfig, {"tasks": [{**tree, "labels": ["x", "y", "z"], "first_label": 0}]}), 0)
    assert named.tasks[0].labels == ("x", "y", "z")
    raws = named._open["mine"].raws
    assert raws["test"].label_codes(np.arange(3)).tolist() == [0, 1, 2]
    assert raws["test"].open().values("references", [2]) == [["z"]]
    lines(tmp_path / "b.jsonl", [{"body": "t", "class": 7}])
    with pytest.raises(DataError, match=r"b\.jsonl, row 1: label '7' is outside the label set: .*labels: null"):
        open_stream(validate(StreamConfig, {"tasks": [tree]}), seed=0)


def test_many_or_several_answers_are_free_text(tmp_path: Path) -> None:
    many = lines(tmp_path / "many.jsonl", [{"text": "t", "label": f"answer {i}"} for i in range(65)])
    several = lines(tmp_path / "several.jsonl", [{"text": "t", "label": ["a", "b"]}] * 20)
    tasks = tuple(TaskSpec(name=name, train=path, test=path) for name, path in (("m", many), ("s", several)))
    stream = open_stream(StreamConfig(tasks=tasks), seed=0)
    assert [(task.labels, task.metric) for task in stream.tasks] == [(None, "rouge_l")] * 2
    with pytest.raises(ConfigError, match="per_class is 4, but the answers of task 'm' are free text"):
        open_stream(StreamConfig(tasks=tasks, per_class=4), seed=0)


def test_references_first_or_one_at_random(write_task: WriteTask, codec: MiniLMCodec) -> None:
    rows = [(f"t{i}", [f"a{i}", f"b{i}", f"c{i}"]) for i in range(60)]
    root = str(write_task("task591_sciq_answer_generation", rows, rows))
    config = StreamConfig(name="x", root=root, tasks=("task591",))
    stream = open_stream(config, seed=0)
    table = stream.table(stream.tasks[0], "test", codec)
    assert table.references([3]) == [("a3", "b3", "c3")]
    random = open_stream(config.model_copy(update={"references": "random"}), seed=0)
    item = random.table(stream.tasks[0], "test", codec)
    kept = item.references(range(60))
    assert {len(names) for names in kept} == {1} and {names[0][0] for names in kept} == {"a", "b", "c"}
    target = item.columns([3]).target_ids[0]
    assert codec.text(target.tolist()) == kept[3][0]


def test_own_tasks_without_a_name_for_their_stream_name_it(write_task: WriteTask, tmp_path: Path) -> None:
    """The tasks name it in results, on pages, and in the name of a run's folder."""
    write_task("agnews", news(20), news(4))
    own = [TaskSpec(name=name, path=str(write_task(name, news(20), news(4)) / name)) for name in ("tickets", "tone")]
    many = tuple(TaskSpec(name=f"department-{number}", path=own[0].path) for number in range(4))
    found = {
        "tickets-tone": StreamConfig(tasks=tuple(own)),
        "topic-tickets": StreamConfig(tasks=("topic", own[0])),
        "agnews": StreamConfig(tasks=("agnews",), root=str(tmp_path / "data")),
        "4-own-tasks": StreamConfig(tasks=many),
        "mine": StreamConfig(name="mine", tasks=tuple(own)),
        "builtin": StreamConfig(tasks=("topic", "sentiment")),
    }
    for title, stream in found.items():
        assert open_stream(stream, 0).name == title
        config = validate(RunConfig, {"stream": as_tree(stream), "output": {"dir": str(tmp_path / "runs")}})
        assert next(free_names(config)) == f"{title}-minilm-lora-s42"


def test_the_builtin_stream(codec: MiniLMCodec) -> None:
    stream = open_stream(StreamConfig(train_rows=20, test_rows=10), seed=0)
    assert stream.name == "builtin" and len(stream.tasks) > 1
    task = stream.tasks[0]
    assert [len(stream.rows(task, split)) for split in ("train", "test")] == [20, 10]
    assert len(stream.rows(task, "dev")) > 0
    assert len(stream.table(task, "train", codec)) == 20
    assert stream.table(task, "train", codec).labels(range(20)).min() >= 0
    more = open_stream(StreamConfig(train_rows=20, train_rows_by_task={task.name: 400}), seed=0)
    assert [len(more.rows(item, "train")) for item in more.tasks[:2]] == [400, 20], "made for it, not cut from 20"
    part = open_stream(StreamConfig(tasks=(stream.tasks[1].name,), train_rows=20), seed=0)
    assert [task.name for task in part.tasks] == [stream.tasks[1].name]


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "long-A"}, "task 'mnli' of stream 'long-A' comes from files: set stream.root"),
        ({"name": "lung-A"}, "did you mean 'long-A'"),
        ({"root": str(tmp_path)}, "stream.name is builtin"),
        ({"tasks": ("nonsense",)}, "unknown task 'nonsense': expected one of the builtin tasks"),
        ({"tasks": ("agnews", "ag"), "root": str(tmp_path)}, "names agnews more than once"),
        ({"tasks": (TaskSpec(name="a", path=str(tmp_path)),)}, "task 'a' has no train file"),
        ({"tasks": (TaskSpec(name="a/b", path=str(tmp_path)),)}, "task name 'a/b' cannot be used"),
    ]
    for settings, message in cases:
        with pytest.raises((ConfigError, DataError), match=message):
            open_stream(StreamConfig(**settings), seed=0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["per_class=4", "train_rows=5"], "both limit the train rows"),
        (["per_class=4", "train_rows_by_task.a=5"], "both limit the train rows"),
        (["train_rows_by_task.a=0"], r"train_rows_by_task\.a.*greater than 0"),
        (["tasks=[{name: a}]"], "task 'a' has no data"),
        (["tasks=[{name: a, path: x, first_label: 0}]"], "first_label without a list of labels"),
        (["tasks=[{name: a, path: x, labels: [yes, no]}]"], "True is no text: write labels in quotes"),
        (["tasks=[{name: a, path: x, words: {b: 1}}]"], "1 is no text: write labels in quotes"),
        (["dev_fraction=1.5"], "dev_fraction"),
        (["tran_rows=5"], "did you mean 'train_rows'"),
    ],
)
def test_config_errors_name_the_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(StreamConfig, None, overrides)


def test_local_paths_become_absolute_and_uris_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert StreamConfig(root="data").root == str(tmp_path / "data")
    assert StreamConfig(root="s3://bucket/data?scheme=http").root == "s3://bucket/data?scheme=http"


def test_a_config_survives_being_written_down() -> None:
    task = TaskSpec(name="a", path="x", labels=("p", "q"), first_label=1)
    config = StreamConfig(tasks=("agnews", task), root="data")
    assert validate(StreamConfig, as_tree(config)) == config


def test_the_real_data(shared: Path, codec: MiniLMCodec) -> None:
    streams = [open_stream(StreamConfig(name=name, root=str(shared / "data"), allow_missing=True), 0) for name in REAL]
    assert sum(len(stream.tasks) for stream in streams) == 20
    counts = {task.name: stream._open[task.name].raws["train"].count for stream in streams for task in stream.tasks}
    assert (counts["agnews"], counts["copa"], counts["task181_outcome_extraction"]) == (4000, 400, 338)
    copa = next(task for task in streams[0].tasks if task.name == "copa")
    assert streams[0].prompt(copa, codec).prefix == ""
    table = streams[0].table(copa, "test", codec)
    assert (len(table), table.truncated_sources) == (100, 0)
    sciq = next(task for task in streams[1].tasks if "sciq" in task.name)
    prefix = streams[1].prompt(sciq, codec).prefix
    assert prefix.startswith("Definition: Given a scientific question, generate a correct answer to it.\n\nNow")


REAL = ("long-A", "superni-1")


def conversations(count: int) -> list[dict[str, Any]]:
    """Return conversations of one to four turns each."""
    return [
        {
            "messages": [
                {"role": role, "content": f"{role} {number} {turn}"}
                for turn in range(1 + number % 4)
                for role in ("user", "assistant")
            ]
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("kind", ["conversations", "group"])
def test_rows_that_belong_together_are_trained_tested_and_replayed_together(tmp_path: Path, kind: str) -> None:
    rows = conversations(40)
    settings: dict[str, Any] = {}
    if kind == "group":
        rows = [{"text": f"t{n} {m}", "label": "ab"[m % 2], "user": n} for n in range(40) for m in range(1 + n % 4)]
        settings = {"group": "user"}
    spec = TaskSpec(name="mine", train=lines(tmp_path / "x.jsonl", rows))
    for more in ({}, {"dev_per_class": 4} if kind == "group" else {"dev_rows": 7}):
        stream = open_stream(StreamConfig(tasks=(spec,), test_fraction=0.15, **settings, **more), seed=0)
        task = stream.tasks[0]
        raw = stream.source(task, "train")
        assert raw is not None
        parts = [set(raw.groups[stream.rows(task, split)]) for split in ("train", "dev", "test")]
        assert all(parts) and not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
        assert 10 <= len(stream.rows(task, "test")) <= 15
        train = stream.rows(task, "train")
        stored = train[stream.stored(task, 0.1)]
        groups = raw.groups[train]
        assert len(stored) and all(
            (groups == group).sum() == (raw.groups[stored] == group).sum() for group in raw.groups[stored]
        )


def test_a_group_that_no_row_names_is_refused_and_one_that_a_task_lacks_is_noted(tmp_path: Path) -> None:
    plain = TaskSpec(name="a", train=lines(tmp_path / "a.jsonl", [{"text": f"t{n}", "label": "x"} for n in range(20)]))
    rows = [{"text": f"t{n}", "label": "x", "user": n // 2} for n in range(20)]
    grouped = TaskSpec(name="b", train=lines(tmp_path / "b.jsonl", rows))
    with pytest.raises(ConfigError, match=r"stream\.group is 'user', which no row of a has"):
        open_stream(StreamConfig(tasks=(plain,), group="user", test_fraction=0.5), seed=0)
    both = open_stream(StreamConfig(tasks=(plain, grouped), group="user", test_fraction=0.5), seed=0)
    assert "a: no train row names a group 'user' (stream.group)" in both.notes
    assert not any(note.startswith("b: no ") for note in both.notes)


def test_rows_that_cannot_be_used_are_refused_or_left_out_and_noted(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + "a,x\nb,y\n" * 10 + "c,\nd, \n")
    test = lines(tmp_path / "test.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "z"}, {"text": "c"}])
    spec = TaskSpec(name="mine", train=str(tmp_path / "train.csv"), test=test)
    with pytest.raises(DataError, match=r"train.csv: 2 rows of 22 with an empty label, the first is row 21: .*=skip"):
        open_stream(StreamConfig(tasks=(spec,)), seed=0)
    stream = open_stream(StreamConfig(tasks=(spec,), on_bad_row="skip"), seed=0)
    assert stream.tasks[0].labels == ("x", "y")
    assert [len(stream.rows(stream.tasks[0], split)) for split in ("train", "dev", "test")] == [18, 2, 1]
    assert "mine: rows without a label dropped: 2 train" in stream.notes
    assert any(
        "2 rows of test cannot be used and are left out" in note and "label 'z' is outside" in note
        for note in stream.notes
    )


def test_how_a_file_is_read_is_noted_when_it_comes_from_the_cache_too(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("text;label\n" + "a;x\nb;y\n" * 10)
    config = StreamConfig(tasks=(TaskSpec(name="mine", path=str(tmp_path)),))
    for _ in range(2):
        assert "mine: train.csv: its cells are separated by semicolons" in open_stream(config, seed=0).notes
