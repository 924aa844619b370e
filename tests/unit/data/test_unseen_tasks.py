"""Tasks that are evaluated and never trained: where they are found, how they are prepared, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from data_samples import MiniLMCodec, WriteTask, news

from raycl.config import load
from raycl.data.benchmarks.knowledge import TASKS, canonical
from raycl.data.benchmarks.layout import task_folder
from raycl.data.benchmarks.orders import ALIASES, ORDERS
from raycl.data.stream import StreamConfig, open_stream
from raycl.errors import ConfigError, DataError, MissingTasksError
from raycl.storage import Storage
from raycl.training.definition.task_order import Joint, Schedule

POEM = "task833_poem_sentiment_classification"


def of(**settings: Any) -> Any:
    return open_stream(StreamConfig(**settings), seed=0)


def test_unseen_tasks_are_prepared_and_are_no_phases(write_task: WriteTask, codec: MiniLMCodec) -> None:
    write_task("agnews", news(40), news(12, 40), below="Long_Sequence")
    root = write_task(POEM, [("x", "y")] * 3, [(f"verse {n} {'word ' * 90}", "positive") for n in range(9)])
    (root / POEM / "train.json").unlink()
    stream = of(name="x", root=str(root), tasks=("agnews",), unseen=("task833",), test_rows=5, max_source_tokens=64)
    assert [task.name for task in stream.tasks] == ["agnews"] == [phase.name for phase in Schedule().phases(stream)]
    (poem,) = stream.unseen
    assert poem.name == POEM and [phase.tasks for phase in Joint().phases(stream)] == [stream.tasks]
    table = stream.table(poem, "test", codec)
    assert (len(table), table.truncated_sources) == (5, 5) and len(stream.rows(poem, "dev")) == 0
    assert "Say which." in stream.prompt(poem, codec).around("")
    stream.check(codec)


def test_an_order_stands_for_its_tasks_and_a_lone_name_for_itself() -> None:
    assert StreamConfig.model_validate({"unseen": "intent"}).unseen == ("intent",)
    assert StreamConfig(unseen=()).unseen is None
    assert load(StreamConfig, None, ["unseen=superni-unseen"]).unseen == ("superni-unseen",)
    names = of(tasks=("topic",), unseen=("intent", "sentiment")).unseen
    assert [task.name for task in names] == ["intent", "sentiment"]
    assert not {canonical(name) for name in (*ORDERS, *ALIASES)} & set(TASKS), "no order is called like a task"


def test_an_order_with_missing_tasks(write_task: WriteTask) -> None:
    write_task("agnews", news(40), news(12, 40))
    root = str(write_task(POEM, [("x", "y")] * 3, [("z", "y")] * 3))
    settings: dict[str, Any] = {"name": "x", "root": root, "tasks": ("agnews",), "unseen": ("superni-unseen",)}
    with pytest.raises(MissingTasksError, match=r"14 of 15 tasks are missing .*task360"):
        of(**settings)
    stream = of(**settings, allow_missing=True)
    assert [task.name for task in stream.unseen] == [POEM] and "task360" in stream.notes[0]


def test_few_shot_does_not_apply_to_unseen_tasks(write_task: WriteTask) -> None:
    write_task("agnews", news(200), news(12, 200))
    root = write_task("free", [("a", f"answer {n}") for n in range(90)], [("b", "answer")] * 3)
    assert of(name="x", root=str(root), tasks=("agnews",), unseen=("free",), per_class=2).unseen[0].labels is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"unseen": ("intent", "topic")},
            "stream.unseen names intent, topic, which the stream trains: a task is either",
        ),
        ({"tasks": ("topic",), "unseen": ("intent", "intent")}, "stream.unseen names intent more than once"),
        ({"tasks": ("topic",), "unseen": ("wether",)}, "unknown task 'wether': expected one of the builtin tasks"),
        ({"unseen": ("wether",)}, "unknown task 'wether': expected one of the builtin tasks"),
        ({"tasks": ("topic",), "unseen": ("agnews",)}, "task 'agnews' of stream 'builtin' comes from files: set"),
        ({"tasks": ("topic",), "unseen": ("superni-1",)}, "task 'task1572_samsum_summary' of stream 'builtin' comes"),
    ],
)
def test_invalid_unseen_tasks_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of(**settings)
    assert str(caught.value).startswith(words)


def test_missing_unseen_tasks(write_task: WriteTask) -> None:
    root = write_task("agnews", news(40), news(12, 40))
    with pytest.raises(MissingTasksError, match=r"1 of 1 tasks are missing under .*nowhere \(no folder\)"):
        of(name="x", root=str(root), tasks=("agnews",), unseen=("nowhere",))
    spec = {"name": "mine", "path": str(root)}
    with pytest.raises(ConfigError, match=f"task 'mine' has no test file: expected test.json.* in '{root}', "):
        of(name="x", root=str(root), tasks=("agnews",), unseen=(spec,))
    assert task_folder(Storage.at(str(root))).files == {}


def test_encoders_refuse_unseen_tasks_with_free_text(write_task: WriteTask) -> None:
    write_task("agnews", news(40), news(12, 40))
    root = write_task("free", [("a", f"answer {n}") for n in range(90)], [("b", "answer")] * 3)
    stream = of(name="x", root=str(root), tasks=("agnews",), unseen=("free",))
    with pytest.raises(DataError, match="task 'free' has free-text answers: an encoder-only backbone needs"):
        stream.check(MiniLMCodec(needs_labels=True))
