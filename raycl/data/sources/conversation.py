"""Conversations: messages in turn, the one text that stands for them, and the forms in which people store them.

Routers, replay buffers and requests know texts. A conversation up to a user's message is such a text: that message
alone where it is the only one, else each message below a line with its role. The chat template of the tokenizer is put
around the messages when they are tokenised, as serving does.

Files hold OpenAI's messages or ShareGPT's, which become a text and an answer for each turn. The loss is on the
assistant's turns alone, each of which is an answer to all before it; this holds for encoder-decoder backbones as well,
and each turn keeps as much of its own past as fits. Tools that a conversation offers, calls of them and their results
are messages of roles of their own, whose contents are JSON in the one form in which chat templates render them. Files
of OpenAI and of TRL have them alike: a row has `tools`, an assistant's message `tool_calls`, and a message of role
`tool` a result. An endpoint gives its requests the same form, so training and serving render the same text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal, NamedTuple, NoReturn, cast, get_args

from raycl.errors import DataError

Role = Literal["system", "user", "assistant"]
ToolRole = Literal["tools", "tool_calls", "tool"]
"""Turns of conversations with tools, as JSON: the tools that are offered, which stand behind the system message; the
calls of the assistant's turn before; and a result."""

_NAMES = "|".join((*get_args(Role), *get_args(ToolRole)))
ROLE_LINE = re.compile(rf"^<\|({_NAMES})\|>$")
_LIKE_ROLE_LINE = re.compile(rf"^(?:\\)*<\|(?:{_NAMES})\|>$", re.MULTILINE)
_ESCAPED = re.compile(rf"^\\((?:\\)*<\|(?:{_NAMES})\|>)$", re.MULTILINE)


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


class Message(NamedTuple):
    """One turn."""

    role: Role | ToolRole
    content: str


def text_of(messages: Sequence[Message]) -> str:
    """Return the text that stands for `messages`: the content of a single user message, else all below their roles."""
    if len(messages) == 1 and messages[0].role == "user" and not _LIKE_ROLE_LINE.search(messages[0].content):
        return messages[0].content
    return "\n".join(f"<|{role}|>\n{_LIKE_ROLE_LINE.sub(_escape, content)}" for role, content in messages)


def messages_of(text: str) -> tuple[Message, ...]:
    """Invert `text_of`; a text without a role in its first line is one user message."""
    lines = text.split("\n")
    if not ROLE_LINE.match(lines[0]):
        return (Message("user", text),)
    turns: list[tuple[Role | ToolRole, list[str]]] = []
    for line in lines:
        role = ROLE_LINE.match(line)
        if role:
            turns.append((cast(Role | ToolRole, role[1]), []))
        else:
            turns[-1][1].append(line)
    return tuple(Message(role, _ESCAPED.sub(r"\1", "\n".join(content))) for role, content in turns)


def with_tools(messages: Sequence[Message], tools: str) -> list[Message]:
    """Return messages that offer tools, given as JSON; "": none."""
    system = len(head_of(messages))
    return [*messages[:system], *([Message("tools", tools)] if tools else []), *messages[system:]]


def head_of(messages: Sequence[Message]) -> list[Message]:
    """Return the messages before the first turn: system message and tools."""
    return list(takewhile(lambda message: message.role in (SYSTEM, "tools"), messages))


def answer_text(turn: Sequence[Message]) -> str:
    """Return the text that stands for a turn of the assistant: its content alone, where it calls no tools."""
    if len(turn) == 1 and not _LIKE_ROLE_LINE.match(turn[0].content):
        return turn[0].content
    return text_of(turn)


def answer_of(text: str) -> tuple[Message, ...]:
    """Invert `answer_text`: return the assistant's message, and its calls of tools where it has any."""
    turn = messages_of(text) if text.startswith("<|assistant|>\n") else ()
    is_turn = [message.role for message in turn] in (["assistant"], ["assistant", "tool_calls"])
    return turn if is_turn else (Message("assistant", text),)


def is_one_message(text: str) -> bool:
    """Return whether a conversation is one message of the user alone."""
    return [message.role for message in messages_of(text)] == ["user"]


def user_turns(text: str) -> int:
    """Return the number of the user's messages in a conversation."""
    return sum(message.role == "user" for message in messages_of(text))


def has_tool_turns(text: str) -> bool:
    """Return whether a conversation has tools, calls of them or their results."""
    return "<|tool" in text and any(message.role in get_args(ToolRole) for message in messages_of(text))


def without_tool_turns(text: str) -> str:
    """Return a conversation without tools, calls of them and their results."""
    if not has_tool_turns(text):
        return text
    return text_of([message for message in messages_of(text) if message.role in get_args(Role)])


