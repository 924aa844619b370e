"""`raycl status --web`: what the server answers in each state of a run, and the page in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from at_step import age_heartbeat, learn, started
from chromium import recorded
from fork_server import Call, ForkServer
from local_endpoint import on_a_port
from page_looks import faults, looks
from playwright.sync_api import Page, expect
from tiny import Complete, Lab, matrix, work

from raycl.cli.main import main
from raycl.cli.runs.status import report_of
from raycl.errors import ResumeError, RunError
from raycl.launch import prepared_run
from raycl.launch.page.progress import POINTS
from raycl.launch.page.server import PageServer, RunReader, make_app
from raycl.storage import Storage
from raycl.training.records.progress import StepResult, Trace, read_trace
from raycl.types import Phase

TASKS = ["colour", "animal"]


@contextmanager
def halted(complete: Complete, folder: Path | str) -> Iterator[tuple[Storage, Callable[[], None]]]:
    """A run that waits after step 3 of its second task, and what lets it go on to its end."""
    config, storage = started(complete("bert", "lora", "torch"), folder)
    there, on = threading.Event(), threading.Event()

    def act() -> None:
        there.set()
        on.wait(60)

    thread = threading.Thread(target=learn, args=(config, storage, 7, act), daemon=True)

    def finish() -> None:
        on.set()
        thread.join(60)

    thread.start()
    try:
        assert there.wait(60), "the run did not come to its seventh step"
        until(lambda: storage.read_json("heartbeat.json").get("step") == 3)
        yield storage, finish
    finally:
        finish()


def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def of_tasks(result: dict[str, Any], key: str) -> list[Any]:
    return [task[key] for task in result["tasks"]]


# ---- what is answered ----------------------------------------------------------------------------------------------


def test_progress_of_a_waiting_a_running_a_crashed_and_a_finished_run(complete: Complete, tmp_path: Path) -> None:
    _, waits = started(complete("bert", "lora", "torch"), tmp_path / "waits")
    waiting = RunReader(waits.uri).progress()
    assert (waiting["state"], waiting["tasks"], waiting["nodes"], waiting["left"]) == ("waiting", [], [], None)
    assert waiting["title"] == "lora, bert" and waiting["problem"] is None
    with halted(complete, tmp_path) as (storage, finish):
        reader = RunReader(storage.uri, fresh_s=0.0)
        running = reader.progress()
        assert running["title"] == f"lora on {storage.read_json('results.json')['stream']['name']}, bert, seed 42"
        assert running["state"] == "running" and running["command"] == ""
        assert of_tasks(running, "name") == TASKS and of_tasks(running, "state") == ["done", "current"]
        assert of_tasks(running, "step") == [4, 3] and of_tasks(running, "steps") == [4, 4]
        assert of_tasks(running, "loss")[1] == running["loss"]["points"][-1][1]
        assert running["nodes"][0]["processes"] == [os.getpid()] and running["workers"] == 1
        steps = read_trace(storage)
        points = [[4 * step["phase"] + step["step"], step["loss"]] for step in steps]
        assert running["loss"] == {"points": points, "recorded": 7, "steps": 8, "starts": [0, 4]}
        assert running["matrix"]["values"] == matrix(storage) and running["matrix"]["tasks"] == TASKS
        (first, *_), *_ = matrix(storage)
        assert running["matrix"]["metrics"] == {"AP": first}
        pace = sum(step["seconds"] for step in steps[4:]) / 3
        assert 0 <= running["left"]["training_s"] <= pace
        record = storage.read_json("results.json")["phase_times"][0]
        assert 0 < running["left"]["evaluation_s"] == pytest.approx(2 * record["eval_s"])
        assert running["log"] == {"name": "", "lines": []}  # a run's own log is written by Ray's workers
        shutil.copytree(storage.uri, tmp_path / "killed")
        finish()
        finished = reader.progress()
    results = storage.read_json("results.json")
    assert finished["state"] == "finished" and finished["command"] == f"raycl report {storage.uri}"
    assert of_tasks(finished, "state") == ["done", "done"] and finished["left"] is None
    assert of_tasks(finished, "eval_s") == [times["eval_s"] for times in results["phase_times"]]
    assert finished["matrix"]["values"] == matrix(storage)
    shown = {"AP": "ap", "F.Ra": "f_ra", "BWT": "bwt"}
    assert finished["matrix"]["metrics"] == {title: results["metrics"][name] for title, name in shown.items()}
    assert finished["loss"]["points"] == [[4 * s["phase"] + s["step"], s["loss"]] for s in read_trace(storage)]
    assert {**finished, "time": 0} == {**RunReader(storage.uri).progress(), "time": 0}, "once, or as it grew: the same"

    age_heartbeat(Storage.at(tmp_path / "killed"))
    crashed = RunReader(str(tmp_path / "killed")).progress()
    assert crashed["state"] == "crashed" and crashed["command"].startswith("raycl train --resume ")
    assert of_tasks(crashed, "state") == ["done", "current"] and of_tasks(crashed, "step") == [4, 3]
    assert crashed["left"] is None and "continues after step 2 of task 2" in crashed["details"]["from"]


def test_a_failed_run_and_a_loss_that_json_does_not_have(lab: Lab, tmp_path: Path) -> None:
    output = {"dir": str(tmp_path), "name": "mine"}
    config = lab.config("bert", output=output, train={"learning_rate": 1e30, "max_grad_norm": 0})
    prepared = prepared_run.prepare(config)
    with pytest.raises(RunError):
        work(prepared)
    trace, colour = Trace(prepared.storage, 1), Phase(0, "colour", ())
    trace.add(colour, 1, StepResult(1.5, 1.0, 0.1, 9), 0.1)
    trace.add(colour, 2, StepResult(float("nan"), 1.0, 0.1, 9), 0.1)
    trace.flush()
    app = make_app(RunReader(prepared.storage.uri, fresh_s=0.0), True)
    with on_a_port(app) as port, urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json") as answer:
        failed = json.load(answer)
    assert failed["state"] == "failed" and "lower train.learning_rate" in failed["message"]
    assert failed["loss"]["points"] == [[1, 1.5], [2, None]] and of_tasks(failed, "state") == ["current", "waiting"]
    assert failed["log"]["name"] == "attempt-0001.txt" and "colour" in failed["log"]["lines"][0]


def test_a_long_curve_is_thinned(complete: Complete, tmp_path: Path) -> None:
    _, storage = started(complete("bert", "lora", "torch"), tmp_path)
    trace = Trace(storage, 1)
    for phase, task in enumerate(TASKS):
        for step in range(1, 3001):
            trace.add(Phase(phase, task, ()), step, StepResult(1 / step, 1.0, 0.1, 9), 0.1)
    trace.flush()
    loss = RunReader(storage.uri).progress()["loss"]
    steps = [step for step, _ in loss["points"]]
    assert loss["recorded"] == loss["steps"] == 6000 and POINTS - 10 < len(steps) <= POINTS + 2
    assert steps[0] == 1 and {3000, 6000} <= set(steps) and steps == sorted(steps)
    assert all(value == 1 / ((step - 1) % 3000 + 1) for step, value in loss["points"])


def test_a_run_on_an_object_store(complete: Complete, s3_uri: Callable[[str], str]) -> None:
    with halted(complete, s3_uri("")) as (storage, finish):
        reader = RunReader(storage.address, fresh_s=0.0)
        assert of_tasks(reader.progress(), "step") == [4, 3]
        finish()
        progress = reader.progress()
    assert progress["state"] == "finished" and progress["matrix"]["values"] == matrix(storage)
    assert progress["loss"]["points"] == [[4 * s["phase"] + s["step"], s["loss"]] for s in read_trace(storage)]


def test_only_this_machine_is_answered(complete: Complete, tmp_path: Path) -> None:
    _, storage = started(complete("bert", "lora", "torch"), tmp_path)
    for local_only, status in ((True, 403), (False, 200)):
        with on_a_port(make_app(RunReader(storage.uri, fresh_s=0.0), local_only)) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/status.json", headers={"Host": "example.org"})
            assert connection.getresponse().status == status
            connection.close()


# ---- the command ---------------------------------------------------------------------------------------------------


def test_no_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path / "none"), "--web"]) == ResumeError.exit_status
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "none' holds no run (no config.yaml)" in err


@pytest.mark.parametrize("words", [["--port", "1"], ["--open"], ["--host", "::1"], ["--web", "--port", "70000"]])
def test_options_of_the_page_without_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "run", *words])
    assert ended.value.code == 2 and "--port" in capsys.readouterr().err


def serve_until_ctrl_c(folder: str, log: Path, answer: Path) -> None:
    """The command as a user has it; once it answers, the user presses Ctrl-C."""

    def user() -> None:
        until(lambda: bool(re.search(r"http://\S+", log.read_text())))
        (url,) = re.findall(r"http://\S+", log.read_text())
        with urllib.request.urlopen(f"{url}/status.json", timeout=20) as response:
            answer.write_bytes(response.read())
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=user, daemon=True).start()
    status = main(["status", folder, "--web", "--port", "0"])
    assert status == 0, f"it ended with {status}"


def test_the_command_prints_its_address_and_ends_by_ctrl_c(
    complete: Complete, tmp_path: Path, fork_server: ForkServer
) -> None:
    _, storage = started(complete("bert", "lora", "torch"), tmp_path)
    log, answer = tmp_path / "log", tmp_path / "answer"
    fork_server.run([Call(f"{__name__}:serve_until_ctrl_c", (storage.uri, log, answer), log)], 60)
    assert re.fullmatch(rf"status of {storage.uri} on http://127\.0\.0\.1:\d+ \(Ctrl-C ends it\)\n", log.read_text())
    assert json.loads(answer.read_text())["state"] == "waiting"


def test_the_address_is_one_document_too(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, storage = started(complete("bert", "lora", "torch"), tmp_path)
    monkeypatch.setattr(PageServer, "run", lambda self: None)
    assert main(["status", storage.uri, "--web", "--port", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == storage.uri and re.fullmatch(r"http://127\.0\.0\.1:\d+", told["url"])


# ---- the page ------------------------------------------------------------------------------------------------------


def table(page: Page) -> list[list[str]]:
    """Return texts of the matrix's cells."""
    return [row.locator("td").all_text_contents() for row in page.locator("#matrix tbody tr").all()]


