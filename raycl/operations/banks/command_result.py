"""The answer of a command of `raycl bank`, as text and as a tree for scripts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class CommandResult:
    """The answer of a command; `ok` False makes the job fail."""

    text: str
    tree: Any
    ok: bool = True


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return columns and rows as text."""
    drawn = Table(box=box.SIMPLE_HEAD, collapse_padding=True, show_header=any(columns))
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*map(str, row))
    text = io.StringIO()
    Console(file=text, width=160, markup=False, highlight=False, emoji=False, color_system=None).print(drawn)
    return "\n".join(line.rstrip() for line in text.getvalue().split("\n") if line.strip())
