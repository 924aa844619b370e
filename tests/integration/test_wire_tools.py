"""Tools: rendered by the chat template as Transformers renders them, and calls found in what the model writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_samples import CONTROL, TOKENIZERS, TOOL_TEMPLATES
from http_client import Wire, listening, problem
from tiny import Lab, run

from raycl.backbone.codec import HFCodec
from raycl.data.stream import StreamConfig, TaskSpec, open_stream
from raycl.serve.http.tool_calls import CallParser, ToolCall
from raycl.storage import Storage
from raycl.testing.tiny_models import tiny_model
from raycl.training.records.named_bank import snapshot_at

CITY = {"type": "string", "maxLength": 5}
PARAMETERS = {
    "type": "object",
    "properties": {"city": CITY},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "It is <|end|>.", "parameters": PARAMETERS},
}
WEATHER_ALONE: Any = {"type": "function", "function": {"name": "weather"}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TOOLS: Any = [WEATHER, CLOCK]
ASK: list[Any] = [{"role": "user", "content": "is it warm?"}]
CALLED: list[Any] = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "abc", "content": "7 degrees <|end|>"},
]
ENDLESS: dict[str, Any] = {
    "start_anchor": "<|turn|>assistant",
    "fields": {
        "content": {"content": "text", "content_args": {"strip": False}},
        "tool_calls": {"open": "<do>", "close_pattern": "(x+x+)+y", "content": "json", "repeats": True},
    },
}
"""A response template whose search takes twice as long with each further x."""

WRITTEN = r'is <tool_call>\{"name": "weather", "arguments": \{"city": "[a-z]{3}"\}\}</tool_call>'
TWICE = r'(<tool_call>\{"name": "clock", "arguments": \{\}\}</tool_call>\n){2}'


@pytest.fixture(scope="module")
def wire(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    folder = tmp_path_factory.mktemp("tools")
    tokenizer = TOKENIZERS["bytes"]()
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL})
    tokenizer.chat_template = TOOL_TEMPLATES["in-tags"]
    tokenizer.save_pretrained(folder / "model")
    tiny_model("llama", len(tokenizer), positions=1024).save_pretrained(folder / "model")
    stream = {"prompt": "plain", "max_source_tokens": 64, "max_target_tokens": 8}
    changes = {"backbone": {"name": str(folder / "model")}, "stream": stream}
    storage = run(lab.config("llama", "slm", **changes), Storage.at(folder / "run")).storage
    with listening(snapshot_at(storage.sub("bank").uri)[0]) as result:
        yield result


def answered(wire: Wire, messages: list[Any], **settings: Any) -> Any:
    body = {"model": "base", "max_tokens": 150, "messages": messages, "temperature": 1.0, "seed": 3, **settings}
    return wire.openai.chat.completions.create(**body)


@pytest.mark.parametrize("messages", [ASK, CALLED], ids=["asked", "called"])
def test_the_prompt_is_that_of_transformers(wire: Wire, messages: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Token for token, but for strings of control tokens in the request, which stay text."""
    seen: list[list[int]] = []
    fit = wire.engine._truncation.fit

    def recorded(requests: Any) -> Any:
        result = fit(requests)
        seen.append(result[-1].ids)
        return result

    monkeypatch.setattr(wire.engine._truncation, "fit", recorded)
    answered(wire, messages, tools=TOOLS, max_tokens=1)
    arguments = json.loads('{"city": "Bern"}')
    taken = [
        {**m, "content": m["content"] or "", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}
        if m.get("tool_calls")
        else m
        for m in messages
    ]
    tokenizer = wire.engine.codec.tokenizer
    text = tokenizer.apply_chat_template(taken, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert wire.engine.codec.shown(seen[-1]) == text and "weather" in text
    control = tokenizer.convert_tokens_to_ids("<|end|>")
    written = len(messages) + 1  # turns, and the system's
    assert seen[-1].count(control) == written < text.count("<|end|>")
    answered(wire, messages, tools=TOOLS, tool_choice="none", max_tokens=1)
    assert "description" not in wire.engine.codec.shown(seen[-1]), "tools that must not be called are not offered"


def test_the_prompt_is_that_of_training(wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token for token, for the call, and for the answer to its result, of rows as files of OpenAI and TRL have them."""
    seen: list[list[int]] = []
    fit = wire.engine._truncation.fit

    def recorded(requests: Any) -> Any:
        result = fit(requests)
        seen.append(result[-1].ids)
        return result

    monkeypatch.setattr(wire.engine._truncation, "fit", recorded)
    system = {"role": "system", "content": "be brief"}
    messages = [system, *CALLED, {"role": "assistant", "content": "it is warm"}]
    called = {"name": "weather", "arguments": {"city": "Bern"}}
    turn = {"role": "assistant", "tool_calls": [{"id": "abc", "type": "function", "function": called}]}
    trl = [*messages[:2], turn, *messages[3:]]
    codec = HFCodec(wire.engine.codec.tokenizer, "decoder", 900, 90)
    for name, row in (
        ("openai", {"messages": messages, "tools": TOOLS}),
        ("trl", {"messages": trl, "tools": json.dumps(TOOLS)}),
    ):
        for split in ("train", "test"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
        spec = TaskSpec(name=name, path=str(tmp_path / name))
        settings = {"dev_fraction": 0, "cache_dir": str(tmp_path), "max_source_tokens": 900, "max_target_tokens": 90}
        stream = open_stream(StreamConfig(tasks=(spec,), **settings), seed=0)
        table = stream.table(stream.tasks[0], "train", codec)
        columns = table.columns(range(2))
        for ids, asked in zip(columns.source_ids, (messages[:2], messages[:4]), strict=True):
            answered(wire, asked, tools=TOOLS, max_tokens=1)
            assert ids.tolist() == seen[-1] and "weather" in codec.shown(seen[-1])
        call, said = (codec.shown(ids.tolist()) for ids in columns.target_ids)
        assert call.startswith('<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call><|end|>')
        assert said.startswith("it is warm<|end|>")
        assert table.references(range(2)) == [
            ('<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>',),
            ("it is warm",),
        ]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_found_in_the_text(wire: Wire, stream: bool) -> None:
    settings = {"tools": TOOLS, "extra_body": {"guided_regex": WRITTEN}}
    if stream:
        chunks = list(answered(wire, ASK, **settings, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas).strip() == "is"
        assert all(delta.model_fields_set for delta in deltas[:-1]), "OpenAI sends no empty delta but the last"
        (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
        assert call.index == 0
        finish = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = answered(wire, ASK, **settings).choices
        assert choice.message.content == "is"
        (call,) = choice.message.tool_calls
        finish = choice.finish_reason
    assert finish == "tool_calls" and call.type == "function" and call.function.name == "weather"
    assert len(json.loads(call.function.arguments)["city"]) == 3 and len(call.id) == 9


def test_text_goes_before_the_calls_of_the_same_piece(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, held = CallParser.feed, list[str]()

    def at_the_end(parser: CallParser, text: str, is_last: bool) -> Iterator[str | ToolCall]:
        held.append(text)
        return feed(parser, "".join(held), True) if is_last else iter(())

    monkeypatch.setattr(CallParser, "feed", at_the_end)
    chunks = answered(wire, ASK, tools=TOOLS, extra_body={"guided_regex": WRITTEN}, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    first, text, call, last = deltas
    assert (first.content, text.content, last.content) == ("", "is", None) and text.tool_calls is None
    assert [called.function.name for called in call.tool_calls] == ["weather"]


@pytest.mark.parametrize("stream", [False, True])
def test_several_calls_or_one_alone(wire: Wire, stream: bool) -> None:
    for parallel, count in ((True, 2), (False, 1)):
        settings = {"tools": TOOLS, "parallel_tool_calls": parallel, "extra_body": {"guided_regex": TWICE}}
        if stream:
            chunks = list(answered(wire, ASK, **settings, stream=True))
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
            assert [call.index for call in calls] == list(range(count))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "", "line breaks between calls"
        else:
            message = answered(wire, ASK, **settings).choices[0].message
            calls = message.tool_calls
            assert message.content is None
        assert len(calls) == count and len({call.id for call in calls}) == count


@pytest.mark.parametrize("choice", ["required", WEATHER_ALONE])
def test_a_call_that_must_be_made_is_made(wire: Wire, choice: Any) -> None:
    tools = [WEATHER] if choice == "required" else TOOLS
    (found,) = answered(wire, ASK, tools=tools, tool_choice=choice).choices
    assert found.finish_reason == "tool_calls" and found.message.content is None
    (call,) = found.message.tool_calls
    assert call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"city"}
    nested = {**PARAMETERS, "properties": {"city": {"$ref": "#/$defs/City"}}, "$defs": {"City": CITY}}
    described = {"type": "function", "function": {"name": "weather", "parameters": nested}}
    (found,) = answered(wire, ASK, tools=[described, CLOCK], tool_choice=WEATHER_ALONE).choices
    assert len(json.loads(found.message.tool_calls[0].function.arguments)["city"]) <= 5, "as Pydantic writes schemas"
    (whole,) = answered(wire, CALLED, tools=tools, tool_choice="none", max_tokens=3).choices
    assert whole.message.tool_calls is None and isinstance(whole.message.content, str)


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (
            '{{ "<tool_call>" }}',
            'a<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
            ["a", ("f", '{"x": 1}')],
        ),
        ('{{ "<tool_call>" }}', 'a<tool_call>{"name": "g"}</tool_call>', ['a{"name": "g"}']),
        ('{{ "<tool_call>" }}', 'a<tool_call>{"name": ["f"]}</tool_call>', ['a{"name": ["f"]}']),
        ('{{ "<tool_call>" }}', "a<tool_call>no JSON</tool_call> b", ["ano JSON b"]),
        (
            "[TOOL_CALLS]",
            '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]',
            [("f", "{}")] * 2,
        ),
        ("<|python_tag|>", '<|python_tag|>{"name": "f", "parameters": {"x": "é"}}', [("f", '{"x": "é"}')]),
        ("<|python_tag|>", "{ but no call", ["{ but no call"]),
        ("tools of another form", '{"name": "f", "arguments": {}}', ['{"name": "f", "arguments": {}}']),
    ],
)
def test_known_forms_are_read_piece_by_piece(
    wire: Wire, template: str, text: str, expected: list[str | tuple[str, str]]
) -> None:
    for size in (1, 7, len(text)):
        parser = CallParser(wire.engine.codec, template, frozenset("f"), False)
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        parts = [part for i, piece in enumerate(pieces) for part in parser.feed(piece, i + 1 == len(pieces))]
        calls = [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]
        said = "".join(part for part in parts if isinstance(part, str))
        assert ([said] if said.strip() else []) + calls == expected, (size, parts)


def test_a_tokenizers_own_description_of_answers_goes_first(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """A description in the form that Transformers documents is used, with its names for the parts of a call."""
    call = {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.with}"}}
    marks = {"open": "<do>", "close": "</do>", "content": "json", "transform": call, "repeats": True}
    own = {"start_anchor": "<|turn|>assistant", "fields": {"content": {"content": "text"}, "tool_calls": marks}}
    codec = wire.engine.codec
    monkeypatch.setattr(codec.tokenizer, "response_template", own, raising=False)
    parser = CallParser(codec, codec.chat_template, frozenset("f"), False)
    parts = [*parser.feed('a<do>{"tool": "f", "with": {"x": 1}}', False), *parser.feed("</do>", True)]
    assert parts == ["a", ToolCall("f", '{"x": 1}')]
    broken = CallParser(codec, codec.chat_template, frozenset("f"), False)
    text = 'hi <do>{"tool": "f", "with": {}}</do> and <do>{"nothing": 1}</do> end'
    parts = [part for i in range(0, len(text), 4) for part in broken.feed(text[i : i + 4], i + 4 >= len(text))]
    said = "".join(part for part in parts if isinstance(part, str))
    assert said == 'hi  and <do>{"nothing": 1}</do> end' and ToolCall("f", "{}") in parts, "nothing is said twice"
    broken = CallParser(codec, codec.chat_template, frozenset("f"), False)
    assert "".join(map(str, broken.feed("a<do>nothing</do>", True))) == "a<do>nothing</do>"
    broken = CallParser(codec, codec.chat_template, frozenset("f"), False)
    assert "".join(map(str, [*broken.feed("a", False), *broken.feed("<do>nothing</do>", True)])) == "a<do>nothing</do>"
    other = CallParser(codec, "a task's template", frozenset("f"), False)
    assert list(other.feed("<do>{}</do>", True)) == ["<do>{}</do>"]


def test_answers_are_read_on_after_another_one_ended_the_process(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.engine.codec.tokenizer, "response_template", ENDLESS, raising=False)
    codec = wire.engine.codec
    parser, endless = (CallParser(codec, codec.chat_template, frozenset("f"), False) for _ in range(2))
    parts = list(parser.feed('a<do>{"name": "f", ', False))
    assert list(endless.feed(f"<do>{'x' * 60}", True)) == [f"<do>{'x' * 60}"]
    assert [*parts, *parser.feed('"arguments": {}}xxy b', True)] == ["a", ToolCall("f", "{}"), " b"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tokenizers_endless_regular_expression_stalls_no_other_request(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The process that searches by it is ended, and the answer is text."""
    monkeypatch.setattr(wire.engine.codec.tokenizer, "response_template", ENDLESS, raising=False)
    body = {"model": "base", "messages": ASK, "tools": TOOLS, "max_tokens": 80, "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(wire.post, "/v1/chat/completions", {**body, "guided_regex": "<do>x{60}"})
        others = 0
        while not asked.done():
            assert wire.get("/healthz") == {"status": "ok"}
            others += 1
        text = asked.result().text
    assert others > 10, "the event loop answers meanwhile"
    pieces = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    said = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert f"<do>{'x' * 60}" == (said if stream else json.loads(text)["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice is 'required' and tools is empty"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice names 'f'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
        ({"messages": [{"role": "user"}]}, "messages.0: content is missing"),
        (
            {"messages": [{**CALLED[1], "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
            "messages.0.tool_calls.0.function.arguments: Input should be a JSON object as text",
        ),
        ({"tools": TOOLS, "model": "colour"}, "the prompt of this text has no chat template that renders tools"),
        (
            {"tools": TOOLS, "messages": [{"role": "user", "content": "fire " * 2000}]},
            "this endpoint reads at most 2047",
        ),
    ],
)
def test_what_cannot_be_offered_is_refused(wire: Wire, settings: dict[str, Any], words: str) -> None:
    status, message = problem(wire.post("/v1/chat/completions", {"messages": ASK, "model": "base", **settings}))
    assert status == 400 and words in message, message


def test_the_router_reads_no_calls_and_results(wire: Wire) -> None:
    plain = wire.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 1}).json()["raycl"]["tasks"]
    with pytest.raises(openai.BadRequestError, match="no chat template that renders tools"):
        answered(wire, CALLED, model="auto")
    reading = wire.loaded().reading("<|user|>\nis it warm?\n<|tool_calls|>\n[]\n<|tool|>\n{}", is_chat=True)
    assert reading.routed == "is it warm?" and plain