def cells(storage: Storage) -> list[list[str]]:
    """Return the same, of the run's results."""
    return [["" if value is None else f"{value:.1f}" for value in row] for row in matrix(storage)]


def test_a_page_of_many_tasks_can_be_read(page: Page, complete: Complete, tmp_path: Path) -> None:
    """Names and notes of tasks and the log are not clipped; the matrix scrolls beside the names of its rows."""
    _, storage = started(complete("bert", "lora", "torch"), tmp_path)
    names = [f"a task with a long name {number}" for number in range(8)]
    task = {
        "state": "done",
        "steps": 12500,
        "step": 12500,
        "train_s": 7265.0,
        "eval_s": 605.0,
        "loss": 0.5,
        "activity": "",
    }
    cells = [[90.0 if column <= row else None for column in range(8)] for row in range(8)]
    matrix = {"tasks": names, "rows": [f"after {name}" for name in names], "values": cells, "metrics": {"AP": 90.0}}
    log = {"name": "attempt-0001.txt", "lines": [f"{'a long line of the log ' * 12}{number}" for number in range(5)]}
    loss = {
        "points": [[step, 1 / step] for step in range(1, 80)],
        "recorded": 79,
        "steps": 80,
        "starts": list(range(0, 80, 10)),
    }
    tree = RunReader(storage.uri, fresh_s=0.0).progress()
    tree |= {"tasks": [{**task, "name": name} for name in names], "matrix": matrix, "log": log, "loss": loss}
    page.route("**/status.json", lambda route: route.fulfill(json=tree))
    with on_a_port(make_app(RunReader(storage.uri, fresh_s=0.0), True)) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#matrix tbody tr")).to_have_count(8)
        for look in looks(page):
            assert faults(page) == [], look
            for part in ("#tasks", "#log", "#facts", "#chart"):
                clipped = page.locator(part).evaluate("part => part.scrollWidth > part.clientWidth")
                assert not clipped, f"{part} is clipped, {look}"
            notes = page.locator("#tasks .note").evaluate_all("all => all.map(n => n.scrollWidth <= n.clientWidth)")
            assert len(notes) == 8 and all(notes), look
            page.locator("#matrix").evaluate("box => { box.scrollLeft = 9999; }")
            (head, box) = (page.locator(where).first.bounding_box() for where in ("#matrix tbody th", "#matrix"))
            assert head and box and head["x"] >= box["x"], f"a row's name must stay while its cells scroll, {look}"


