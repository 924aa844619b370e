"""The wire as OpenAI's own client sees it: the same answers as without it, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from http_client import Wire, listening, problem
from openai.types.completion_choice import Logprobs as TextLogprobs
from service_client import Asked, bank_of, examples
from tiny import Done, SnapshotModel, Taught, opened

from raycl.bank import Bank
from raycl.errors import ConfigError
from raycl.serve.settings import load_serve_config

REPO = Path(__file__).resolve().parents[2]

LONG = "the sea is"


@pytest.fixture(scope="module")
def done(taught: Taught) -> Done:
    return taught("llama", "slm")


@pytest.fixture(scope="module")
def bank(done: Done, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return bank_of(done, tmp_path_factory.mktemp("wire"))


@pytest.fixture(scope="module")
def asked(done: Done, bank: Bank) -> list[Asked]:
    return examples(done, bank)


@pytest.fixture(scope="module")
def model(bank: Bank) -> SnapshotModel:
    return opened(bank, bank.open(2))


@pytest.fixture(scope="module")
def wire(bank: Bank) -> Iterator[Wire]:
    with listening(bank) as result:
        yield result


@pytest.fixture(scope="module")
def labels(taught: Taught, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with listening(bank_of(taught("bert", "slm"), tmp_path_factory.mktemp("labels"))) as result:
        yield result


def pinned(**pins: Any) -> dict[str, Any]:
    return {"extra_body": {"raycl": pins}}


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_chat_answers_equal_the_evaluated_ones(wire: Wire, asked: list[Asked], model: SnapshotModel) -> None:
    for item in asked:
        result = wire.chat(item.text, max_tokens=12)
        (choice,) = result.choices
        assert (result.object, result.model, choice.index) == ("chat.completion", "auto", 0)
        assert (choice.message.role, choice.message.content) == ("assistant", item.answer)
        assert result.id.startswith("chatcmpl-") and result.created > 1e9
        how = result.raycl
        assert how == choice.raycl and how["snapshot"] == 2 and how["template"] == item.task and how["batch"] >= 1
        mixture = model.loaded.mixture([item.text])
        expected = {model.loaded.names[key]: weight for key, weight in _weights(mixture).items() if weight > 1e-6}
        assert how["adapters"] == pytest.approx(expected, abs=1e-5) and 0.0 not in how["adapters"].values()
        assert next(iter(how["tasks"])) == item.task and how["retrieval_ms"] > 0
        text = f"{item.text}\nOutput: "
        assert result.usage.prompt_tokens == len(model.backbone.codec.encode_source([text])[0])
        assert result.usage.total_tokens == result.usage.prompt_tokens + result.usage.completion_tokens
        words = len(item.answer.split())
        assert (result.usage.completion_tokens, choice.finish_reason) == (words, "length" if words == 12 else "stop")


def _weights(mixture: Any) -> dict[str, float]:
    return dict(zip(mixture.names, mixture.weights[0].tolist(), strict=True))


def test_turns_and_parts_are_one_text(wire: Wire) -> None:
    parts: Any = [{"type": "text", "text": "is warm "}, {"type": "text", "text": "very a"}]
    messages: Any = [{"role": "system", "content": "fire"}, {"role": "user", "content": parts, "name": "me"}]
    result = wire.openai.chat.completions.create(model="auto", messages=messages)
    assert result.choices[0].message.content == wire.chat("fire\nis warm very a").choices[0].message.content
    assert result.usage is not None and result.usage.prompt_tokens == 1 + 5 + 2


def test_a_completion_is_sent_as_it_is(wire: Wire, asked: list[Asked]) -> None:
    item = asked[2]
    result = wire.openai.completions.create(model="auto", prompt=f"{item.text}\nOutput: ", max_tokens=12)
    continued = f" {item.answer}"  # the space between two words of the tokenizer
    assert (result.object, result.choices[0].text) == ("text_completion", continued) and result.id.startswith("cmpl-")
    assert result.raycl["template"] == ""  # type: ignore[attr-defined]
    prompts = [f"{other.text}\nOutput: " for other in asked[:3]]
    echoed = wire.openai.completions.create(model="auto", prompt=prompts, echo=True, n=2)
    texts = [choice.text for choice in echoed.choices]
    assert [choice.index for choice in echoed.choices] == list(range(6)) and texts[::2] == texts[1::2]
    assert texts[::2] == [f"{prompt} {other.answer}" for prompt, other in zip(prompts, asked, strict=False)]
    wrapped = wire.openai.completions.create(model="auto", prompt=item.text, max_tokens=12, **pinned(template=True))
    assert wrapped.choices[0].text == item.answer and wrapped.raycl["template"] == item.task  # type: ignore[attr-defined]
    bare = wire.chat(f"{item.text}\nOutput: ", max_tokens=12, **pinned(template=False))
    assert bare.choices[0].message.content == item.answer


def test_a_stream_gives_the_same_answer(wire: Wire) -> None:
    whole = wire.chat(LONG, model="base", max_tokens=20)
    text = whole.choices[0].message.content
    assert len(text.split()) > 8
    chunks = list(wire.chat(LONG, model="base", max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    first, *middle, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert first.raycl["snapshot"] == 2 and first.raycl["adapters"] == {}
    pieces = [chunk.choices[0].delta.content or "" for chunk in (*middle, last)]
    assert "".join(pieces) == text and len(pieces) > 5, "it comes in pieces"
    assert [chunk.choices[0].finish_reason for chunk in middle] == [None] * len(middle)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert usage.choices == [] and usage.usage == whole.usage
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in (first, *middle, last))
    unasked = wire.chat(LONG, model="base", max_tokens=3, stream=True)
    assert not any("usage" in chunk.model_fields_set for chunk in unasked)
    completion = wire.openai.completions.create(model="base", prompt=LONG, max_tokens=20, stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in completion) == f"{LONG} {text}"


def test_every_line_of_a_stream_is_an_event(wire: Wire) -> None:
    body = {"prompt": [LONG, "fire is"], "model": "base", "stream": True, "n": 2, "max_tokens": 5}
    with wire.http.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        raw = stream.read().decode()
    events = raw.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])
    trees = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [tree["choices"][0]["index"] for tree in trees if "raycl" in tree] == [0, 1, 2, 3]
    assert [tree["choices"][0]["finish_reason"] for tree in trees].count("length") == 4


def test_several_answers_and_seeds(wire: Wire) -> None:
    drawn = {"model": "base", "temperature": 1.5, "n": 3, "max_tokens": 8}
    first, two = (wire.chat(LONG, seed=5, **drawn) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert texts == [choice.message.content for choice in two.choices]
    alone = wire.chat(LONG, seed=6, **{**drawn, "n": 1})
    assert alone.choices[0].message.content == texts[1], "answer i of seed s is the first answer of seed s + i"
    assert first.usage.prompt_tokens == alone.usage.prompt_tokens, "a prompt counts once"
    free = {tuple(choice.message.content for choice in wire.chat(LONG, **drawn).choices) for _ in range(3)}
    assert len(free) > 1, "without a seed every answer is drawn anew"
    cold = wire.chat(LONG, model="base", temperature=2.0, top_p=1e-6, max_tokens=8)
    assert cold.choices[0].message.content == wire.chat(LONG, model="base", max_tokens=8).choices[0].message.content


def test_stop_sequences(wire: Wire) -> None:
    text = wire.chat(LONG, model="base", max_tokens=12).choices[0].message.content
    words = text.split()
    for stop in (words[3], [words[5], words[3]], f"{words[2]} {words[3]}"):
        result = wire.chat(LONG, model="base", max_tokens=12, stop=stop)
        assert result.choices[0].finish_reason == "stop"
        first = min(text.index(item) for item in ([stop] if isinstance(stop, str) else stop))
        assert result.choices[0].message.content == text[:first].rstrip()
        streamed = wire.chat(LONG, model="base", max_tokens=12, stop=stop, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text[:first].rstrip()


def test_null_equals_an_absent_field(wire: Wire) -> None:
    settings = ("temperature", "top_p", "n", "seed", "stop", "stream", "stream_options", "max_tokens", "raycl")
    body = {"messages": [{"role": "user", "content": "fire is"}]}
    settings += ("model", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "logit_bias", "tool_choice")
    neutral = {"logit_bias": {}, "presence_penalty": 0.0, "logprobs": False, "response_format": {"type": "text"}}
    neutral |= {
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1.0,
        "tool_choice": "none",
        "length_penalty": 1.0,
        "documents": "",
    }
    bodies = [body, {**body, **dict.fromkeys(settings)}, {**body, **neutral, "tools": [], "user": "somebody"}]
    bodies += [{**body, "raycl": {"mix": None}}]
    answers = [wire.post("/v1/chat/completions", item).json() for item in bodies]
    assert all(answer["choices"][0]["message"] == answers[0]["choices"][0]["message"] for answer in answers)
    assert all(answer["model"] == "auto" for answer in answers)


def test_penalties_and_truncation_change_the_answer(wire: Wire) -> None:
    """At temperature 0 a token that is penalized, or biased against, gives way to the next one."""
    plain = wire.chat(LONG, model="base", max_tokens=12).choices[0].message.content.split()
    assert len(set(plain)) < len(plain), "it repeats itself"
    for penalty in ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 2.0}}):
        words = wire.chat(LONG, model="base", max_tokens=12, **penalty).choices[0].message.content.split()
        assert words != plain and len(set(words)) > len(set(plain))
    first = wire.engine.model.backbone.codec.encode_target([plain[0]])[0][0]
    other = wire.chat(LONG, model="base", max_tokens=1, logit_bias={str(first): -100})
    assert other.choices[0].message.content != plain[0]
    for few in ({"top_k": 1}, {"min_p": 1.0}):
        hot = wire.chat(LONG, model="base", max_tokens=12, temperature=2.0, seed=1, extra_body=few)
        assert hot.choices[0].message.content.split() == plain


# ---- log probabilities -----------------------------------------------------------------------------------------------


def forced(model: SnapshotModel, ids: list[int]) -> torch.Tensor:
    """Log probabilities `[T, V]` of what follows each token, by one pass of the bare model."""
    with torch.no_grad():
        return model.backbone.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_log_probabilities_of_an_answer_are_the_models(wire: Wire, model: SnapshotModel) -> None:
    codec = model.backbone.codec
    settings = {"model": "base", "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    answered = wire.chat(LONG, **settings, temperature=1.0, seed=3, frequency_penalty=1.0)
    content = answered.choices[0].logprobs.content
    prompt = codec.encode_source([LONG])[0]
    ids = codec.tokenizer.convert_tokens_to_ids([item.token.strip() for item in content])
    expected = forced(model, [*prompt, *ids])[len(prompt) - 1 :]
    assert 0 < len(content) <= 6
    for row, (token, item) in enumerate(zip(ids, content, strict=True)):
        assert item.logprob == pytest.approx(float(expected[row, token]), abs=1e-4), "without penalty and temperature"
        values, tokens = expected[row].topk(3)
        assert [other.logprob for other in item.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
        assert [other.token.strip() for other in item.top_logprobs] == codec.pieces(tokens.tolist())
        assert bytes(item.bytes).decode() == item.token
    chunks = list(wire.chat(LONG, **settings, temperature=1.0, seed=3, frequency_penalty=1.0, stream=True))
    assert [
        item for chunk in chunks if chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content
    ] == content
    assert wire.chat(LONG, model="base", max_tokens=2).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_as_lm_eval_asks_for_it(wire: Wire, model: SnapshotModel, stream: bool) -> None:
    """Token ids in, `echo` with `logprobs`, no token or one out, which it leaves away."""
    codec = model.backbone.codec
    prompts = [codec.encode_source([text])[0] for text in (LONG, "fire is warm very a", "it")]
    for most in (0, 1):
        body = {"prompt": prompts, "model": "base", "max_tokens": most, "echo": True, "logprobs": 1, "stream": stream}
        choices: dict[int, dict[str, list[Any]]] = {}
        if stream:
            for chunk in wire.openai.completions.create(**body):
                for name, values in (chunk.choices[0].logprobs or TextLogprobs()).model_dump(exclude_none=True).items():
                    choices.setdefault(chunk.choices[0].index, {}).setdefault(name, []).extend(values)
        else:
            answered = wire.openai.completions.create(**body)
            choices = {choice.index: choice.logprobs.model_dump() for choice in answered.choices}
            for choice, ids in zip(answered.choices, prompts, strict=True):
                assert choice.text.startswith(codec.shown(ids))
        for number, ids in enumerate(prompts):
            found, expected = choices[number], forced(model, ids)
            assert len(found["tokens"]) == len(ids) + most and found["token_logprobs"][0] is None
            scored = [float(expected[place, token]) for place, token in enumerate(ids[1:])]
            assert found["token_logprobs"][1 : len(ids)] == pytest.approx(scored, abs=1e-4)
            best = [max(top.values()) for top in found["top_logprobs"][1 : len(ids)]]
            assert best == pytest.approx(expected[:-1].max(-1).values.tolist(), abs=1e-4)
            starts = [sum(map(len, found["tokens"][:place])) for place in range(len(found["tokens"]))]
            assert found["text_offset"] == starts
    text = wire.openai.completions.create(prompt=LONG, model="base", max_tokens=0, echo=True, logprobs=0)
    assert text.choices[0].text == LONG and text.choices[0].finish_reason == "length"
    assert text.usage.completion_tokens == 0 and wire.engine.pending == 0


# ---- mixtures --------------------------------------------------------------------------------------------------------


def test_listed_models_can_be_requested(wire: Wire, model: SnapshotModel) -> None:
    names = [item.id for item in wire.openai.models.list()]
    assert names[:6] == ["auto", "base", "snapshot:1", "snapshot:2", "colour", "animal"]
    assert set(names[6:]) == set(model.loaded.keys)
    assert wire.openai.models.retrieve("colour").id == "colour"
    assert wire.openai.models.retrieve("base").owned_by == "raycl"
    for name, adapters, snapshot in (
        ("base", {}, 2),
        ("colour.1", {"colour.1": 1.0}, 2),
        ("animal.0@1", {"animal.0": 1.0}, 2),
        ("colour", {f"colour.{slot}": 0.25 for slot in range(4)}, 2),
    ):
        result = wire.chat("fire is", model=name)
        assert result.model == name and result.raycl["adapters"] == adapters and result.raycl["snapshot"] == snapshot
    older = wire.chat("it purrs", model="snapshot:1")
    assert older.raycl["snapshot"] == 1 and set(older.raycl["tasks"]) == {"colour"}
    newer = wire.chat("it purrs", model="snapshot:2")
    assert newer.raycl["snapshot"] == 2 and "animal" in newer.raycl["tasks"]


def test_names_of_clients_stand_for_models(bank: Bank) -> None:
    with listening(
        bank, model_aliases={"gpt-4o": "auto", "org/m": "auto", "gpt-3.5": "colour.1", "gpt-0": "nothing"}
    ) as aliased:
        answered = aliased.chat("fire is", model="gpt-4o")
        assert answered.model == "gpt-4o" and answered.raycl["tasks"] == aliased.chat("fire is").raycl["tasks"]
        assert aliased.chat("fire is", model="gpt-3.5").raycl["adapters"] == {"colour.1": 1.0}
        assert {"gpt-4o", "gpt-3.5"} <= {item.id for item in aliased.openai.models.list()}
        assert aliased.openai.models.retrieve("org/m").id == "org/m", "names of the hub have a slash"
        with pytest.raises(openai.NotFoundError, match="model 'nothing' does not exist"):
            aliased.chat("fire is", model="gpt-0")
    with pytest.raises(ConfigError, match="model_aliases names 'base', which is a model itself"):
        load_serve_config(None, ["bank=b", "model_aliases={base: auto}"])


def test_requests_pin_more_exactly(wire: Wire, model: SnapshotModel) -> None:
    mixture = {"colour.0": -1.5, "animal.3": 0.75, "animal.1": 0.0}
    result = wire.chat("fire is", **pinned(adapters=mixture))
    assert result.raycl["adapters"] == {"animal.3": 0.75, "colour.0": -1.5} and result.raycl["template"] == "animal"
    assert wire.chat("fire is", **pinned(adapters={})).raycl["adapters"] == {}
    assert wire.chat("fire is", **pinned(snapshot=1)).raycl["snapshot"] == 1
    assert wire.chat("fire is", model="snapshot:2", **pinned(snapshot=1)).raycl["snapshot"] == 1
    assert wire.chat("fire is", **pinned(task="animal")).raycl["template"] == "animal"
    mixed = next(
        text for text in ("is cold a", "it purrs", "fire is", "a sleeps") if len(wire.chat(text).raycl["tasks"]) == 2
    )
    hard = wire.chat(mixed, **pinned(mix=False)).raycl
    assert list(hard["tasks"]) == [next(iter(wire.chat(mixed).raycl["tasks"]))]
    assert sum(hard["adapters"].values()) == pytest.approx(1.0, abs=1e-5)


def test_counts_are_of_the_active_snapshot_alone(wire: Wire) -> None:
    wire.chat("fire is")
    counted = wire.get("/v1/drift")["served"]
    wire.chat("fire is", **pinned(snapshot=1))
    assert wire.get("/v1/drift")["served"] == counted != {}


def test_a_route_without_an_answer(wire: Wire, labels: Wire) -> None:
    answer = wire.post("/v1/route", {"input": ["fire is", "it purrs"]}).json()
    assert [list(item) for item in answer["data"]] == [["index", "raycl"]] * 2 and answer["object"] == "list"
    for text, item in zip(("fire is", "it purrs"), answer["data"], strict=True):
        assert item["raycl"]["adapters"] == wire.chat(text).raycl["adapters"]
    bare = wire.post("/v1/route", {"input": "fire is", **pinned(template=False)["extra_body"]}).json()
    assert (answer["data"][0]["raycl"]["template"], bare["data"][0]["raycl"]["template"]) == ("colour", "")
    assert labels.post("/v1/route", {"input": "fire is"}).json()["data"][0]["raycl"]["template"] == ""
    assert wire.engine.pending == labels.engine.pending == 0


def test_classification(labels: Wire, taught: Taught) -> None:
    asked = examples(taught("bert", "slm"), labels.snapshot_manager.bank)
    answer = labels.post("/v1/classify", {"input": [item.text for item in asked]}).json()
    assert [item["label"] for item in answer["data"]] == [item.answer for item in asked]
    assert [item["index"] for item in answer["data"]] == list(range(len(asked)))
    for item in answer["data"]:
        chances = list(item["scores"].values())
        assert sum(chances) == pytest.approx(1.0, abs=1e-5) and chances == sorted(chances, reverse=True)
        assert item["label"] == next(iter(item["scores"]))
        assert set(item["scores"]) <= {"red", "blue", "cat", "dog"} and item["raycl"]["snapshot"] == 2
    assert (
        answer["usage"] == {"prompt_tokens": answer["usage"]["total_tokens"], "completion_tokens": 0} | answer["usage"]
    )
    pin = labels.post("/v1/classify", {"input": "it purrs", "raycl": {"adapters": {"colour.0": 1}}}).json()
    assert set(pin["data"][0]["scores"]) == {"red", "blue"}
    assert problem(labels.post("/v1/classify", {"input": "it purrs", "model": "base"}))[0] == 400
    with pytest.raises(openai.BadRequestError, match="gives labels, not texts"):
        labels.chat("fire is")


def test_the_examples_of_the_guide_run_as_printed(wire: Wire, labels: Wire) -> None:
    """The first for a backbone that writes its answers, the second for one that gives labels."""
    guide = (REPO / "docs/guides/serving.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    for example, served in zip(examples, (wire, labels), strict=True):
        names: dict[str, Any] = {}
        exec(example.replace("http://127.0.0.1:8000", served.url), names)
        assert isinstance(names["answer"], str) and names["answer"]


def test_adapters_and_snapshots_are_listed(wire: Wire, model: SnapshotModel) -> None:
    value = wire.get("/v1/adapters")
    assert value["snapshot"] == 2 and [item["name"] for item in value["data"]] == list(model.loaded.keys)
    assert value["data"][0]["rank"] == 8 and value["data"][0]["version"] == 1 and value["data"][0]["bytes"] > 0
    assert {tuple(item["tasks"]) for item in value["data"]} == {("colour",), ("animal",)}
    shown = wire.get("/v1/snapshots")
    assert (shown["active"], shown["data"], shown["kind"], shown["problem"]) == (2, [1, 2], "decoder", "")
    assert shown["tasks"] == ["colour", "animal"] and shown["decision"] == {}
    assert wire.get("/healthz") == {"status": "ok"} and wire.get("/readyz") == {
        "status": "ready",
        "snapshot": 2,
        "metrics": None,
    }
    assert wire.http.get("/").headers["content-type"].startswith("text/html")
