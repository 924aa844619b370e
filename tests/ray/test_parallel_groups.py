"""`launch.parallel_tasks` on a real Ray cluster: groups of one worker that stay, and groups of two by Ray Train.

What they give is that of one task after another; the tests of `tests/integration/test_parallel_tasks.py` say what else
holds.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fork_server import ForkServer
from tiny import Lab, exported, matrix, run, trace

from raycl import config as configs
from raycl.errors import ConfigError
from raycl.launch import driver
from raycl.launch.prepared_run import prepare
from raycl.operations.sweep.comparison import ComparisonConfig, run_comparison
from raycl.operations.sweep.definition.sweep_config import SweepConfig
from raycl.operations.sweep.definition.sweep_folder import SweepFolder
from raycl.operations.sweep.drive import concurrency, make_plan, run_sweep
from raycl.storage import Storage
from raycl.training.records.journal import read_state
from raycl.training.setup.run_config import RunConfig

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]

NAMES = ("colour", "animal", "again")


def three(lab: Lab, folder: Path, workers: int, at_once: int, count: int = 3, **train: object) -> RunConfig:
    """Return a run of three tasks in `folder`, or of the first `count` of them.

    Where each group has several workers, only the run scores, since texts select instructions.
    """
    return lab.config(
        "bert",
        "epi",
        stream={"tasks": [*lab.tasks, {**lab.tasks[0], "name": "again"}][:count], "dev_fraction": 0.3},
        launch={"workers": workers, "cpus_per_worker": 1 / workers, "parallel_tasks": at_once},
        output={"dir": str(folder.parent), "name": folder.name, "exists": "resume"},
        eval={"instruction": "given" if workers == 1 else "chosen"},
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


def test_groups_of_two_workers_learn_at_the_same_time(lab: Lab, fork_server: ForkServer, tmp_path: Path) -> None:
    whole_run = configs.as_tree(three(lab, tmp_path / "whole", 2, 1, count=2))
    jobs = [{"tree": whole_run, "folder": str(tmp_path / "whole"), "after": None}]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    fork_server.pair("two_workers:main", tmp_path, tmp_path / "rendezvous", tmp_path / "jobs.json", seconds=120)
    driver.train(prepare(three(lab, tmp_path / "split", 2, 2, count=2)))
    whole, split = Storage.at(tmp_path / "whole"), Storage.at(tmp_path / "split")
    assert_equal(whole, split)
    folders = [split.sub(f"tasks/{index:03d}-{name}") for index, name in enumerate(NAMES[:2])]
    assert [read_state(folder).attempts[0]["workers"] for folder in folders] == [2, 2]


def test_sweeps_and_comparisons_have_runs_whose_tasks_are_learned_at_the_same_time(lab: Lab, tmp_path: Path) -> None:
    """The trial takes both CPUs of the cluster, and so does the run of the comparison."""
    base = configs.as_tree(three(lab, tmp_path / "whole", 1, 2))
    del base["seed"], base["output"]
    for key in ("workers", "cpus_per_worker"):
        del base["launch"][key]
    tree = {"name": "swept", "base": base, "space": {"seed": {"grid": [1]}}}
    sweep = configs.validate(SweepConfig, {**tree, "resources": {"cpus_per_worker": 1}})
    assert not sweep.in_process and concurrency(sweep) == 1
    outcome = run_sweep(sweep, str(tmp_path))
    compared = {"name": "compared", "base": {**base, "launch": {"cpus_per_worker": 1, "parallel_tasks": 2}}}
    comparison = configs.validate(ComparisonConfig, {**compared, "runs": {"epi": {}}, "seeds": [1]})
    results = run_comparison(comparison, str(tmp_path))
    assert len(outcome.rows) == 1 and list(results.results) == ["epi-s1"]
    compared_run = Storage.at(tmp_path / "compared" / "epi-s1")
    folder = SweepFolder.of(sweep, str(tmp_path))
    alone, (number,) = Storage.at(tmp_path / "alone"), folder.settings()
    run(three(lab, tmp_path / "whole", 1, 1).model_copy(update={"seed": 1}), alone)
    for learned in (folder.run(number), compared_run):
        assert trace(learned) == trace(alone) and matrix(learned) == matrix(alone)
        assert [len(attempts) for attempts in pids(learned)] == [2, 2, 2], "each task is learned once, and scored once"


def test_a_scheduler_that_stops_trials_after_a_task_is_refused(lab: Lab, tmp_path: Path) -> None:
    base = {**configs.as_tree(three(lab, tmp_path / "whole", 1, 2)), "output": {}}
    tree = {"name": "swept", "base": base, "space": {"seed": {"grid": [1, 2]}}, "scheduler": "asha"}
    sweep = configs.validate(SweepConfig, tree)
    with pytest.raises(
        ConfigError, match=r"^scheduler 'asha' stops trials after a task, and with base.launch.parallel_t"
    ):
        make_plan(sweep, SweepFolder.of(sweep, str(tmp_path)))
