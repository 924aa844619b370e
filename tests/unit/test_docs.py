"""The documentation's excerpts are what the source says, and the files that its pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import excerpts
import pytest

REPO = Path(__file__).resolve().parents[2]
FOLDERS = {"raycl", "jobs", "sweeps", "tests", "cluster", "docs"}
FOLDERS |= {path.parent.name for path in REPO.glob("raycl/*/__init__.py")} - {"bank"}  # runs have a folder bank/ too


def test_excerpts_in_the_pages_are_what_the_source_says() -> None:
    pages = sorted(excerpts.PAGES.glob("*.md"))
    stale = [page.name for page in pages if excerpts.filled(page.read_text()) != page.read_text()]
    assert stale == [], "run `make docs-excerpts`"
    marks = [line for page in pages for line in page.read_text().splitlines() if "excerpt:" in line]
    assert len(marks) > 15 and all(re.fullmatch(r"<!-- excerpt: \S+( \w+)? -->", mark) for mark in marks)


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        ("raycl/nothing.py", None, "names no file of the repository"),
        ("raycl/routing/router.py", "Nobody", "no top-level 'Nobody'"),
    ],
)
def test_a_missing_excerpt_fails(path: str, name: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        excerpts.excerpt(path, name)


@pytest.mark.parametrize(
    "page", [*sorted(REPO.glob("docs/**/*.md")), REPO / "CONTRIBUTING.md", REPO / "README.md", REPO / "SECURITY.md"]
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """`raycl/training/step.py`, or `training/step.py` for short; folders with a slash at their end."""
    named = re.findall(r"`([\w./-]+/(?:[\w.-]+\.(?:py|yaml|md))?)`", page.read_text())
    ours = [name for name in named if name.split("/")[0] in FOLDERS or name.endswith(".py")]
    assert [name for name in ours if not (REPO / name).exists() and not (REPO / "raycl" / name).exists()] == []
