"""The page of error messages quotes messages that the code has, and names every exit status."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from architecture import Module

from raycl import errors

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs/guides/errors.md").read_text()
QUOTED = re.findall(r"^### `(.+)`\n\n\S", PAGE, re.MULTILINE)
"""Messages, with `…` in the place of values."""


@cache
def messages() -> tuple[str, ...]:
    """Return every text in the package, with `…` in the place of values."""
    modules = [Module.of(str(path), path.read_text()) for path in sorted(REPO.glob("raycl/**/*.py"))]
    return tuple(dict.fromkeys(text for module in modules for text in texts(module)))


def texts(module: Module) -> Iterator[str]:
    for node in module.each(ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    for constant in module.each(ast.Constant):
        if isinstance(constant.value, str):
            yield constant.value


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_one_of_the_codes(quoted: str) -> None:
    assert len(quoted.replace("…", "")) > 10, "too little is fixed to be recognized"
    assert any(quoted.rstrip("…") in text for text in messages()), "correct the page: no message has this text"


def test_the_page_has_enough_messages_and_quotes_each_once() -> None:
    assert len(QUOTED) == len(set(QUOTED)) > 40
    assert PAGE.count("\n### ") == len(QUOTED), "a message has no cause behind it, or is no code"


def test_the_page_names_every_exit_status() -> None:
    statuses = {kind.exit_status for kind in vars(errors).values() if isinstance(kind, type)}
    assert [status for status in statuses if f"\n| {status} | " not in PAGE] == []
