"""The run as users start it, on a real Ray cluster: every way in which it can stop, resumes, refusals.

Every process that is signalled is one that the test's own run wrote into its journal, or started itself.
"""

from __future__ import annotations

import json
import os
import re
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
import yaml
from recipes import installed_recipes
from store import Store

from raycl.bank import Bank
from raycl.errors import LaunchError, ResumeError, RunError
from raycl.launch import driver as launch
from raycl.launch import prepared_run
from raycl.launch.status import status_of
from raycl.plugins import Kind
from raycl.storage import Storage
from raycl.testing.packages import on_path, write_package
from raycl.training.records import progress
from raycl.training.records.journal import RunState, read_state
from raycl.training.records.progress import read_trace
from raycl.training.setup import run_config

pytestmark = [pytest.mark.usefixtures("s3_uri", "site", "ray_cluster"), pytest.mark.timeout(900)]
"""The order counts: the cluster's workers take the store's credentials and their path from the environment."""

REPO = Path(__file__).resolve().parents[2]
OWN_CLUSTER = True
STEPS = (24, 36)
"""Optimizer steps of the two tasks: 4 an epoch. The second is long, since a run is stopped three times in it."""
PAUSE_S = 0.25
"""Seconds that each step waits, so that the second task takes at least 9 s."""
WITHOUT_PAUSES = 'modifiers=[{"name":"pause","seconds":0}]'
"""Override of runs that are not stopped."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder where the package of `docs/extending` is installed, on the path of this process and of its workers."""
    folder = installed_recipes(tmp_path_factory.mktemp("recipes"))
    with on_path(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield folder


@pytest.fixture(scope="module")
def small(lab: tiny.Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the config of a small run on two workers."""
    train = {"epochs_by_task": {"colour": STEPS[0] // 4, "animal": STEPS[1] // 4}, "log_every_s": 0.3}
    sections = {"train": train, "checkpoint": {"every_steps": 6}, "launch": {"workers": 2}}
    tree = lab.tree("bert", "lora", modifiers=[{"name": "pause", "seconds": PAUSE_S}], **sections)
    file = tmp_path_factory.mktemp("small") / "small.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def prepared(small: Path, folder: Path, *overrides: str) -> prepared_run.Prepared:
    """Return a small run below `folder`."""
    return prepared_run.prepare(run_config.load_config(str(small), [f"output.dir={folder}", *overrides]))


def losses(storage: Storage) -> list[tuple[int, int, float]]:
    """Return (phase, step, loss) of every step."""
    return [(row["phase"], row["step"], row["loss"]) for row in read_trace(storage)]


def cells(results: dict[str, Any]) -> list[list[float | None]]:
    """Return the matrix as plain numbers."""
    return [[cell["value"] if cell else None for cell in row] for row in results["matrix"]]


def until(ready: Callable[[], bool], seconds: float = 280) -> None:
    """Wait until it is so."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"it did not happen in {seconds:g} s"
        time.sleep(0.4)


def in_second_task(storage: Storage, attempt: int) -> int:
    """Return the process of the first worker, once this attempt trains the second task."""
    file = f"{progress.FOLDER}/attempt-{attempt:04d}.jsonl"

    def trains() -> bool:
        lines = storage.read_text(file).splitlines() if storage.exists(file) else []
        return sum(json.loads(step)["phase"] == 1 for step in lines) > 2

    until(trains)
    return int(read_state(storage).attempts[-1]["pid"])


@pytest.fixture(scope="module")
def whole(
    ray_cluster: dict[str, str], small: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Storage, dict[str, Any]]:
    """Return the uninterrupted run that the others must equal."""
    reference = prepared(small, tmp_path_factory.mktemp("whole"), WITHOUT_PAUSES)
    return reference.storage, launch.train(reference)


def test_the_run_directory_is_complete(whole: tuple[Storage, dict[str, Any]], small: Path) -> None:
    storage, results = whole
    steps = [(phase, step + 1) for phase in (0, 1) for step in range(STEPS[phase])]
    assert [(phase, step) for phase, step, _ in losses(storage)] == steps
    assert results["finished"] and results["attempts"] == 1 and results["workers"] == 2
    matrix = cells(results)
    assert matrix[0][1] is None and None not in matrix[1]
    assert results["fingerprint"] == run_config.fingerprint(run_config.load_config(str(small), [WITHOUT_PAUSES]))
    assert all(entry["tokens_per_s"] > 0 and entry["peak_memory_mb"] > 100 for entry in results["phase_times"])
    newest = Bank(storage.sub("bank")).newest()
    assert newest is not None and [str(entry) for entry in newest.adapters] == ["lora@2"]
    assert len(storage.list("checkpoints")) <= 2


@pytest.fixture
def own_driver(ray_cluster: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Yield what starts `jobs/train_stream.py` on the module's cluster, and end what still runs."""
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


def with_checkpoint(storage: Storage) -> RunState:
    """Return the state of a run in its first task, once that has a checkpoint."""
    until(lambda: bool(storage.list("checkpoints") and read_state(storage).checkpoints))
    state = read_state(storage)
    assert not state.phases, "it has gone on already"
    return state


def test_a_run_that_is_stopped_in_every_way_equals_the_run_that_is_left_alone(
    whole: tuple[Storage, dict[str, Any]], small: Path, own_driver: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """A killed worker in the first task; in the second a killed driver, a hung worker, Ctrl-C.

    A worker that hangs (SIGSTOP) is ended, its group starts again; Ctrl-C writes a checkpoint and exits with 130. A
    finished run is not started again. SIGTERM is in `test_submit`; a store that stays away, and a newer command that
    takes over, are in `tests/integration/test_local.py`.
    """
    store, picture = Store(), tmp_path / "matrix.png"
    storage = Storage.at(store.uri("runs/mine"))
    first = own_driver(str(small), f"output.dir={store.uri('runs')}", "output.name=mine")
    os.kill(with_checkpoint(storage).attempts[-1]["pid"], signal.SIGKILL)
    worker = in_second_task(storage, 2)
    first.kill()
    first.communicate()
    until(lambda: not psutil.pid_exists(worker))
    before = storage.list("journal/attempt-0002")

    second = own_driver("--resume", storage.address, "launch.hang_s=8", "launch.max_failures=2")
    hanging = in_second_task(storage, 3)
    assert storage.list("journal/attempt-0002") == before, "the dead attempt wrote on"
    os.kill(hanging, signal.SIGSTOP)
    in_second_task(storage, 4)
    second.send_signal(signal.SIGINT)
    assert_stopped_by_ctrl_c(storage, second)

    last = own_driver("--resume", storage.address, "--png", str(picture))
    out, said = last.communicate(timeout=280)
    assert last.returncode == 0 and "trying again" not in said, said
    assert "AP" in out and "matrix.png" in out and picture.stat().st_size > 1000
    assert storage.list("journal/attempt-0002") == before, "the dead attempt wrote on"
    assert (tiny.trace(storage), tiny.matrix(storage)) == (tiny.trace(whole[0]), tiny.matrix(whole[0]))
    results, attempts = storage.read_json("results.json"), read_state(storage).attempts
    assert cells(results) == cells(whole[1]) and results["attempts"] == len(attempts) == 5
    assert status_of(storage.address).state == "finished"
    assert launch.train(prepared_run.reopen(storage.address))["matrix"] == results["matrix"]
    assert read_state(storage).attempts == attempts, "a finished run was started again"
    store.stop()


def assert_stopped_by_ctrl_c(storage: Storage, driver: subprocess.Popen[str]) -> None:
    """Check a run after a hang in attempt 3; the newest checkpoint is of the very last step."""
    _, said = driver.communicate(timeout=280)
    assert driver.returncode == 130 and "Traceback" not in said, said
    assert re.search(r"worker 2 of 2 \(process \d+ on .*\) made no progress for \d+ s while training", said), said
    last_line = said.splitlines()[-1]
    assert "stopped by Ctrl-C, 1 of 2 tasks are done, checkpoint 'phase001-step" in last_line, said
    assert last_line.endswith(f"continue with --resume '{storage.address}'"), said
    assert len(read_state(storage).attempts) == 4
    last = json.loads(storage.read_text(f"{progress.FOLDER}/attempt-0004.jsonl").splitlines()[-1])
    phase, step = last["phase"], last["step"]  # the worker that hung may have come further
    newest = read_state(storage).checkpoints[-1]
    assert newest.startswith(f"phase001-step{step:07d}-") and (phase, step < STEPS[1]) == (1, True), (newest, step)
    stopped = status_of(storage.address)
    assert stopped.state == "stopped" and "made no progress" in stopped.details["hang 1"]


def test_a_changed_config_is_refused_by_name(whole: tuple[Storage, dict[str, Any]]) -> None:
    with pytest.raises(ResumeError, match=r"train\.learning_rate was 0\.01, now 0\.5.*start a new run"):
        prepared_run.reopen(whole[0].uri, overrides=("train.learning_rate=0.5",))
    assert prepared_run.reopen(whole[0].uri, overrides=("launch.workers=1",)).config.launch.workers == 1
    with pytest.raises(ResumeError, match="holds no run"):
        prepared_run.reopen(f"{whole[0].uri}/checkpoints")


def test_an_existing_run_is_not_overwritten(whole: tuple[Storage, dict[str, Any]], small: Path) -> None:
    name = whole[0].uri.rsplit("/", 1)[-1]
    folder = Path(whole[0].uri).parent
    with pytest.raises(RunError, match="holds a run already: continue with --resume"):
        prepared(small, folder, f"output.name={name}")
    assert prepared(small, folder).name == f"{name}-2"


def test_more_workers_than_the_cluster_can_give(small: Path, tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"launch\.workers=4 needs 1 CPUs and 0 GPUs for each, .* have 1 x \(2 CPUs, 0 GPUs\)"
    ):
        launch.train(prepared(small, tmp_path, "launch.workers=4"))


def tensors_of(run: Storage) -> dict[str, bytes]:
    """Return file -> bytes of all tensors that a run has published."""
    return {name: run.read(name) for name in run.files("bank") if name.endswith(".safetensors")}


def test_a_run_of_this_process_is_the_run_of_one_worker(lab: tiny.Lab, tmp_path: Path) -> None:
    """`launch.mode=local`: losses, gradient norms, matrix, answers and published tensors, bit for bit.

    Method, modifier and optimizer are of the package of `docs/extending`, which the worker has too.
    """
    sections = {"modifiers": ["scale"], "train": {"optimizer": "nesterov"}}
    runs = []
    for mode in ("ray", "local"):
        launched = {"mode": mode, "workers": 1, "cpus_per_worker": 1}
        output = {"dir": str(tmp_path), "name": mode}
        runs.append(prepared_run.prepare(lab.config("bert", "fading", launch=launched, output=output, **sections)))
    ray_results, results = (launch.train(run) for run in runs)
    there, here = (run.storage for run in runs)
    steps = [
        [(row["phase"], row["step"], row["loss"], row["grad_norm"]) for row in read_trace(run)] for run in (there, here)
    ]
    assert len(steps[0]) == 8 and steps[0] == steps[1]
    assert results["matrix"] == ray_results["matrix"] and results["fingerprint"] == ray_results["fingerprint"]
    assert tensors_of(there) and tensors_of(there) == tensors_of(here)
    names = there.files("predictions").keys()
    assert names and {name: there.read(name) for name in names} == {name: here.read(name) for name in names}
    assert ray_results["versions"]["optimizer nesterov"] == "my-raycl 0.1.0"
    snapshot = Bank(there.sub("bank")).newest()
    assert snapshot is not None and snapshot.router.package == "my-raycl 0.1.0"


def test_workers_that_lack_a_package_say_so(lab: tiny.Lab, tmp_path: Path) -> None:
    adds: dict[Kind, dict[str, str]] = {"optimizer": {"mine": "my_raycl.optimizer:Nesterov"}}
    folder = write_package(tmp_path / "here", "only-here", adds, "2.0")
    with on_path(folder):
        config = lab.config("bert", "lora", train={"optimizer": "mine"}, output={"dir": str(tmp_path), "name": "run"})
        words = "optimizer 'mine' comes from package 'only-here' 2.0, and the worker on .* does not have it: install it"
        with pytest.raises(RunError, match=words):
            launch.train(prepared_run.prepare(config))
