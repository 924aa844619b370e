"""The pictures of the served pages in docs/, from a run that was really trained; each for light and dark pages.

    raycl train jobs/configs/demo.yaml method=slm launch.mode=local output.name=pictures
    python tests/lab/pictures.py runs/pictures --status    # while it trains its last task
    python tests/lab/pictures.py runs/pictures             # when it has ended: about four minutes

and from the run of docs/results/smollm2.md, "A bank that answers", the answer to a text (`docs/playground-chat.png`):

    python tests/lab/pictures.py runs/best --text "The food was wonderful, the staff were friendly."

and of recorded comparisons their page, from the top (`docs/report.png`):

    python tests/lab/pictures.py docs/results/methods-*.csv --report

The endpoint gets the built-in tasks' test rows, a few texts of no task and requests for a task that does not exist;
answers, times and scores are its own.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from chromium import ARGUMENTS
from local_endpoint import Served, serving
from page_looks import SCHEMES, window
from playwright.sync_api import Browser, Page, expect, sync_playwright
from report_picture import overview, write_shown

from raycl.data.benchmarks.builtin import TASKS, rows

RAYCL = (sys.executable, "-m", "raycl.cli.main")
DOCS = Path(__file__).resolve().parents[2] / "docs"
FOREIGN = ("Preheat the oven to 180 degrees and butter the tin.", "E = m c^2", "der Zug nach Basel hat Verspätung")
REQUESTS, SECONDS, SPAN_S = 150, 240, "600"
"""Requests before the picture of metrics, over about this time; the page then shows this span."""
WIDTH, BELOW = 1280, 12
"""Pixels of a picture, and below the first part of a report's page."""


def saved(browser: Browser, name: str, url: str, arrange: Callable[[Page], None], shown: str = "") -> None:
    """Write `docs/NAME.png` and `docs/NAME-dark.png`: the page after `arrange(page)`.

    Args:
        shown: the picture ends below the page's first section and has this text.
    """
    for scheme in SCHEMES:
        page = window(browser, WIDTH, scheme)
        page.goto(url)
        arrange(page)
        path = DOCS / f"{name}{'-dark' if scheme == 'dark' else ''}.png"
        box = page.locator("section").first.bounding_box() if shown else None
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + BELOW} if box else None
        page.screenshot(path=path, full_page=True, clip=clip)
        if shown:
            write_shown(path, shown)
        page.context.close()
        sys.stdout.write(f"wrote {path}\n")


def shown_status(page: Page) -> None:
    expect(page.locator("#matrix table")).to_be_visible()
    page.wait_for_timeout(4000)


def shown_answer(page: Page, text: str | None = None) -> None:
    page.fill("#text", text or next(text for text, _ in rows("question_type", "test", 1, 7)))
    page.press("#text", "Control+Enter")
    for card in page.locator("article.card[data-state]").all() if text else [page.locator("#auto")]:
        expect(card).to_have_attribute("data-state", "done", timeout=60_000)
    page.wait_for_timeout(1000)


def shown_metrics(page: Page) -> None:
    page.select_option("#span", SPAN_S)
    page.wait_for_timeout(6000)


def ask(served: Served) -> None:
    """Send texts of the tasks in bouts, as users come and go."""
    draw = random.Random(0)
    texts = [text for task in TASKS for text, _ in rows(task, "test", REQUESTS // len(TASKS), 1)] + [*FOREIGN] * 4
    for text in draw.sample(texts, len(texts)):
        body = {"input": text} | ({"raycl": {"task": "weather"}} if draw.random() < 0.04 else {})
        served.ask("/v1/classify", {"model": "auto"} | body)
        time.sleep(draw.expovariate(len(texts) / SECONDS))


def main() -> int:
    """Make the pictures of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", help="folder of a run; with --report files of recorded runs")
    parser.add_argument("--report", action="store_true", help="the page of its report, and no other")
    parser.add_argument("--status", action="store_true", help="the page of its status, and no other")
    parser.add_argument("--text", help="the picture of this text's answers, and no other")
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        if options.status:
            command = [*RAYCL, "status", options.run[0], "--web", "--port", "0"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:
                url = re.search(r"http://\S+", page.stdout.readline())
                saved(browser, "status", url[0], shown_status)
                page.terminate()
        elif options.report:
            with TemporaryDirectory() as folder:
                page = Path(folder, "report.html")
                subprocess.run([*RAYCL, "report", *options.run, "--html", page, "--quiet"], check=True)
                saved(browser, "report", page.as_uri(), lambda _: None, overview(map(Path, options.run)))
        elif options.text:
            with serving(f"{options.run[0]}/bank") as served:
                arrange = partial(shown_answer, text=options.text)
                saved(browser, "playground-chat", f"{served.url}/", arrange)
        else:
            with serving(f"{options.run[0]}/bank") as served:
                ask(served)
                saved(browser, "metrics", f"{served.url}/playground/metrics.html", shown_metrics)
                saved(browser, "playground", f"{served.url}/", shown_answer)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
