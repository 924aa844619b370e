"""Tools beside a conversation and their calls in it, in the one form in which chat templates render them.

Files of OpenAI and of TRL have them alike: a row has `tools`, an assistant's message `tool_calls`, and a message of
role `tool` a result. An endpoint gives its requests the same form, so training and serving render the same text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

RefuseRow = Callable[[str], NoReturn]
"""Raises an error about a row."""

NOTHING: tuple[Any, ...] = (None, "", "[]", "{}", "null", [], {})
"""Values of fields that hold nothing."""

_OF_A_FUNCTION = ("name", "description", "parameters")
"""The parts of a tool that a prompt has, in their order. Other keys are left out in training and in serving."""


def tools_text(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return the JSON of tools as templates take them; "" without any."""
    trees = [
        {
            "type": "function",
            "function": {key: function[key] for key in _OF_A_FUNCTION if function.get(key) is not None},
        }
        for function in functions
    ]
    return json.dumps(trees, ensure_ascii=False) if trees else ""


def call_tree(name: str, arguments: str | Mapping[str, Any], call_id: str | None) -> dict[str, Any]:
    """Return a call as templates take it, with arguments that are an object and no text.

    Raises:
        ValueError: the arguments are a text that is no JSON object.
    """
    given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    if not isinstance(given, Mapping):
        raise ValueError(f"expected a JSON object, found a {type(given).__name__}")
    return {**({"id": call_id} if call_id else {}), "type": "function", "function": {"name": name, "arguments": given}}


def calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return the JSON of calls (`call_tree`) as conversations have it."""
    return json.dumps(calls, ensure_ascii=False)


def result_text(content: str, call_id: str | None, name: str | None) -> str:
    """Return the JSON of a tool's result as conversations have it."""
    named = {"tool_call_id": call_id, "name": name}
    given = {key: value for key, value in named.items() if value is not None}
    return json.dumps({"content": content, **given}, ensure_ascii=False)


def row_tools(value: Any, refuse: RefuseRow) -> str:
    """Return the JSON of the tools in a row's field, a list or its JSON; "" without any.

    Raises:
        DataError: it is no list of functions with names.
    """
    if value in NOTHING:
        return ""
    if isinstance(value, str):
        value = _loaded(value, "the tools are", refuse)
    if not isinstance(value, list):
        refuse(f"the tools are a {type(value).__name__}: expected a list of functions, repair or remove the row")
    functions = []
    for number, tool in enumerate(value, 1):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            refuse(f"tool {number} of the row has no name: expected a function with name and parameters, repair it")
        functions.append(function)
    return tools_text(functions)


def row_calls(value: Any, refuse: RefuseRow) -> str:
    """Return the JSON of the calls in a message of a row; "" without any.

    Raises:
        DataError: they are no list of functions with names and arguments.
    """
    if value in NOTHING:
        return ""
    calls = []
    for item in value if isinstance(value, list) else [value]:
        function = item.get("function") if isinstance(item, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            refuse("a call of a tool has no function with a name: expected name and arguments, repair or remove it")
        arguments = function.get("arguments")
        try:
            calls.append(call_tree(name, {} if arguments is None else arguments, item.get("id")))
        except (ValueError, RecursionError) as error:
            refuse(f"the arguments of a call of '{name}' are no JSON object ({error}): repair or remove the message")
    return calls_text(calls)


def check_called(calls: str, tools: str, refuse: RefuseRow) -> None:
    """Check that all calls are of tools that the row offers, where it offers any.

    Raises:
        DataError: one is of another.
    """
    offered = [tool["function"]["name"] for tool in json.loads(tools or "[]")]
    for call in json.loads(calls or "[]"):
        name = call["function"]["name"]
        if offered and name not in offered:
            refuse(f"a message calls '{name}': expected one of the row's tools ({', '.join(offered)}), correct it")


def _loaded(text: str, what: str, refuse: RefuseRow) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(f"{what} no JSON ({error}): expected a list, repair or remove the row")
