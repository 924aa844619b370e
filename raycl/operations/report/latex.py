"""Tables as LaTeX, for papers: the rules are those of the package booktabs."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "…": r"\ldots{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    **{character: rf"\{character}" for character in "&%$#_{}"},
}
"""Character -> what prints it."""


def to_latex(pages: Sequence[Group]) -> str:
    r"""Return a `table` for each table of the pages, with the lines around it as its caption.

    The document needs `\usepackage{booktabs}`.
    """
    blocks = []
    for page in pages:
        caption = escaped(" ".join(part.plain.rstrip(".") + "." for part in page.renderables if isinstance(part, Text)))
        blocks += [_floating(part, caption) for part in page.renderables if isinstance(part, Table)]
    return "% \\usepackage{booktabs}\n" + "\n".join(blocks)


def escaped(text: str) -> str:
    """Return a text that LaTeX prints as it is."""
    return "".join(SPECIAL.get(character, character) for character in text)


def _floating(table: Table, caption: str) -> str:
    sides = "".join("r" if column.justify == "right" else "l" for column in table.columns)
    heads = [escaped(str(column.header)) for column in table.columns]
    lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{sides}}}", r"\toprule", _line(heads), r"\midrule"]
    cells = zip(*(column.cells for column in table.columns), strict=True)
    for row, texts in zip(table.rows, cells, strict=True):
        lines.append(_line([escaped(str(text)) for text in texts]))
        if row.end_section:
            lines.append(r"\midrule")
    if lines[-1] == r"\midrule":
        lines.pop()
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", r"\end{table}", ""])


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
