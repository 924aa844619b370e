"""The documentation builds strictly, its generated pages list what there is, and readers can read it in a browser."""

from __future__ import annotations

import functools
import gc
import http.server
import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import settings_reference
from mkdocs.commands.build import build
from mkdocs.config import load_config
from page_looks import SCHEMES, Scheme, faults, looks, window
from playwright.sync_api import Browser, Page, expect
from transformers import PretrainedConfig

import raycl
from raycl.backbone import architecture
from raycl.backbone.architecture import known_sizes
from raycl.launch.http.page_files import page_files
from raycl.operations.banks.commands import COMMANDS
from raycl.training.setup.run_config import RunConfig

REPO = Path(__file__).resolve().parents[2]
SETTINGS = "reference/run/method-slm/"
PAGES = ("", SETTINGS, "reference/methods/", "guides/serving/", "guides/errors/", "results/methods/")
GROUPS = functools.cache(settings_reference.groups)
"""The settings of a config class are the same for the navigation, the pages and the test that looks for them."""
TALLEST = 12_000
"""Pixels of a page of settings on a telephone; all of a run's settings on one page took 84,000."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "known_sizes", _shallow)
        patch.setattr(settings_reference, "groups", GROUPS)
        gc.disable()  # the build makes millions of objects, and nearly all live until its end
        try:
            _build(folder)
        finally:
            gc.enable()
    return folder


def _shallow(name: str) -> PretrainedConfig | None:
    """Return what a known model is, with 2 layers: the numbers of the table of methods are smaller, and nothing else.

    The table has 40 rows, and each is counted on a model of its own.
    """
    sizes = known_sizes(name)
    if sizes is not None:
        sizes.update({"num_layers": 2, "num_decoder_layers": 2} if sizes.is_encoder_decoder else {})
    return sizes


def _build(folder: Path) -> None:
    config = load_config(str(REPO / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    config.plugins.on_shutdown()


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
    paths = [setting.path for group in GROUPS(RunConfig) for setting in group.settings]
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


def shown(browser: Browser, url: str, *paths: str) -> Iterator[tuple[Page, Scheme]]:
    """Yield each page in each color scheme; the theme keeps the scheme of the first load, so windows are new."""
    for path, scheme in itertools.product(paths, SCHEMES):
        page = window(browser, 1280, scheme)
        page.goto(url + path)
        yield page, scheme
        page.context.close()


@pytest.mark.parametrize("path", PAGES)
def test_pages_can_be_read(browser: Browser, url: str, path: str) -> None:
    for page, scheme in shown(browser, url, path):
        can_be_read(page, path, scheme)
        if path in FIGURES:
            figures_are_of(page, scheme)
        if path == "reference/methods/":
            columns_fit(page)


def can_be_read(page: Page, path: str, scheme: Scheme) -> None:
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


def columns_fit(page: Page) -> None:
    """In the last of the looks, which is the widest."""
    table = page.locator("article table")
    beyond = "table => table.getBoundingClientRect().right - table.closest('article').getBoundingClientRect().right"
    assert table.evaluate(beyond) <= 0


FIGURES = ("", "guides/sapt/", "guides/runs/", "guides/serving/", "tutorials/from-python/")
"""Pages with figures."""
BRIGHTNESS = """image => {
  const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const corner = canvas.getImageData(2, 2, 1, 1).data;
  return Math.max(corner[0], corner[1], corner[2]);
}"""


def figures_are_of(page: Page, scheme: Scheme) -> None:
    """A page shows figures, and those of the scheme."""
    images = [image for image in page.locator("article img").all() if image.is_visible()]
    for image in images:
        brightness = image.evaluate(BRIGHTNESS)
        assert brightness < 64 if scheme == "dark" else brightness > 192, f"{image.get_attribute('src')}, {scheme}"
    assert images, f"no figure is shown, {scheme}"


def test_figures_are_dark_in_dark_mode(browser: Browser, url: str) -> None:
    """Those of the other pages with figures are looked at where the pages are read."""
    for page, scheme in shown(browser, url, *(path for path in FIGURES if path not in PAGES)):
        figures_are_of(page, scheme)


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
