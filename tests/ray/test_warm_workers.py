"""A comparison on a real Ray cluster: its processes stay between runs, and are killed, stopped and continued.

Workers of `raycl predict` write what one process writes.

The processes that are killed are workers that the test's own runs wrote into their journals.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from tiny import Lab, exported, matrix, run, trace

from raycl.cli import main
from raycl.operations.sweep.comparison import load_comparison, plan, run_comparison
from raycl.storage import Storage
from raycl.training.records.journal import read_state

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]

REPO = Path(__file__).resolve().parents[2]
LONG = ['modifiers=[{"name":"pause","seconds":0.2}]', 'train.epochs_by_task={"colour":2,"animal":6}']
ROWS = [("the sky is blue", "cold"), ("the sea is blue", "cold"), ("the sun is red", "warm"), ("red fire", "warm")] * 3


def written(lab: Lab, folder: Path, runs: dict[str, list[str]], **settings: Any) -> Path:
    """Return a comparison file with these rows."""
    base = lab.tree("bert", "lora", launch={"cpus_per_worker": 1}, checkpoint={"every_steps": 20})
    tree = {"name": "mine", "base": base, "runs": {name: {"set": words} for name, words in runs.items()}, "seeds": [1]}
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({**tree, **settings}, sort_keys=False))
    return file


def folder_of(file: Path, row: str) -> Storage:
    return Storage.at(file.parent / "mine" / f"{row}-s1")


def pids(file: Path, row: str) -> list[int]:
    """Return the worker of each attempt."""
    return [attempt["pid"] for attempt in read_state(folder_of(file, row)).attempts]


def until(ready: Callable[[], bool], seconds: float = 280) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"it did not happen in {seconds:g} s"
        time.sleep(0.05)


def assert_as_if_alone(file: Path, row: str, folder: Path) -> None:
    """Check that the run is what its config gives in a process of its own, bit for bit."""
    alone = Storage.at(folder / row)
    config = plan(load_comparison(str(file)), str(file.parent))[f"{row}-s1"]
    run(config, alone)
    mine = folder_of(file, row)
    assert trace(mine) == trace(alone) and matrix(mine) == matrix(alone) and exported(mine) == exported(alone)


def test_runs_share_processes_and_leave_nothing_in_them(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two at a time: the same run twice among others; one whose worker is killed, one that fails, one of two workers.

    The run of two workers gets the room of those that wait for a run; the killed one continues in a new process.
    """
    runs = {
        "first": ["method=lora"],
        "killed": ["method=lora", *LONG],
        "other": ["method=finetune", "backbone.dtype=bfloat16"],
        "again": ["method=lora"],
        "pair": ["launch.workers=2"],
        "last": ["method=lora"],
        "broken": ["train.learning_rate=1e30", "train.max_grad_norm=0"],
    }
    file = written(lab, tmp_path, runs, at_once=2)
    with ThreadPoolExecutor(1) as thread:
        compared = thread.submit(run_comparison, load_comparison(str(file)), str(tmp_path))
        until(lambda: bool(read_state(folder_of(file, "killed")).phases))
        os.kill(pids(file, "killed")[-1], signal.SIGKILL)
        outcome = compared.result(timeout=280)
    assert list(outcome.failed) == ["broken-s1"] and "the loss is" in outcome.failed["broken-s1"]
    assert [name.removesuffix("-s1") for name in outcome.results] == [name for name in runs if name != "broken"]
    warm = {pid for row in ("first", "killed", "other", "again") for pid in pids(file, row)}
    assert len(warm) <= 3, "five attempts on two processes, and on the one that replaces the killed one"
    died, continued = pids(file, "killed")
    assert "killed-s1: the worker's process died, " in caplog.text
    assert died != continued
    assert not warm & set(pids(file, "pair"))
    for row in ("again", "last"):
        assert trace(folder_of(file, row)) == trace(folder_of(file, "first"))
        assert exported(folder_of(file, row)) == exported(folder_of(file, "first"))
    for row in ("first", "killed", "other"):
        assert_as_if_alone(file, row, tmp_path / "alone")


@pytest.fixture
def compare(ray_cluster: dict[str, str], tmp_path: Path) -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Yield what starts `jobs/compare.py` on the module's cluster, and end what still runs."""
    started: list[subprocess.Popen[str]] = []

    def start(file: Path) -> subprocess.Popen[str]:
        words = [sys.executable, str(REPO / "jobs/compare.py"), str(file), "--dir", str(file.parent)]
        environment = {**os.environ, "RAY_ADDRESS": ray_cluster["address"]}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(words, cwd=tmp_path, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def both_learn(file: Path) -> bool:
    """Return whether the first two rows are in their second task."""
    return all(read_state(folder_of(file, row)).phases for row in "ab")


def test_a_signal_writes_checkpoints_and_the_same_command_continues(
    lab: Lab, tmp_path: Path, compare: Callable[[Path], subprocess.Popen[str]]
) -> None:
    """Two runs train at a time, as the cluster holds; the third has not begun when SIGTERM comes.

    What Ctrl-C does to a comparison is in `tests/integration/test_comparison.py`, and beside Ray in `test_sweep`.
    """
    file = written(lab, tmp_path, {"a": LONG, "b": [*LONG, "method.r=2"], "c": []})
    process = compare(file)
    until(lambda: both_learn(file) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 75, output
    last = output.splitlines()[-1]
    assert "1 of 2 tasks are done" in last and last.endswith("the same command continues with all runs"), output
    assert "Traceback" not in output and "c-s1" not in output.replace("'c-s1' has not begun", "")
    process = compare(file)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0 and "a-s1: [2/2] animal" in output, output
    assert [len(pids(file, row)) for row in "abc"] == [2, 2, 1]
    for row in "ab":
        assert_as_if_alone(file, row, tmp_path / "alone")


def test_workers_write_what_one_process_writes(lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Hub data and files are resumed part by part; an error of a worker is the sentence that one process gives."""
    bank = run(lab.config("bert", "slm"), Storage.at(tmp_path / "run")).storage.sub("bank").uri
    texts = [text for text, _ in ROWS]
    (tmp_path / "data").mkdir()
    Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "data" / "test-00000-of-00001.parquet")
    rows = [{"text": text if number != 3 else 7, "id": number} for number, text in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["predict", bank, str(tmp_path / "data"), str(tmp_path / "rows.jsonl"), "--part-rows", "5", "--to"]
    assert main.main([*words, str(tmp_path / "one")]) == 0
    assert main.main([*words, str(tmp_path / "two"), "--workers", "2"]) == 0
    assert "24 answered now" in capfd.readouterr().out
    parts = {path.name: path.read_text() for path in (tmp_path / "one").glob("part-*.jsonl")}
    assert '"row": 4, "answer": null, "error": "the text is a int' in "".join(parts.values())
    assert len(parts) == 5 and parts == {
        path.name: path.read_text() for path in (tmp_path / "two").glob("part-*.jsonl")
    }
    (tmp_path / "two" / "part-000003.jsonl").write_text("")
    assert main.main([*words, str(tmp_path / "two"), "--workers", "1"]) == 0
    assert "5 answered now" in capfd.readouterr().out
    assert (tmp_path / "two" / "part-000003.jsonl").read_text() == parts["part-000003.jsonl"]
    (tmp_path / "bad.jsonl").write_text('{"text": 7}\n')
    given = ["predict", bank, str(tmp_path / "bad.jsonl"), "--to", str(tmp_path / "bad"), "--workers", "1"]
    assert main.main(given) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.endswith("bad.jsonl, row 1: the text is a int: expected a string, repair or remove the row")
