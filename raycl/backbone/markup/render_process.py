"""The process that runs what comes with a tokenizer for another process (`raycl.backbone.markup.rendering`).

It renders chat templates, and reads answers by response templates, whose regular expressions may take any time.

It is started as a file, with the import path of the other process as its argument, and imports nothing of raycl. A
request is a line of JSON on its standard input; the answer is a line for each conversation, up to the first problem, or
one for a piece of an answer.
"""

import json
import os
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

CPU_S = 1.0
"""Seconds of CPU time for one conversation, or one piece of an answer, then the kernel ends the process: Python cannot
interrupt `9**9**9`."""

MEMORY_MIB, OUT_OF_MEMORY = 512, 77
"""Memory in addition to that at the start of the process, and the exit status when it is not enough."""

CHARACTERS, FACTOR = 2**18, 4
"""A rendered text has at most this many characters plus the factor times those of its conversation."""

KEPT_PARSERS = 256
"""Answers that are read at the same time; of more, the one that has waited longest is read again from its start."""

LONGEST_PROBLEM = 300
"""The most characters of a message."""

FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError),
    *(RuntimeError, SyntaxError, TypeError, ValueError),
)
"""Errors of Python code; a template's own refusals are Jinja's errors."""


def main(path: Sequence[str]) -> None:
    """Answer requests until there are no more."""
    sys.path[:] = path
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    try:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        _send(answers, {"problem": str(error)})
        return
    _limit()
    _send(answers, {"problem": ""})
    parsers: OrderedDict[str, Any] = OrderedDict()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "piece" in request:
            _send(answers, _timed(partial(_events, request, parsers, ResponseParser)))
            continue
        for answer in _answers(request, render_jinja_template, TemplateError):
            _send(answers, answer)


def _timed(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
    done = work()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return done


def _events(request: Mapping[str, Any], parsers: OrderedDict[str, Any], new: Callable[..., Any]) -> dict[str, Any]:
    """Return what a piece of an answer adds (Transformers' events); `unknown` where the pieces before are not known.

    Args:
        request: `answer` names the answer, `before` is its text before the piece, or null where this process knows it.
    """
    name, before = request["answer"], request["before"]
    try:
        parser = parsers.pop(name, None)
        if parser is None:
            if before is None:
                return {"unknown": True}
            parser = new(request["form"], prefix="")
            parser.feed(before)
        events = parser.feed(request["piece"])
        if request["is_last"]:
            return {"events": events + parser.finalize()[1]}
        parsers[name] = parser
        if len(parsers) > KEPT_PARSERS:
            parsers.popitem(last=False)
        return {"events": events}
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except FAILURES as error:
        return {"problem": f"{type(error).__name__}: {error}"[:LONGEST_PROBLEM]}


def _send(to: TextIO, answer: Mapping[str, Any]) -> None:
    to.write(json.dumps(answer) + "\n")
    to.flush()


def _limit() -> None:
    """Limit the process: its memory, and no files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of a terminal is for the parent process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with suppress(OSError, ValueError):  # macOS has no memory limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_MIB * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answers(
    request: Mapping[str, Any], render: Callable[..., Any], refusal: type[Exception]
) -> Iterator[dict[str, str]]:
    for messages, generates in request["wanted"]:
        answer = _timed(partial(_answer, request, messages, generates, render, refusal))
        yield answer
        if "problem" in answer:
            return


def _answer(
    request: Mapping[str, Any],
    messages: Sequence[tuple[str, str]],
    generates: bool,
    render: Callable[..., Any],
    refusal: type[Exception],
) -> dict[str, str]:
    try:
        named, tools = _named(messages)
        given = {"tools": tools, "chat_template": request["template"], "add_generation_prompt": generates}
        (text,), _ = render([named], **given, **request["names"])
        most = CHARACTERS + FACTOR * sum(len(content) for _, content in messages)
        if len(text) > most:
            return {"problem": f"it writes {len(text):,} characters, expected at most {most:,}"}
        text.encode()
        return {"text": text}
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except refusal as error:
        return {"problem": str(error)[:LONGEST_PROBLEM]}
    except FAILURES as error:
        return {"problem": f"{type(error).__name__}: {error}"[:LONGEST_PROBLEM]}


def _named(messages: Sequence[tuple[str, str]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages as templates take them, and tools; calls of tools belong to the assistant's turn before."""
    named: list[dict[str, Any]] = []
    tools = None
    for role, content in messages:
        if role == "tools":
            tools = json.loads(content)
        elif role == "tool_calls":
            if not named or named[-1]["role"] != "assistant":
                named.append({"role": "assistant", "content": ""})
            named[-1]["tool_calls"] = json.loads(content)
        elif role == "tool":
            named.append({"role": role, **json.loads(content)})
        else:
            named.append({"role": role, "content": content})
    return named, tools


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
