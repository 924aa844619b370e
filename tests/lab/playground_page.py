"""User actions on the playground's page, and readers of what it shows."""

from __future__ import annotations

import re
from typing import Any

from local_endpoint import Served
from playwright.sync_api import Locator, Page, expect

CARDS = ("auto", "base", "pinned")
"""Names of the three cards."""


def opened(page: Page, served: Served) -> Page:
    """Return the page, after it has loaded the snapshots."""
    page.goto(served.url + "/")
    expect(page.locator("#snapshot")).to_have_text(re.compile(r"snapshot \d"))
    return page


def shown(bars: Locator) -> dict[str, str]:
    """Return the name -> number beside it."""
    rows = bars.locator("li").all()
    return {row.locator(".name").inner_text(): row.locator(".value").inner_text() for row in rows}


def mixture(page: Page, card: str = "auto") -> Locator:
    """Return the bars of a card's mixture."""
    return page.locator(f"#{card} .mixture > .bars")


def answer_text(page: Page, card: str) -> str:
    return page.locator(f"#{card} .text").inner_text()


def send(page: Page, text: str, **settings: Any) -> None:
    """Type and press Ctrl+Enter."""
    if settings:
        page.locator("#settings").evaluate("element => { element.open = true; }")
        for name, value in settings.items():
            page.fill(f"#{name}", str(value))
    page.fill("#text", text)
    page.press("#text", "Control+Enter")


def expect_state(page: Page, state: str, *cards: str) -> None:
    for card in cards:
        expect(page.locator(f"#{card}")).to_have_attribute("data-state", state)
