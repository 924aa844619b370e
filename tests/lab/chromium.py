"""A real browser, headless, for the pages that raycl serves; tests are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

QUIET = ("background-networking", "component-update", "sync", "quic", "gpu", "dev-shm-usage")
POPUPS = ("WebUIOmniboxPopup", "WebUIOmniboxAimPopup")
"""Pages behind the address bar, which each window of a headless browser loads too: half a second of processor time."""
PLAYWRIGHT = (
    *("AimEnabled", "AvoidCorsURLLoaderRestartOnRedirect", "AvoidUnnecessaryBeforeUnloadCheckSync"),
    *("DestroyProfileOnBrowserClose", "HttpsFirstBalancedModeAutoEnable", "HttpsUpgrades", "LensOverlay"),
    *("MediaRouter", "NetworkTimeServiceQuerying", "OptimizationHints", "PaintHolding", "PreconnectToSearch"),
    "ThirdPartyStoragePartitioning",
)
"""Features that Playwright disables: of two lists, Chromium takes the last one."""
ARGUMENTS = (
    *("--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in QUIET)),
    f"--disable-features={','.join((*POPUPS, *PLAYWRIGHT))}",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no 'chromium' on the path: install it with 'apt-get install chromium'")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Yield a fresh window."""
    from playwright.sync_api import expect

    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    context.set_default_timeout(20_000)
    expect.set_options(timeout=20_000)
    yield context.new_page()
    context.close()


def recorded(page: Page) -> list[str]:
    """Return errors from now on, of the console and of scripts."""
    collected: list[str] = []
    page.on("console", lambda message: collected.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: collected.append(str(error)))
    return collected
