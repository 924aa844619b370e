"""`launch.parallel_tasks` on a real Ray cluster: groups of one worker that stay, and groups of two by Ray Train.

What they give is that of one task after another; the tests of `tests/integration/test_parallel_tasks.py` say what else
holds.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny import Lab, exported, matrix, run, trace

from raycl.launch import driver
from raycl.launch.prepared_run import prepare
from raycl.storage import Storage
from raycl.training.records.journal import read_state
from raycl.training.setup.run_config import RunConfig

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]

NAMES = ("colour", "animal", "again")


def three(lab: Lab, folder: Path, workers: int, at_once: int, **train: object) -> RunConfig:
    """Return a run of three tasks in `folder`."""
    return lab.config(
        "bert",
        "epi",
        stream={"tasks": [*lab.tasks, {**lab.tasks[0], "name": "again"}], "dev_fraction": 0.3},
        launch={"workers": workers, "cpus_per_worker": 1 / workers, "parallel_tasks": at_once},
        output={"dir": str(folder.parent), "name": folder.name, "exists": "resume"},
        train=train,
    )


def assert_equal(one: Storage, other: Storage) -> None:
    assert trace(one) == trace(other) != []
    assert matrix(one) == matrix(other) and exported(one) == exported(other)


def pids(split: Storage) -> list[list[int]]:
    """Return the processes of each task's attempts."""
    folders = [split.sub(f"tasks/{index:03d}-{name}") for index, name in enumerate(NAMES)]
    return [[attempt["pid"] for attempt in read_state(folder).attempts] for folder in folders]


def test_groups_of_one_worker_stay_and_one_that_is_killed_is_replaced(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "raycl")
    long = {"epochs_by_task": {"animal": 20}}
    run(three(lab, tmp_path / "whole", 1, 1, **long), Storage.at(tmp_path / "whole"))
    split = Storage.at(tmp_path / "split")
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(driver.train, prepare(three(lab, tmp_path / "split", 1, 2, **long)))
        task = split.sub("tasks/001-animal")
        while not training.done() and not read_state(task).checkpoints:
            time.sleep(0.05)
        killed = read_state(task).attempts[-1]["pid"]
        os.kill(killed, signal.SIGKILL)
        training.result()
    assert_equal(Storage.at(tmp_path / "whole"), split)
    used = {pid for attempts in pids(split) for pid in attempts}
    assert killed in used and len(used) == 3, "two processes, and the one that replaces the killed one"
    assert read_state(split).attempts[-1]["pid"] in used - {killed}, "one of them joins the tasks"
    assert "animal: the worker's process died, " in caplog.text and "[3/3] again: joined" in caplog.text


def test_groups_of_two_workers_learn_at_the_same_time(lab: Lab, tmp_path: Path) -> None:
    for name, at_once in (("whole", 1), ("split", 2)):
        driver.train(prepare(three(lab, tmp_path / name, 2, at_once)))
    whole, split = Storage.at(tmp_path / "whole"), Storage.at(tmp_path / "split")
    assert_equal(whole, split)
    folders = [split.sub(f"tasks/{index:03d}-{name}") for index, name in enumerate(NAMES)]
    assert [read_state(folder).attempts[0]["workers"] for folder in folders] == [2, 2, 2]
