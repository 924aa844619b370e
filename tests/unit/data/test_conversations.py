"""Rows as people store them: conversations, instructions, preferences; each becomes the texts and answers it means."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from raycl.data.sources.conversation import (
    Message,
    Role,
    ToolRole,
    answer_of,
    answer_text,
    messages_of,
    plain_text,
    remarked,
    text_of,
)
from raycl.data.sources.fields import Columns, SourceRow
from raycl.data.sources.formats import read_rows
from raycl.data.sources.hub import HubSplit
from raycl.data.sources.reading import Findings
from raycl.data.sources.source import SourceFile
from raycl.errors import DataError

SYSTEM, USER, BOT = Message("system", "be brief"), Message("user", "hi"), Message("assistant", "hello")
contents = st.lists(st.sampled_from(["a b", "", "<|user|>", "\\<|user|>", "\\", "<|system|> x", "  "])).map("\n".join)
conversations = st.lists(
    st.builds(Message, st.sampled_from([*get_args(Role), *get_args(ToolRole)]), contents), min_size=1, max_size=5
)


@given(conversations)
def test_a_conversation_is_one_text_and_comes_back(messages: list[Message]) -> None:
    assert list(messages_of(text_of(messages))) == messages


@given(contents, st.booleans())
def test_an_answer_is_one_text_and_comes_back(content: str, calls: bool) -> None:
    turn = (Message("assistant", content), *([Message("tool_calls", "[]")] if calls else []))
    assert answer_of(answer_text(turn)) == turn
    assert calls or "<|" in content or answer_text(turn) == content


def test_a_single_user_message_is_its_own_text() -> None:
    assert text_of([USER]) == "hi" and messages_of("hi") == (USER,)
    assert text_of([SYSTEM, USER]) == "<|system|>\nbe brief\n<|user|>\nhi"
    assert plain_text(messages_of(text_of([SYSTEM, USER, BOT]))) == "be brief\nhi\nhello"


def test_a_remark_stands_behind_what_the_user_said_last() -> None:
    assert remarked("hi", " there") == "hi there"
    turns = messages_of(remarked(text_of([SYSTEM, USER, BOT, USER, BOT]), " there"))
    assert turns == (SYSTEM, USER, BOT, Message("user", "hi there"), BOT)


def rows(folder: Path, *items: Any, columns: Columns | None = None) -> list[SourceRow]:
    (folder / "x.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return list(read_rows(SourceFile.at(folder / "x.jsonl"), columns=columns))


OPENAI = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "now"}]},
    {"role": "assistant", "content": "bye"},
]
TURNS = [
    SourceRow(1, text_of([SYSTEM, USER]), ("hello",), is_chat=True),
    SourceRow(1, text_of([SYSTEM, USER, BOT, Message("user", "and now")]), ("bye",), is_chat=True),
]


CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern", "day": null}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "7"}
TOOL = {"name": "weather", "description": "now", "parameters": {"type": "object", "properties": {}}}


def bad_call(arguments: str) -> dict[str, Any]:
    return {**CALL, "function": {"name": "weather", "arguments": arguments}}


def test_tools_calls_and_results_are_turns_and_calls_are_answers(tmp_path: Path) -> None:
    turns = [OPENAI[0], OPENAI[1], CALLS, RESULT, OPENAI[2]]
    offered = Message("tools", json.dumps([{"type": "function", "function": TOOL}]))
    arguments = {"city": "Bern", "day": None}
    call = json.dumps([{"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}])
    called = (Message("assistant", ""), Message("tool_calls", call))
    told = Message("tool", '{"content": "7", "tool_call_id": "a"}')
    expected = [
        SourceRow(1, text_of([SYSTEM, offered, USER]), (text_of(called),), is_chat=True),
        SourceRow(1, text_of([SYSTEM, offered, USER, *called, told]), ("hello",), is_chat=True),
    ]
    wrapped = [{"type": "function", "function": {**TOOL, "strict": True}}]
    assert rows(tmp_path, {"messages": turns, "tools": wrapped, "parallel_tool_calls": False}) == expected
    assert rows(tmp_path, {"messages": turns, "tools": json.dumps([TOOL])}) == expected
    assert answer_of(expected[0].references[0]) == called
    unlearned = [*turns[:2], {**CALLS, "weight": 0}, *turns[3:]]
    assert rows(tmp_path, {"messages": unlearned, "tools": [TOOL]}) == expected[1:]
    (asked,) = rows(tmp_path, {"messages": turns, "tools": [TOOL]}, columns=Columns(label=()))
    assert asked.text == expected[1].text, "what is answered last, to the result of a call"
    given = [{**CALL, "function": {"name": "weather", "arguments": arguments}}]
    trl = {"messages": [*turns[:2], {"role": "assistant", "tool_calls": given}, *turns[3:]], "tools": [TOOL]}
    assert rows(tmp_path, trl) == expected
    alone = rows(tmp_path, {"instruction": "hi", "output": "hello", "tools": [TOOL]})
    assert alone == [SourceRow(1, text_of([offered, USER]), ("hello",), is_chat=True)]


def test_arrow_adds_no_keys_to_tools_and_arguments(tmp_path: Path) -> None:
    """It gives each object of a column the keys of all, with null for those that an object does not have."""
    items = []
    for name, arguments in (("weather", {"city": "Bern"}), ("clock", {"zone": "UTC"})):
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        parameters = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
        messages = [OPENAI[1], {"role": "assistant", "tool_calls": calls}]
        items.append({"messages": messages, "tools": [{"name": name, "parameters": parameters}]})
    expected = rows(tmp_path, *items)
    pq.write_table(pa.Table.from_pylist(items), tmp_path / "x.parquet")
    assert list(read_rows(SourceFile.at(tmp_path / "x.parquet"))) == expected
    Dataset.from_list(items).save_to_disk(tmp_path / "saved")
    assert list(HubSplit(str(tmp_path / "saved"), "").rows(Columns(), Findings())) == expected


def test_each_turn_of_the_assistant_is_an_answer_to_all_before_it(tmp_path: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[item["role"]], "value": item["content"]} for item in OPENAI]
    shared[3]["value"] = "and now"
    assert rows(tmp_path, {"messages": OPENAI}) == TURNS
    assert rows(tmp_path, {"id": 7, "conversations": shared}) == TURNS
    assert rows(tmp_path, {"dialog": OPENAI}, columns=Columns(text=("dialog",))) == TURNS
    assert rows(tmp_path, {"messages": [*OPENAI, {"role": "user", "content": "more"}]}) == TURNS
    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "messages"], [1, json.dumps(OPENAI)]])
    assert list(read_rows(SourceFile.at(tmp_path / "x.csv"))) == TURNS


def test_without_answers_a_conversation_is_what_the_assistant_shall_answer(tmp_path: Path) -> None:
    texts = Columns(label=())
    (whole,) = rows(tmp_path, {"messages": OPENAI}, columns=texts)
    (asked,) = rows(tmp_path, {"messages": OPENAI[:2]}, columns=texts)
    assert (whole.text, asked.text) == (TURNS[1].text, TURNS[0].text) and whole.is_chat


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "critic", "content": "x"}], "a message is of 'critic': expected one of system, user, assistant"),
        ([{"role": "tool", "content": "x"}], "message 1 of the conversation is of tool: expected user"),
        ([{"role": "user", "content": None}], "the content of a message is a NoneType: expected text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "the content of a message is a NoneType"),
        ([{"role": "user", "content": "x"}], "has no answer of the assistant: expected user and assistant in turn"),
        ([{"role": "system", "content": "x"}], "has no user message"),
        ([OPENAI[1], OPENAI[1]], "message 2 of the conversation is of user: expected assistant"),
        ([OPENAI[2], OPENAI[1]], "message 1 of the conversation is of assistant: expected user"),
        ([OPENAI[0], OPENAI[2]], "message 2 of the conversation is of assistant: expected user"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_row(tmp_path: Path, messages: Any, problem: str) -> None:
    with pytest.raises(DataError, match=f"x.jsonl, row 2: .*({problem})"):
        rows(tmp_path, {"messages": OPENAI}, {"messages": messages})


def test_instructions_prompts_and_fields_of_fields(tmp_path: Path) -> None:
    alpaca = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert rows(tmp_path, alpaca, {**alpaca, "input": ""}) == [
        SourceRow(1, "Add.\n\n1 2", ("3",)),
        SourceRow(2, "Add.", ("3",)),
    ]
    assert rows(tmp_path, {"prompt": "1 2", "completion": "3"}) == [SourceRow(1, "1 2", ("3",))]
    columns = Columns(label=("answers.text",), parts=("question", "context"))
    squad = {"question": "who", "context": "me", "answers": {"text": ["I", "me"], "answer_start": [0, 1]}}
    assert rows(tmp_path, squad, columns=columns) == [SourceRow(1, "who\nme", ("I", "me"))]
    with pytest.raises(DataError, match=r"row 1: the context is a missing value: expected a string"):
        rows(tmp_path, {"question": "who", "answers": {"text": ["I"]}}, columns=columns)


def test_preferences_are_refused_unless_their_columns_are_named(tmp_path: Path) -> None:
    pair = {"prompt": "1 2", "chosen": "3", "rejected": "4"}
    with pytest.raises(DataError, match=r"hold preferences \(chosen, rejected\), .*columns.label=chosen"):
        rows(tmp_path, pair)
    assert rows(tmp_path, pair, columns=Columns(("prompt",), ("chosen",))) == [SourceRow(1, "1 2", ("3",))]
    turns = {"chosen": OPENAI[1:3], "rejected": OPENAI[1:3]}
    openai = {"input": {"messages": OPENAI[:2]}, "preferred_output": OPENAI[2:3], "non_preferred_output": OPENAI[2:3]}
    for item, names in ((turns, "chosen, rejected"), (openai, "preferred_output, non_preferred_output")):
        with pytest.raises(DataError, match=rf"hold preferences \({names}\), from which no method here learns"):
            rows(tmp_path, item)


def test_a_turn_of_weight_0_is_read_and_not_learned_and_the_last_one_may_be_learned_alone(tmp_path: Path) -> None:
    turns = [OPENAI[1], {**OPENAI[2], "weight": 0}, OPENAI[3], OPENAI[4]]
    assert rows(tmp_path, {"messages": [OPENAI[0], *turns]}) == TURNS[1:]
    last = Columns(turns="last")
    assert rows(tmp_path, {"messages": OPENAI}, columns=last) == TURNS[1:]
    draft = {"messages": [*OPENAI[:4], {**OPENAI[4], "weight": 0}]}
    assert rows(tmp_path, draft, columns=last) == rows(tmp_path, draft) == TURNS[:1], "the last that is learned"
    for weight, problem in ((0, "each answer of the conversation has weight 0"), (0.5, "a message has weight 0.5")):
        with pytest.raises(DataError, match=f"x.jsonl, row 1: .*{problem}"):
            rows(tmp_path, {"messages": [OPENAI[1], {**OPENAI[2], "weight": weight}]})


def test_a_system_message_and_earlier_turns_beside_a_row_are_read(tmp_path: Path) -> None:
    shared = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    asked = [SourceRow(1, text_of([SYSTEM, USER]), ("hello",), is_chat=True)]
    assert rows(tmp_path, {**shared, "system": "be brief", "tools": "[]"}) == asked
    assert rows(tmp_path, {"messages": OPENAI[:3], "system": "be brief"}) == asked
    assert rows(tmp_path, {**shared, "system": None}) == [SourceRow(1, "hi", ("hello",), is_chat=True)]
    alpaca = {"instruction": "hi", "input": "", "output": "hello"}
    pair = {**alpaca, "instruction": "and now", "output": "bye", "system": "be brief", "history": [["hi", "hello"]]}
    result = rows(tmp_path, {**alpaca, "system": "be brief", "history": []}, pair)
    assert result == [asked[0], TURNS[1]._replace(number=2)]
    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [list(pair), [json.dumps(cell) if type(cell) is list else cell for cell in pair.values()]]
        )
    assert list(read_rows(SourceFile.at(tmp_path / "x.csv"))) == TURNS[1:]
    assert rows(tmp_path, {"text": "hi", "label": "a", "system": "linux"}) == [SourceRow(1, "hi", ("a",))], (
        "another meaning"
    )


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"functions": [{"name": "search"}]}, "the row has functions, which are not learned"),
        ({"tools": [{"type": "web_search"}]}, "tool 1 of the row has no name"),
        ({"tools": "[{"}, "the tools are no JSON"),
        ({"tools": {"name": "search"}}, "the tools are a dict: expected a list of functions"),
        ({"images": ["a.png"]}, "the row has images, which are not learned"),
        ({"system": 3}, "the system is a int: expected text"),
        ({"system": "be long"}, "the conversation has a system message and the row another one"),
        (
            {"messages": [OPENAI[1], {**OPENAI[2], "tool_calls": [1]}]},
            "a call of a tool has no function with a name",
        ),
        (
            {"messages": [OPENAI[1], {**OPENAI[2], "function_call": {"name": "search"}}]},
            "a message has function_call, which are not learned",
        ),
        ({"messages": [{**OPENAI[1], "tool_calls": [CALL]}]}, "a message of user has tool_calls"),
        (
            {"messages": [OPENAI[1], CALLS, OPENAI[1]]},
            "message 3 .* is of user: expected tool, since the calls of tools",
        ),
        ({"messages": [OPENAI[1], CALLS], "tools": [{"name": "clock"}]}, r"a message calls 'weather': .* \(clock\)"),
        (
            {"messages": [OPENAI[1], {"role": "assistant", "tool_calls": [bad_call("[1]")]}]},
            "the arguments of a call of 'weather' are no JSON object",
        ),
        (
            {"messages": [OPENAI[1], {"role": "assistant", "tool_calls": [bad_call("{")]}]},
            "the arguments of a call of 'weather' are no JSON object",
        ),
        ({"messages": None, "instruction": "x", "output": "y", "history": ["hi"]}, "the history is no list of pairs"),
        ({"messages": None, "instruction": "x", "output": "y", "history": "hi"}, "the history is no JSON"),
    ],
)
def test_what_is_beside_a_conversation_and_not_learned_is_refused_by_name(
    more: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    row = {key: value for key, value in {"messages": OPENAI[:3], **more}.items() if value is not None}
    with pytest.raises(DataError, match=f"x.jsonl, row 1: {problem}"):
        rows(tmp_path, row)
