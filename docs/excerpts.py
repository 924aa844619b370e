"""Excerpts of the source in the pages: `make docs-excerpts` writes them anew, and a test keeps them true.

A page names a definition of a file, or a file, in a comment; the code up to the closing comment is generated. Tables of
measured runs are generated too (`docs/run_tables.py`).

    <!-- excerpt: raycl/routing/routers.py SumRouter -->
    <!-- /excerpt -->
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from run_tables import with_tables

REPO = Path(__file__).resolve().parents[1]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
EXCERPT = re.compile(r"^<!-- excerpt: (\S+)(?: (\w+))? -->\n.*?^<!-- /excerpt -->$", re.MULTILINE | re.DOTALL)


def filled(page: str) -> str:
    """Return the page with all its excerpts and tables as the source and the measured runs have them now.

    Raises:
        ValueError: it names a file, a definition or a table that does not exist.
    """
    return with_tables(EXCERPT.sub(lambda match: _block(match[1], match[2]), page))


def _block(path: str, name: str | None) -> str:
    head = f"<!-- excerpt: {path}{f' {name}' if name else ''} -->"
    return f"{head}\n{excerpt(path, name)}\n<!-- /excerpt -->"


def excerpt(path: str, name: str | None) -> str:
    """Return a file of the repository, or one top-level definition of a Python file, as a block of code."""
    if not (REPO / path).is_file():
        raise ValueError(f"'{path}' names no file of the repository: correct the path")
    text = (REPO / path).read_text(encoding="utf-8")
    return f'```python title="{path}"\n{definition(path, text, name) if name else text.rstrip()}\n```'


def definition(path: str, text: str, name: str) -> str:
    """Return the source of a class, function or assignment at the top level, with the string that describes it."""
    lines, body = text.splitlines(), ast.parse(text).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if name in [getattr(node, "name", ""), *(getattr(target, "id", "") for target in targets)]:
            start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            described = targets and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            end = following.end_lineno if described and following is not None else node.end_lineno
            return "\n".join(lines[start - 1 : end])
    raise ValueError(f"'{path}' has no top-level '{name}': correct the name")


def main() -> int:
    """Write the pages anew; names those that changed."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            sys.stdout.write(f"{page.relative_to(REPO)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
