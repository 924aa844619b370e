"""`eval.response_format`: the form of a task's generated answers, in evaluation and wherever its snapshots answer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from chat_samples import TOKENIZERS
from http_client import listening
from tiny import Lab, run

from raycl.bank import Bank
from raycl.cli.main import main
from raycl.errors import BankError, ConfigError
from raycl.operations.banks.merge import merge
from raycl.operations.banks.unlearning import evaluate
from raycl.scoring.scored_task import recorded_settings
from raycl.serve.gate.judge import judge
from raycl.serve.offline.model import OfflineModel
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import decide_first
from raycl.storage import Storage
from raycl.testing.runs import TASKS
from raycl.testing.tiny_models import tiny_model
from raycl.training.records.named_bank import snapshot_at
from raycl.training.setup.checks import check

WARMTH = {
    "type": "object",
    "properties": {"warm": {"type": "boolean"}, "why": {"type": "string", "maxLength": 3}},
    "required": ["warm", "why"],
    "additionalProperties": False,
}
DATE = "[0-9]{4}-[01][0-9]"
FORMATS: dict[str, dict[str, Any]] = {"colour": {"json_schema": WARMTH}, "animal": {"regex": DATE}}


def is_formed(task: str, answer: str) -> bool:
    """Return whether an answer has the form that `FORMATS` gives its task."""
    if task == "animal":
        return re.fullmatch(DATE, answer) is not None
    tree = json.loads(answer)
    return set(tree) == {"warm", "why"} and isinstance(tree["warm"], bool) and len(tree["why"]) <= 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model whose tokens are bytes, which can write anything, and knows nothing."""
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer = TOKENIZERS["bytes"]()
    tokenizer.save_pretrained(folder)
    tiny_model("llama", len(tokenizer), positions=512).save_pretrained(folder)
    return str(folder)


def settings(model: str, formats: dict[str, Any] = FORMATS, **evaluation: Any) -> dict[str, Any]:
    """Return sections of a run's config."""
    return {
        "backbone": {"name": model},
        "stream": {"max_source_tokens": 64, "max_target_tokens": 48},
        "eval": {"response_format": formats, "untrained": True, **evaluation},
    }


