"""The page as one HTML file: styles and pictures in it, no script, nothing fetched."""

import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from rich.table import Table
from rich.text import Text

import raycl
from raycl.config import Tree
from raycl.operations.report.page.sections import PageSection, sections_of
from raycl.operations.report.plots import svg_of
from raycl.operations.report.tables import Page


def report_page(
    results: Sequence[Tree], title: str, against: str | None = None, more: Sequence[PageSection] = ()
) -> str:
    """Return the page about these runs.

    Args:
        title: of the page. against: reference of the verdicts. more: sections in front of the others.

    Raises:
        RunError: there is no reference of this name.
    """
    return page_of([*more, *sections_of(results, against)], title)


def page_of(sections: Sequence[PageSection], title: str) -> str:
    """Return the page with these sections."""
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_file("page.html"))
    return template.render(
        title=title,
        version=raycl.__version__,
        styles=Markup(_file("base.css", "raycl.launch.http") + _file("style.css")),
        sections=[_parts(section) for section in sections],
    )


def _parts(section: PageSection) -> dict[str, Any]:
    return {
        "id": re.sub(r"\W+", "-", section.title.lower()),
        "title": section.title,
        "figure": Markup(svg_of(section.figure)) if section.figure is not None else "",
        "lead": section.lead,
        "tables": [block for page in section.tables for block in _blocks(page)],
        "numbers": [block for page in section.numbers for block in _blocks(page)],
    }


def _blocks(page: Page) -> list[dict[str, Any]]:
    """Return the lines and tables of a printed page."""
    blocks: list[dict[str, Any]] = []
    for part in page.renderables:
        if isinstance(part, Table):
            columns = [{"head": str(column.header), "right": column.justify == "right"} for column in part.columns]
            cells = zip(*(map(str, column.cells) for column in part.columns), strict=True)
            blocks.append({"columns": columns, "rows": list(cells)})
        elif isinstance(part, Text):
            blocks.append({"line": part.plain})
    return blocks


def _file(name: str, package: str = __package__) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
