"""A stream with conversations: what is evaluated, served, and answered for files is one and the same prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_endpoint import serving
from tiny import Lab, run

from raycl.backbone import load_codec
from raycl.cli import main
from raycl.data.loader import Collate
from raycl.data.router_texts import RouterTexts
from raycl.data.settings import TaskSpec
from raycl.data.sources.conversation import Message, messages_of
from raycl.data.stream import StreamConfig, open_stream
from raycl.serve.offline.model import OfflineModel
from raycl.storage import Storage
from raycl.training.records.named_bank import snapshot_at
from raycl.training.setup.run_config import RunConfig
from raycl.types import RouterText

TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'very', 'user': 'a', 'assistant': 'Output :'}[m['role']] }} "
    "{% if loop.last and m['role'] == 'assistant' %}much {% endif %}"
    "{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}Output : {% endif %}"
)
"""Its words are known to the tiny tokenizer; it writes one of them before the last answer, as others do a block."""

WORDS = {"chat": {"sky": "blue", "fire": "red"}, "talk": {"purrs": "cat", "barks": "dog"}}
"""Task -> (word of a question -> its answer)."""


def conversation(answers: dict[str, str], number: int) -> dict[str, Any]:
    """Return two turns; some have a system message."""
    first, second = list(answers)[:: 1 - 2 * (number % 2)]
    turns = [("user", f"the {first} is"), ("assistant", answers[first])]
    turns += [("user", f"the {second} is very"), ("assistant", answers[second])]
    system = [("system", "runs warm")] if number % 3 == 0 else []
    return {"messages": [{"role": role, "content": content} for role, content in system + turns]}


def question(answers: dict[str, str], number: int) -> dict[str, Any]:
    """Return one question with its answer."""
    word = list(answers)[number % 2]
    turns = [("user", f"the {word} is"), ("assistant", answers[word])]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


Config = Callable[[str], RunConfig]


@pytest.fixture(scope="module")
def config(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return the name of the second task -> a stream of two tasks, the first of conversations, learned by SLM: it reads
    texts."""
    folder = tmp_path_factory.mktemp("chats")
    specs: dict[str, Any] = {"animal": {**lab.tasks[1], "like": "agnews", "definition": "", "labels": ["cat", "dog"]}}
    for task, answers in WORDS.items():
        (folder / task).mkdir()
        for split, rows in (("train", 12), ("test", 4)):
            lines = [json.dumps(conversation(answers, number)) for number in range(rows)]
            (folder / task / f"{split}.jsonl").write_text("\n".join(lines))
        specs[task] = {"name": task, "path": str(folder / task)}

    def get(second: str) -> RunConfig:
        stream = {"tasks": [specs["chat"], specs[second]], "max_source_tokens": 16}
        train = {"epochs": 10, "learning_rate": 0.005}
        sections = {"stream": stream, "train": train, "eval": {"untrained": True}}
        return lab.config("llama", "slm", backbone={"chat_template": TEMPLATE}, **sections)

    return get


