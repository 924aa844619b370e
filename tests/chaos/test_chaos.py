"""Six tasks through everything that can go wrong on a cluster, while an endpoint answers: nothing is lost or changed.

`make chaos`: about ten minutes on two cores. The log records what was broken, and when.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from faults import (
    Asking,
    Driver,
    Flood,
    Log,
    Nodes,
    Store,
    damage_newest_checkpoint,
    endpoint,
    kill_child,
    short_folder,
    wait_for,
)
from tiny import save_model

from raycl.bank import Bank
from raycl.bank.branches import head_of
from raycl.storage import Storage
from raycl.training.records.journal import RunState, read_state
from raycl.training.records.progress import read_trace

PORT = 8993
ROWS, TESTS = 160, 24
WORDS = {
    "colour": (("red", "fire is warm very"), ("blue", "the sea is cold")),
    "animal": (("cat", "it purrs a sleeps"), ("dog", "the barks runs much")),
    "heat": (("warm", "fire red is very"), ("cold", "sea blue the is")),
    "motion": (("runs", "dog barks much very"), ("sleeps", "cat purrs a is")),
    "place": (("sky", "blue the is a"), ("sea", "cold the much is")),
    "noise": (("purrs", "cat a sleeps is"), ("barks", "dog runs much the")),
}
"""Task -> (label, words of its texts)."""
OUTAGE_S = 60.0


def save_tasks(folder: Path) -> list[dict[str, str]]:
    """Save six tasks of two labels."""
    for name, classes in WORDS.items():
        (folder / name).mkdir(parents=True)
        for split, rows in (("train", ROWS), ("test", TESTS)):
            lines = []
            for number in range(rows):
                label, words = classes[number % 2]
                pool = [*words.split(), "a", "very"]
                text = " ".join(
                    pool[(number // 2 + index * (1 + number % 3)) % len(pool)] for index in range(2 + number % 5)
                )
                lines.append(json.dumps({"text": text, "label": label}))
            (folder / name / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return [{"name": name, "path": str(folder / name)} for name in WORDS]


def save_config(folder: Path) -> Path:
    """Save a config: SLM on a tiny encoder, so many steps that every task lasts for seconds."""
    model = str(save_model("bert", folder / "bert"))
    tree = {
        "stream": {"tasks": save_tasks(folder / "tasks"), "dev_fraction": 0.1, "max_source_tokens": 24},
        "backbone": {"name": model, "dtype": "float32"},
        "method": {
            "name": "slm",
            "target_modules": ["attention", "ffn"],
            "keys": {"groups": 4, "steps": 40, "start": "data"},
            "encoder": {"name": model, "max_tokens": 64},
        },
        "train": {"epochs": 60, "batch_size": 8, "learning_rate": 0.01, "log_every_s": 5},
        "checkpoint": {"every_steps": 150},
        "launch": {"workers": 2, "cpus_per_worker": 1, "max_failures": 5},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    made = Store()
    yield made
    made.stop()


@pytest.fixture
def nodes(store: Store) -> Iterator[Nodes]:
    with short_folder() as folder:
        made = Nodes(folder)
        try:
            yield made
        finally:
            made.stop()


def inside(phase: int) -> Any:
    """Return whether the newest checkpoint is one inside this phase, or inside a later one."""

    def ready(state: RunState) -> bool:
        done, name = len(state.phases), state.checkpoints[-1] if state.checkpoints else ""
        return done >= phase and name.startswith(f"phase{done:03d}-")

    return ready


def outcome(storage: Storage, bank: Bank | None = None) -> dict[str, Any]:
    """Return what must not depend on what went wrong: every cell, every step's numbers, every adapter, every answer."""
    results = storage.read_json("results.json")
    newest = (bank or Bank(storage.sub("bank"))).newest()
    assert newest is not None and results["finished"]
    folder = f"predictions/{len(results['phases']) - 1:03d}-{results['phases'][-1]}"
    return {
        "matrix": [[cell and cell["value"] for cell in row] for row in results["matrix"]],
        "steps": [(step["phase"], step["step"], step["loss"], step["grad_norm"]) for step in read_trace(storage)],
        "adapters": {entry.name: entry.tensors.sha256 for entry in newest.adapters},
        "router": newest.router.tensors and newest.router.tensors.sha256,
        "answers": {name: storage.read(f"{folder}/{name}").decode() for name in storage.list(folder)},
    }


@pytest.mark.timeout(1500)
def test_six_tasks_through_everything_that_can_go_wrong(store: Store, nodes: Nodes, tmp_path: Path) -> None:
    log, config = Log(), save_config(tmp_path)
    root = store.uri("runs")
    output_setting = f"output.dir={root}"
    driver = Driver(nodes.address, tmp_path, log)
    try:
        driver.start(str(config), output_setting, "output.name=whole")
        assert driver.wait(400) == 0, driver.said()
        whole = outcome(Storage.at(root).sub("whole"))
        log(f"undisturbed: {len(whole['steps'])} steps, matrix' last row {whole['matrix'][-1]}")
        _disturbed(
            log,
            store,
            nodes,
            driver,
            [str(config), output_setting, "output.name=mine", "output.exists=resume"],
            tmp_path,
        )
        mine = outcome(Storage.at(root).sub("mine"))
        attempts = read_state(Storage.at(root).sub("mine")).attempts
        log(f"disturbed: {len(attempts)} attempts, matrix' last row {mine['matrix'][-1]}")
        for what in whole:
            assert mine[what] == whole[what], what
        log("matrix, steps, adapters, router and answers are equal, bit for bit")
        last = _from_the_bank_alone(log, store, driver, config)
        for what in whole.keys() - {"steps"}:
            assert last[what] == whole[what], what
        assert last["steps"] == [step for step in whole["steps"] if step[0] >= last["steps"][0][0]]
        log("from the bank alone: matrix, steps, adapters, router and answers are equal, bit for bit")
    finally:
        driver.stop()


