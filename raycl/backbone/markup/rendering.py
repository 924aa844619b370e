"""What comes with a tokenizer, run in processes of their own with limits on time, memory and output: chat templates are
rendered, and answers are read by response templates.

A template is a program that comes with a bank or a model of another author. Jinja's sandbox keeps it from files and
attributes, but a loop, a number of a million digits or a text of gigabytes stops the process that renders it, some of
them within one step of Python; so may a regular expression of a response template. So the kernel ends another process,
and only that conversation fails.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from raycl.backbone.markup import render_process
from raycl.errors import BackboneError

Conversation = Sequence[tuple[str, str]]
"""Messages as (role, content). The contents of `TOOL_ROLES` are JSON."""

TOOL_ROLES = ("tools", "tool_calls", "tool")
"""Roles of tools that are offered, of calls in the assistant's turn before, and of a result."""

NO_PROCESS = "the process that renders chat templates does not start"

KEPT = ("LD_LIBRARY_PATH", "TZ")
"""The only environment variables of the process; others, such as keys, are removed."""


class Rendered(NamedTuple):
    """The result of rendering a conversation.

    Attributes:
        problem: why there is no text; "": there is one.
        ended: the process was ended, since the template took more than it may.
    """

    text: str = ""
    problem: str = ""
    ended: bool = False


class Renderer:
    """The process, which is started when it is first needed and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def render(
        self, template: str, names: Mapping[str, Any], wanted: Sequence[tuple[Conversation, bool]]
    ) -> list[Rendered]:
        """Return the text of each conversation, up to the first one with a problem.

        Args:
            template: Jinja source. names: further variables of the template: the special tokens.
            wanted: conversations; True: with the generation prompt.

        Raises:
            BackboneError: the process cannot be started.
        """
        request = json.dumps({"template": template, "names": dict(names), "wanted": list(wanted)})
        with self._lock:
            process = self._process = self._process or _started()
            rendered: list[Rendered] = []
            _write(process, request)
            while len(rendered) < len(wanted) and not (rendered and rendered[-1].problem):
                answer = _line(process)
                if answer:
                    rendered.append(Rendered(answer.get("text", ""), answer.get("problem", "")))
                else:
                    rendered.append(Rendered(problem=self._ended(process), ended=True))
            return rendered

    def events(self, form: Mapping[str, Any], answer: str, before: str, piece: str, is_last: bool) -> list[Any]:
        """Return what a piece of an answer adds to it by a response template, as events of Transformers' parser.

        Args:
            form: response template. answer: name of the answer. before: its text before the piece.

        Raises:
            ValueError: the template takes more than it may, or cannot read the answer.
            BackboneError: the process cannot be started.
        """
        request = {"form": dict(form), "answer": answer, "before": None, "piece": piece, "is_last": is_last}
        with self._lock:
            done: dict[str, Any] = {"unknown": True} if not before or self._process is None else self._asked(request)
            if "unknown" in done:
                done = self._asked({**request, "before": before})
        if "events" not in done:
            raise ValueError(done["problem"])
        events: list[Any] = done["events"]
        return events

    def _asked(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; the lock is held."""
        process = self._process = self._process or _started()
        _write(process, json.dumps(request))
        return _line(process) or {"problem": self._ended(process)}

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        """Return why the process gives no answer; the next conversation gets another process."""
        self._process = None
        status = _closed(process)
        if status == -signal.SIGPROF:
            return f"it takes more than {render_process.CPU_S:g} s of CPU time"
        if status == render_process.OUT_OF_MEMORY:
            return f"it takes more than {render_process.MEMORY_MIB} MiB of memory"
        return f"the process that renders it ended with status {status}"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _closed(self._process)
            self._process = None


@lru_cache(maxsize=1)
def renderer() -> Renderer:
    """Return the renderer of this process."""
    return Renderer()


@lru_cache(maxsize=1)
def answer_reader() -> Renderer:
    """Return the process of this one that reads answers: another one, so that templates are rendered meanwhile."""
    return Renderer()


for kept in (renderer, answer_reader):
    os.register_at_fork(after_in_child=kept.cache_clear)  # only the process that started it may use it


def isolated(program: str) -> dict[str, Any]:
    """Return arguments of `subprocess` for a process that imports what this one imports, nothing from its working
    directory, and has none of its environment.

    Args:
        program: Python file, which gets the import path as JSON.
    """
    path = [folder for folder in sys.path if Path(folder).is_absolute()]
    known = {name: os.environ[name] for name in KEPT if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    return {"args": [sys.executable, "-I", program, json.dumps(path)], "env": known, "cwd": "/"}


def _started() -> subprocess.Popen[bytes]:
    """Return a new process, ready to answer."""
    pipe, known = subprocess.PIPE, isolated(render_process.__file__)
    try:
        process: subprocess.Popen[bytes] = subprocess.Popen(**known, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise BackboneError(f"{NO_PROCESS}: {error}") from error
    first = _line(process)
    if first != {"problem": ""}:
        status = _closed(process)
        raise BackboneError(f"{NO_PROCESS}: {first.get('problem', f'it ended with status {status}')}")
    return process


def _write(process: subprocess.Popen[bytes], request: str) -> None:
    assert process.stdin is not None, "it is a pipe"
    with suppress(BrokenPipeError):
        process.stdin.write(request.encode() + b"\n")
        process.stdin.flush()


def _line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return the process's next answer; empty: it has ended."""
    assert process.stdout is not None, "it is a pipe"
    line = process.stdout.readline()
    answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
    return answer


def _closed(process: subprocess.Popen[bytes]) -> int:
    """End the process if it is running, and return its exit status."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    return process.wait()
