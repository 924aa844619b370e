"""Conversations as people store them: OpenAI's messages and ShareGPT's, as a text and an answer for each turn.

Why it exists: the loss is on the assistant's turns alone, each of which is an answer to all before it; this holds for
encoder-decoder backbones as well, and each turn keeps as much of its own past as fits.
What it does not know: files, chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from raycl.data.conversation import Message, Role, text_of
from raycl.errors import DataError

if TYPE_CHECKING:
    from raycl.data.sources.fields import Refuse

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


def is_chat(value: Any) -> bool:
    """Whether a field holds messages: a list of objects, or the same as JSON in a cell of a CSV file."""
    return (isinstance(value, list) and bool(value) and isinstance(value[0], dict)) or (
        isinstance(value, str) and value.startswith("[{")
    )


def turns_of(value: Any, number: int, answered: bool, refuse: Refuse) -> Iterator[tuple[str, str]]:
    """(conversation up to a user's message, the assistant's answer to it) for each turn.

    Args:
        answered: each of the assistant's turns is wanted; else only the conversation up to its last user message.

    Raises:
        DataError: roles that are not known or do not alternate, contents that are no texts, nothing to learn.
    """
    messages = _messages(value, number, refuse)
    users = [place for place, message in enumerate(messages) if message.role == "user"]
    if not users or (answered and messages[-1].role == "user" and len(users) == 1):
        wanted = "answer of the assistant" if users else "user message"
        refuse(f"the conversation has no {wanted}: expected user and assistant in turn, complete or remove it", number)
    if not answered:
        yield text_of(messages[: users[-1] + 1]), ""
        return
    for place in users:
        if place + 1 < len(messages):
            yield text_of(messages[: place + 1]), messages[place + 1].content


def conversation_of(value: Any) -> list[Message]:
    """The messages of a conversation in memory, in any of the forms that files have.

    Raises:
        DataError: roles that are not known or do not alternate, contents that are no texts.
    """

    def refuse(problem: str, row: int | None = None) -> NoReturn:
        raise DataError(problem)

    return _messages(value, 1, refuse)


def _messages(value: Any, number: int, refuse: Refuse) -> list[Message]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            refuse(f"the conversation is no JSON ({error}): expected a list of messages", number)
    found = [_message(one, number, refuse) for one in value]
    turns = [message.role for message in found]
    if turns[:1] == ["system"]:
        turns = turns[1:]
    for place, role in enumerate(turns):
        wanted = "assistant" if place % 2 else "user"
        if role != wanted:
            refuse(
                f"message {place + 1 + len(found) - len(turns)} of the conversation is of {role}: expected {wanted}, "
                "since user and assistant alternate, behind at most one system message; repair or remove it",
                number,
            )
    return found


def _message(one: Any, number: int, refuse: Refuse) -> Message:
    if not isinstance(one, dict):
        refuse(f"a message is a {type(one).__name__}: expected an object with role and content", number)
    name, content = one.get("role", one.get("from")), one.get("content", one.get("value"))
    role = ROLES.get(str(name))
    if role is None:
        refuse(f"a message is of '{name}': expected one of {', '.join(ROLES)}; remove the row or the message", number)
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(content, str):
        refuse(f"the content of a message is a {type(content).__name__}: expected text, repair or remove it", number)
    return Message(role, content)


def _joined(parts: Sequence[Any]) -> str | None:
    """The texts of a content in parts; None if there is anything but text in it (images, audio)."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]