@pytest.fixture(scope="module")
def talks(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """Return a run whose tasks are conversations both."""
    return run(config("talk"), Storage.at(tmp_path_factory.mktemp("talks") / "run")).storage


def evaluated(storage: Storage, phase: str) -> list[dict[str, Any]]:
    """Return the texts and answers of the task `chat` in an evaluation."""
    (file,) = (name for name in storage.files("predictions") if name.endswith("/chat.jsonl") and f"/{phase}" in name)
    return [json.loads(line) for line in storage.read_text(file).splitlines()]


def test_the_bare_backbone_gets_the_turns_of_its_own_row(talks: Storage) -> None:
    """The bare backbone by name, by an empty mixture, and with a task named answers as in the untrained row."""
    measured = evaluated(talks, "untrained")
    assert any(row["answer"] for row in measured)
    with serving(talks.sub("bank").uri) as served:
        for row in measured:
            messages = [message._asdict() for message in messages_of(row["text"])]
            for pins in ({"model": "base"}, {"raycl": {"adapters": {}}}, {"model": "base", "raycl": {"task": "chat"}}):
                body = {"temperature": 0, "messages": messages, **pins}
                status, result = served.ask("/v1/chat/completions", body)
                assert status == 200 and result["choices"][0]["message"]["content"] == row["answer"], pins
                assert result["raycl"]["adapters"] == {}


def test_conversations_of_one_message_are_examples_of_the_playground(talks: Storage) -> None:
    with serving(talks.sub("bank").uri) as served:
        tasks = served.ask("/v1/tasks")[1]["data"]
    assert [task["examples"] for task in tasks] == [["the fire is", "the sky is"], ["the barks is", "the purrs is"]]


def test_the_endpoint_and_files_get_the_answers_of_the_evaluation(
    config: Config, talks: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = talks
    measured = evaluated(storage, "001")
    bank, snapshot = snapshot_at(storage.sub("bank").uri)
    assert snapshot.tasks[0].chat_template == TEMPLATE and snapshot.tasks[0].prompt == ("", "")
    texts = [row["text"] for row in measured]
    assert len(texts) == 8 and sum(len(messages_of(text)) > 1 for text in texts) >= 5
    with OfflineModel.open(bank, snapshot) as model:
        offline = list(model.predict([messages_of(text) for text in texts]))
        mixtures = model.route([messages_of(text) for text in texts])
    assert [item.text for item in offline] == [row["answer"] for row in measured]
    assert any(item.text for item in offline)
    assert [item.tasks for item in offline] == mixtures
    with serving(bank.storage.uri) as served:
        for text, row, ours in zip(texts, measured, offline, strict=True):
            messages = [message._asdict() for message in messages_of(text)]
            body = {"model": "auto", "temperature": 0, "messages": messages}
            status, result = served.ask("/v1/chat/completions", body)
            assert status == 200 and result["choices"][0]["message"]["content"] == row["answer"]
            assert result["raycl"]["tasks"] == pytest.approx(ours.tasks, abs=1e-5)
    folder = config("talk").stream.tasks[0].path  # type: ignore[index, union-attr]
    capsys.readouterr()  # what training printed
    assert main.main(["predict", bank.storage.uri, f"{folder}/test.jsonl"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["row"] for record in records] == [1, 2, 3, 4]
    assert [record["answer"] for record in records] == [row["answer"] for row in measured[1::2]], "the last turns"


def test_a_task_that_is_no_conversation_gets_the_plain_contents(config: Config, tmp_path: Path) -> None:
    given = config("animal")
    short = {"train": given.train.model_copy(update={"epochs": 1}), "eval": given.eval.__class__()}
    storage = run(given.model_copy(update=short), Storage.at(tmp_path / "run")).storage
    with OfflineModel.open(*snapshot_at(storage.sub("bank").uri)) as model:
        words = "it purrs a sleeps " * 4
        (plain,) = model.predict([f"{words}\n{words}"], task="animal")
        (of_chat,) = model.predict([messages_of(f"<|system|>\n{words}\n<|user|>\n{words}")], task="animal")
    assert of_chat.cut_tokens == plain.cut_tokens > 0, "the model reads no role lines"


def test_answers_are_learned_by_turn_and_cut_ones_keep_their_last_message(config: Config) -> None:
    result = config("talk")
    codec = load_codec(result.backbone, 16, 4)
    stream = open_stream(StreamConfig(tasks=result.stream.tasks, max_source_tokens=14, dev_fraction=0), seed=0)
    table = stream.table(stream.tasks[0], "train", codec)
    assert len(table) == 24 and 0 < table.truncated_sources < 24
    columns = table.columns(range(24))
    for ids, text in zip(columns.source_ids, table.texts(range(24)), strict=True):
        shown = codec.shown(ids.tolist())
        assert len(ids) <= 14 and shown.endswith("Output : much") and messages_of(text)[-1].content in shown


@pytest.mark.parametrize("text", ["input", "prompt"])
def test_routers_are_fitted_on_as_many_turns_as_most_conversations_have(
    config: Config, tmp_path: Path, text: RouterText
) -> None:
    """So it is in batches of longer conversations, whose prompts have all turns, and in those without any."""
    rows = [conversation(WORDS["chat"], number) for number in range(1, 21)]
    long = {"messages": [*rows[0]["messages"], *rows[1]["messages"], *rows[3]["messages"]]}
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, long])))
    codec = load_codec(config("talk").backbone, 64, 4)
    tasks = [TaskSpec(name="chat", train=str(path), test=str(path))]
    stream = open_stream(StreamConfig(tasks=tasks, turns="last", dev_fraction=0), seed=0)
    table, reads = stream.table(stream.tasks[0], "test", codec), RouterTexts(stream, codec, text)
    assert stream.user_turns(stream.tasks[0]) == 2
    two = "<|user|>\nthe sky is\n<|assistant|>\nblue\n<|user|>\nthe fire is very"
    assert [len(messages_of(table.texts([row])[0])) for row in (19, 20)] == [3, 11]
    assert {reads.words(stream.tasks[0], table.texts([row])[0]) for row in (19, 20)} == {two}, "for a sentence encoder"
    collate = Collate([table], codec.pad_id, router_texts=reads)
    batch, without = collate(np.arange(18, 21), 4), collate(np.arange(18, 20), 2)
    assert batch.source_mask[2].sum() > batch.source_mask[1].sum(), "the model reads all turns"
    (ids, mask), (ids_without, _) = batch.routed, without.routed
    assert ids[2].equal(ids[1]) and mask[2].equal(mask[1]) and not ids[1].equal(ids[0])
    assert (without.input_ids is None) == (text == "prompt"), "where prompts are what it reads"
    assert ids[0][: mask[0].sum()].tolist() == ids_without[0][: mask[0].sum()].tolist()
    fitted = reads.ids(table, range(18, 21))
    assert [row[:count].tolist() for row, count in zip(ids, mask.sum(1), strict=True)][:3] == fitted


