"""The run as users start it, on a real Ray cluster: kills, resumes, refusals, submission.

Every killed process is one that the test's own run wrote into its journal, or started itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny

from raycl.bank import Bank
from raycl.errors import LaunchError, ResumeError, RunError
from raycl.launch import driver as launch
from raycl.run import config as run_config
from raycl.storage import Storage
from raycl.training.records.journal import RunState, read_state
from raycl.training.records.progress import read_trace

REPO = Path(__file__).resolve().parents[2]
SMALL = [
    "stream.tasks=[topic,sentiment]",
    "stream.train_rows=40",
    "stream.test_rows=20",
    "train.epochs=4",
    "train.batch_size=8",
    "checkpoint.every_steps=4",
    "launch.workers=2",
]
STEPS = 20
"""Optimizer steps of each of the two tasks: 40 rows in batches of 8, four times."""


def prepared(folder: Path, *overrides: str) -> launch.Prepared:
    """A small run below `folder`."""
    return launch.prepare(run_config.load_config(None, [*SMALL, f"output.dir={folder}", *overrides]))


def losses(storage: Storage) -> list[tuple[int, int, float]]:
    """(phase, step, loss) of every step."""
    return [(row["phase"], row["step"], row["loss"]) for row in read_trace(storage)]


def cells(results: dict[str, Any]) -> list[list[float | None]]:
    """The matrix as plain numbers."""
    return [[cell["value"] if cell else None for cell in row] for row in results["matrix"]]


def wait_for(storage: Storage, ready: Callable[[RunState], bool], seconds: float = 120) -> RunState:
    """The first journal state that is `ready`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state = read_state(storage)
        if ready(state):
            return state
        time.sleep(0.02)
    raise AssertionError(f"the run did not get there in {seconds:g} s: {read_state(storage)}")


def inside(phase: int) -> Callable[[RunState], bool]:
    """Whether the newest checkpoint is one inside this phase."""
    prefix = f"phase{phase:03}-"
    return lambda state: len(state.phases) == phase and any(name.startswith(prefix) for name in state.checkpoints[-1:])


@pytest.fixture(scope="module")
def whole(ray_cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Storage, dict[str, Any]]:
    """The uninterrupted run that the others must equal."""
    reference = prepared(tmp_path_factory.mktemp("whole"))
    return reference.storage, launch.train(reference)


def test_the_run_directory_is_complete(whole: tuple[Storage, dict[str, Any]]) -> None:
    storage, results = whole
    assert [(phase, step) for phase, step, _ in losses(storage)] == [(s, n + 1) for s in (0, 1) for n in range(STEPS)]
    assert results["finished"] and results["attempts"] == 1 and results["workers"] == 2
    matrix = cells(results)
    assert matrix[0][1] is None and None not in matrix[1]
    assert results["fingerprint"] == run_config.fingerprint(run_config.load_config(None, SMALL))
    assert all(entry["tokens_per_s"] > 0 and entry["peak_memory_mb"] > 100 for entry in results["phase_times"])
    newest = Bank(storage.sub("bank")).newest()
    assert newest is not None and [str(entry) for entry in newest.adapters] == ["lora@2"]
    assert len(storage.list("checkpoints")) <= 2