def plain_text(messages: Sequence[Message]) -> str:
    """Return all contents below each other, for tasks that are no conversations."""
    return "\n".join(message.content for message in messages if message.content)


def routed_turns(text: str, most: int) -> str:
    """Return what routers read of a conversation: its system message, the user's last messages and the answers between
    them, without tools, calls of them and their results; where the user says nothing, the last message.

    Args:
        most: number of the user's messages, at least 1.
    """
    messages = messages_of(without_tool_turns(text))
    head = head_of(messages)
    asked = [number for number, message in enumerate(messages) if message.role == "user"]
    if not asked:
        return text_of([*head, *(Message("user", message.content) for message in messages[len(head) :][-1:])])
    return text_of([*head, *messages[asked[-most:][0] : asked[-1] + 1]])


def remarked(text: str, remark: str) -> str:
    """Return a text with a remark right behind what the user said last."""
    messages = list(messages_of(text))
    asked = max((number for number, message in enumerate(messages) if message.role == "user"), default=-1)
    messages[asked] = messages[asked]._replace(content=f"{messages[asked].content}{remark}")
    return text_of(messages)


def last_exchange(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages from the user's last one on."""
    asked = max((number for number, message in enumerate(messages) if message.role == "user"), default=-1)
    return messages[asked:]


def last_contents(texts: Sequence[str]) -> list[str]:
    """Return the content of each conversation's last message, and other texts unchanged."""
    return [messages_of(text)[-1].content for text in texts]


def _escape(line: re.Match[str]) -> str:
    return f"\\{line[0]}"


CHAT_NAMES = ("messages", "conversations", "conversation")
"""Fields that hold a conversation."""

ROLES: dict[str, Role] = {
    **{role: role for role in get_args(Role)},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
"""Roles by the names that files have for them."""


SYSTEM, HISTORY, TOOLS = "system", "history", "tools"
"""Fields next to a conversation or an instruction: its system message, the turns before it as pairs of texts, and the
tools that it offers."""

UNREAD = ("functions", "image", "images", "videos", "audios")
"""Fields next to a conversation or an instruction of which nothing is learned."""

BESIDE = (SYSTEM, HISTORY, TOOLS, *UNREAD)

_UNREAD_OF_MESSAGE = ("function_call", "reasoning_content", "thinking", *UNREAD)

Turns = Literal["all", "last"]
"""The assistant's turns that are learned."""


def is_chat(value: Any) -> bool:
    """Return whether a field holds messages: a list of objects, or the same as JSON in a cell of a CSV file."""
    return (isinstance(value, list) and bool(value) and isinstance(value[0], dict)) or (
        isinstance(value, str) and value.startswith("[{")
    )


def turns_of(
    value: Any, answered: bool, refuse: RefuseRow, turns: Turns = "all", system: str = "", tools: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield (conversation before it, the assistant's answer) for each turn of the assistant whose `weight` is not 0.

    Args:
        answered: the assistant's turns are wanted; else only the conversation up to the last message that it answers.
        turns: which of them. system: system message of a conversation without one. tools: JSON of those offered.

    Raises:
        DataError: roles that are not known or not in turn, contents that are no texts, nothing to learn.
    """
    given = _parsed(value, refuse)
    if system:
        first = _turn(given[0], refuse)[0] if given else None
        if first is not None and first.role == SYSTEM and first.content not in ("", system):
            refuse("the conversation has a system message and the row another one: expected one, remove it")
        rest = given[1:] if first is not None and first.role == SYSTEM else given
        given = [{"role": SYSTEM, "content": system}, *rest]
    said = _turns(given, refuse)
    for turn in said:
        check_called(turn[1].content if len(turn) > 1 else "", tools, refuse)
    roles = [turn[0].role for turn in said]
    if "user" not in roles or (answered and "assistant" not in roles):
        wanted = "answer of the assistant" if "user" in roles else "user message"
        refuse(f"the conversation has no {wanted}: expected user and assistant in turn, complete or remove it")

    def before(index: int) -> str:
        return text_of(with_tools([message for turn in said[:index] for message in turn], tools))

    if not answered:
        asked = max(index for index, role in enumerate(roles) if role in ("user", "tool"))
        yield before(asked + 1), ""
        return
    answers = [index for index, role in enumerate(roles) if role == "assistant"]
    for weight in (given[index].get("weight") for index in answers):
        if weight not in (None, 0, 1):
            refuse(f"a message has weight {weight}: expected 0 (not learned) or 1")
    learned = [index for index in answers if given[index].get("weight", 1) != 0]
    if not learned:
        refuse("each answer of the conversation has weight 0: expected one to learn, remove the row")
    for index in learned if turns == "all" else learned[-1:]:
        yield before(index), answer_text(said[index])


def system_of(item: Mapping[str, Any], refuse: RefuseRow) -> str:
    """Return the system message of a conversation or an instruction.

    Raises:
        DataError: the row has other fields of which nothing would be learned.
    """
    for name in UNREAD:
        if item.get(name) not in NOTHING:
            refuse(f"the row has {name}, which are not learned: remove the row, or the field from all of them")
    return _text(item.get(SYSTEM), SYSTEM, refuse)


def tools_of(item: Mapping[str, Any], refuse: RefuseRow) -> str:
    """Return the JSON of the tools of a conversation or an instruction, a list or its JSON; "" without any.

    Raises:
        DataError: they are no list of functions with names.
    """
    value = item.get(TOOLS)
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


def earlier_turns(value: Any, refuse: RefuseRow) -> list[Message]:
    """Return the turns before an instruction, which are pairs of texts.

    Raises:
        DataError: they are something else.
    """
    if value in NOTHING:
        return []
    pairs = _loaded(value, f"the {HISTORY} is", refuse) if isinstance(value, str) else value
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        refuse(f"the {HISTORY} is no list of pairs: expected [question, answer] for each turn before, repair it")
    texts = [_text(text, HISTORY, refuse) for pair in pairs for text in pair]
    return [Message("assistant" if index % 2 else "user", text) for index, text in enumerate(texts)]


def _text(value: Any, name: str, refuse: RefuseRow) -> str:
    if value is not None and not isinstance(value, str):
        refuse(f"the {name} is a {type(value).__name__}: expected text, repair or remove the row")
    return value or ""


def conversation_of(value: Any, where: str) -> list[Message]:
    """Return the messages of a conversation in memory, in any of the forms that files have.

    Args:
        where: its name in error messages.

    Raises:
        DataError: roles that are not known or not in turn, contents that are no texts.
    """

    def refuse(problem: str) -> NoReturn:
        raise DataError(f"{where}: {problem}")

    return [message for turn in _turns(_parsed(value, refuse), refuse) for message in turn]


def _parsed(value: Any, refuse: RefuseRow) -> list[Any]:
    messages = _loaded(value, "the conversation is", refuse) if isinstance(value, str) else value
    return list(messages)


_NEXT: Mapping[str, tuple[str, ...]] = {
    "user": ("assistant",),
    "assistant": ("user",),
    "tool_calls": ("tool",),
    "tool": ("assistant", "tool"),
}
"""Role of a turn's last message -> roles of the next turn."""


def _turns(given: Sequence[Any], refuse: RefuseRow) -> list[tuple[Message, ...]]:
    """Return each message of a conversation, with its calls of tools as a message of their own behind it."""
    said = [_turn(item, refuse) for item in given]
    wanted: tuple[str, ...] = ("user", SYSTEM)
    for number, turn in enumerate(said, 1):
        if turn[0].role not in wanted:
            why = "since the calls of tools before it have results"
            if wanted != ("tool",):
                why = "since user and assistant alternate, behind at most one system message"
            refuse(
                f"message {number} of the conversation is of {turn[0].role}: expected "
                f"{' or '.join(role for role in wanted if role != SYSTEM)}, {why}; repair or remove it"
            )
        wanted = _NEXT.get(turn[-1].role, ("user",))
    return said


def _turn(item: Any, refuse: RefuseRow) -> tuple[Message, ...]:
    if not isinstance(item, dict):
        refuse(f"a message is a {type(item).__name__}: expected an object with role and content")
    name, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
    role = "tool" if name == "tool" else ROLES.get(str(name))
    if role is None:
        known = ", ".join((*ROLES, "tool"))
        refuse(f"a message is of '{name}': expected one of {known}; remove the row or the message")
    unread = next((key for key in _UNREAD_OF_MESSAGE if item.get(key) not in NOTHING), None)
    if unread is not None:
        refuse(f"a message has {unread}, which are not learned: remove the row or the message")
    calls = row_calls(item.get("tool_calls"), refuse)
    if calls and role != "assistant":
        refuse(f"a message of {role} has tool_calls: expected them in the assistant's messages, repair or remove it")
    if isinstance(content, list):
        content = _joined(content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        refuse(f"the content of a message is a {type(content).__name__}: expected text, repair or remove it")
    if role == "tool":
        return (Message("tool", result_text(content, item.get("tool_call_id"), item.get("name"))),)
    return (Message(role, content), *([Message("tool_calls", calls)] if calls else []))


def _joined(parts: Sequence[Any]) -> str | None:
    """Return the texts of a content in parts; None if there is anything but text in it (images, audio)."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    whole = [text for text in texts if isinstance(text, str)]
    return "".join(whole) if len(whole) == len(texts) else None
