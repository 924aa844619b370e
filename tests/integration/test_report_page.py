"""`raycl report --html`: one file about real runs, in a browser on a phone and a desk, without script or network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from chromium import recorded
from page_looks import faults, looks, window
from playwright.sync_api import Browser, Page
from tiny import Complete, Lab, run

from raycl.cli.main import main
from raycl.storage import Storage

METHODS = ("lora", "slm", "sapt")
SECTIONS = (
    "Comparison",
    "Verdicts",
    "Verdicts on forgetting",
    "Accuracy matrices",
    "Accuracy over time",
    "Forgetting and transfer",
    "Attention over adapters",
    "Routing",
    "Cost",
    "Sample answers",
    "Runs, versions and settings",
)


@pytest.fixture(scope="module")
def written(complete: Complete, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    folders = [complete("bert", method, "torch").storage.uri for method in METHODS]
    assert main(["report", *folders, "--html", str(file), "--quiet"]) == 0
    return file


def test_the_page_can_be_read_everywhere(written: Path, page: Page) -> None:
    """It has no script, so it need not be loaded for each look."""
    errors, asked = recorded(page), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(written.as_uri())
    assert page.locator("section h2").all_inner_texts() == list(SECTIONS)
    for look in looks(page):
        assert faults(page) == [], look
    for details in page.locator("details").all():
        details.locator("summary").click()
    for look in looks(page):
        assert faults(page) == [], f"the numbers as tables too, {look}"
    assert errors == [] and [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_pictures_have_their_numbers_as_tables(written: Path, browser: Browser, complete: Complete) -> None:
    page = window(browser, 1440, "dark")
    page.goto(written.as_uri())
    drawn = page.locator("section:has(figure svg)")
    assert drawn.count() == 8
    for place in range(drawn.count()):
        assert drawn.nth(place).locator("table").count() >= 1, drawn.nth(place).locator("h2").inner_text()
    matrices = page.locator("#accuracy-matrices")
    matrices.locator("summary").click()
    result = json.loads(complete("bert", "lora", "torch").storage.read("results.json"))
    last = [f"{cell['value']:.1f}" for cell in result["matrix"][-1]]
    rows = matrices.locator("tr", has_text="after animal").all_inner_texts()
    assert any(row.split()[2:] == last for row in rows)
    answers = page.locator("#sample-answers table").first.locator("tbody tr").count()
    assert answers == 3 * len(METHODS), "three texts, answered by each method"
    wider = page.locator("figure").evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth).length")
    assert wider == 0, "where there is room no picture is cut"
    inks = page.locator("#routing svg text").evaluate_all("all => all.map(one => getComputedStyle(one).fill)")
    assert set(inks) == {"rgb(230, 228, 222)", "rgb(154, 162, 165)"}, "black and grey words are light on a dark page"
    page.context.close()


@pytest.fixture(scope="module")
def scored(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """Return the folder of a run that keeps dev texts, and its page."""
    folder = tmp_path_factory.mktemp("scored")
    storage = Storage.at(folder / "run")
    run(lab.config("bert", lab.slots(), stream={"dev_fraction": 0.3}, eval={"false_alarms": 0.2}), storage)
    assert main(["report", storage.uri, "--html", str(folder / "report.html"), "--quiet"]) == 0
    return storage


def test_out_of_distribution_scores_are_drawn(scored: Storage, page: Page) -> None:
    page.goto(Path(scored.uri).with_name("report.html").as_uri())
    section = page.locator("#out-of-distribution-scores")
    section.locator("summary").click()
    for look in looks(page):
        assert faults(page) == [], look
        whole = section.locator("figure").evaluate("figure => figure.scrollWidth <= figure.clientWidth")
        assert whole, f"the picture is cut, {look}"
    words = set(section.locator("svg text").all_text_contents())
    assert {"colour", "animal", "learned", "before it was learned", "threshold (0.2 false alarms)"} <= words
    last = scored.read_json("results.json")["phase_summaries"][-1]["ood"]
    rows = [row.split("\t") for row in section.locator("tbody tr").all_inner_texts()]
    expected = [["colour", "learned"], ["animal", "learned"], ["animal", "before it was learned"]]
    assert [row[:2] for row in rows] == expected
    scores = [*last["learned"].values(), *last["outside"].values()]
    assert sorted(row[2:7] for row in rows) == sorted([f"{score:.3f}" for score in part] for part in scores)


def test_the_file_needs_nothing_else(written: Path) -> None:
    text = written.read_text()
    assert "<script" not in text and "default-src 'none'" in text
    outside = set(re.findall(r"(?:src|href)=\"([^\"#]+)\"", text))
    assert {address.partition(":")[0] for address in outside} <= {"data"}
