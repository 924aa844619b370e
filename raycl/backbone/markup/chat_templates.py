"""Chat templates: the text that they write before an answer of the assistant, and their form of the answer.

A template may trim an answer, put a block of thinking before it, or add tokens of its own. So the template is probed
for the end of the prompt and the text to learn, which are never searched for in its output.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from raycl.backbone.markup.rendering import Conversation, Rendered, renderer
from raycl.config import Tree
from raycl.errors import FEW, ConfigError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat markup that many tokenizers have as their template."""

PROBE = "\U0010fffb"
"""A private character in place of an answer, which shows the text around answers."""

TOGETHER = 64
"""The number of conversations that one request renders."""

TOKENS = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
"""Made-up special tokens to try a template with."""

SHORT = (("user", "the sky is"),)
LONG = (*(("user", "the sky is " * 20), ("assistant", "blue " * 20)) * 16, *SHORT)
"""Conversations to try a template with."""

WITH_TOOLS = (
    ("tools", '[{"type": "function", "function": {"name": "offered", "description": "x", "parameters": {}}}]'),
    *SHORT,
    ("assistant", ""),
    ("tool_calls", '[{"id": "abcdefghi", "type": "function", "function": {"name": "called", "arguments": {}}}]'),
    ("tool", '{"content": "returned", "tool_call_id": "abcdefghi", "name": "called"}'),
)
"""A conversation that shows whether a template renders tools; Mistral's templates demand ids of nine letters."""

SUFFIXES, LARGEST = (".jinja", ".jinja2", ".j2"), 2**20
"""Suffixes of template files, and their largest size in bytes."""


def template_source(value: str | None) -> str | None:
    """Return the Jinja source that `backbone.chat_template` names, so that every node and snapshot has the template
    itself.

    Raises:
        ValueError: it is no template; files are read before (`with_template_files`), since records name no files.
    """
    if value is None or _is_source(value):
        return value
    if value == "chatml":
        return CHATML
    raise ValueError(f"the chat template '{value:.80}' is no Jinja source: expected that, or chatml")


def with_template_files(tree: Tree) -> Tree:
    """Return a config that a person wrote, with each `backbone.chat_template` that names a file replaced by what it
    holds.

    Raises:
        ConfigError: there is no such file, or it cannot be a template.
    """
    inner = {key: with_template_files(value) for key, value in tree.items() if isinstance(value, dict)}
    return {key: _with_file(value) if key == "backbone" else inner.get(key, value) for key, value in tree.items()}


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
    try:
        return {**backbone, "chat_template": file.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"backbone.chat_template: '{value}' cannot be read ({error}): expected a readable file in UTF-8"
        ) from error


def _is_source(value: str) -> bool:
    return "{%" in value or "{{" in value


class Around(NamedTuple):
    """The text that a template writes around the assistant's next answer, whatever the answer is.

    Attributes:
        prompt: the text before it: the conversation with the generation prompt, and the common beginning of answers (an
        empty block of thinking).
        lead: white space between prompt and answer, which tokenizers join with the answer's first word.
        tail: the text after it.
    """

    prompt: str
    lead: str
    tail: str


def turns(
    template: str,
    names: Mapping[str, Any],
    conversations: Sequence[Conversation],
    answers: Sequence[Conversation] | None = None,
) -> Iterator[tuple[Around, str]]:
    """Yield the text around the answer to each conversation, and the answer as the template writes it behind the
    prompt.

    Args:
        names: further variables of the template: the special tokens.
        answers: an answer for each conversation: the assistant's message, and its calls of tools where it has any;
            None: any, which is yielded as "".

    Raises:
        ValueError: the template cannot render a conversation, begins the turn of an answer otherwise than its
            generation prompt, or writes something else around this answer than around others.
    """
    for first in range(0, len(conversations), TOGETHER):
        several = list(enumerate(conversations[first : first + TOGETHER], first))
        wanted: list[tuple[Conversation, bool]] = []
        for index, conversation in several:
            tried: list[Conversation] = [(("assistant", PROBE),), *([] if answers is None else [answers[index]])]
            wanted += [(conversation, True), *(([*conversation, *answer], False) for answer in tried)]
        rendered = iter(renderer().render(template, names, wanted))
        for index, conversation in several:
            around = _around(_text(conversation, next(rendered)), _text(conversation, next(rendered)))
            written = "" if answers is None else _text(conversation, next(rendered))
            yield around, "" if answers is None else _written(written, answers[index], around)


def check(template: str, system: str) -> None:
    """Try a template before anything depends on it, with a short conversation and a long one.

    Args:
        system: system message of conversations that have none of their own; "": none.

    Raises:
        ValueError: see `turns`.
    """
    short, long = ([*([("system", system)] if system else []), *conversation] for conversation in (SHORT, LONG))
    for _ in turns(template, TOKENS, [short]):
        (tried,) = renderer().render(template, TOKENS, [(long, True)])
        if tried.ended:  # it may refuse a conversation, but not delay others
            _text(long, tried)


@lru_cache(maxsize=64)
def renders_tools(template: str) -> bool:
    """Return whether a template renders the tools that are offered, calls of them and their results."""
    (tried,) = renderer().render(template, TOKENS, [(WITH_TOOLS, True)])
    return all(word in tried.text for word in ("offered", "called", "returned"))


def _text(conversation: Conversation, rendered: Rendered) -> str:
    if rendered.problem:
        roles = ", ".join(role for role, _ in conversation[:FEW]) + (", ..." if len(conversation) > FEW else "")
        raise ValueError(f"cannot render a conversation of {roles}: {rendered.problem}")
    return rendered.text


def _around(before: str, probed: str) -> Around:
    """Compare a conversation with the generation prompt to the same with `PROBE` as its answer."""
    before_answer, mark, tail = probed.rpartition(PROBE)
    if not mark or not before_answer.startswith(before):
        raise ValueError(
            f"begins the turn of an answer with '{_end(before_answer)}' and ends its generation prompt with "
            f"'{_end(before)}': expected the same, so that what is learned is what is asked"
        )
    head = before_answer[len(before) :]
    lead = head[len(head.rstrip(" ")) :] if head.strip() else head
    return Around(before_answer.removesuffix(lead), lead, tail)


def _written(written: str, answer: Conversation, around: Around) -> str:
    """Return an answer as the template writes it behind the prompt, taken from the conversation with it.

    Calls of tools may stand there without the white space before texts.
    """
    start = around.prompt + ("" if len(answer) > 1 else around.lead)
    common = next((index for index, (a, b) in enumerate(zip(written, start, strict=False)) if a != b), len(start))
    if len(written) < len(start) + len(around.tail) or not (
        written.startswith(start) and written.endswith(around.tail)
    ):
        raise ValueError(
            f"rewrites the answer '{answer[-1][1][:40]}' to '{written[common:][:40]}': expected it behind "
            f"'{_end(start)}' and in front of '{around.tail[:20]}', as other answers are"
        )
    return written[len(around.prompt) : len(written) - len(around.tail)]


def _end(text: str) -> str:
    return text[-20:]
