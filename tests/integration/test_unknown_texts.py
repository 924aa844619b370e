"""Texts of no learned task: one rule in evaluation and serving, with the threshold from the tasks' dev rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from http_client import listening, problem
from service_client import LIMIT, bank_of, serving
from tiny import Done, Lab, matrix, run

from raycl.errors import BankError, ConfigError
from raycl.generation.requests import Sampling
from raycl.operations.banks.unlearning import evaluate
from raycl.serve.offline.model import OfflineModel
from raycl.storage import Storage
from raycl.training.setup.checks import check

CHAT, CLASSIFY = "/v1/chat/completions", "/v1/classify"
KNOWN, UNKNOWN = "fire is warm", "Output : Output : Output :"
RATE = 0.3
"""Each task has four dev rows."""


def learned(
    lab: Lab, folder: Path, kind: str = "llama", method: Any = None, epochs: int = 6, **evaluation: Any
) -> Done:
    settings = {"epochs": epochs, "learning_rate": 0.03}
    method = method or lab.slots()
    config = lab.config(kind, method, stream={"dev_fraction": 0.3}, train=settings, eval=evaluation)
    storage = Storage.at(folder)
    return Done(config, storage, run(config, storage).context)


def asking(text: str, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **body}


def kept(done: Done, task: str) -> list[dict[str, Any]]:
    """Return the rows of a task as its last evaluation answered them."""
    lines = done.storage.read(f"predictions/001-animal/{task}.jsonl").decode().splitlines()
    return [json.loads(line) for line in lines]


def said(answer: dict[str, Any]) -> str:
    content = answer["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def test_an_endpoint_answers_unknown_texts_by_its_rule(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("raycl"), "propagate", True)
    done = learned(lab, tmp_path / "run", epochs=3)
    with listening(bank_of(done, tmp_path / "nearest"), false_alarms=RATE) as wire:
        known, unknown = (wire.post(CHAT, asking(text)).json() for text in (KNOWN, UNKNOWN))
        assert known["raycl"]["unknown"] is False and known["raycl"]["tasks"]
        assert unknown["raycl"]["unknown"] is True and unknown["raycl"]["tasks"], "the nearest task answers by default"
        limit = known["raycl"]["ood_threshold"]
        assert known["raycl"]["ood_distance"] <= limit < unknown["raycl"]["ood_distance"]
        bare = said(wire.post(CHAT, asking(UNKNOWN, model="base")).json())
    with listening(bank_of(done, tmp_path / "bare"), unknown="bare", false_alarms=RATE) as wire:
        answer = wire.post(CHAT, asking(UNKNOWN)).json()
        assert said(answer) == bare and not answer["raycl"]["adapters"] and answer["raycl"]["unknown"] is True
        assert answer["raycl"]["template"] == ""
        again = wire.post(CHAT, asking(KNOWN)).json()
        assert said(again) == said(known) and again["raycl"]["adapters"] == known["raycl"]["adapters"]
        assert said(wire.post(CHAT, asking(UNKNOWN, raycl={"mix": False})).json()) == bare
    with listening(bank_of(done, tmp_path / "refuse"), unknown="refuse", false_alarms=RATE) as wire:
        status, message = problem(wire.post(CHAT, asking(UNKNOWN)))
        assert status == 422 and "unlike those of all learned tasks" in message and "name a task" in message
        assert said(wire.post(CHAT, asking(KNOWN)).json()) == said(known)
        assert wire.post(CHAT, asking(UNKNOWN, model="colour")).status_code == 200, "the request names its adapters"
    assert "warm-up" not in caplog.text, "its text is of no task, and is answered"


@pytest.mark.parametrize(("policy", "decoding"), [("bare", "auto"), ("refuse", "auto"), ("refuse", "generate")])
def test_the_served_model_is_the_measured_one(lab: Lab, tmp_path: Path, policy: str, decoding: str) -> None:
    """Its run records the rule: the matrix, `raycl evaluate` and an endpoint follow it."""
    done = learned(lab, tmp_path / "run", epochs=3, unknown=policy, false_alarms=RATE, decoding=decoding)
    bank, task = bank_of(done, tmp_path), done.context.stream.tasks[1]
    cells = matrix(done.storage)[-1]
    assert [score.value for score in evaluate(bank, bank.open(2)).values()] == pytest.approx(cells)
    table = done.context.stream.table(task, "test", done.context.backbone.codec)
    texts = table.texts(range(len(table)))
    with OfflineModel.open(bank, bank.open(2)) as model, serving(bank) as client:
        predictions = list(model.predict(texts, task=task.name))
        sampling = Sampling(LIMIT, as_trained=True)
        replies = [client.ask(text, task=task.name, sampling=sampling).wait() for text in texts]
    outside = {bool(prediction.error) if policy == "refuse" else prediction.unknown for prediction in predictions}
    assert len(outside) == 2, "of so few dev rows"
    for prediction, reply in zip(predictions, replies, strict=True):
        if policy == "refuse" and prediction.error:
            assert not prediction.text and "unlike those" in prediction.error == reply.error
            assert "this endpoint" not in prediction.error, "a file of rows may be answered without one"
        else:
            assert reply.metadata.unknown is prediction.unknown
            assert reply.text.strip() == prediction.text.strip()
            assert bool(reply.metadata.weights) is not prediction.unknown
    answers = [prediction.text.strip() for prediction in predictions]
    assert [row["answer"] for row in kept(done, task.name)] == answers


def test_labels_of_unknown_texts_are_refused_and_have_no_bare_model(lab: Lab, tmp_path: Path) -> None:
    done = learned(lab, tmp_path / "run", "bert", epochs=1)
    with listening(bank_of(done, tmp_path / "refuse"), unknown="refuse", false_alarms=RATE) as wire:
        assert problem(wire.post(CLASSIFY, {"input": UNKNOWN}))[0] == 422
        assert wire.post(CLASSIFY, {"input": KNOWN}).status_code == 200
    with (
        pytest.raises(BankError, match="encoder-only and has no labels without adapters: expected nearest or refuse"),
        serving(bank_of(done, tmp_path / "bare"), unknown="bare", false_alarms=RATE),
    ):
        pass


@pytest.mark.parametrize(
    ("kind", "method", "evaluation", "expected"),
    [
        ("bert", "slm", {"unknown": "bare"}, "is encoder-only and has no labels without adapters"),
        (
            "llama",
            "lora",
            {"unknown": "refuse"},
            "method 'lora' under stream.schedule=sequential publishes no statistics",
        ),
        ("llama", ("separate", "slm"), {"unknown": "bare"}, "'slm' under stream.schedule=separate publishes no"),
        (
            "llama",
            "sapt",
            {"unknown": "bare", "false_alarms": 0.1},
            "takes 9 dev rows of the first task, and 'colour' has 4",
        ),
    ],
)
def test_a_run_that_cannot_find_unknown_texts_is_refused(
    lab: Lab, kind: str, method: Any, evaluation: dict[str, Any], expected: str
) -> None:
    config = lab.config(kind, method, stream={"dev_fraction": 0.3}, eval=evaluation)
    with pytest.raises(ConfigError, match=expected):
        check(config)


@pytest.mark.parametrize("method", ["sapt", "gainlora", "mocl", "l2p", "moelora", "epi"])
def test_every_router_that_reads_prompts_knows_texts(lab: Lab, tmp_path: Path, method: str) -> None:
    done = learned(lab, tmp_path / "run", method=method, epochs=1, false_alarms=RATE, unknown="bare")
    bank = bank_of(done, tmp_path)
    cells = matrix(done.storage)[-1]
    assert [score.value for score in evaluate(bank, bank.open(2)).values()] == pytest.approx(cells)
    with serving(bank) as client:
        unknown, known = (client.ask(text).wait().metadata for text in (UNKNOWN, KNOWN))
    if method == "epi":  # distances to classes in the states of a model of random weights tell nothing apart
        assert {unknown.unknown, known.unknown} <= {True, False}
        return
    assert unknown.unknown is True and not unknown.weights and unknown.ood_score > 0.8
    assert known.ood_distance < unknown.ood_distance
