"""Sweeps as users start them, on a real Ray cluster: killed, resumed, with a trial that fails and one that is stopped.

The processes that are killed or get SIGTERM are drivers that the tests started themselves.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import Lab, matrix, run, trace

from raycl import config as configs
from raycl.errors import ResumeError, RunError
from raycl.launch.status import status_of
from raycl.operations.sweep.definition.sweep_config import load_sweep
from raycl.operations.sweep.definition.sweep_folder import SweepFolder
from raycl.operations.sweep.drive import run_sweep
from raycl.storage import Storage
from raycl.training.records.journal import read_state
from raycl.training.records.run_folder import CONFIG
from raycl.training.setup.run_config import RunConfig, load_config

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Swept:
    """A sweep that was killed once and then finished."""

    place: SweepFolder
    summary: dict[str, Any]
    killed: dict[int, int]
    output: str
    status: int

    def row(self, number: int) -> dict[str, Any]:
        return next(row for row in self.summary["rows"] if row["number"] == number)


def start(file: Path, *arguments: str) -> subprocess.Popen[str]:
    """Return `jobs/sweep.py` as a process of its own, on the module's cluster."""
    command = [sys.executable, str(REPO / "jobs/sweep.py"), str(file), "--dir", str(file.parent), *arguments]
    return subprocess.Popen(command, cwd=file.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def reached(sweep_folder: SweepFolder) -> dict[int, int]:
    """Return finished phases by trial."""
    return {number: len(read_state(sweep_folder.run(number)).phases) for number in sweep_folder.settings()}


def wait(ready: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 200) -> None:
    """Wait until `ready`, or until the process has ended."""
    end = time.monotonic() + seconds
    while not ready() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert ready(), process.communicate(timeout=5)[0] if process.poll() is not None else "it did not get there"


def assert_as_if_alone(trial: Storage, folder: Path) -> None:
    """Check that the trial is the run of its config without a sweep, bit for bit."""
    tree = configs.from_yaml(trial.read(CONFIG).decode(), "trial")
    alone = Storage.at(folder)
    run(configs.validate(RunConfig, {**tree, "bank": {}}), alone)
    assert matrix(trial) == matrix(alone) and trace(trial) == trace(alone)


pytestmark = pytest.mark.timeout(600)
IN_ORDER = 220
"""With a scheduler a grid is shuffled; by this seed five trials stay in order."""


@pytest.fixture(scope="module")
def swept(ray_cluster: dict[str, str], lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """Five trials in turn: MIGU's threshold, which spares the first task; one learns nothing, one cannot begin.

    Before the kill a trial's worker is Tune's own process, afterwards each trial has one of its own.
    """
    folder = tmp_path_factory.mktemp("sweep")
    base = lab.tree("bert", "lora", modifiers=["migu", "pause"], train={"epochs": 8})
    tree = {
        "name": "mine",
        "base": base,
        "space": {
            "modifiers.migu.threshold": {"grid": [0.2, 0.8, 0.85, 0.9, 0.95]},
            "train.learning_rate": {"expr": "1e-9 if modifiers.migu.threshold == 0.9 else 0.01"},
            "modifiers.pause.seconds": {"expr": "0.06 if modifiers.migu.threshold == 0.85 else 0"},
            "eval.singles": {"expr": "'/nowhere' if modifiers.migu.threshold == 0.95 else None"},
        },
        "search": {"name": "grid", "seed": IN_ORDER},
        "scheduler": {"name": "asha", "reduction": 2},
        "concurrency": 1,
        "retries": 1,
    }
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(tree))
    sweep_folder = SweepFolder(Storage.at(folder).sub("mine"), "mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_cluster["address"])
        first = start(file)
        try:
            wait(lambda: reached(sweep_folder).get(2, 0) == 1, first)
        finally:
            first.kill()
            first.communicate()
        killed = reached(sweep_folder)
        second = start(file, "--resume", "--set", "resources.isolated=true")
        output, _ = second.communicate(timeout=280)
    summary = json.loads((folder / "mine" / "summary.json").read_text()) if second.returncode in (0, 1) else {}
    return Swept(sweep_folder, summary, killed, output, second.returncode)


def test_a_killed_sweep_resumes(swept: Swept) -> None:
    assert swept.killed == {0: 2, 1: 2, 2: 1}
    assert swept.status == 1, swept.output
    assert {row["number"]: (row["state"], row["tasks"]) for row in swept.summary["rows"]} == {
        0: ("done", 2),
        1: ("done", 2),
        2: ("done", 2),
        3: ("stopped", 1),
        4: ("failed", 0),
    }
    assert "3 of 5 trials to run" in swept.output, "finished trials are not run again"
    assert read_state(swept.place.run(0)).attempts[-1]["attempt"] == 1


def test_asha_stops_trials_between_tasks_for_good(swept: Swept) -> None:
    assert swept.summary["best"] in (0, 1, 2) and "stopped" in swept.output
    folder, file = str(Path(swept.place.storage.uri).parent), f"{swept.place.storage.uri}.yaml"
    attempts = read_state(swept.place.run(3)).attempts
    again = run_sweep(load_sweep(file, ["retries=0"]), folder, resume=True)
    assert {row.number: row.state for row in again.rows} == {
        **dict.fromkeys(range(3), "done"),
        3: "stopped",
        4: "failed",
    }
    assert read_state(swept.place.run(3)).attempts == attempts, "a stopped trial was started again"


def test_a_failed_trial_is_retried_and_then_reported(swept: Swept) -> None:
    assert "failed: trial 5: there is no results.json in '/nowhere'" in swept.output
    assert "(tried 2 times)" in swept.row(4)["error"]


@pytest.mark.parametrize("number", [1, 2])
def test_the_first_task_is_learned_once(swept: Swept, lab: Lab, tmp_path: Path, number: int) -> None:
    """The trial is the run alone, bit for bit, in a process that another one has left, or that was killed and moved."""
    assert [swept.row(trial)["forked_tasks"] for trial in (0, 1, 2)] == [0, 1, 1]
    trial = swept.place.run(number)
    assert_as_if_alone(trial, tmp_path)
    assert "modifiers" not in read_state(trial).phases[0]["summary"], "rows of another threshold are not its own"


def test_trials_share_a_process_unless_they_are_isolated(swept: Swept) -> None:
    pids = [[attempt["pid"] for attempt in read_state(swept.place.run(number)).attempts] for number in range(4)]
    shared = pids[0][0]
    assert {*pids[0], *pids[1], *pids[2][:-1]} == {shared}
    assert len({shared, pids[2][-1], pids[3][-1]}) == 3


def test_the_best_config_alone_gives_the_same_numbers(swept: Swept, tmp_path: Path) -> None:
    best, storage = load_config(f"{swept.place.storage.uri}/best.yaml", []), Storage.at(tmp_path)
    run(best, storage)
    trial = swept.row(swept.summary["best"])
    assert storage.read_json("results.json")["metrics"]["ap"] == trial["scores"][0]
    assert matrix(storage) == matrix(swept.place.run(trial["number"]))


def test_a_sweep_is_not_overwritten_nor_changed(swept: Swept) -> None:
    folder, file = str(Path(swept.place.storage.uri).parent), f"{swept.place.storage.uri}.yaml"
    with pytest.raises(RunError, match="holds a sweep already: continue with --resume"):
        run_sweep(load_sweep(file), folder)
    with pytest.raises(ResumeError, match=r"base\.seed was None, now 7"):
        run_sweep(load_sweep(file, ["base.seed=7"]), folder, resume=True)


def test_sigterm_writes_checkpoints_of_all_running_trials(
    ray_cluster: dict[str, str], lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three trials are learning; each continues from its very last step, as if nothing had happened.

    The third is short. Those that continue share a process.
    """
    train, pause = {"epochs": 100, "log_every_s": 0.1}, {"name": "pause", "seconds": 0.2}
    tree = {
        "name": "mine",
        "base": lab.tree("bert", "lora", train=train, checkpoint={"every_steps": None}, modifiers=[pause]),
        "space": {"seed": {"grid": [1, 2, 3]}, "train.max_steps": {"expr": "4 if seed == 3 else 20"}},
        "search": {"name": "grid"},
        "concurrency": 2,
    }
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(tree))
    sweep_folder = SweepFolder(Storage.at(tmp_path).sub("mine"), "mine")
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster["address"])
    first, running = start(file), [sweep_folder.run(number) for number in (0, 1)]
    try:
        wait(lambda: all(len(trace(trial)) > 3 for trial in running), first)
        first.send_signal(signal.SIGINT)
        said, _ = first.communicate(timeout=100)
    finally:
        first.kill()
    assert first.returncode == 130, said
    last = said.splitlines()[-1]
    assert re.search(
        "stopped by Ctrl-C, 0 of 3 trials are over, .*; continue with the same command and --resume$", last
    )
    assert "Traceback" not in said and not sweep_folder.storage.list("failed"), said
    assert "Last result" not in said, "Tune prints nothing of its own"
    for trial in running:
        phase, step = trace(trial)[-1][:2]
        assert read_state(trial).checkpoints[-1].startswith(f"phase{phase:03d}-step{step:07d}-")
        assert status_of(trial.uri).state == "stopped"
    assert not read_state(sweep_folder.run(2)).attempts, "a trial began after the signal"
    second = start(file, "--resume", "--set", "concurrency=1")
    said, _ = second.communicate(timeout=200)
    assert second.returncode == 0, said
    for number, trial in enumerate(running):
        assert len(read_state(trial).attempts) == 2
        assert_as_if_alone(trial, tmp_path / f"alone-{number}")


def test_tpe_runs_trials_that_differ_in_unused_settings_once(
    ray_cluster: dict[str, str], lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tune is asked for five trials and gets fewer; asked again, the sweep has nothing left to do."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster["address"])
    tree = {
        "name": "alike",
        "base": lab.tree("bert", "sapt", train={"max_steps": 1}),
        "space": {"method.arm.weight": {"uniform": [0.1, 2.0]}, "method.ablation": {"choice": ["none", "arm"]}},
        "search": "tpe",
        "samples": 5,
        "concurrency": 2,
    }
    file = tmp_path / "alike.yaml"
    file.write_text(yaml.safe_dump(tree))
    sweeps = [run_sweep(load_sweep(str(file)), str(tmp_path), resume) for resume in (False, True)]
    position = SweepFolder.of(load_sweep(str(file)), str(tmp_path))
    repeated = position.settings(repeated=True)
    assert repeated and {item["method.ablation"] for item in repeated.values()} == {"arm"}
    for outcome in sweeps:
        assert {row.state for row in outcome.rows} == {"done"} and len(outcome.rows) == 5 - len(repeated)
        assert [row.settings for row in outcome.rows].count({"method.ablation": "arm"}) == 1
