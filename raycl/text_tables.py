"""Tables as plain text: what a command prints has the same form everywhere."""

import io
from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from raycl.errors import printable


def grid(titles: Sequence[str], rows: Iterable[Sequence[str]] = (), left: int = 1, heading: str | None = None) -> Table:
    """Return a table whose first `left` columns are of words, and the others of numbers."""
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def short_number(value: float) -> str:
    """Return `1.2k`, `3.4M` or `5.6B` with three digits, and smaller numbers whole."""
    rounded = float(f"{value:.3g}")
    units = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{rounded / size:g}{unit}" for size, unit in units if rounded >= size), f"{value:.0f}")


def edgeless(titles: Sequence[str], words: Collection[int] = (0,)) -> Table:
    """Return a table that begins at the edge, with columns of words at these places, and of numbers at the others."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number in words else "right")
    return table


def render(content: RenderableType, width: int = 10_000) -> str:
    """Return plain text without empty ends.

    Args:
        width: characters of a line; by default no table is squeezed.
    """
    text = io.StringIO()
    console = Console(  # force_jupyter: a notebook would show the table itself, and the file would stay empty
        file=text, width=width, markup=False, highlight=False, emoji=False, color_system=None, force_jupyter=False
    )
    console.print(content)
    return "\n".join(printable(line.rstrip()) for line in text.getvalue().split("\n")).strip("\n")