@pytest.mark.parametrize("method", ["slm", "sapt"])
def test_a_router_of_single_questions_reads_the_last_message_alone(lab: Lab, tmp_path: Path, method: str) -> None:
    """Earlier turns, even of the same task, are nothing that it was fitted on: a long talk counted as unknown.

    The few longer conversations among the train rows do not change this. SAPT reads prompts, and has statistics of the
    texts beside its attention.
    """
    specs = []
    for task, answers in WORDS.items():
        (tmp_path / task).mkdir()
        for split, rows in (("train", 24), ("test", 4)):
            lines = [json.dumps(question(answers, number)) for number in range(rows)]
            lines += [json.dumps(conversation(answers, 1))] * (split == "train")
            (tmp_path / task / f"{split}.jsonl").write_text("\n".join(lines))
        specs.append({"name": task, "path": str(tmp_path / task)})
    stream = {"tasks": specs, "max_source_tokens": 48, "dev_fraction": 0.3}
    rule = {"unknown": "bare", "false_alarms": 0.3}
    config = lab.config("llama", method, backbone={"chat_template": TEMPLATE}, stream=stream, eval=rule)
    bank, snapshot = snapshot_at(run(config, Storage.at(tmp_path / "run")).storage.sub("bank").uri)
    asked = [Message("user", "the barks is")]
    earlier = [Message("user", "Output : very much warm cold"), Message("assistant", "blue Output")] * 3
    with OfflineModel.open(bank, snapshot) as model:
        assert len({tuple(route.items()) for route in model.route([asked, [*earlier, *asked]])}) == 1
        alone, later = model.predict([asked, [*earlier, *asked]])
    assert alone.unknown is later.unknown is False