@pytest.fixture(scope="module")
def done(lab: Lab, model: str, tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """Return the folder of a run whose tasks have forms."""
    return run(
        lab.config("llama", "slm", **settings(model)), Storage.at(tmp_path_factory.mktemp("formed") / "run")
    ).storage


def answers(storage: Storage) -> Iterable[tuple[str, str]]:
    """Yield the task and the answer of each scored row."""
    for folder in storage.list("predictions"):
        for file in storage.list(f"predictions/{folder}"):
            for line in storage.read(f"predictions/{folder}/{file}").decode().splitlines():
                yield file.removesuffix(".jsonl"), json.loads(line)["answer"]


def test_every_answer_of_an_evaluation_has_the_form_of_its_task(done: Storage) -> None:
    given = list(answers(done))
    assert {"untrained", "000-colour", "001-animal"} <= set(done.list("predictions"))
    assert {task for task, _ in given} == set(FORMATS) and all(is_formed(*pair) for pair in given), given


def test_transformers_generate_keeps_to_the_form_too(lab: Lab, model: str, done: Storage, tmp_path: Path) -> None:
    other = run(
        lab.config("llama", "slm", **settings(model, decoding="generate")), Storage.at(tmp_path / "run")
    ).storage
    assert list(answers(other)) == list(answers(done))


def test_snapshots_answer_as_they_were_evaluated(done: Storage, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """By `predict`, `evaluate`, the evaluation of a bank, and an endpoint, where a request's own form goes first."""
    bank, snapshot = snapshot_at(done.sub("bank").uri)
    text = "fire is warm"
    with OfflineModel.open(bank, snapshot) as offline:
        for task in FORMATS:
            assert all(is_formed(task, answer.text) for answer in offline.predict([text, "it purrs"], task=task))
        (alone,) = offline.predict([text])
        assert is_formed(next(iter(alone.tasks)), alone.text)
    scores = evaluate(bank, snapshot)
    row = done.read_json("results.json")["matrix"][-1]
    assert [scores[task].value for task in FORMATS] == [cell["value"] for cell in row]
    file = Path(lab.tasks[0]["path"]) / "test.jsonl"
    assert main(["predict", bank.storage.uri, str(file), "--task", "colour", "--json"]) == 0
    assert all(is_formed("colour", row["answer"]) for row in json.loads(capsys.readouterr().out))
    with listening(bank) as wire:
        for task in FORMATS:
            answered = wire.chat(text, model=task, temperature=2.0, seed=3).choices[0].message.content
            assert is_formed(task, answered)
        assert wire.chat(text, extra_body={"guided_choice": ["warm"]}).choices[0].message.content == "warm"
        bare = wire.chat(text, model="base", temperature=2.0, seed=3, max_tokens=40).choices[0].message.content
        assert not re.fullmatch(DATE, bare), "no task, no form"


def test_gate_and_evaluate_score_answers_of_the_form(
    lab: Lab, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that knows nothing is right now and then if its answers can only be labels, and never else."""
    given = {task: {"regex": "|".join(label for label, _ in classes)} for task, classes in TASKS.items()}
    storage = run(lab.config("llama", "slm", **settings(model, given)), Storage.at(tmp_path / "run")).storage
    bank, snapshot = snapshot_at(storage.sub("bank").uri)
    file = Path(lab.tasks[0]["path"]) / "test.jsonl"
    capsys.readouterr()
    assert main(["evaluate", bank.storage.uri, str(file), "--task", "colour", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["score"]["value"] > 0
    earlier, candidate = bank.snapshots()
    tree = {"bank": bank.storage.uri, "snapshot": earlier, "device": "cpu", "gate": {"split": "test"}}
    config = ServeConfig(**tree)
    decide_first(bank, config)
    result = judge(config, candidate)
    assert candidate == snapshot.number and result.before["colour"].value > 0
    assert set(result.after) == set(TASKS) and all(score.value > 0 for score in result.after.values())


def test_a_text_alone_gets_the_form_of_the_task_whose_prompt_it_gets(lab: Lab, model: str, tmp_path: Path) -> None:
    tasks = [{**task, "definition": f"Name the {task['name']}."} for task in lab.tasks]
    sections = settings(model, instruction="chosen", untrained=False)
    sections["stream"]["tasks"] = tasks
    storage = run(lab.config("llama", "slm", **sections), Storage.at(tmp_path / "run")).storage
    bank, snapshot = snapshot_at(storage.sub("bank").uri)
    with OfflineModel.open(bank, snapshot) as offline:
        lines = storage.read("predictions/001-animal/colour.jsonl").decode().splitlines()
        evaluated = [json.loads(line) for line in lines]
        served = list(offline.predict(line["text"] for line in evaluated))
    assert [answer.text for answer in served] == [line["answer"] for line in evaluated]


def test_forms_survive_a_merge(lab: Lab, model: str, tmp_path: Path) -> None:
    found = []
    for task in lab.tasks:
        sections = settings(model, {task["name"]: FORMATS[task["name"]]}, untrained=False)
        sections["stream"] |= {"tasks": [task], "max_target_tokens": 4}  # what is answered is another matter
        storage = run(lab.config("llama", "slm", **sections), Storage.at(tmp_path / task["name"])).storage
        found.append(snapshot_at(storage.sub("bank").uri))
    (bank, ours), (other, theirs) = found
    merged = recorded_settings(merge(bank, ours, theirs, other)).response_format
    assert {task: given.form[0] for task, given in merged.items()} == {"colour": "json", "animal": "regex"}


@pytest.mark.parametrize(
    ("kind", "sections", "words"),
    [
        (
            "bert",
            {"eval": {"response_format": FORMATS}},
            "response_format names colour, animal, but backbone .* is encoder-only and answers with labels",
        ),
        ("llama", {"eval": {"response_format": {"shape": {"regex": "a"}}}}, r"response_format names \['shape'\]"),
        (
            "llama",
            {"eval": {"response_format": {"colour": {"json_schema": {"type": "nothing"}}}}},
            "response_format.colour is '{'type': 'nothing'}', which names no form of an answer .*Invalid type: nothing",
        ),
        ("llama", {"eval": {"response_format": {"colour": {"json_schema": "{"}}}}, "Expecting property name"),
        ("llama", {"eval": {"response_format": {"colour": {}}}}, "it has no form: expected one of json_schema, regex"),
        (
            "llama",
            {"eval": {"response_format": {"colour": {"regex": "a", "grammar": "b"}}}},
            "it has regex and grammar: expected one of",
        ),
        (
            "llama",
            {"eval": {"response_format": FORMATS}, "stream": {"objective": "clm"}},
            "stream.objective is clm, under which no answers are written",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(
    lab: Lab, model: str, kind: str, sections: dict[str, Any], words: str
) -> None:
    own = {} if kind == "bert" else {"backbone": {"name": model}}
    with pytest.raises(ConfigError, match=words):
        check(lab.config(kind, "lora", **own, **sections))


def test_forms_need_their_package(lab: Lab, model: str, done: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, snapshot = snapshot_at(done.sub("bank").uri)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    words = r"response_format.\w+: answers of a form need the package llguidance: pip install 'raycl\[structured\]'"
    with pytest.raises(ConfigError, match=words):
        check(lab.config("llama", "slm", **settings(model)))
    with pytest.raises(BankError, match=f"cannot answer as it was evaluated: eval.{words}"):
        OfflineModel.open(Bank(bank.storage), snapshot)
