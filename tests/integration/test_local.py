"""`launch.mode=local`: this process is the only worker, without Ray; how it starts, stops, fails and can be debugged.

That its results are those of Ray Train is tested in tests/ray/test_train_on_ray.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from fork_server import Call, ForkServer
from store import Store
from tiny import Lab, exported, trace

from raycl import config as configs
from raycl.cli.main import main
from raycl.errors import ConfigError
from raycl.launch import driver, prepared_run
from raycl.launch.status import status_of
from raycl.methods.single_adapter import Lora
from raycl.operations.sweep.comparison import ComparisonConfig, run_comparison
from raycl.operations.sweep.definition.sweep_config import SweepConfig
from raycl.operations.sweep.definition.sweep_folder import SweepFolder
from raycl.operations.sweep.drive import make_plan
from raycl.storage import Storage
from raycl.training.records.journal import read_state
from raycl.training.setup.run_config import load_config

WITHOUT_RAY = """
import sys
from importlib.abc import MetaPathFinder

class NoRay(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")

sys.meta_path.insert(0, NoRay())
"""
"""Begins a script of a machine that has no Ray."""

STOPPED = """
import threading
from raycl.training.phase import trainer
step = trainer.train_step

def stops(*given):
    trainer.train_step = step
    inside = threading.current_thread() is threading.main_thread()
    breakpoint()
    return step(*given)

trainer.train_step = stops
"""
"""The first optimizer step stops in the debugger."""

UNUSED = ("bitsandbytes", "datasets", "deepspeed", "faiss", "matplotlib", "optuna", "peft", "sklearn", "wandb")
"""Libraries that a run which does not use them does not wait for."""


@pytest.fixture
def file(lab: Lab, tmp_path: Path) -> Path:
    """Return the config of a small run of this process."""
    tree = lab.tree("bert", "lora", launch={"mode": "local", "cpus_per_worker": 1}, checkpoint={"every_steps": 2})
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(file: Path, tmp_path: Path) -> Start:
    """Return what starts `raycl train small.yaml OVERRIDES` behind these lines of Python."""

    def begin(before: str, *overrides: str) -> subprocess.Popen[str]:
        words = ["train", *overrides]
        script = f"{textwrap.dedent(before)}\nfrom raycl.cli.main import main\nstatus = main({words!r})\n"
        script += "import sys\nassert 'ray' not in sys.modules\nsys.exit(status)\n"
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        ours = {
            name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"
        }  # Ray sets it in drivers
        return subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, text=True, env=ours, **pipes)

    return begin


def test_a_debugger_stops_in_a_run_of_a_machine_without_ray(file: Path, start: Start, tmp_path: Path) -> None:
    process = start(f"{WITHOUT_RAY}{STOPPED}\nUNUSED = {UNUSED}", str(file), "output.name=mine")
    commands = ["p ('main', inside)", "import sys", "p ('imported', {*UNUSED} & {*sys.modules})", "c", ""]
    said, errors = process.communicate("\n".join(commands), timeout=120)
    assert process.returncode == 0, errors
    assert "('main', True)" in said and "('imported', set())" in said and "(Pdb)" in said and "after animal" in said
    assert "[2/2] animal" in errors, "progress is printed as it comes"
    run = Storage.at(tmp_path / "runs/mine")
    assert status_of(run.uri).state == "finished" and run.exists("bank/branches/main")
    (log,) = run.list("log")
    assert run.read_text(f"log/{log}") in errors, "its lines are in the run's folder too"


@pytest.mark.parametrize(
    ("number", "status", "reason"), [(signal.SIGTERM, 75, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")]
)
def test_a_signal_writes_a_checkpoint_and_the_run_resumes(
    fork_server: ForkServer, file: Path, tmp_path: Path, number: signal.Signals, status: int, reason: str
) -> None:
    """Results of a run that was stopped are those of one that was not."""
    run, log, result = tmp_path / "mine", tmp_path / "log", tmp_path / "status"
    words = ["train", str(file), f"output.dir={tmp_path}", "output.name=mine", "checkpoint.every_steps=null"]
    step = "raycl.training.phase.trainer:train_step"
    fork_server.run([Call("interrupted:interrupted", (words, step, result, number), log)], seconds=100)
    errors = log.read_text()
    assert result.read_text() == str(status) and "Traceback" not in errors, errors
    assert f"{reason}: the workers write a checkpoint" in errors and f"error: stopped by {reason}, 0 of 2" in errors
    assert "checkpoint 'phase000-step" in errors and status_of(str(run)).state == "stopped"
    resumed = driver.train(prepared_run.reopen(str(run)))
    whole = driver.train(prepared_run.prepare(load_config(str(file), [f"output.dir={tmp_path}", "output.name=whole"])))
    assert resumed["matrix"] == whole["matrix"] and resumed["attempts"] == 2
    assert trace(Storage.at(run)) == trace(Storage.at(tmp_path / "whole"))


def test_a_newer_command_takes_over_and_the_older_stops(fork_server: ForkServer, file: Path, tmp_path: Path) -> None:
    """The older one is suspended at the end of its first task, and goes on when the newer one has ended."""
    run, log, result = tmp_path / "mine", tmp_path / "log", tmp_path / "status"
    words = ["train", str(file), f"output.dir={tmp_path}", "output.name=mine"]
    end = "raycl.methods.single_adapter:Lora.end_task"
    older = Call("interrupted:interrupted", (words, end, result, signal.SIGSTOP), log)
    with ThreadPoolExecutor(1, "older") as pool:
        going_on = pool.submit(fork_server.run, [older], 100)
        until(
            lambda: (
                run.exists()
                and bool(attempts := read_state(Storage.at(run)).attempts)
                and is_suspended(attempts[0]["pid"])
            )
        )
        state = read_state(Storage.at(run))
        assert state.checkpoints and not state.phases
        resumed = driver.train(prepared_run.reopen(str(run)))
        os.kill(state.attempts[0]["pid"], signal.SIGCONT)
        going_on.result(timeout=100)
    assert result.read_text() == "1" and "was replaced by attempt 2: it stops here" in log.read_text()
    whole = driver.train(prepared_run.prepare(load_config(str(file), [f"output.dir={tmp_path}", "output.name=whole"])))
    assert resumed["matrix"] == whole["matrix"] and resumed["attempts"] == 2
    assert trace(Storage.at(run)) == trace(Storage.at(tmp_path / "whole"))


def is_suspended(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def until(ready: Callable[[], bool]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + 90
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.usefixtures("s3_uri")
def test_a_store_that_stays_away_ends_the_command_which_continues_when_it_is_back(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store, end_task = Store(), Lora.end_task

    def store_stops(*given: Any) -> Any:
        monkeypatch.setattr(Lora, "end_task", end_task)
        store.stop()
        return end_task(*given)

    monkeypatch.setattr(Lora, "end_task", store_stops)
    assert (
        main(["train", str(file), f"output.dir={store.uri('runs')}", "output.name=mine", "output.retry_s=1"])
        == os.EX_TEMPFAIL
    )
    said = capfd.readouterr().err
    storage = Storage.at(store.uri("runs/mine"))
    assert f"when it is back, continue with --resume '{storage.address}'" in said.splitlines()[-1], said
    assert "did not answer for" in said and "Traceback" not in said
    store.start()
    assert main(["train", "--resume", storage.address]) == 0
    assert "trying again" not in capfd.readouterr().err
    driver.train(prepared_run.prepare(load_config(str(file), [f"output.dir={tmp_path}", "output.name=whole"])))
    assert trace(storage) == trace(Storage.at(tmp_path / "whole"))
    store.stop()


def test_an_exception_of_a_method_is_raised_as_it_is(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing starts the worker again the second time, and its trace is what a developer needs."""

    def fails(*given: Any) -> None:
        raise KeyError("mine")

    monkeypatch.setattr(Lora, "end_task", fails)
    prepared = prepared_run.prepare(load_config(str(file), [f"output.dir={tmp_path}", "output.name=mine"]))
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            driver.train(prepared)
    status = status_of(str(tmp_path / "mine"))
    assert status.state == "failed" and status.message == "KeyError: 'mine'"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("launch.workers=2", r"launch\.workers is 2.* this process is the only worker: set launch\.workers to 1"),
        ("launch.address=auto", r"launch\.address.*launch\.mode=local"),
        ("launch.hang_s=9", r"launch\.hang_s.*launch\.mode=local"),
    ],
)
def test_what_needs_other_processes_is_refused(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(str(file), [override])


def test_a_sweep_needs_ray(lab: Lab, tmp_path: Path) -> None:
    base = lab.tree("bert", launch={"mode": "local", "cpus_per_worker": 1})
    sweep = configs.validate(SweepConfig, {"name": "mine", "base": base, "space": {"seed": {"grid": [1, 2]}}})
    with pytest.raises(ConfigError, match=r"a sweep runs on Ray.* launch\.mode"):
        make_plan(sweep, SweepFolder(Storage.at(tmp_path), "mine"))


def test_a_comparison_runs_one_after_another_in_its_process(lab: Lab, tmp_path: Path) -> None:
    """Each as alone, with nothing of the one before; the run that fails stops none."""
    base = lab.tree("bert", launch={"mode": "local", "cpus_per_worker": 1})
    bad = ["train.learning_rate=1e30", "train.max_grad_norm=0"]
    runs = {"first": {}, "broken": {"set": bad}, "other": {"set": ["method=finetune"]}, "again": {}}
    tree: dict[str, Any] = {"name": "mine", "base": base, "runs": runs, "seeds": [1]}
    outcome = run_comparison(configs.validate(ComparisonConfig, tree), str(tmp_path))
    assert list(outcome.results) == ["first-s1", "other-s1", "again-s1"] and list(outcome.failed) == ["broken-s1"]
    folders = {row: Storage.at(tmp_path / "mine" / f"{row}-s1") for row in runs}
    assert trace(folders["first"]) == trace(folders["again"]) and exported(folders["first"]) == exported(
        folders["again"]
    )
    assert {attempt["pid"] for row in runs for attempt in read_state(folders[row]).attempts} == {os.getpid()}
    for mixed in ({"at_once": 2}, {"runs": {**runs, "ray": {"set": ["launch.mode=ray"]}}}):
        with pytest.raises(ConfigError, match=r"'first-s1' has launch\.mode=local.* leave at_once out"):
            run_comparison(configs.validate(ComparisonConfig, {**tree, **mixed}), str(tmp_path))
