"""`--status RUN`: what a run does, how far it is and what to type, from its files alone."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from at_step import age_heartbeat, learn, started
from tiny import Complete, Lab, work

from raycl.errors import ResumeError, RunError
from raycl.launch import console, prepared_run, status
from raycl.launch.status import Status, status_of
from raycl.storage import Storage
from raycl.training.workers import stopping
from raycl.training.workers.stopping import request_stop

REPO = Path(__file__).resolve().parents[2]


def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_status_of_a_running_and_a_killed_run(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, storage = started(complete("bert", "lora", "torch"), tmp_path)
    waiting = status_of(storage.uri)
    assert waiting.state == "waiting" and waiting.details["tasks"] == "0 done"
    seen: list[Status] = []

    def look() -> None:
        until(lambda: "step 3 of 4" in status_of(storage.uri).message)
        seen.append(status_of(storage.uri))
        shutil.copytree(storage.uri, tmp_path / "killed")  # what a process leaves that is killed now

    learn(config, storage, 7, look)
    (running,) = seen
    assert running.state == "running" and running.command == ""
    assert "training in task 2 of 2, 'animal', step 3 of 4, loss " in running.message and "ago" in running.message
    assert running.details["tasks"] == "1 of 2 done: colour"
    assert f"process {os.getpid()}" in running.details["workers"] and running.details["workers"].startswith("1 on ")

    killed = tmp_path / "killed"
    age_heartbeat(Storage.at(killed))
    crashed = status_of(str(killed))
    assert crashed.state == "crashed" and "may be starting again" in crashed.message
    assert crashed.details["step"].startswith("the last one recorded is 3 of 4 of task 2, 'animal', loss ")
    assert crashed.details["from"].startswith("it continues after step 2 of task 2 (phase001-step0000002")
    assert crashed.command == f"raycl train --resume {killed}"
    assert "may be starting" not in later(killed, 3600, monkeypatch).message
    assert "1:00:0" in later(killed, 3600, monkeypatch).message

    finished = status_of(storage.uri)
    assert finished.state == "finished" and finished.command == f"raycl report {storage.uri}"
    assert finished.details["tasks"] == "2 of 2 done: colour, animal"


def later(folder: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Status:
    """Return the status as it will be then."""
    now = time.time() + seconds
    with monkeypatch.context() as patch:
        patch.setattr(status.time, "time", lambda: now)
        return status_of(str(folder))


def test_status_while_stopping_and_when_stopped(complete: Complete, tmp_path: Path) -> None:
    config, storage = started(complete("bert", "lora", "torch"), tmp_path)
    seen: list[Status] = []

    def ask() -> None:
        request_stop(storage, "mine", "Ctrl-C")
        seen.append(status_of(storage.uri))

    learn(config, storage, 7, ask)
    stopped = status_of(storage.uri)
    assert seen[0].state == "stopping" and seen[0].message.startswith("stop requested by Ctrl-C")
    assert stopped.state == "stopped" and "by Ctrl-C at 20" in stopped.message and "exit status 130" in stopped.message
    assert stopped.details["from"].startswith("it continues after step 3 of task 2")
    assert stopped.command == f"raycl train --resume {storage.uri}"
    work(prepared_run.reopen(storage.uri))
    assert status_of(storage.uri).state == "finished"


def test_status_names_the_failure(lab: Lab, tmp_path: Path) -> None:
    output = {"dir": str(tmp_path), "name": "mine"}
    config = lab.config("bert", output=output, train={"learning_rate": 1e30, "max_grad_norm": 0})
    prepared = prepared_run.prepare(config)
    with pytest.raises(RunError):
        work(prepared)
    failed = status_of(prepared.storage.uri)
    assert failed.state == "failed" and "lower train.learning_rate" in failed.message
    prepared.storage.write("heartbeat.json", b"{")  # damaged: of no use, and no reason to say nothing
    assert status_of(prepared.storage.uri).state == "failed"


def test_on_an_object_store_the_command_can_be_pasted(complete: Complete, s3_uri: Callable[[str], str]) -> None:
    done = complete("bert", "lora", "torch")
    output = done.config.output.model_copy(update={"dir": s3_uri(""), "name": "mine"})
    prepared = prepared_run.prepare(done.config.model_copy(update={"output": output}))
    status = status_of(prepared.storage.address)
    assert status.command == f"raycl train --resume '{prepared.storage.address}'"


def test_the_command_line(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = complete("bert", "lora", "torch")
    _, storage = started(done, tmp_path)
    job = runpy.run_path(str(REPO / "jobs" / "train_stream.py"))
    monkeypatch.setattr(stopping, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(console, "log_to_stderr", lambda quiet: None)

    def said(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train_stream.py", *arguments])
        return job["main"](), *capsys.readouterr()

    code, out, err = said("--status", storage.uri)
    assert code == 0 and err == ""
    assert out.splitlines()[0] == f"run       {storage.uri}" and out.splitlines()[1].startswith("state     waiting: ")
    assert out.splitlines()[-1] == f"next      raycl train --resume {storage.uri}"
    code, out, err = said("--status", str(tmp_path))
    assert code == 1 and err.startswith("error: ") and "holds no run" in err and out == ""
    with pytest.raises(SystemExit) as ended:
        said("--status", storage.uri, "train.epochs=2")
    assert ended.value.code == 2
    with pytest.raises(ResumeError):
        status_of(str(tmp_path))
