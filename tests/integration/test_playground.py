"""The playground in a real browser, headless, over a real endpoint: what a person would see, and nothing else.

The page has no build step that could find its mistakes.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chromium import recorded
from local_endpoint import Served, serving
from page_looks import broken_words, cut_choices, faults, looks
from playground_page import CARDS, answer_text, expect_state, mixture, opened, send, shown
from playwright.sync_api import Page, Route, expect
from tiny import Complete, on_main

from raycl.bank import Bank, NewSnapshot
from raycl.bank.activations import Activations
from raycl.launch.http.page_files import TYPES, page_files
from raycl.serve.engine.serving_engine import ServingEngine
from raycl.serve.gate import gate_actor

FILES = page_files("raycl.serve.http.playground")
COLOUR, ANIMAL = "the sea is cold", "it purrs a sleeps"
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"

Get = Callable[[str], Served]


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Served], None]:
    """Return a function that makes an endpoint take a while over each token."""

    def slow(served: Served) -> None:
        assert isinstance(served.service.engine, ServingEngine)
        texts, step = served.service.engine._texts, served.service.engine._texts.step
        monkeypatch.setattr(texts, "step", lambda: (time.sleep(0.04), step()))

    return slow


def hurry(page: Page) -> None:
    """The page's pauses are a tenth as long: it asks for news more often."""
    page.add_init_script("const later = setTimeout; setTimeout = (work, ms) => later(work, ms / 10);")


# ---- the page and its files ----------------------------------------------------------------------------------------


def test_files_come_with_type_policy_and_tag(served: Get) -> None:
    endpoint = served("llama")
    for name in FILES:
        path = "/" if name == "index.html" else f"/playground/{name}"
        with urllib.request.urlopen(endpoint.url + path) as answer:
            assert answer.headers["Content-Type"] == TYPES[Path(name).suffix]
            assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
            assert "unsafe" not in answer.headers["Content-Security-Policy"]
        with urllib.request.urlopen(urllib.request.Request(endpoint.url + path, method="HEAD")) as head:
            assert head.status == 200 and head.headers["ETag"] == answer.headers["ETag"] and head.read() == b""
        again = urllib.request.Request(endpoint.url + path, headers={"If-None-Match": answer.headers["ETag"]})
        with pytest.raises(urllib.error.HTTPError, match="304"):
            urllib.request.urlopen(again)


def test_the_page_loads_without_errors_and_sends_no_other_requests(page: Page, served: Get) -> None:
    endpoint, errors, asked = served("llama"), recorded(page), []
    page.on("request", lambda request: asked.append(request.url))
    opened(page, endpoint)
    expect(page.locator("#summary")).to_have_text("· 2 tasks · decoder")
    expect_footer(page, "/v1/chat/completions")
    assert shown(mixture(page)) == {"colour": "0.00", "animal": "0.00"}
    alone = page.locator("#pinned-choice option").all_text_contents()
    assert alone[:2] == ["colour", "animal"] and "colour.0@1" in alone[2:]
    assert sum(f"/{name}" in url for url in asked for name in FILES) >= 9
    assert [url for url in asked if not url.startswith(endpoint.url + "/")] == []
    assert errors == []


# ---- answers -------------------------------------------------------------------------------------------------------


def test_typing_updates_the_mixture_before_a_request_is_sent(page: Page, served: Get) -> None:
    opened(page, served("llama"))
    for text in (COLOUR, ANIMAL):
        page.fill("#text", "")
        page.locator("#text").press_sequentially(text, delay=15)
        how = served("llama").ask("/v1/route", {"input": text})[1]["data"][0]["raycl"]
        hard_weights = next(iter(how["tasks"]))
        assert how["tasks"][hard_weights] > 0.5, "these texts must be routed to different tasks"
        wanted = f"{how['tasks'][hard_weights]:.2f}"
        row = mixture(page).locator("li").filter(has=page.locator(f"[title={hard_weights}]"))
        expect(row.locator(".value")).to_have_text(wanted)
        assert row.locator(".track i").evaluate("bar => bar.getBoundingClientRect().width") > 20
        page.locator("#auto .mixture summary").click()
        assert set(shown(page.locator("#auto .mixture details .bars"))) == set(how["adapters"])
        page.locator("#auto .mixture summary").click()
    assert page.locator("#auto .text").inner_text() == "" and page.locator("#recent button").count() == 0
    page.fill("#text", "")
    expect(mixture(page).locator(".value")).to_have_text(["0.00", "0.00"])


