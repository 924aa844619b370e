"""A run that continues from where another one was equals, bit for bit, the run that learned everything itself.

The pairs are those whose prefix keys agree: that is the promise behind the keys.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Lab, matrix, run, trace

from raycl import config as configs
from raycl.bank import Bank
from raycl.operations.banks.maintenance import verify
from raycl.operations.sweep.trials.prefix import prefix_keys
from raycl.storage import Storage
from raycl.training.records.checkpoint import read_checkpoint
from raycl.training.records.fork_points import read_fork_point, save_fork_point, start_from
from raycl.training.records.journal import read_state
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.setup.run_config import RunConfig

MIGU = {"name": "migu", "layers": ["attention", "ffn"]}


def three(lab: Lab) -> list[dict[str, Any]]:
    """Return the two tasks of the laboratory and a third one, which has the first one's rows."""
    return [*lab.tasks, {**copy.deepcopy(lab.tasks[0]), "name": "third"}]


def pair(lab: Lab, case: str, engine: str, count: int = 3) -> tuple[RunConfig, RunConfig]:
    """Return the run that saves fork points, and the one that uses them; of the first `count` tasks."""
    tasks = three(lab)
    names = [str(task["name"]) for task in tasks]
    migu = [{"modifiers": [{**MIGU, "threshold": value}]} for value in (0.3, 0.8)]
    olora = [{"method": {"name": "olora", "lambda_1": value}} for value in (0.1, 2.0)]
    sapt = [{"method": {"name": "sapt", "arm": {"weight": value}}} for value in (0.1, 2.0)]
    later = [{"method": lab.slots(), "train": {"epochs_by_task": {names[2]: epochs}}} for epochs in (1, 2)]
    orders: list[dict[str, Any]] = [
        {"method": "inclora", "stream": {"tasks": tasks}},
        {"method": "inclora", "stream": {"tasks": [tasks[0], tasks[2], tasks[1]]}},
    ]
    finetune = [{"method": "finetune", "train": {"epochs_by_task": {names[1]: epochs}}} for epochs in (1, 2)]
    rates = [{"train": {"learning_rate_by_task": {names[2]: rate}}} for rate in (0.02, 0.03)]
    chosen = {
        "rates": rates,
        "migu": migu,
        "olora": olora,
        "sapt": sapt,
        "later": later,
        "orders": orders,
        "finetune": finetune,
    }[case]
    collected = []
    for sections in chosen:
        merged = {"stream": {"tasks": tasks[:count]}, "checkpoint": {"keep": 1}, **copy.deepcopy(sections)}
        collected.append(lab.config("bert", merged.pop("method", "lora"), engine, **merged))
    return collected[0], collected[1]


@pytest.mark.parametrize(
    ("case", "engine", "agreed"),
    [
        ("migu", {"name": "deepspeed", "zero_stage": 2}, 1),
        ("olora", "torch", 1),
        ("sapt", "torch", 1),
        ("later", "torch", 2),
        ("orders", "torch", 1),
        ("finetune", "torch", 1),
        ("rates", "torch", 2),
    ],
    ids=["migu-zero2", "olora", "sapt", "slm-later-epochs", "inclora-orders", "finetune-epochs", "later-rates"],
)
def test_a_run_from_a_fork_point_equals_a_full_run(
    lab: Lab, tmp_path: Path, case: str, engine: Any, agreed: int
) -> None:
    lender, borrower = pair(lab, case, engine)
    names = [[task.name for task in config.stream.tasks or ()] for config in (lender, borrower)]  # type: ignore[union-attr]
    keys = [prefix_keys(config, item) for config, item in zip((lender, borrower), names, strict=True)]
    assert [a == b for a, b in zip(*keys, strict=True)] == [True] * agreed + [False] * (2 - agreed)
    if agreed == 1 and case != "orders":  # the second task is where they part
        lender, borrower = pair(lab, case, engine, 2)

    bank = {"dir": str(tmp_path / "bank"), "publish": True}
    banks = (bank, {**bank, "branch": "other"})
    pairs = zip((lender, borrower), banks, strict=True)
    lender, shared = (configs.validate(RunConfig, {**configs.as_tree(item), "bank": held}) for item, held in pairs)
    first, fork_storage = Storage.at(tmp_path / "lender"), Storage.at(tmp_path / "place")
    run(lender, first, on_phase=lambda record: save_fork_point(first, agreed, fork_storage))
    fork_point = read_fork_point(fork_storage)
    assert fork_point is not None and len(fork_point.phases) == agreed

    second, alone = Storage.at(tmp_path / "borrower"), Storage.at(tmp_path / "alone")
    start_from(fork_storage, second, fork_point.phases, bank=Storage.at(tmp_path / "bank"))
    run(shared, second)
    run(borrower, alone)
    assert matrix(second) == matrix(alone)
    assert trace(second) == trace(alone) != trace(first)
    cells = [read_state(item).phases for item in (second, alone)]
    assert [record["row"] for record in cells[0]] == [record["row"] for record in cells[1]]
    objects = TensorObjects(second, Storage.at(tmp_path / "bank")), TensorObjects(alone, alone.sub("bank"))
    ends = [read_checkpoint(item.storage, read_state(item.storage).checkpoints[-1], item) for item in objects]
    for kind in ("parameters", "frozen_state"):
        mine, theirs = getattr(ends[0], kind), getattr(ends[1], kind)
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    answers = [{name: item.read(name) for name in item.files("predictions")} for item in (second, alone)]
    assert answers[0] == answers[1] and answers[0]
    if case != "finetune":
        both = [
            Bank.at(str(tmp_path / "bank")).open(cells[0][-1]["bank"]["snapshot"]),
            Bank(alone.sub("bank")).newest(),
        ]
        hashes = [{entry.name: entry.tensors.sha256 for entry in item.adapters} for item in both if item is not None]
        assert hashes[0] == hashes[1] and verify(Bank.at(str(tmp_path / "bank"))).problems == []


def test_a_fork_point_is_stored_once_and_only_if_it_matches(lab: Lab, tmp_path: Path) -> None:
    config = lab.config("bert", stream={"tasks": three(lab)})
    first, fork_storage, early = (Storage.at(tmp_path / name) for name in ("first", "place", "early"))
    run(config, first, on_phase=lambda record: save_fork_point(first, 2, fork_storage))
    save_fork_point(first, 1, early)
    assert read_fork_point(early) is None, "the checkpoint of the first phase is gone by now"
    before = fork_storage.files()
    save_fork_point(first, 2, fork_storage)
    assert fork_storage.files().keys() == before.keys() and read_fork_point(Storage.at(tmp_path / "nowhere")) is None


def test_a_phase_may_be_the_last_one(lab: Lab, tmp_path: Path) -> None:
    """A run that a scheduler ends after a phase keeps its phases, and the next attempt finishes the stream."""
    storage = Storage.at(tmp_path)
    config = lab.config("bert", stream={"tasks": three(lab)})
    run(config, storage, on_phase=lambda record: record["phase"] < 1)
    assert len(read_state(storage).phases) == 2
    run(config, storage)
    assert len(read_state(storage).phases) == 3 and storage.read_json("results.json")["finished"]
