"""Calls of tools in generated text, for chat templates of a known form: the one that Transformers reads by the
tokenizer's `response_template`, and those of Hermes and Qwen, Mistral, and Llama 3.

A tokenizer's own template may hold regular expressions, which run in a process with limits
(`raycl.backbone.markup.rendering`), called from a thread of its own, so that they stall no other request.
"""

import asyncio
import json
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from transformers.utils.chat_parsing import ResponseParser

from raycl.backbone.codec import HFCodec
from raycl.backbone.markup.rendering import answer_reader


def _form(opened: str, closed: str) -> dict[str, Any]:
    """Return a response template whose calls are JSON between two marks."""
    calls = {"open": opened, "close": closed, "content": "json", "content_args": {"allow_non_json": True}}
    text = {"content": "text", "content_args": {"strip": False}}
    return {"start_anchor": opened, "fields": {"content": text, "tool_calls": {**calls, "repeats": True}}}


FORMS: Mapping[str, Mapping[str, Any] | None] = {
    "<tool_call>": _form("<tool_call>", "</tool_call>"),
    "[TOOL_CALLS]": _form("[TOOL_CALLS]", "</s>"),
    "<|python_tag|>": None,
    '"parameters": dictionary': None,
}
"""Mark in a chat template -> its response template; None: the whole answer is JSON, as Llama 3 writes a call."""


class ToolCall(NamedTuple):
    """A call that the model wrote."""

    name: str
    arguments: str

    def tree(self) -> dict[str, Any]:
        """Return the call as the endpoint sends it; templates of Mistral want ids of nine letters."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


READING = ThreadPoolExecutor(1, "raycl-calls")
"""The thread that waits for the process that reads answers, one at a time."""


class _OwnForm:
    """Reads one answer by a tokenizer's own response template, in the process with limits."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._form, self._name, self._before = form, uuid.uuid4().hex, ""

    def events(self, text: str, is_last: bool) -> list[Any]:
        """Return what the text adds.

        Raises:
            ValueError: the template takes more than it may, or cannot read the answer.
        """
        found = answer_reader().events(self._form, self._name, self._before, text, is_last)
        self._before += text
        return found


class _KnownForm:
    """Reads one answer by a response template of `FORMS`, which have no regular expressions."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._parser = ResponseParser(dict(form), prefix="")

    def events(self, text: str, is_last: bool) -> list[Any]:
        """Return what the text adds.

        Raises:
            LookupError, TypeError, ValueError: what stands in the place of a call is none.
        """
        events = list(self._parser.feed(text))
        return events + self._parser.finalize()[1] if is_last else events


class CallParser:
    """Separates calls from the other text of an answer while it is written."""

    def __init__(self, codec: HFCodec, template: str, names: frozenset[str], is_forced: bool) -> None:
        """Find the form of calls.

        Args:
            template: chat template of the prompt. names: names of the tools that are offered.
            is_forced: the answer is a call, as `forced_schema` describes it.
        """
        self._names, self._whole = names, ""
        self._passed_on = 0  # characters of the whole that were read and passed on
        self._parser: _OwnForm | _KnownForm | None = None
        own = getattr(codec.tokenizer, "response_template", None) if template == codec.chat_template else None
        form = own or next((form for mark, form in FORMS.items() if mark in template), {})
        self._close: str = (form or {}).get("fields", {}).get("tool_calls", {}).get("close", "")
        self._waits = is_forced or form is None
        if form and not is_forced:
            self._parser = _OwnForm(form) if own else _KnownForm(form)

    async def parts(self, text: str, is_last: bool) -> list[str | ToolCall]:
        """Return what the text adds, as `feed`; a tokenizer's own template is waited for without stalling others."""
        if not isinstance(self._parser, _OwnForm):
            return list(self.feed(text, is_last))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(READING, lambda: list(self.feed(text, is_last)))

    def feed(self, text: str, is_last: bool) -> Iterator[str | ToolCall]:
        """Yield what the text adds: pieces of text, and calls."""
        if self._waits:
            self._whole += text
            if is_last:
                marked = self._whole.strip().removeprefix("<|python_tag|>")
                yield from self._calls(_json_of(marked)) or [self._whole]
        elif self._parser is None:
            yield text
        else:
            yield from self._parsed(text, is_last)

    def _parsed(self, text: str, is_last: bool) -> Iterator[str | ToolCall]:
        assert self._parser is not None, "there is a form"
        begin = len(self._whole)
        self._whole += text
        try:
            events = self._parser.events(text, is_last)
        except (LookupError, RecursionError, TypeError, ValueError):  # what stands in the place of a call is none
            self._parser = None
            yield self._whole[self._passed_on :]
            return
        for event in events:
            if event["field"] == "content" and event["type"] == "region_chunk":
                at = self._whole.find(event["text"], self._passed_on)
                self._passed_on = max(self._passed_on, at + len(event["text"]))
                yield event["text"]
            elif event["field"] == "tool_calls" and event["type"] == "region_close":
                end = self._whole.find(self._close, max(self._passed_on, begin - len(self._close)))  # in this piece
                self._passed_on = max(self._passed_on, begin if end < 0 else end + len(self._close))
                value = event["value"]
                yield from self._calls(value) or [
                    value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                ]

    def _calls(self, value: Any) -> list[str | ToolCall]:
        """Return calls of tools that are offered; nothing where it is something else."""
        found: list[str | ToolCall] = []
        for item in value if isinstance(value, list) else [value]:
            call = item.get("function", item) if isinstance(item, dict) else {}
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str) or name not in self._names:
                return []
            given = call.get("arguments", call.get("parameters", {}))
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            found.append(ToolCall(name, arguments))
        return found


def forced_schema(tools: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these tools, whose parameters have schemas.

    Each of these is a schema of its own (`$id`), so that its `$ref` point into it.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": {"$id": f"https://tools.invalid/{number}", **(parameters or {"type": "object"})},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, (name, parameters) in enumerate(tools.items())
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