def test_the_page_follows_a_run_to_its_end(page: Page, complete: Complete, tmp_path: Path) -> None:
    errors, requested = recorded(page), []
    page.on("request", lambda request: requested.append(request.url))
    with (
        halted(complete, tmp_path) as (storage, finish),
        on_a_port(make_app(RunReader(storage.uri, fresh_s=0.0), True, lambda: report_of(storage.uri))) as port,
    ):
        with page.expect_response("**/report.html") as report:
            page.goto(f"http://127.0.0.1:{port}/report.html")
        assert report.value.headers["refresh"] == "30", "a running run's report is loaded again"
        expect(page.locator("main")).to_contain_text("unfinished, 1 of 2 phases evaluated")
        requested.clear()
        page.clock.install()  # so that the page's two seconds pass at once
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#state")).to_have_text("running")
        expect(page.locator("#tasks .name")).to_have_text(TASKS)
        expect(page.locator("#tasks .current .note")).to_have_text("step 3 of 4")
        assert page.get_by_role("progressbar", name="animal").get_attribute("aria-valuenow") == "75"
        assert page.locator("#tasks .current .track i").evaluate("bar => bar.style.width") == "75%"
        loss = read_trace(storage)[-1]["loss"]
        expect(page.locator("#loss-now")).to_have_text(f"{loss:.4f} at step 7 of 8")
        assert page.locator("#chart .curve").get_attribute("data-points") == "7"
        assert (
            page.locator("#chart svg").get_attribute("aria-label") == f"Training loss over 7 of 8 steps, now {loss:.4f}"
        )
        assert page.locator("#chart .start").count() == 1, "one task begins after the first"
        assert table(page) == cells(storage) and cells(storage)[1] == ["", ""]
        assert page.locator("[data-fact='Time left']").inner_text().startswith("about 0:0")
        assert f"(process {os.getpid()})" in page.locator("[data-fact=Workers]").inner_text()
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390

        config = Path(storage.uri, "config.yaml").rename(tmp_path / "config.yaml")
        page.clock.run_for(2000)
        expect(page.locator("#problem")).to_have_text(re.compile("The run's files cannot be read now: .* holds no run"))
        expect(page.locator("#state")).to_have_text("running")
        config.rename(f"{storage.uri}/config.yaml")
        page.clock.run_for(2000)
        expect(page.locator("#problem")).to_be_hidden()

        finish()
        page.clock.run_for(2000)
        expect(page.locator("#state")).to_have_text("finished")
        expect(page.locator("#tasks .done")).to_have_count(2)
        results = storage.read_json("results.json")["metrics"]
        shown = f"AP {results['ap']:.1f} F.Ra {results['f_ra']:.1f} BWT {results['bwt']:.1f}"
        expect(page.locator("#metrics")).to_have_text(shown)
        assert table(page) == cells(storage)
        assert page.locator("[data-fact=Next]").inner_text() == f"raycl report {storage.uri}"
        assert page.title() == "finished, 2 of 2 tasks · lora on colour-animal, bert, seed 42"
        assert errors == [] and [url for url in requested if not url.startswith(f"http://127.0.0.1:{port}/")] == []
    page.clock.run_for(2000)
    expect(page.locator("#problem")).to_have_text(re.compile("does not answer"))
