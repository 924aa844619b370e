"""SIGTERM, workers that hang, a store that is away, on a real Ray cluster: the run ends as one that was left alone.

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

import pytest
import tiny
from store import Store

from raycl.launch import driver as launch
from raycl.launch.status import status_of
from raycl.run import config as run_config
from raycl.storage import Storage
from raycl.training.records import progress
from raycl.training.records.journal import RunState, read_state

pytestmark = pytest.mark.usefixtures("s3_uri", "ray_cluster")
"""In this order: the cluster's workers take the store's credentials from the environment."""

REPO = Path(__file__).resolve().parents[2]
SMALL = [
    "stream.tasks=[topic,sentiment]",
    "stream.train_rows=40",
    "stream.test_rows=20",
    "train.epochs=16",
    "train.batch_size=8",
    "train.log_every_s=0.1",
    "checkpoint.every_steps=null",
    "engine=torch",
    "launch.workers=2",
]


def wait_for(ready: Callable[[], Any], seconds: float = 280) -> Any:
    """The first true answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := ready():
            return answer
        time.sleep(0.02)
    raise AssertionError(f"it did not happen in {seconds:g} s")


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


@pytest.fixture(scope="module")
def whole(ray_cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """The run that is left alone."""
    reference = launch.prepare(run_config.load_config(None, [*SMALL, f"output.dir={tmp_path_factory.mktemp('whole')}"]))
    launch.train(reference)
    return reference.storage


def in_second_task(storage: Storage, attempt: int) -> RunState | None:
    """The state, once this attempt trains the second task."""
    file = f"{progress.FOLDER}/attempt-{attempt:04d}.jsonl"
    if not storage.exists(file):
        return None
    steps = map(json.loads, storage.read_text(file).splitlines())
    return read_state(storage) if sum(step["phase"] == 1 for step in steps) > 2 else None


@pytest.mark.timeout(900)
def test_a_hang_then_sigterm_then_a_store_that_is_away(
    own_driver: Callable[..., subprocess.Popen[str]], whole: Storage
) -> None:
    """One run through all three, in its second task, equals the run that was left alone.

    A worker that hangs (SIGSTOP) is ended, its group starts again; SIGTERM writes a checkpoint and exits with 75; a
    store that stays away exits with 75 as well, and the run is resumed when it is back.
    """
    store = Store()
    storage = Storage.at(store.uri("runs/mine"))
    hang = ["launch.hang_s=20", "launch.max_failures=2"]
    driver = own_driver(*SMALL, *hang, f"output.dir={store.uri('runs')}", "output.name=mine")
    os.kill(wait_for(lambda: in_second_task(storage, 1)).attempts[-1]["pid"], signal.SIGSTOP)
    wait_for(lambda: in_second_task(storage, 2))
    driver.send_signal(signal.SIGTERM)
    _, said = driver.communicate(timeout=280)
    assert driver.returncode == os.EX_TEMPFAIL == 75, said
    assert re.search(r"worker 2 of 2 \(process \d+ on .*\) made no progress for \d+ s while training", said), said
    assert f"--resume '{storage.address}'" in said.splitlines()[-1] and "SIGTERM" in said.splitlines()[-1], said
    assert "Traceback" not in said and len(read_state(storage).attempts) == 2
    newest = read_state(storage).checkpoints[-1]
    assert newest.startswith("phase001-step00000") and not newest.startswith("phase001-step0000080"), newest
    stopped = status_of(storage.address)
    assert (stopped.state, "by SIGTERM" in str(stopped)) == ("stopped", True)
    assert "made no progress" in stopped.details["hang 1"]

    second = own_driver("--resume", storage.address, "output.retry_s=1", "launch.max_failures=0")
    wait_for(lambda: in_second_task(storage, 3))
    store.stop()
    _, said = second.communicate(timeout=280)
    store.start()
    assert second.returncode == os.EX_TEMPFAIL, said
    assert f"when it is back, continue with --resume '{storage.address}'" in said.splitlines()[-1], said
    assert "did not answer for" in said and "Traceback" not in said

    third = own_driver("--resume", storage.address)
    _, said = third.communicate(timeout=280)
    assert third.returncode == 0 and "trying again" not in said, said
    assert (tiny.trace(storage), tiny.matrix(storage)) == (tiny.trace(whole), tiny.matrix(whole))
    assert status_of(storage.address).state == "finished" and len(read_state(storage).attempts) == 4
    store.stop()
