"""Answers of a form: JSON of a schema, a regular expression, a grammar; by llguidance, which limits its own work."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from raycl.errors import ConfigError

FormKind = Literal["json", "regex", "grammar"]

WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of JSON, as Python's `json.dumps` writes it: models that may write any amount do not always stop."""

INSTALL = "pip install 'raycl[structured]'"


class Grammar:
    """A form, for any number of answers."""

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher, self._ends = matcher, ends

    def started(self) -> GrammarState:
        """Return the state of an answer that has no token yet; it is copied, since building it takes long."""
        return GrammarState(self._matcher.deep_copy(), self._ends)


class GrammarState:
    """The tokens with which one answer may continue, by its grammar."""

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher, self._ends, self._read = matcher, ends, 0

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
            ConfigError: llguidance is not installed, or reads no such tokenizer. ValueError: there is no such form.
        """
        with self._lock:
            tokenizer = self._tokenizer
        from llguidance import LLMatcher, grammar_from

        if kind == "json":
            text = LLMatcher.grammar_from_json_schema(json.dumps(form), overrides=WRITTEN)
        else:
            text = grammar_from(kind, form)
        matcher = LLMatcher(tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(" ".join(matcher.get_error().split())[:300])
        return Grammar(matcher, tokenizer.eos_tokens)
