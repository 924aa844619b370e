"""Files of the pages that raycl serves: all of them in the wheel, of a known kind, loading nothing from elsewhere."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from raycl.errors import LaunchError
from raycl.launch.http.connections import bound
from raycl.launch.http.page_files import INDEX, TYPES, page_files
from raycl.launch.page.server import PORT, listen

REPO = Path(__file__).resolve().parents[2]
SHARED, PAGES = "raycl.launch.http", ("raycl.launch.page", "raycl.serve.http.playground")


@pytest.mark.parametrize("package", [SHARED, *PAGES, "raycl.operations.report.page"])
def test_every_file_is_of_a_known_kind_and_packaged(package: str) -> None:
    names = {file.name for file in resources.files(package).iterdir() if file.is_file()}
    names = {name for name in names if not name.endswith(".py")}
    assert names and {Path(name).suffix for name in names} <= set(TYPES)
    patterns = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][package]
    assert [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


@pytest.mark.parametrize("package", PAGES)
def test_no_text_becomes_markup(package: str) -> None:
    scripts = {name: content.decode() for name, content in page_files(package).items() if name.endswith(".js")}
    markup = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|srcdoc")
    assert scripts and [name for name, text in scripts.items() if markup.search(text)] == []


@pytest.mark.parametrize("package", PAGES)
def test_a_page_names_files_of_its_own_alone(package: str) -> None:
    files = page_files(package)
    assert {INDEX, "base.css", "icon.svg"} <= set(files)
    pages = "".join(content.decode() for name, content in files.items() if name.endswith(".html"))
    named = re.findall(r'(?:href|src)="([^"]+)"', pages)
    assert {name.rpartition("/")[2] for name in named} - {"openapi.json", ""} - {"report.html"} <= set(files)
    script = "".join(content.decode() for name, content in files.items() if name.endswith(".js"))
    assert {name.removeprefix("./") for name in re.findall(r'from "([^"]+)"', script)} <= set(files)


def test_without_a_port_the_next_free_one_is_taken() -> None:
    try:
        taken = bound("127.0.0.1", PORT)
    except LaunchError:
        taken = None  # by another program
    with listen("127.0.0.1", None) as result:
        assert result.getsockname()[1] > PORT
        with pytest.raises(LaunchError, match=r"choose a free port with --port NUMBER"):
            listen("127.0.0.1", result.getsockname()[1])
    if taken is not None:
        taken.close()
