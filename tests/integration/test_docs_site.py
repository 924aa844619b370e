"""The documentation builds strictly, its generated pages list what there is, and readers can read it in a browser."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from page_looks import SCHEMES, Scheme, faults, looks, window
from playwright.sync_api import Browser, Page, expect
from settings_reference import groups

import raycl
from raycl.launch.http.page_files import page_files
from raycl.operations.banks.commands import COMMANDS
from raycl.training.setup.run_config import RunConfig

REPO = Path(__file__).resolve().parents[2]
SETTINGS = "reference/run/method-slm/"
PAGES = ("", SETTINGS, "reference/methods/", "guides/serving/", "guides/errors/", "results/methods/")
TALLEST = 12_000
"""Pixels of a page of settings on a telephone; all of a run's settings on one page took 84,000."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(REPO / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    config.plugins.on_shutdown()
    return folder


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    """The address of the documentation on a free port."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_generated_pages_list_what_there_is(site: Path) -> None:
    python = (site / "reference/python/index.html").read_text()
    assert [name for name in dir(raycl) if f'id="raycl.{name}"' not in python] == ["__version__"]
    settings = "".join(page.read_text() for page in site.glob("reference/run/**/index.html")).replace("<wbr>", "")
    paths = [setting.path for group in groups(RunConfig) for setting in group.settings]
    assert [
        path for path in paths if f"<code>{path.replace('<', '&lt;').replace('>', '&gt;')}</code>" not in settings
    ] == []
    commands = (site / "reference/commands/index.html").read_text()
    assert all(f"<code>{name}</code>" in commands for name in COMMANDS) and "--print-config" in commands
    ready = (site / "reference/files/index.html").read_text()
    assert [path for path in REPO.glob("jobs/configs/**/*.yaml") if path.name not in ready] == []
    assert "RecencyRouter" in (site / "extending/router/index.html").read_text()
    assert "What raycl does not protect from" in (site / "security/index.html").read_text()
    notebook = (site / "tutorials/from-python/index.html").read_text()
    (picture,) = re.findall(r'src="([^"]*from-python_\d+_0\.png)#only-light"', notebook)
    assert (site / "tutorials/from-python" / picture).read_bytes()[:4] == b"\x89PNG"
    assert "after tickets" in notebook and '<table border="1" class="dataframe">' in notebook
    pages = [path.read_text() for path in site.rglob("*.html")]
    assert all("fonts.googleapis.com" not in page and 'src="http' not in page for page in pages)


def test_the_icon_is_that_of_the_served_pages(site: Path) -> None:
    assert (site / "icon.svg").read_bytes() == page_files("raycl.serve.http.playground")["icon.svg"]
    index = (site / "index.html").read_text()
    assert '<link rel="icon" href="icon.svg">' in index and '<img src="icon.svg" alt="logo">' in index


def test_guides_are_grouped(site: Path) -> None:
    index = (site / "index.html").read_text()
    tabs = re.findall(r'class="md-tabs__link">\s*(.+?)\s*</a>', index, re.DOTALL)
    assert tabs[:6] == ["Start", "Data", "Methods", "Serving", "Operating", "Extending"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("path", PAGES)
def test_pages_can_be_read(page: Page, url: str, path: str, scheme: Scheme) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(url + path)
    for look in looks(page, scheme):
        assert faults(page, "article") == [], look
        title = page.locator("article h1")
        assert float(title.evaluate("title => getComputedStyle(title).fontWeight")) >= 600, look
        code = page.locator("article code").first
        assert float(code.evaluate("code => parseFloat(getComputedStyle(code).fontSize)")) >= 13, look
        if path == SETTINGS:
            cells = page.locator(".settings tr").nth(2).locator("td")
            beyond = "cells => Math.max(...cells.map(cell => cell.getBoundingClientRect().right)) - innerWidth"
            assert cells.evaluate_all(beyond) <= 0, f"the table of settings is cut off, {look}"
            assert page.evaluate("document.documentElement.scrollHeight") < TALLEST, look


def test_columns_of_the_methods_fit(browser: Browser, url: str) -> None:
    page = window(browser, 1440, "light")
    page.goto(url + "reference/methods/")
    table = page.locator("article table")
    beyond = "table => table.getBoundingClientRect().right - table.closest('article').getBoundingClientRect().right"
    assert table.evaluate(beyond) <= 0
    page.context.close()


BRIGHTNESS = """image => {
  const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const corner = canvas.getImageData(2, 2, 1, 1).data;
  return Math.max(corner[0], corner[1], corner[2]);
}"""


@pytest.mark.parametrize("path", ["", "guides/sapt/", "guides/runs/", "guides/serving/", "tutorials/from-python/"])
def test_figures_are_dark_in_dark_mode(browser: Browser, url: str, path: str) -> None:
    for scheme, check in (("dark", lambda value: value < 64), ("light", lambda value: value > 192)):
        page = window(browser, 1280, scheme)
        page.goto(url + path)
        shown = [image for image in page.locator("article img").all() if image.is_visible()]
        assert shown and all(check(image.evaluate(BRIGHTNESS)) for image in shown), scheme
        page.context.close()


def test_search_finds_settings_and_messages(page: Page, url: str) -> None:
    page.goto(url)
    page.keyboard.press("/")
    expect(page.locator(".md-search-result__meta")).to_have_text("Type to start searching")  # the index has been read
    for words, found in (
        ("max_loaded_rows", "reference/serve/"),
        ("dev_fraction", "reference/run/stream/"),
        ("no Ray answers at", "guides/errors/"),
    ):
        page.locator(".md-search__input").fill(words)
        page.keyboard.press("End")  # the page looks at what is typed when a key is released
        expect(page.locator(f".md-search-result__link[href*='{found}']").first).to_be_attached()
