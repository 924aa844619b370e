"""Chat templates: what one writes before an answer of the assistant, and what it makes of the answer.

Why it exists: a template trims an answer, puts a block of thinking before it, or ends it with tokens of its own, so
where the prompt ends and what is learned is asked of the template and never searched for in what it wrote.
What it does not know: tokenizers, files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raycl.config import Tree
from raycl.errors import ConfigError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat markup that many tokenizers have as their template."""

PROBE = "\U0010fffb"
"""A private character that stands for an answer, to see what is written around one."""

Conversation = Sequence[tuple[str, str]]
"""Messages as (role, content)."""

Render = Callable[[Conversation, bool], str]
"""The text of a conversation; True: as it is, False: with the generation prompt behind it."""


SUFFIXES, LARGEST = (".jinja", ".jinja2", ".j2"), 2**20
"""Of a file that holds a template: its names' ends, and bytes at most."""


def template_source(value: str | None) -> str | None:
    """The Jinja source that `backbone.chat_template` names, so that every node and snapshot has the template itself.

    Raises:
        ValueError: it is none; files are read before (`with_template_files`), since records name none.
    """
    if value is None or _is_source(value):
        return value
    if value == "chatml":
        return CHATML
    raise ValueError(f"the chat template '{value:.80}' is no Jinja source: expected that, or chatml")


def with_template_files(tree: Tree) -> Tree:
    """A config that a person wrote, with each `backbone.chat_template` that names a file replaced by what it holds.

    Raises:
        ConfigError: there is no such file, or it cannot be a template.
    """
    return {key: _with_file(value) if key == "backbone" else _inner(value) for key, value in tree.items()}


def _inner(value: Any) -> Any:
    return with_template_files(value) if isinstance(value, dict) else value


def _with_file(backbone: Any) -> Any:
    value = backbone.get("chat_template") if isinstance(backbone, dict) else None
    if not isinstance(value, str) or value == "chatml" or _is_source(value):
        return backbone
    file = Path(value).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"backbone.chat_template: the chat template '{value}' is no file: expected a Jinja file, or chatml"
        )
    if file.suffix not in SUFFIXES or file.stat().st_size > LARGEST:
        raise ConfigError(
            f"backbone.chat_template: '{value}' has {file.stat().st_size:,} bytes: expected a template of up to "
            f"{LARGEST:,} bytes whose name ends in {' or '.join(SUFFIXES)}, since it is copied into the bank"
        )
    return {**backbone, "chat_template": file.read_text(encoding="utf-8")}


def _is_source(value: str) -> bool:
    return "{%" in value or "{{" in value


class Around(NamedTuple):
    """What a template writes around the assistant's next answer, whatever that is.

    Attributes:
        prompt: all before it: the conversation with the generation prompt, and what each answer begins with (an empty
            block of thinking).
        lead: white space between prompt and answer, which tokenizers join with the answer's first word.
        tail: all behind it.
    """

    prompt: str
    lead: str
    tail: str


def around_answer(conversation: Conversation, render: Render) -> Around:
    """What is written around the answer to a conversation.

    Raises:
        ValueError: the template begins the turn of an answer otherwise than its generation prompt.
    """
    before = render(conversation, False)
    before_answer, found, tail = render([*conversation, ("assistant", PROBE)], True).rpartition(PROBE)
    if not found or not before_answer.startswith(before):
        raise ValueError(
            f"begins the turn of an answer with '{_end(before_answer)}' and ends its generation prompt with "
            f"'{_end(before)}': expected the same, so that what is learned is what is asked"
        )
    head = before_answer[len(before) :]
    lead = head[len(head.rstrip(" ")) :] if head.strip() else head
    return Around(before_answer.removesuffix(lead), lead, tail)


def written_answer(conversation: Conversation, answer: str, around: Around, render: Render) -> str:
    """What a template makes of an answer: itself, or less white space.

    Raises:
        ValueError: the template writes something else around this answer than around others.
    """
    whole, start = render([*conversation, ("assistant", answer)], True), around.prompt + around.lead
    if len(whole) < len(start) + len(around.tail) or not (whole.startswith(start) and whole.endswith(around.tail)):
        raise ValueError(
            f"rewrites the answer '{answer[:40]}' to '{whole[len(_common(whole, start)) :][:40]}': expected it behind "
            f"'{_end(start)}' and in front of '{around.tail[:20]}', as other answers are"
        )
    return whole[len(start) : len(whole) - len(around.tail)]


def _common(one: str, other: str) -> str:
    """What both begin with."""
    length = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
    return one[:length]


def _end(text: str) -> str:
    return text[-20:]