def test_of_many_tasks_those_with_the_largest_weights_are_shown(page: Page, served: Get) -> None:
    loud = {"task17": 0.9, "task3": 0.3, "task5": -0.2, "task9": 0.001}
    tasks = {f"task{number}": 0.0 for number in range(20)} | loud
    summary = {"active": 1, "tasks": list(tasks), "kind": "decoder", "data": [1], "problem": ""}
    how = {"tasks": loud, "adapters": {"one": 1.5, "two": -0.5}, "ood_score": 0.994}
    page.route("**/v1/snapshots", lambda route: route.fulfill(json=summary))
    page.route("**/v1/route", lambda route: route.fulfill(json={"data": [{"raycl": how}]}))
    opened(page, served("llama"))
    page.fill("#text", COLOUR)
    expect(mixture(page).locator(".value")).to_have_text(["0.00", "0.00", "0.30", "−0.20", "< 0.01", "0.90"])
    assert list(shown(mixture(page))) == ["task0", "task1", "task3", "task5", "task9", "task17"]
    strange = "unlike what was learned: 99 % of known texts are nearer to a task"
    assert page.locator("#auto .hint").inner_text() == f"and 14 tasks with smaller weights · {strange}"
    page.locator("#auto .mixture summary").click()
    assert shown(page.locator("#auto .mixture details .bars")) == {"one": "1.50", "two": "−0.50"}


def test_three_answers_stream_in(page: Page, served: Get, slowly: Callable[[Served], None]) -> None:
    endpoint = served("llama")
    slowly(endpoint)
    errors = recorded(opened(page, endpoint))
    page.fill("#text", ANIMAL)
    page.select_option("#pinned-choice", "colour.0@1")
    seen: list[str] = []
    page.expose_function("note", lambda text: seen.append(text))
    page.locator("#base .text").evaluate(
        "text => new MutationObserver(() => note(text.textContent)).observe(text, {characterData: true, subtree: true})"
    )
    send(page, ANIMAL, max_tokens=12)
    expect(page.locator("#stop")).to_be_enabled()
    expect_state(page, "done", *CARDS)
    expect(page.locator("#stop")).to_be_disabled()
    for card, model in zip(CARDS, ("auto", "base", "colour.0@1"), strict=True):
        body = {"model": model, "messages": [{"role": "user", "content": ANIMAL}], "max_tokens": 12}
        answer = endpoint.ask("/v1/chat/completions", body)[1]
        text = answer["choices"][0]["message"]["content"]
        assert answer_text(page, card) == text
        figures = page.locator(f"#{card} .figures").inner_text()
        count = answer["usage"]["completion_tokens"]
        assert f"{count} token{'s' * (count != 1)}" in figures and " in all" in figures
        assert ("first after" in figures) == bool(text)
        assert ("cut at the limit of tokens" in figures) == (answer["choices"][0]["finish_reason"] == "length")
    longer = [text for text in seen if text]
    assert len(set(longer)) > 2, "the answer came in one piece"
    assert all(after.startswith(before) for before, after in pairwise(longer))
    assert shown(mixture(page, "pinned")) == {"colour": "1.00"} and shown(mixture(page, "base")) == {}
    assert errors == []


def test_an_encoder_answers_with_labels(page: Page, served: Get) -> None:
    endpoint = served("bert")
    opened(page, endpoint)
    expect_footer(page, "/v1/classify")
    assert not page.locator("#max_tokens").is_visible(), "nothing is generated here"
    page.fill("#text", ANIMAL)
    page.select_option("#pinned-choice", "colour")
    send(page, ANIMAL)
    expect_state(page, "done", "auto", "pinned")
    for card, model in (("auto", "auto"), ("pinned", "colour")):
        result = endpoint.ask("/v1/classify", {"input": ANIMAL, "model": model})[1]["data"][0]
        assert page.locator(f"#{card} .label").inner_text() == result["label"]
        bars = shown(page.locator(f"#{card} .answer > .bars"))
        assert bars == {label: f"{chance:.2f}" for label, chance in result["scores"].items()}
    assert not page.locator("#base").is_visible(), "an encoder's bare backbone has no label head: it cannot answer"
    assert page.locator("#cards").get_attribute("data-count") == "2"


