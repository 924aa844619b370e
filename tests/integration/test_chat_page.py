"""The page for conversations in a real browser: turns, mixtures, Markdown without markup, stop and retry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from chat_samples import CONTROL, TEMPLATES, TOKENIZERS
from chromium import recorded
from local_endpoint import Served, serving
from page_looks import faults, looks
from playground_page import opened
from playwright.sync_api import Page, Route, expect
from tiny import Lab, run

from raycl.storage import Storage
from raycl.testing.tiny_models import tiny_model

HOSTILE = "<img src=x onerror=\"document.title='broken'\"> [click](javascript:alert(1))"
RICH = f"""# A head

Some *slanted*, **bold** and `code <b>` words with [a link](https://example.org/?q=1).
{HOSTILE}
```b c``` begins the line of a__b__c

- one
- two

3. three

> said

```py
print("<i>")
```py
```"""


@pytest.fixture(scope="module")
def served(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An endpoint over a model with a chat template, whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = TOKENIZERS["bytes"]()
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL})
    tokenizer.chat_template = TEMPLATES["trims"]
    tokenizer.save_pretrained(folder / "model")
    tiny_model("llama", len(tokenizer), positions=512).save_pretrained(folder / "model")
    changes = {"backbone": {"name": str(folder / "model")}, "stream": {"max_source_tokens": 128}}
    storage = run(lab.config("llama", "slm", **changes), Storage.at(folder / "run")).storage
    with serving(storage.sub("bank").uri) as endpoint:
        yield endpoint


def test_instructions_of_the_tasks_are_listed(served: Served) -> None:
    for task in served.ask("/v1/tasks")[1]["data"]:
        assert task["definition"] == f"Answer with one of: {', '.join(task['labels'])}"


def chatting(page: Page, served: Served) -> Page:
    page.goto(f"{served.url}/playground/chat.html")
    expect(page.locator("#snapshot")).to_have_text(re.compile(r"snapshot \d"))
    return page


def say(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Control+Enter")


def canned(page: Page, text: str) -> list[dict[str, Any]]:
    """Answer every request with a text, and return the bodies of requests as they come."""
    bodies: list[dict[str, Any]] = []
    how: dict[str, Any] = {"tasks": {"colour": 0.75, "animal": 0.25}, "adapters": {}, "template": "colour"}
    how |= {"ood_score": 0.5, "cut_tokens": 3, "unknown": True}

    def answer(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        chunks = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}], "raycl": how},
            {"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"completion_tokens": 2}},
        ]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        route.fulfill(body=f"{events}data: [DONE]\n\n", content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    return bodies


def test_a_conversation_with_the_endpoint(page: Page, served: Served) -> None:
    """Each model reads its own answers; the page is linked where the model has a chat template."""
    errors = recorded(page)
    opened(page, served).locator("#chat").click()
    expect(page.locator("#snapshot")).to_have_text(re.compile(r"snapshot \d"))
    page.locator("#settings").evaluate("element => { element.open = true; }")
    page.fill("#max_tokens", "4")
    say(page, "the sea is cold")
    first = page.locator(".turn").first
    expect(first.locator(".reply[data-state=done]")).to_have_count(2)
    assert first.locator(".reply h2").all_inner_texts() == ["raycl", "Bare model"]
    assert set(first.locator("[data-model=auto] .bars .name").all_inner_texts()) <= {"colour", "animal"}
    assert "prompted as" in first.locator("[data-model=auto] .figures").inner_text()
    assert first.locator("[data-model=base] .bars li").count() == 0
    assert errors == []


def test_the_history_system_text_and_retry(page: Page, served: Served) -> None:
    bodies = canned(page, "warm")
    chatting(page, served).locator("#settings").evaluate("element => { element.open = true; }")
    page.fill("#system", " be kind ")
    say(page, "one")
    expect(page.locator(".reply[data-state=done]")).to_have_count(2)
    expect(page.locator("[data-model=auto] .figures")).to_have_text(
        re.compile(
            r"prompted as colour · of no learned task, so the bare model answers · out-of-distribution score 0\.50 · "
            r"3 tokens cut off · 2 tokens$"
        )
    )
    assert page.locator("[data-model=auto] .bars .value").all_inner_texts() == ["0.75", "0.25"]
    page.uncheck("#beside")
    say(page, "two")
    expect(page.locator(".reply[data-state=done]")).to_have_count(3)
    turns = [("system", "be kind"), ("user", "one"), ("assistant", "warm"), ("user", "two")]
    assert [(message["role"], message["content"]) for message in bodies[-1]["messages"]] == turns
    assert [body["model"] for body in bodies] == ["auto", "base", "auto"] and bodies[0]["temperature"] == 0
    page.click("#retry")
    expect(page.locator(".reply[data-state=done]")).to_have_count(3)
    expect(page.locator("#stop")).to_be_disabled()
    assert bodies[3]["messages"] == bodies[2]["messages"] and len(bodies) == 4
    page.click("#clear")
    assert page.locator(".turn").count() == 0 and page.locator("#retry").is_disabled()


def test_markdown_is_built_and_never_parsed_as_markup(page: Page, served: Served) -> None:
    errors = recorded(page)
    canned(page, RICH)
    say(chatting(page, served), HOSTILE)
    written = page.locator("[data-model=auto] .written")
    expect(page.locator("[data-model=auto]")).to_have_attribute("data-state", "done")
    assert written.evaluate("e => [...e.children].map(one => one.tagName)") == [
        "H3",
        "P",
        "UL",
        "OL",
        "BLOCKQUOTE",
        "PRE",
    ]
    assert (
        written.locator("ul li").all_inner_texts() == ["one", "two"]
        and written.locator("ol").get_attribute("start") == "3"
    )
    assert written.locator("em").inner_text() == "slanted" and written.locator("strong").inner_text() == "bold"
    assert (
        written.locator("code").first.inner_text() == "code <b>"
        and written.locator("pre").inner_text() == 'print("<i>")\n```py'
    )
    assert written.locator("a").evaluate_all("links => links.map(one => [one.href, one.rel])") == [
        ["https://example.org/?q=1", "noopener noreferrer nofollow"]
    ]
    assert "b c begins the line of a__b__c" in written.inner_text()
    assert HOSTILE in written.inner_text() and page.locator(".said").inner_text() == HOSTILE
    assert page.locator("#turns img").count() == 0 and page.title() == "raycl chat" and errors == []


def test_stop_keeps_what_was_written_and_a_refusal_is_shown(page: Page, served: Served) -> None:
    chatting(page, served)
    page.route("**/v1/chat/completions", lambda route: None)  # never answered
    say(page, "one")
    expect(page.locator("#stop")).to_be_enabled()
    page.click("#stop")
    expect(page.locator(".reply[data-state=ended] .figures").first).to_contain_text("stopped")
    page.unroute("**/v1/chat/completions")
    body = {"error": {"message": "the queue is full"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json=body))
    page.click("#retry")
    expect(page.locator(".reply[data-state=ended] .note").first).to_have_text("the queue is full")


def test_everything_can_be_read(page: Page, served: Served) -> None:
    """Styles alone depend on the width and the scheme, so the page need not be loaded for each."""
    canned(page, RICH)
    say(chatting(page, served), "a question that is long enough to fill more than one line on a narrow screen")
    expect(page.locator(".reply[data-state=done]")).to_have_count(2)
    page.locator("#settings").evaluate("element => { element.open = true; }")
    for look in looks(page):
        assert faults(page) == [], look