def _disturbed(log: Log, store: Store, nodes: Nodes, driver: Driver, words: list[str], folder: Path) -> None:
    storage = Storage.at(store.uri("runs")).sub("mine")
    driver.start(*words)
    state = wait_for(storage, inside(1), driver)
    os.kill(state.attempts[-1]["pid"], signal.SIGKILL)
    log(f"{_where(state)}: a worker was killed")
    with endpoint(storage.sub("bank").address, PORT, folder) as serving:
        asking, flood = Asking(f"http://127.0.0.1:{PORT}"), Flood(PORT)
        clients = [threading.Thread(target=item.run, daemon=True) for item in (asking, flood)]
        for client in clients:
            client.start()
        log("the endpoint answers")
        try:
            _faults(log, store, nodes, driver, words, storage, serving)
            newest = Bank(storage.sub("bank")).newest()
            assert newest is not None
            _follows(asking, newest.number)
        finally:
            asking.stop()
            flood.stop()
            for client in clients:
                client.join(timeout=60)
        log(
            f"endpoint: {asking.answers} answers, {asking.lost} lost, statuses {dict(asking.statuses)}, "
            f"snapshots {asking.snapshots}"
        )
        log(f"flood of header fields: statuses {dict(flood.statuses)}, slowest /healthz {flood.slowest:.1f} s")
        assert asking.lost == 0 and asking.answers > 100
        assert set(flood.statuses) <= {0, 431} and flood.statuses.total() > 100
        assert asking.snapshots == sorted(asking.snapshots), "an older snapshot answered after a newer one"


def _from_the_bank_alone(log: Log, store: Store, driver: Driver, config: Path) -> dict[str, Any]:
    """A run is killed half way and its folder deleted; another one learns the rest from the bank."""
    root, shared = store.uri("runs"), store.uri("shared")
    first = Storage.at(root).sub("first")
    driver.start(str(config), f"output.dir={root}", "output.name=first", f"bank.dir={shared}")
    state = wait_for(first, inside(3), driver)
    driver.send(signal.SIGKILL)
    wait_until_gone([attempt["pid"] for attempt in state.attempts])
    Storage.at(root).delete("first")
    bank = Bank.at(shared)
    learned = [task.name for task in head_of(bank).tasks]
    log(f"{_where(state)}: the driver was killed and the run's folder deleted; the bank has {', '.join(learned)}")
    rest = [task for task in yaml.safe_load(config.read_text())["stream"]["tasks"] if task["name"] not in learned]
    again = [f"bank.start={shared}@main", f"stream.tasks={json.dumps(rest)}", "launch.workers=2"]
    driver.start(*again, "launch.cpus_per_worker=1", f"output.dir={root}", "output.name=rest")
    assert driver.wait(400) == 0, driver.said()
    return outcome(Storage.at(root).sub("rest"), bank)


def wait_until_gone(pids: list[int]) -> None:
    """Wait until these processes have ended."""
    ends = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < ends, "workers outlive their driver"
        time.sleep(0.2)


def _faults(
    log: Log, store: Store, nodes: Nodes, driver: Driver, words: list[str], storage: Storage, serving: Any
) -> None:
    state = wait_for(storage, inside(2), driver)
    nodes.kill_of(state.attempts[-1]["pid"])
    log(f"{_where(state)}: the node of the first worker was killed, another one joined")

    state = wait_for(storage, lambda now: inside(2)(now) and len(now.attempts) > len(state.attempts), driver)
    log(f"endpoint: killed {kill_child(serving, 'ray::ServeReplica')}")
    log(f"{_where(state)}: the store is away for {OUTAGE_S:.0f} s")
    store.away(OUTAGE_S)
    log("the store is back")

    if not driver.running:
        log(f"the driver had stopped with {driver.wait(1)}; started again")
        driver.start(*words)
    state = wait_for(storage, inside(3), driver)
    driver.send(signal.SIGKILL)
    log(f"{_where(state)}: the driver was killed; started again")
    log(f"endpoint: killed {kill_child(serving, 'ray::CacheActor')}")
    driver.start(*words)

    state = wait_for(storage, lambda now: inside(4)(now) and len(now.attempts) > len(state.attempts), driver)
    status = driver.send(signal.SIGTERM)
    log(f"{_where(state)}: the driver got SIGTERM and ended with {status}")
    assert status == 75
    log(f"damaged the newest checkpoint, {damage_newest_checkpoint(storage)}; started again")
    driver.start(*words)
    assert driver.wait(400) == 0, driver.said()
    log("the run is finished")


def _where(state: RunState) -> str:
    return f"{len(state.phases)} tasks learned, {state.checkpoints[-1]}"


def _follows(asking: Asking, number: int) -> None:
    """The endpoint comes to the last snapshot."""
    ends = time.monotonic() + 120
    while asking.snapshots[-1:] != [number]:
        assert time.monotonic() < ends, f"the endpoint answers from {asking.snapshots[-1:]}, the newest is {number}"
        time.sleep(0.5)