@pytest.fixture
def own_driver(ray_cluster: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `jobs/train_stream.py` on the module's cluster; whatever still runs at the end is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "RAY_ADDRESS": ray_cluster["address"]}
        command = [sys.executable, str(REPO / "jobs/train_stream.py"), *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_killed_run_resumes_exactly_and_a_finished_run_is_unchanged(
    whole: tuple[Storage, dict[str, Any]], own_driver: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """A worker in the first task, then the driver in the second."""
    folder = tmp_path / "runs" / "mine"
    driver = own_driver(*SMALL, f"output.dir={tmp_path / 'runs'}", "output.name=mine")
    storage = Storage.at(folder)
    os.kill(wait_for(storage, inside(0)).attempts[-1]["pid"], signal.SIGKILL)
    state = wait_for(storage, lambda state: len(state.attempts) == 2 and inside(1)(state))
    driver.kill()
    driver.communicate()
    worker = state.attempts[-1]["pid"]
    end = time.monotonic() + 30
    while psutil.pid_exists(worker) and time.monotonic() < end:
        time.sleep(0.1)
    last = folder / "journal" / "attempt-0002"
    before = last.stat().st_mtime_ns

    again = own_driver("--resume", str(folder))
    out, err = again.communicate(timeout=200)
    assert again.returncode == 0, err
    assert "AP" in out and "matrix.png" in out and (folder / "matrix.png").stat().st_size > 1000
    assert last.stat().st_mtime_ns == before, "the dead attempt wrote on"
    assert losses(storage) == losses(whole[0])
    results = json.loads((folder / "results.json").read_text())
    assert cells(results) == cells(whole[1]) and results["attempts"] == 3

    attempts = read_state(storage).attempts
    finished = launch.reopen(str(folder))
    assert launch.train(finished)["matrix"] == results["matrix"]
    assert read_state(storage).attempts == attempts, "a finished run was started again"


def test_a_changed_config_is_refused_by_name(whole: tuple[Storage, dict[str, Any]]) -> None:
    with pytest.raises(ResumeError, match=r"train\.learning_rate was 0\.001, now 0\.5.*start a new run"):
        launch.reopen(whole[0].uri, overrides=("train.learning_rate=0.5",))
    assert launch.reopen(whole[0].uri, overrides=("launch.workers=1",)).config.launch.workers == 1
    with pytest.raises(ResumeError, match="holds no run"):
        launch.reopen(f"{whole[0].uri}/checkpoints")


def test_an_existing_run_is_not_overwritten(whole: tuple[Storage, dict[str, Any]]) -> None:
    name = whole[0].uri.rsplit("/", 1)[-1]
    folder = Path(whole[0].uri).parent
    with pytest.raises(RunError, match="holds a run already: continue with --resume"):
        prepared(folder, f"output.name={name}")
    assert prepared(folder).name == f"{name}-2"


def test_more_workers_than_the_cluster_can_give(ray_cluster: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"launch\.workers=4 needs 4 CPUs.*cluster has 2 CPUs and 0 GPUs"):
        launch.train(prepared(tmp_path, "launch.workers=4"))


def test_a_raycl_error_is_logged_once_and_ends_the_run(ray_cluster: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the loss is .*lower train\.learning_rate"):
        launch.train(
            prepared(tmp_path, "train.learning_rate=1e30", "train.max_grad_norm=0", "launch.workers=1", "engine=torch")
        )


def test_a_newer_driver_takes_over_and_the_older_stops(
    own_driver: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """On one worker, which is another one for the second task: as it is learned in this process, without Ray."""
    folder, alone = tmp_path / "runs" / "mine", Storage.at(tmp_path / "alone")
    launched = ["launch.workers=1", "launch.cpus_per_worker=1", "launch.fresh_workers_per_task=true"]
    small = [*SMALL, "engine=torch", *launched]
    old = own_driver(*small, f"output.dir={tmp_path / 'runs'}", "output.name=mine")
    storage = Storage.at(folder)
    late_writer = wait_for(storage, lambda state: bool(state.checkpoints)).attempts[-1]["pid"]
    os.kill(late_writer, signal.SIGSTOP)
    new = own_driver("--resume", str(folder))
    wait_for(storage, lambda state: len(state.attempts) == 2)
    os.kill(late_writer, signal.SIGCONT)
    tiny.run(run_config.load_config(None, small), alone)
    _, said_by_old = old.communicate(timeout=200)
    _, said_by_new = new.communicate(timeout=200)
    assert new.returncode == 0, said_by_new
    assert old.returncode == 1 and "was replaced by attempt" in said_by_old, said_by_old
    assert len({attempt["pid"] for attempt in read_state(storage).attempts}) == 3
    assert losses(storage) == losses(alone)