def expect_footer(page: Page, path: str) -> None:
    """The footer names what this endpoint answers."""
    footer = page.locator("body > footer")
    expect(footer).to_contain_text(f"POST {path}")
    assert footer.inner_text().count("/v1/") == 2, "its own path, and that of mixtures"


def test_settings_and_pins_travel(page: Page, served: Get) -> None:
    opened(page, served("llama"))
    page.locator("#settings summary").click()
    page.select_option("#pin", "1")
    page.select_option("#task", "colour")
    page.uncheck("#mix")
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if "chat" in request.url else None)
    send(page, COLOUR, max_tokens=3, temperature=0.5, seed=7)
    expect_state(page, "done", *CARDS)
    assert {body["model"] for body in bodies} == {"auto", "base", "colour"}
    for body in bodies:
        assert (body["max_tokens"], body["temperature"], body["seed"], body["stream"]) == (3, 0.5, 7, True)
        assert body["raycl"]["snapshot"] == 1
    assert next(body["raycl"] for body in bodies if body["model"] == "auto") == {
        "snapshot": 1,
        "mix": False,
        "task": "colour",
    }
    page.select_option("#pin", "1")
    page.select_option("#pinned-choice", "animal")
    send(page, COLOUR)
    expect_state(page, "failed", "pinned")  # snapshot 1 had not learned it
    expect(page.locator("#pinned .note")).to_have_text(re.compile(r"^model 'animal' does not exist: expected auto"))


def test_errors_show_the_servers_message(page: Page, served: Get) -> None:
    opened(page, served("llama"))
    send(page, COLOUR, max_tokens=9999)
    expect_state(page, "failed", *CARDS)
    sentence = "max_tokens is 9999: this endpoint allows at most 512"
    assert [page.locator(f"#{card} .note").inner_text() for card in CARDS] == [sentence] * 3
    send(page, COLOUR, max_tokens=2)
    expect_state(page, "done", *CARDS)
    assert page.locator("#base .note").inner_text() == "" and answer_text(page, "base"), "the old error must go"


def test_examples_of_the_served_tasks_stand_where_no_text_is(page: Page, served: Get) -> None:
    opened(page, served("bert"))
    tasks = served("bert").ask("/v1/tasks")[1]["data"]
    assert [task["name"] for task in tasks] == ["colour", "animal"] and all(len(t["examples"]) == 2 for t in tasks)
    expect(page.locator("#examples h3")).to_have_text(["colour", "animal"])
    expect(page.locator("#examples .hint").first).to_have_text(" · ".join(tasks[0]["labels"]))
    assert not page.locator("#cards").is_visible()
    page.locator("#examples button").last.click()
    assert page.input_value("#text") == tasks[1]["examples"][1]
    assert not page.locator("#empty").is_visible()
    expect(page.locator("#auto .mixture .value").last).not_to_have_text("0.00")
    page.fill("#text", "")
    expect(page.locator("#empty")).to_be_visible()


