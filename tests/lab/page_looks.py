"""Measures of a page in a browser: its width, its smallest letters, and the contrast of its words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from playwright.sync_api import Browser, Page

Scheme = Literal["light", "dark"]

WIDTHS = (390, 1280, 1440)
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
LEAST_PX, LEAST_CONTRAST = 12.0, 4.5
"""Pixels of a letter's size, and WCAG's contrast of ordinary text (level AA)."""

MEASURE = """root => {
  const channel = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const [brightness, stacks] = [new Map(), new Map()];
  const painted = layers => {
    const key = layers.join(";");
    if (!brightness.has(key)) brightness.set(key, paint(layers));
    return brightness.get(key);
  };
  const paint = layers => {
    canvas.globalCompositeOperation = "copy";
    canvas.fillStyle = "#fff";
    canvas.fillRect(0, 0, 1, 1);
    canvas.globalCompositeOperation = "source-over";
    for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(value => channel(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    if (!element) return [];
    if (!stacks.has(element)) {
      stacks.set(element, [...behind(element.parentElement), getComputedStyle(element).backgroundColor]);
    }
    return stacks.get(element);
  };
  const found = [];
  const walker = document.createTreeWalker(document.querySelector(root), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const words = walker.currentNode.data.trim();
    if (!words || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (element.closest("option, script, style, :disabled, .headerlink, svg")) continue;
    const style = getComputedStyle(element);
    const layers = behind(element);
    const [one, other] = [painted(layers), painted([...layers, style.color])].sort((a, b) => b - a);
    found.push({ words: words.slice(0, 60), px: parseFloat(style.fontSize), contrast: (one + 0.05) / (other + 0.05) });
  }
  return found;
}"""

BROKEN = """root => {
  const found = [];
  const walker = document.createTreeWalker(document.querySelector(root), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    for (const word of walker.currentNode.data.matchAll(/\\S+/g)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, word.index);
      range.setEnd(walker.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(({ top }) => top)).size > 1) found.push(word[0]);
    }
  }
  return found;
}"""

CUT = """root => [...document.querySelectorAll(`${root} select`)].map(select => {
  const style = getComputedStyle(select);
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  context.font = style.font;
  const room = select.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - 20;
  const words = select.selectedOptions[0]?.text ?? "";
  return context.measureText(words).width > room ? words : "";
}).filter(Boolean)"""
"""The arrow of a select takes 20 pixels."""


def broken_words(page: Page, root: str) -> list[str]:
    """Return the words below an element that stand on two lines."""
    found: list[str] = page.evaluate(BROKEN, root)
    return found


def cut_choices(page: Page, root: str) -> list[str]:
    """Return the chosen words of selects below an element that have no room."""
    found: list[str] = page.evaluate(CUT, root)
    return found


def faults(page: Page, root: str = "body") -> list[str]:
    """Return what cannot be read below an element: words that are too small or too pale, and a page that is too wide.

    Args:
        page: the page, loaded. root: selector of the element.
    """
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    found: list[dict[str, Any]] = page.evaluate(MEASURE, root)
    assert found, f"'{root}' shows no words"
    listed = [f"the page is {wide} pixels too wide"] if wide > 0 else []
    listed += [f"'{one['words']}' has {one['px']:g} px" for one in found if one["px"] < LEAST_PX]
    pale = [one for one in found if one["contrast"] < LEAST_CONTRAST]
    return listed + [f"'{one['words']}' has a contrast of {one['contrast']:.2f}" for one in pale]


def looks(page: Page, *schemes: Scheme) -> Iterator[str]:
    """Yield a name for each width and each color scheme, in which the page is shown then; it is not loaded again.

    Dark colors are looked at in one width: a width changes no color.
    """
    for scheme in schemes or SCHEMES:
        page.emulate_media(color_scheme=scheme)
        for width in WIDTHS if scheme == "light" else WIDTHS[-1:]:
            page.set_viewport_size({"width": width, "height": 900})
            yield f"{scheme}, {width} pixels"


def window(browser: Browser, width: int, scheme: str) -> Page:
    """Return a page of a new window; its context is to be closed."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        reduced_motion="reduce",
    )
    context.set_default_timeout(20_000)
    return context.new_page()
