"""Conversations: messages in turn, and the one text that stands for them wherever a text is expected.

Routers, replay buffers and requests know texts. A conversation up to a user's message is such a text: that message
alone where it is the only one, else each message below a line with its role. The chat template of the tokenizer is put
around the messages when they are tokenised, as serving does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

Role = Literal["system", "user", "assistant"]

ROLE_LINE = re.compile(r"^<\|(system|user|assistant)\|>$")
_LIKE_ROLE_LINE = re.compile(r"^(?:\\)*<\|(?:system|user|assistant)\|>$", re.MULTILINE)
_ESCAPED = re.compile(r"^\\((?:\\)*<\|(?:system|user|assistant)\|>)$", re.MULTILINE)


class Message(NamedTuple):
    """One turn."""

    role: Role
    content: str


def text_of(messages: Sequence[Message]) -> str:
    """Return the text that stands for `messages`: the content of a single user message, else all below their roles.

    An empty system message is left out.
    """
    messages = [message for message in messages if message.role != "system" or message.content]
    if len(messages) == 1 and messages[0].role == "user" and not _LIKE_ROLE_LINE.search(messages[0].content):
        return messages[0].content
    return "\n".join(f"<|{role}|>\n{_LIKE_ROLE_LINE.sub(_escape, content)}" for role, content in messages)


def messages_of(text: str) -> tuple[Message, ...]:
    """Invert `text_of`; a text without a role in its first line is one user message."""
    lines = text.split("\n")
    if not ROLE_LINE.match(lines[0]):
        return (Message("user", text),)
    turns: list[tuple[Role, list[str]]] = []
    for line in lines:
        role = ROLE_LINE.match(line)
        if role:
            turns.append((cast(Role, role[1]), []))
        else:
            turns[-1][1].append(line)
    return tuple(Message(role, _ESCAPED.sub(r"\1", "\n".join(content))) for role, content in turns)


def plain_text(messages: Sequence[Message]) -> str:
    """Return all contents below each other, for tasks that are no conversations."""
    return "\n".join(message.content for message in messages if message.content)


def last_contents(texts: Sequence[str]) -> list[str]:
    """Return the content of each conversation's last message, and other texts unchanged."""
    return [messages_of(text)[-1].content for text in texts]


def _escape(line: re.Match[str]) -> str:
    return f"\\{line[0]}"
