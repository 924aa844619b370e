"""Answers of a form: JSON of a schema, a regular expression, a grammar, one of several texts, a task's labels."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chat_samples import TOKENIZERS
from http_client import Wire, listening, problem
from impatient import impatient
from pydantic import BaseModel
from tiny import Lab, run

from raycl.bank import Bank
from raycl.errors import BankError
from raycl.generation import form_process
from raycl.generation.grammars import Grammars
from raycl.generation.requests import Sampling
from raycl.storage import Storage
from raycl.testing.tiny_models import tiny_model
from raycl.training.records.named_bank import snapshot_at

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
DATE = "[0-9]{4}-[01][0-9]"


class City(BaseModel):
    """The same schema, as OpenAI's client takes it."""

    city: str
    warm: bool


@pytest.fixture(scope="module")
def bank(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Return a bank over a model whose tokens are bytes, which can write anything, and knows nothing."""
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer = TOKENIZERS["bytes"]()
    tokenizer.save_pretrained(folder / "model")
    tiny_model("llama", len(tokenizer), positions=512).save_pretrained(folder / "model")
    changes = {"backbone": {"name": str(folder / "model")}, "stream": {"max_source_tokens": 64, "max_target_tokens": 8}}
    return snapshot_at(run(lab.config("llama", "slm", **changes), Storage.at(folder / "run")).storage.sub("bank").uri)[
        0
    ]


@pytest.fixture(scope="module")
def wire(bank: Bank) -> Iterator[Wire]:
    with listening(bank) as result:
        yield result


def text_of(wire: Wire, stream: bool = False, **settings: Any) -> tuple[str, str]:
    """Return an answer of the bare model at a high temperature, and why it ended."""
    body = {"model": "base", "max_tokens": 80, "temperature": 1.0, "seed": 7, **settings}
    if stream:
        choices = [chunk.choices[0] for chunk in wire.chat("a city", **body, stream=True)]
        return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
    choice = wire.chat("a city", **body).choices[0]
    return choice.message.content, choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}},
        {"extra_body": {"guided_json": json.dumps(CITY)}},
        {"extra_body": {"structured_outputs": {"json": CITY}}},
    ],
    ids=["OpenAI's", "text", "vLLM's"],
)
def test_an_answer_is_json_of_the_schema(wire: Wire, settings: dict[str, Any], stream: bool) -> None:
    text, finish = text_of(wire, stream, **settings)
    assert finish == "stop" and set(City.model_validate_json(text).model_dump()) == {"city", "warm"}
    assert text == json.dumps(json.loads(text), ensure_ascii=False), "white space as Python writes it"


def test_other_forms(wire: Wire) -> None:
    assert re.fullmatch(DATE, text_of(wire, extra_body={"guided_regex": DATE})[0])
    assert re.fullmatch(DATE, text_of(wire, extra_body={"structured_outputs": {"regex": DATE}})[0])
    grammar = 'root ::= "is " ("warm" | "cold")+'
    assert re.fullmatch("is (warm|cold)+.*", text_of(wire, extra_body={"guided_grammar": grammar}, max_tokens=16)[0])
    closed = {str(wire.engine.codec.tokenizer.convert_tokens_to_ids(sign)): 20 for sign in '}"'}
    assert isinstance(json.loads(text_of(wire, response_format={"type": "json_object"}, logit_bias=closed)[0]), dict)
    parsed = wire.openai.chat.completions.parse(
        model="base",
        messages=[{"role": "user", "content": "a city"}],
        response_format=City,
        logit_bias=closed,
        max_tokens=80,
    )
    assert isinstance(parsed.choices[0].message.parsed, City)


def test_each_answer_of_a_batch_has_a_state_of_its_own(wire: Wire) -> None:
    body = {"prompt": ["a", "b"], "model": "base", "n": 3, "temperature": 1.5, "seed": 1, "max_tokens": 60}
    answered = wire.openai.completions.create(**body, extra_body={"guided_regex": f"({DATE},){{2}}"})
    assert all(re.fullmatch(f"({DATE},){{2}}", choice.text) for choice in answered.choices)
    assert len({choice.text for choice in answered.choices[:3]}) == 3


def test_an_answer_is_one_of_the_choices(wire: Wire) -> None:
    choices = ["a warm day", "a warmer day", "cold"]
    said = {text_of(wire, seed=seed, extra_body={"guided_choice": choices}) for seed in range(12)}
    assert {text for text, _ in said} <= set(choices) and len(said) > 1 and {finish for _, finish in said} == {"stop"}
    for model in ("auto", "colour"):
        assert text_of(wire, model=model, extra_body={"structured_outputs": {"choice": choices}})[0] in choices


def test_labels_of_the_task_are_the_only_answers_where_the_setting_says_so(bank: Bank, wire: Wire) -> None:
    """Answers are those of `eval.labels=task`; a form that a request names goes before it."""
    texts = ("fire is warm very", "it purrs a sleeps")
    free = [wire.chat(text, temperature=2.0, seed=1).choices[0].message.content for text in texts]
    with listening(bank, labels="task") as kept:
        for text, other in zip(texts, free, strict=True):
            for settings in ({}, {"temperature": 2.0, "seed": 1}):
                answered = kept.chat(text, **settings)
                labels = kept.snapshot_manager.active.labels[answered.raycl["template"]]
                assert answered.choices[0].message.content in labels and other not in labels
        assert kept.chat(texts[0], extra_body={"guided_choice": ["warm"]}).choices[0].message.content == "warm"
        base = kept.chat(texts[0], model="base", temperature=2.0, seed=1)
        assert base.choices[0].message.content not in ("red", "blue"), "no task, no labels"


def test_a_task_without_a_prompt_has_its_labels_and_its_form(bank: Bank, lab: Lab, tmp_path: Path) -> None:
    """The run evaluated its answers so, though nothing stands around its texts."""
    backbone = {"name": bank.open(1).backbone.name}
    stream = {"prompt": "plain", "max_source_tokens": 64, "max_target_tokens": 8}
    for name, evaluation, answers in (
        ("labels", {"labels": "task"}, "red|blue"),
        ("form", {"response_format": {"colour": {"regex": "[0-9]{4}"}}}, "[0-9]{4}"),
    ):
        config = lab.config("llama", "slm", backbone=backbone, stream=stream, eval=evaluation)
        learned = run(config, Storage.at(tmp_path / name)).storage.sub("bank")
        with listening(snapshot_at(learned.uri)[0], **({"labels": "task"} if name == "labels" else {})) as wire:
            answered = wire.chat("fire is warm very", model="colour")
            assert answered.raycl["template"] == ""
            assert re.fullmatch(answers, answered.choices[0].message.content)


def test_a_snapshot_that_is_refused_leaves_no_forms(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: Any = object()

    def refuse(loaded: Any) -> None:
        raise BankError("made for another backbone")

    monkeypatch.setattr(wire.engine, "_forms_of", lambda loaded: {})
    monkeypatch.setattr(wire.engine.model, "add", refuse)
    with pytest.raises(BankError, match="another backbone"):
        wire.engine.load_snapshot(refused)
    assert refused not in wire.engine._forms


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"guided_json": {"type": "nothing"}}, "guided_json names no form of an answer: Invalid type: nothing"),
        ({"guided_json": "{"}, "guided_json names no form of an answer: Expecting property name"),
        ({"guided_regex": "(("}, "guided_regex names no form of an answer: "),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex and guided_choice both name the form"),
        ({"guided_choice": []}, "guided_choice: List should have at least 1 item"),
        ({"response_format": {"type": "xml"}}, "response_format.type: Input should be 'text', 'json_object' or"),
        ({"response_format": {"type": "json_schema"}}, "response_format: type is json_schema: expected the schema in"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag: Input is not supported"),
    ],
)
def test_what_is_no_form_is_refused(wire: Wire, settings: dict[str, Any], words: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "model": "base", **settings}
    status, message = problem(wire.post("/v1/chat/completions", body))
    assert status == 400 and message.startswith(words), message


def test_a_form_needs_its_package(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = wire.engine.codec
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    monkeypatch.setattr(wire.engine, "grammars", Grammars(codec.tokenizer, [codec.eos_id]))
    body = {"messages": [{"role": "user", "content": "a"}], "model": "base", "guided_regex": "a"}
    status, message = problem(wire.post("/v1/chat/completions", body))
    assert status == 400 and message.startswith("guided_regex: answers of a form need the package llguidance: pip inst")
    assert wire.chat("a", model="base", extra_body={"guided_choice": ["b"]}).choices[0].message.content == "b"


def test_a_form_that_grows_too_complex_ends_the_answer(wire: Wire) -> None:
    grammar = wire.engine.grammars.grammar("regex", "[a-z]{4,40}")
    state = grammar.started()
    assert len(state.after([])) > 20
    state._matcher.consume_token(10**6)
    assert list(state.after([])) == [wire.engine.codec.eos_id]
    assert wire.ask("a", weights={}, sampling=Sampling(50, allowed=grammar)).text.isalpha()


PATTERNS = [f".*a.{{{number}}}b.*" for number in range(1, 40)]
"""Regular expressions that hold together: the time to find whether a text satisfies n of them doubles with n."""


@pytest.mark.parametrize(
    ("form", "said", "seconds"),
    [
        (
            {"guided_json": {"allOf": [{"type": "string", "pattern": f"^({text})$"} for text in PATTERNS]}},
            f"more than {form_process.CPU_S:g} s of CPU time or 1024 MiB of memory",
            form_process.CPU_S,
        ),
        (
            {"guided_grammar": "start: A\nA: " + " & ".join(f"/{text}/" for text in PATTERNS)},
            "more than 0.5 s of CPU time or 1024 MiB of memory",
            0.5,  # the limit of the other one is the product's
        ),
        ({"guided_regex": "(a|b)?" * 30_000}, "has 180000 characters, expected at most 65536", 0.5),
        ({"guided_json": {"type": "string", "pattern": "(a|b)?" * 30_000}}, "characters, expected at most 65536", 0.5),
    ],
    ids=["schema", "grammar", "long regex", "long schema"],
)
def test_a_form_that_takes_too_much_is_refused_while_others_are_answered(
    wire: Wire, form: dict[str, Any], said: str, seconds: float, tmp_path: Path
) -> None:
    waits: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            began = time.monotonic()
            wire.get("/healthz")
            waits.append(time.monotonic() - began)

    with impatient(form_process, seconds, tmp_path), ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            body = {"messages": [{"role": "user", "content": "a city"}], "max_tokens": 2, **form}
            status, message = problem(wire.post("/v1/chat/completions", body))
        finally:
            over.set()
        looking.result()
    assert status == 400 and said in message and "\n" not in message
    assert max(waits, default=0.0) < 10, "building it holds the event loop"


def test_a_form_is_built_once(wire: Wire) -> None:
    grammars = wire.service.engine.grammars
    assert grammars.grammar("regex", "[ab]{3}") is grammars.grammar("regex", "[ab]{3}")
