"""Answers of a form: JSON of a schema, a regular expression, a grammar; by llguidance, which limits its own work at
each token. A new form is tried in a process of its own first (`raycl.generation.form_process`)."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from raycl.backbone.markup.rendering import isolated
from raycl.errors import ConfigError
from raycl.generation import form_process
from raycl.metrics.settings import AnswerFormat
from raycl.types import FormKind

WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of JSON, as Python's `json.dumps` writes it: models that may write any amount do not always stop."""

MAX_FORM = 65_536
"""Characters of a form: the time to read a regular expression grows with the square of its length."""

KEPT_FORMS = 32
"""Forms that are kept ready: clients send the same one with every request."""

INSTALL = "pip install 'raycl[structured]'"


class Grammar:
    """The tokens with which an answer of a form may continue."""

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher, self._ends, self._read = matcher, ends, 0

    def started(self) -> Grammar:
        """Return the grammar of one answer, which has no token yet; it is copied, since building it takes long."""
        return Grammar(self._matcher.deep_copy(), self._ends)

    def after(self, ids: Sequence[int]) -> Sequence[int]:
        """Return tokens that may follow these, which begin with those of the call before; the ends of an answer where
        the form allows no more, or has become too complex."""
        self._matcher.consume_tokens(list(ids[self._read :]))
        self._read = len(ids)
        if self._matcher.is_error():
            return self._ends
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed: list[int] = bits.nonzero()[0].tolist()
        return allowed or self._ends


class Grammars:
    """Makes forms for a tokenizer, which is read when the first one is wanted."""

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        """Keep the tokenizer.

        Args:
            ends: tokens that end an answer.
        """
        self._given, self._ends = tokenizer, sorted(ends)
        self._lock = threading.Lock()
        self._known = lru_cache(maxsize=KEPT_FORMS)(self._new)

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConfigError(f"answers of a form need the package llguidance: {INSTALL}") from error
        try:
            return from_tokenizer(self._given, eos_token=self._ends)
        except ValueError as error:
            raise ConfigError(f"this backbone's tokenizer cannot write answers of a form: {error}") from error

    def grammar(self, kind: FormKind, form: Any) -> Grammar:
        """Return a form; it takes up to seconds.

        Args:
            form: JSON schema as a tree, regular expression, or grammar in GBNF or Lark.

        Raises:
            ConfigError: llguidance is not installed, or reads no such tokenizer.
            ValueError: there is no such form, or it is too large.
        """
        text = form if isinstance(form, str) and kind != "json" else json.dumps(form)
        if len(text) > MAX_FORM:
            raise ValueError(f"it has {len(text)} characters, expected at most {MAX_FORM}")
        return self._known(kind, text)

    def _new(self, kind: FormKind, form: str) -> Grammar:
        with self._lock:
            tokenizer = self._tokenizer
        from llguidance import LLMatcher, grammar_from

        if kind == "json":
            text = LLMatcher.grammar_from_json_schema(form, overrides=WRITTEN)
        else:
            text = grammar_from(kind, form)
        _try(text)
        matcher = LLMatcher(tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(_in_one_line(matcher.get_error()))
        return Grammar(matcher, tokenizer.eos_tokens)


def forms_of(grammars: Grammars, formats: Mapping[str, AnswerFormat]) -> dict[str, Grammar]:
    """Return the form of each task's answers (`eval.response_format`).

    Raises:
        ConfigError: llguidance is not installed or reads no such tokenizer, or one is no form.
    """
    forms = {}
    for task, given in formats.items():
        kind, form = given.form
        try:
            forms[task] = grammars.grammar(kind, json.loads(form) if kind == "json" and isinstance(form, str) else form)
        except ConfigError as error:
            raise ConfigError(f"eval.response_format.{task}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"eval.response_format.{task} is '{str(form)[:60]}', which names no form of an answer ({error}): "
                "expected a JSON schema, a regular expression or a grammar that llguidance reads"
            ) from error
    return forms


def _try(grammar: str) -> None:
    """Read a grammar in another process.

    Raises:
        ValueError: it is none, or it takes too much.
    """
    process = isolated(form_process.__file__)
    done: subprocess.CompletedProcess[bytes] = subprocess.run(
        **process, input=grammar.encode(), capture_output=True, check=False
    )
    if done.returncode:
        raise ValueError(
            f"it takes more than {form_process.CPU_S:g} s of CPU time or {form_process.MEMORY_MIB} MiB of memory to "
            "read: expected fewer regular expressions that hold together, and fewer repetitions"
        )
    if done.stdout:
        raise ValueError(_in_one_line(done.stdout.decode(errors="replace")))


def _in_one_line(problem: str) -> str:
    return " ".join(problem.split())[:300]