def test_examples_are_data_and_not_shown_to_others(complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n")
    keys = {"keys_file": str(tmp_path / "keys")}
    uri, bearer = complete("bert", "slm", "torch").storage.sub("bank").uri, {"Authorization": "Bearer one"}
    for settings, count in (({}, 0), ({"examples": 1}, 1)):
        with serving(uri, auth=keys, **settings) as endpoint:
            tasks = endpoint.ask("/v1/tasks", **bearer)[1]["data"]
            assert [len(task["examples"]) for task in tasks] == [count, count]


def test_hostile_examples_stay_text(page: Page, served: Get) -> None:
    task = {"name": HOSTILE, "labels": [HOSTILE], "definition": "", "examples": [HOSTILE]}
    page.route("**/v1/tasks", lambda route: route.fulfill(json={"data": [task]}))
    opened(page, served("bert"))
    expect(page.locator("#examples button")).to_have_text(HOSTILE)
    assert page.locator("main img, main script").count() == 0 and page.title() == "raycl playground"


def test_the_out_of_distribution_score_of_an_answer(page: Page, served: Get) -> None:
    opened(page, served("llama"))
    send(page, COLOUR, max_tokens=2)
    expect_state(page, "done", *CARDS)
    how = served("llama").ask("/v1/route", {"input": COLOUR})[1]["data"][0]["raycl"]
    shown_score = "none" if how["ood_score"] is None else f"{how['ood_score']:.2f}"
    expect(page.locator("#auto .ood b")).to_have_text(shown_score)
    assert not page.locator("#pinned .ood").is_visible(), "a request that names its adapters has no score"
    page.route("**/v1/route", lambda route: route.fulfill(json={"data": [{"raycl": {**how, "ood_score": 0.973}}]}))
    page.fill("#text", ANIMAL)
    expect(page.locator("#auto .ood b")).to_have_text("0.97")
    expect(page.locator("#auto .ood")).to_have_class(re.compile("high"))


def test_a_text_of_no_task_is_said_to_be_one(page: Page, served: Get) -> None:
    how: dict[str, Any] = {"tasks": {"colour": 1.0}, "ood_score": 1.0}
    how |= {"unknown": True, "ood_distance": 312.4, "ood_threshold": 204.6}
    page.route("**/v1/route", lambda route: route.fulfill(json={"data": [{"raycl": how}]}))
    opened(page, served("llama"))
    cases: list[tuple[str, dict[str, float], str]] = [
        (ANIMAL, {"one": 1.0}, ""),
        (COLOUR, {}, ", so the bare model answers"),
    ]
    for text, adapters, end in cases:
        how["adapters"] = adapters
        page.fill("#text", text)
        said = f"of no learned task: distance 312, known texts lie below 205{end}"
        expect(page.locator("#auto .hint")).to_have_text(said)


def requested(line: str) -> Any:
    """Return the answer to the request of a `curl` line; a shell takes it apart, so curl need not be installed."""
    script = f"curl() {{ printf '%s\\0' \"$@\"; }}; {line}"
    shell = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    address, _, header, flag, body, _ = shell.stdout.decode().split("\0")
    assert flag == "-d"
    request = urllib.request.Request(address, body.encode(), dict([header.split(": ")]))
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_curl_line_sends_the_same_request(page: Page, served: Get, kind: str) -> None:
    opened(page, served(kind))
    text = f"{ANIMAL} 'quoted' $HOME \\ `date`"
    page.fill("#text", text)
    assert not page.locator("#auto .request").is_visible(), "there is no request yet"
    send(page, text)
    expect_state(page, "done", "auto")
    page.locator("#auto .request summary").click()
    line = page.locator("#auto .request pre").inner_text()
    answered = requested(line)
    if kind == "bert":
        assert answered["data"][0]["label"] == page.locator("#auto .label").inner_text()
    else:
        assert answered["choices"][0]["message"]["content"] == answer_text(page, "auto")
    assert json.dumps(text) in line.replace("'\\''", "'")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#auto .request button").click()
    expect(page.locator("#auto .request button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == line


# ---- stopping ------------------------------------------------------------------------------------------------------


def test_stop_ends_the_answers_in_page_and_server(page: Page, served: Get, slowly: Callable[[Served], None]) -> None:
    endpoint = served("llama")
    slowly(endpoint)
    for by in ("button", "escape", "asking again"):
        opened(page, endpoint)
        _stop(page, endpoint, by)


def _stop(page: Page, endpoint: Served, by: str) -> None:
    send(page, ANIMAL, max_tokens=400)
    expect(page.locator("#base .text")).not_to_be_empty()
    expect_state(page, "answering", "base")
    if by == "asking again":
        send(page, COLOUR, max_tokens=2)
        expect_state(page, "done", *CARDS)
        assert len(answer_text(page, "base").split()) <= 2, "the old answer wrote into the new one"
    else:
        page.click("#stop") if by == "button" else page.press("#text", "Escape")
        expect_state(page, "stopped", "base")
        text = answer_text(page, "base")
        assert text, "the answer so far must stay"
        expect(page.locator("#stop")).to_be_disabled()
    deadline = time.monotonic() + 10
    while endpoint.service.engine.pending:
        assert time.monotonic() < deadline, "the server continues although the client has disconnected"
        time.sleep(0.05)
    if by != "asking again":
        assert answer_text(page, "base") == text


# ---- keys, snapshots -----------------------------------------------------------------------------------------------


def test_a_key_is_requested_and_kept_in_the_tab(page: Page, complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sésame\nadmin:other\n")
    uri = complete("bert", "slm", "torch").storage.sub("bank").uri
    hurry(page)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with serving(uri, auth={"keys_file": str(tmp_path / "keys")}) as endpoint:
        page.goto(endpoint.url + "/")
        expect(page.locator("#key-form")).to_be_visible()
        sentence = "an API key is needed: send 'Authorization: Bearer KEY'"
        expect(page.locator("#key-why")).to_have_text(sentence)
        page.fill("#key", "wrong")
        with page.expect_response("**/v1/snapshots") as refused:
            page.press("#key", "Enter")
        assert refused.value.status == 401
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key", "sésame")
        page.press("#key", "Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#snapshot")).to_have_text("snapshot 2")
        send(page, ANIMAL)
        expect_state(page, "done", "auto", "pinned")
        assert sum(url.endswith("/v1/snapshots") for url in asked) < 10, "a refused key is asked about again and again"
        opened(page, endpoint)  # reloaded: the key is still there
        assert not page.locator("#key-form").is_visible()
        assert page.evaluate("() => JSON.stringify(localStorage)").find("same") < 0, "keys must not outlive the tab"


def test_a_new_snapshot_is_shown_without_a_reload(page: Page, complete: Complete, tmp_path: Path) -> None:
    bank = complete("bert", "slm", "torch").copy(tmp_path).sub("bank")
    hurry(page)
    with serving(bank.uri) as endpoint:
        opened(page, endpoint)
        page.fill("#text", ANIMAL)
        expect(mixture(page).locator("li")).to_have_count(2)
        expect(mixture(page).locator(".value").last).not_to_have_text("0.00")
        assert endpoint.ask("/admin/activate", {"snapshot": 1})[0] == 200
        expect(page.locator("#snapshot")).to_have_text("snapshot 1")
        expect(mixture(page).locator(".name")).to_have_text(["colour"])
        expect(mixture(page).locator(".value")).to_have_text(["1.00"])
        assert page.locator("#pinned-choice option").first.inner_text() == "colour"


def test_switching_snapshots_and_the_way_back(page: Page, complete: Complete, tmp_path: Path) -> None:
    bank = complete("bert", "slm", "torch").copy(tmp_path).sub("bank")
    with serving(bank.uri) as endpoint:
        opened(page, endpoint)
        page.locator("#switch > summary").click()
        assert page.locator("#activate-number option").all_inner_texts() == ["1"] and page.locator("#back").is_hidden()
        page.locator("#activate").click()
        expect(page.locator("#activate")).to_have_text("Activate snapshot 1 for everyone?")
        assert endpoint.ask("/v1/snapshots")[1]["active"] == 2, "one click must not switch"
        page.locator("#activate").click()
        expect(page.locator("#snapshot")).to_have_text("snapshot 1")
        expect(page.locator("#switch-note")).to_contain_text("Snapshot 1 answers now")
        expect(page.locator("#decisions li").first).to_contain_text("snapshot 1 · requested")
        page.locator("#back").click()
        expect(page.locator("#snapshot")).to_have_text("snapshot 2")
        assert endpoint.ask("/v1/snapshots")[1]["active"] == 2
        expect(page.locator("#back")).to_have_text("Back to snapshot 1")


def test_switching_needs_an_admin_key(page: Page, complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("plain\nadmin:chief\n")
    bank = complete("bert", "slm", "torch").copy(tmp_path / "run").sub("bank")
    with serving(bank.uri, auth={"keys_file": str(tmp_path / "keys")}) as endpoint:
        page.goto(endpoint.url + "/")
        page.fill("#key", "plain")
        page.press("#key", "Enter")
        expect(page.locator("#snapshot")).to_have_text("snapshot 2")
        page.locator("#switch > summary").click()
        page.locator("#activate").click()
        page.locator("#activate").click()
        expect(page.locator("#key-why")).to_contain_text("an admin key is needed")
        assert endpoint.service.snapshot_manager.active.snapshot.number == 2
        page.fill("#key", "chief")
        page.press("#key", "Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        page.locator("#activate").click()
        page.locator("#activate").click()
        expect(page.locator("#snapshot")).to_have_text("snapshot 1")


def test_the_gates_last_judgement(page: Page, complete: Complete, tmp_path: Path) -> None:
    passed, rejected = "passed the gate: no task falls", f"snapshot 2 was rejected: {HOSTILE} falls by 9.0 points"
    gate_source = Path(gate_actor.__file__).read_text()
    assert passed.partition("no task")[0] in gate_source, "the page knows a passed gate by its words"
    bank = complete("bert", "slm", "torch").copy(tmp_path).sub("bank")
    decisions = Activations(Bank(bank))
    decisions.add(1, passed)
    hurry(page)
    with serving(bank.uri, follow={"enabled": False}) as endpoint:
        opened(page, endpoint)
        expect(page.locator("#gate")).to_contain_text(f"snapshot 1 {passed}")
        decisions.add(1, rejected, rejected=2)
        expect(page.locator("#gate")).to_contain_text(rejected)
        expect(page.locator("#gate")).to_have_class("rejected")
        assert page.locator("main img, main script").count() == 0


def test_a_snapshot_that_does_not_answer_is_a_notice(page: Page, served: Get) -> None:
    rejected = "snapshot 3 was rejected: colour falls by 9.0 points, allowed are 1"
    summary = {"active": 2, "tasks": ["colour"], "kind": "decoder", "data": [2, 3], "problem": rejected}
    page.route("**/v1/snapshots", lambda route: route.fulfill(json={**summary, "decisions": []}))
    page.goto(served("llama").url + "/")
    expect(page.locator("#problem")).to_have_text(f"Snapshot 2 still answers: {rejected}")


# ---- how it looks --------------------------------------------------------------------------------------------------


def test_pages_can_be_read(page: Page, served: Get) -> None:
    opened(page, served("llama"))
    expect(page.locator("#examples li")).to_have_count(2)
    for look in looks(page):
        assert faults(page) == [], f"without a text, {look}"
    page.locator("#settings > summary").click()
    for look in looks(page, "light"):
        assert cut_choices(page, "#settings") == [], look
    page.locator("#settings > summary").click()
    send(page, COLOUR, max_tokens=2)
    expect_state(page, "done", *CARDS)
    for summary in ("#auto .request > summary", "#switch > summary", "#auto .mixture summary"):
        page.locator(summary).click()
    line = page.locator("#auto .request pre")
    for look in looks(page):
        assert faults(page) == [], f"with answers, {look}"
        assert line.evaluate("line => line.scrollWidth <= line.clientWidth"), f"the curl line is cut off, {look}"
    page.goto(served("llama").url + "/playground/metrics.html")
    expect(page.locator("#weights .line")).to_have_count(2)
    for look in looks(page):
        assert faults(page) == [], f"metrics, {look}"


# ---- metrics -------------------------------------------------------------------------------------------------------


def test_metrics_without_prometheus(page: Page, complete: Complete) -> None:
    with serving(complete("bert", "slm", "torch").storage.sub("bank").uri, keep_unsure=2) as endpoint:
        errors = recorded(page)
        page.goto(f"{endpoint.url}/playground/metrics.html")
        expect(page.locator("#times")).to_contain_text("no answer yet")
        for text in (COLOUR, ANIMAL, ANIMAL):
            assert endpoint.ask("/v1/classify", {"input": text})[0] == 200
        assert endpoint.ask("/v1/route", {"input": COLOUR})[0] == 200
        assert endpoint.ask("/v1/classify", {"input": COLOUR, "model": "nothing"})[0] == 404
        metrics = endpoint.ask("/v1/metrics")[1]
        assert sum(one["answers"] for one in metrics["data"]) == 3, "a mixture alone is no answer"
        assert sum(sum(one["total_ms"]) for one in metrics["data"]) == 3
        statuses = [one["statuses"] for one in metrics["data"]]
        assert sum(one.get("2", 0) for one in statuses) == 3 and sum(one.get("4", 0) for one in statuses) == 1
        page.reload()
        totals = page.locator("#totals div")
        expect(totals.filter(has_text="Answers").locator("dd")).to_have_text("3")
        expect(totals.filter(has_text="Refused").locator("dd")).to_have_text("1")
        expect(page.locator("#weights-title + .legend li")).to_have_text(["animal", "colour"])
        page.select_option("#span", "600")
        expect(page.locator("#requests .line").first).to_have_attribute("data-points", "60")
        expect(page.locator("#drift-note")).to_contain_text("A difference in bold is larger than chance")
        expect(page.locator("#drift tr")).to_have_count(3)
        expect(page.locator("#drift td:nth-child(2)")).to_have_text(["1 (33 %)", "2 (67 %)"])
        drift = endpoint.ask("/v1/drift")[1]
        assert {task: counts["texts"] for task, counts in drift["served"].items()} == {"colour": 1, "animal": 2}
        trained = drift["training"]["data"]
        assert all(counts["texts"] and sum(counts["labels"].values()) for counts in trained.values())
        unsure = [one["text"] for one in endpoint.ask("/admin/unsure")[1]["data"]]
        assert set(unsure) <= {COLOUR, ANIMAL} and unsure
        expect(page.locator("#unsure li span")).to_have_text(unsure)
        with page.expect_download() as saved:
            page.locator("#unsure-file").click()
        rows = [json.loads(row) for row in saved.value.path().read_text().splitlines()]
        assert rows == [{"text": text, "label": ""} for text in unsure]
        for look in looks(page):
            assert faults(page) == [], f"metrics with drift, {look}"
            assert broken_words(page, "#drift") == [], f"metrics with drift, {look}"
        assert errors == []


def test_labels_of_long_times_are_whole(page: Page, served: Get) -> None:
    page.goto(f"{served('bert').url}/playground/metrics.html")
    cut = page.evaluate("""async () => {
      const { plot } = await import("./plot.js");
      const box = document.getElementById("times");
      plot(box, [{ name: "half within", values: [500, 12000] }], [0, 1], { unit: " ms", empty: "" });
      const left = box.querySelector("svg").getBoundingClientRect().left;
      const labels = [...box.querySelectorAll("text")].filter((text) => text.textContent.endsWith("ms"));
      return [labels.length, labels.filter((text) => text.getBoundingClientRect().left < left).length];
    }""")
    assert cut[0] > 1 and cut[1] == 0


def test_metrics_of_several_replicas_are_summed(page: Page, served: Get) -> None:
    start = int(time.time()) // 10 * 10 - 20
    classes, scores = [0, 0, 4] + [0] * 13, [0] * 9 + [2]
    one = {"start": start, "statuses": {"2": 4}, "answers": 4, "tokens": 8, "weights": {HOSTILE: 3.0, "colour": -1.0}}
    one |= {"total_ms": classes, "first_ms": classes, "queue_ms": classes, "ood": scores, "ood_sum": 1.9}
    replies = iter(["one:1", "two:2"])
    bounds = served("bert").ask("/v1/metrics")[1]["bounds_ms"]

    def answer(route: Route) -> None:
        tree = {"replica": next(replies), "now": time.time(), "interval_s": 10, "bounds_ms": bounds, "data": [one]}
        route.fulfill(json=tree)

    page.route("**/v1/metrics", answer)
    page.route("**/v1/drift", lambda route: route.fulfill(status=503, json={"error": {"message": "not now"}}))
    page.clock.install()
    page.goto(f"{served('bert').url}/playground/metrics.html")
    expect(page.locator("#state")).to_have_text("1 replica")
    page.clock.run_for(5000)
    expect(page.locator("#state")).to_have_text("2 replicas")
    expect(page.locator("#totals dd").first).to_have_text("8")
    expect(page.locator("#drift-note")).to_have_text("not now")
    assert page.locator("#totals dd").all_inner_texts()[4:] == ["5.0 ms", "5.0 ms", "0.95"]
    expect(page.locator("#weights-title + .legend li").first).to_have_text(HOSTILE)
    dots = page.locator("#weights circle").evaluate_all("all => all.map(dot => dot.cy.baseVal.value)")
    floor = page.locator("#weights svg").evaluate("svg => svg.viewBox.baseVal.height - 22")
    assert len(dots) == 2 and 0 < dots[0] < dots[1] < floor, "a weight below 0 is drawn inside the picture"
    assert page.locator("main img, main script").count() == 0 and page.title() == "raycl metrics"


# ---- what others wrote ---------------------------------------------------------------------------------------------


def test_names_and_labels_stay_text(page: Page, complete: Complete, tmp_path: Path) -> None:
    bank = Bank(complete("bert", "lora", "torch").copy(tmp_path).sub("bank"))
    last = bank.newest()
    assert last is not None
    task, label = f"task {HOSTILE}", f"label {HOSTILE}"
    (entry,) = last.adapters
    hostile = entry.model_copy(update={"tasks": (task, *entry.tasks[1:]), "labels": (label, *entry.labels[1:])})
    summary = (last.tasks[0].model_copy(update={"name": task}), *last.tasks[1:])
    entries = [(hostile, last.layouts[entry.layout])]
    on_main(bank, bank.snapshot(NewSnapshot(entries, last.backbone, last.router, summary, provenance=last.provenance)))
    with serving(bank.storage.uri) as endpoint:
        errors = recorded(opened(page, endpoint))
        send(page, HOSTILE)
        expect_state(page, "done", "auto", "pinned")
        assert set(shown(mixture(page))) == {task, "animal"}
        assert label in shown(page.locator("#auto .answer > .bars"))
        assert page.locator("#recent button").first.inner_text() == HOSTILE
        assert task in page.locator("#task option").all_text_contents()
        page.reload()
        expect(page.locator("#recent button").first).to_have_text(HOSTILE)
        assert page.locator("main img, main script").count() == 0 and page.title() == "raycl playground"
        assert errors == []
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390, "a long name must not widen the page"


def test_answers_and_errors_stay_text_however_the_stream_is_cut(page: Page, served: Get) -> None:
    opened(page, served("llama"))
    chunks = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in (HOSTILE[:9], HOSTILE[9:], " – 你好")]
    stream = "".join(f": a comment\r\n\r\ndata: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n" for chunk in chunks)

    def answer(route: Route) -> None:
        if route.request.post_data_json["model"] == "auto":
            route.fulfill(body=stream + "data: [DONE]\n\n", content_type="text/event-stream")
        elif route.request.post_data_json["model"] == "base":
            failed = {"error": {"message": HOSTILE, "type": "server_error"}}
            route.fulfill(body=stream + f"data: {json.dumps(failed)}\n\n", content_type="text/event-stream")
        else:
            route.fulfill(body=stream[:-30], content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    send(page, COLOUR)
    expect_state(page, "done", "auto")
    expect_state(page, "failed", "base", "pinned")
    assert answer_text(page, "auto") == answer_text(page, "base") == f"{HOSTILE} – 你好"
    assert page.locator("#base .note").inner_text() == HOSTILE
    assert page.locator("#pinned .note").inner_text() == "The answer ended before it was finished."
    assert page.locator("main img, main script").count() == 0 and page.title() == "raycl playground"


def test_recent_texts_are_kept_in_the_browser(page: Page, served: Get) -> None:
    opened(page, served("bert"))
    for text in [*(f"{ANIMAL} {'very ' * number}" for number in range(6)), ANIMAL]:
        send(page, text)
        expect_state(page, "done", "auto", "pinned")
    page.reload()
    chips = page.locator("#recent button")
    expect(chips).to_have_count(6)  # five texts, and one to forget them
    chips.nth(0).click()
    assert page.input_value("#text") == ANIMAL
    expect(mixture(page).locator(".value").last).not_to_have_text("0.00")
    chips.last.click()
    expect(chips).to_have_count(0)
    assert page.evaluate("() => localStorage.length") == 0


def test_an_unreachable_endpoint_is_reported(page: Page, complete: Complete) -> None:
    with serving(complete("bert", "slm", "torch").storage.sub("bank").uri) as endpoint:
        opened(page, endpoint)
        assert not page.locator("#problem").is_visible()
    expect(page.locator("#problem")).to_have_text("The endpoint cannot be reached: is it still running?")
    send(page, COLOUR)
    expect_state(page, "failed", "auto", "pinned")  # an encoder's bare backbone has no label head and is not asked
