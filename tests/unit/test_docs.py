"""The documentation builds strictly, its generated pages list what there is, and its example works as printed."""

from __future__ import annotations

import re
from pathlib import Path

import excerpts
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from raycl.config.reference import groups
from raycl.operations.banks.commands import COMMANDS
from raycl.training.setup.run_config import RunConfig

REPO = Path(__file__).resolve().parents[2]
FOLDERS = {"raycl", "jobs", "sweeps", "tests", "cluster", "docs"}
FOLDERS |= {path.parent.name for path in REPO.glob("raycl/*/__init__.py")} - {"bank"}  # runs have a folder bank/ too


def test_the_documentation_builds_strictly(tmp_path: Path) -> None:
    config = load_config(str(REPO / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    config.plugins.on_shutdown()

    settings = (tmp_path / "reference/run/index.html").read_text()
    paths = [setting.path for group in groups(RunConfig) for setting in group.settings]
    assert [
        path for path in paths if f"<code>{path.replace('<', '&lt;').replace('>', '&gt;')}</code>" not in settings
    ] == []
    commands = (tmp_path / "reference/commands/index.html").read_text()
    assert all(f"<code>{name}</code>" in commands for name in COMMANDS) and "--print-config" in commands
    ready = (tmp_path / "reference/files/index.html").read_text()
    assert [path for path in REPO.glob("jobs/configs/**/*.yaml") if path.name not in ready] == []
    assert "RecencyRouter" in (tmp_path / "extending/router/index.html").read_text()
    assert "What raycl does not protect from" in (tmp_path / "security/index.html").read_text()
    notebook = (tmp_path / "tutorials/from-python/index.html").read_text()
    (picture,) = re.findall(r'src="([^"]*from-python_\d+_0\.png)"', notebook)
    assert (tmp_path / "tutorials/from-python" / picture).read_bytes()[:4] == b"\x89PNG"
    assert "after tickets" in notebook and '<table border="1" class="dataframe">' in notebook
    pages = [path.read_text() for path in tmp_path.rglob("*.html")]
    assert all("fonts.googleapis.com" not in page and 'src="http' not in page for page in pages)


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
