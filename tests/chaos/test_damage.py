"""Tests that change, cut, flip and swap what a killed run and a killed prediction left.

They end as if nothing had disturbed them, or say in one sentence why not. Part of `make chaos`: about two minutes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from damage import KINDS, damaged
from faults import REPO, TEXTS, Driver, Log, wait_for
from test_chaos import inside, outcome, save_config

from raycl.bank import Bank
from raycl.operations.banks.maintenance import verify
from raycl.storage import Storage
from raycl.training.records.checkpoint import FOLDER
from raycl.training.records.journal import read_state

ROWS, PART_ROWS = 1200, 30
ANEW = ("is made anew", "are computed again", "is hashed again", "are hashed again")
"""The words of log lines about a cache."""

WORKER = f"""
import logging, sys, yaml
sys.path.insert(0, {str(REPO / "tests" / "lab")!r})
from tiny import run
from raycl import config as configs
from raycl.errors import RayclError
from raycl.training.setup.run_config import RunConfig
from raycl.storage import Storage
logging.basicConfig(level=logging.INFO, format="%(message)s")
try:
    run(configs.validate(RunConfig, yaml.safe_load(open(sys.argv[1]))), Storage.at(sys.argv[2]))
except RayclError as error:
    sys.exit(f"error: {{error}}")
"""


class Training(Driver):
    """One worker, which trains as those on Ray do, without Ray: its words are the config and the run's folder."""

    command = (sys.executable, "-c", WORKER)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache of its own, which the processes inherit."""
    monkeypatch.setenv("RAYCL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def two_tasks(folder: Path) -> Path:
    """Return the config of the first two tasks, each of a few seconds."""
    file = save_config(folder)
    tree = yaml.safe_load(file.read_text())
    tree["stream"]["tasks"] = tree["stream"]["tasks"][:2]
    tree["train"]["epochs"] = 15
    tree["checkpoint"] = {"every_steps": 40}
    del tree["launch"]
    file.write_text(yaml.safe_dump(tree))
    return file


def damage_all(files: list[Path]) -> Counter[str]:
    """Return every file in one of all ways, in turn, and strays beside each; how many in which way."""
    counter: Counter[str] = Counter()
    draw = random.Random(0)
    draw.shuffle(files)
    contents = [path.read_bytes() for path in files]
    for number, (path, whole) in enumerate(zip(files, contents, strict=True)):
        kind = KINDS[number % len(KINDS)]
        alike = [
            other for file, other in zip(files, contents, strict=True) if file != path and file.suffix == path.suffix
        ]
        bad = damaged(whole, kind, draw.choice(alike or [b"{}"]))
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        for stray in (f"{path.name}~", f".{path.name}.swp", f"{path.stem} (1){path.suffix}"):
            path.with_name(stray).write_bytes(b"\0\xff not ours")
        counter[kind] += 1
    return counter


@pytest.mark.timeout(900)
def test_a_run_goes_on_from_what_is_whole_or_not_at_all(cache: Path, tmp_path: Path) -> None:
    log, config, root = Log(), two_tasks(tmp_path), Storage.at(tmp_path / "runs")
    driver, storage = Training("", tmp_path, log), root.sub("mine")
    words = [str(config), storage.uri]
    try:
        driver.start(str(config), root.sub("whole").uri)
        assert driver.wait(240) == 0, driver.said()
        whole = outcome(root.sub("whole"))
        log(f"undisturbed: {len(whole['steps'])} steps, matrix' last row {whole['matrix'][-1]}")
        driver.start(*words)
        state = wait_for(storage, inside(1), driver)
        driver.send(signal.SIGKILL)
        log(f"{len(state.phases)} task learned, {state.checkpoints[-1]}: the process was killed")
        _with_changed_inputs(log, driver, words, tmp_path)
        names = read_state(storage).checkpoints
        older, newest = (Path(storage.path(f"{FOLDER}/{name}")) for name in names[-2:])
        shutil.rmtree(newest)
        shutil.copytree(older, newest)
        log(f"the folder of {newest.name} is that of {older.name} now")
        files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
        log(f"damaged {len(files)} files of the cache: {dict(damage_all(files))}; started again")
        driver.start(*words)
        assert driver.wait(240) == 0, driver.said()
        said = driver.logs()
        lines = {words: said.count(words) for words in (*ANEW, "is of another checkpoint")}
        log(f"the log says {lines}")
        assert lines["is of another checkpoint"] == 1 and sum(lines.values()) > 3 and "Traceback" not in said
        mine = outcome(storage)
        for what in whole:
            assert mine[what] == whole[what], what
        assert verify(Bank(storage.sub("bank"))).problems == []
        log("matrix, steps, adapters, router and answers are equal, bit for bit")
        _predictions(log, storage.sub("bank").uri, tmp_path)
    finally:
        driver.stop()


def _with_changed_inputs(log: Log, driver: Driver, words: list[str], folder: Path) -> None:
    """A row of the task that is learned, and of the one that is not: both would be mixed with what was learned."""
    for task in ("colour", "animal"):
        file = folder / "tasks" / task / "train.jsonl"
        whole = file.read_bytes()
        rows = whole.splitlines(keepends=True)
        file.write_bytes(b"".join([json.dumps({"text": "a", "label": json.loads(rows[0])["label"]}).encode(), b"\n"]))
        with file.open("ab") as rest:
            rest.writelines(rows[1:])
        driver.start(*words)
        status = driver.wait(120)
        said = driver.logs().splitlines()[-1]
        log(f"a row of '{task}' changed, started again: status {status}, {said}")
        assert status == 1 and "since what it reads has changed" in said and task in said
        file.write_bytes(whole)


def _predictions(log: Log, bank: str, folder: Path) -> None:
    """Answers in parts, killed half way and damaged, equal those that nothing disturbed."""
    rows, to, whole = folder / "rows.jsonl", folder / "answers", folder / "answers_whole"
    rows.write_text("".join(json.dumps({"text": f"{TEXTS[n % 4]} {n % 7}", "id": n}) + "\n" for n in range(ROWS)))

    def command(path: Path) -> list[str]:
        words = ["predict", bank, str(rows), "--to", str(path), "--part-rows", str(PART_ROWS)]
        return [
            sys.executable,
            "-c",
            "import sys; from raycl.cli import main; sys.exit(main.main(sys.argv[1:]))",
            *words,
        ]

    assert subprocess.run(command(whole), capture_output=True, timeout=200, check=False).returncode == 0
    process = subprocess.Popen(command(to), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ends = time.monotonic() + 120
    while len(list(to.glob("part-*.json"))) < 10:
        assert time.monotonic() < ends and process.poll() is None, "no part was written"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    written = sorted(to.glob("part-*"))
    kinds = damage_all(written)
    log(f"predict was killed after {len(written) // 2} parts; damaged {len(written)} files: {dict(kinds)}")
    done = subprocess.run(command(to), capture_output=True, text=True, timeout=200, check=False)
    said = next((line for line in done.stdout.splitlines() if " rows in " in line), done.stderr)
    log(f"started again: status {done.returncode}, {said}")
    assert done.returncode == 0 and "Traceback" not in done.stderr and f"{ROWS:,} rows in" in said
    assert _parts(to) == _parts(whole)
    log(f"all {len(_parts(to))} files of parts are equal, byte for byte")


def _parts(folder: Path) -> dict[str, Any]:
    names = [f"part-{number:06d}.{suffix}" for number in range(ROWS // PART_ROWS) for suffix in ("jsonl", "json")]
    return {name: (folder / name).read_bytes() for name in names}
