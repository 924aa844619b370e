"""Continual pre-training end to end: texts are learned, runs resume, and end tasks start from their model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import ENGINES, TASKS, Done, Lab, Stop, exported, matrix, run, trace

from raycl.bank import Bank
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.workers.distributed import DistributedContext

CASES = [
    ("masked", "mlm", "finetune"),
    ("masked", "mlm", "olora"),
    ("llama", "clm", "finetune"),
    ("llama", "clm", "olora"),
]


@pytest.fixture(scope="module")
def learned(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Done]:
    """(backbone kind, objective, method) -> its run over texts; for reading only."""

    @functools.cache
    def made(kind: str, objective: str, method: str) -> Done:
        config = lab.config(kind, method, stream={"objective": objective}, train={"epochs": 2})
        storage = Storage.at(tmp_path_factory.mktemp("texts"))
        return Done(config, storage, run(config, storage).context)

    return made


@pytest.fixture(params=CASES, ids="-".join)
def done(request: pytest.FixtureRequest, learned: Callable[[str, str, str], Done]) -> Done:
    return learned(*request.param)


def test_every_cell_has_token_accuracy_and_perplexity(done: Done) -> None:
    results = done.storage.read_json("results.json")
    assert [[cell is not None for cell in row] for row in results["matrix"]] == [[True, False], [True, True]]
    for cell in (cell for row in results["matrix"] for cell in row if cell):
        assert 0 <= cell["value"] <= 100 and cell["count"] == 6
        assert 1 < cell["extra"]["perplexity"] < 300 and cell["extra"]["tokens"] >= 6
        assert cell["value"] * cell["extra"]["tokens"] / 100 == pytest.approx(
            round(cell["value"] * cell["extra"]["tokens"] / 100)
        )
    assert done.storage.list("predictions") == []


def test_a_run_stopped_inside_an_epoch_resumes_bit_for_bit(done: Done, tmp_path: Path) -> None:
    """The choice of hidden words is no state: it follows from seed, epoch and row."""
    storage, steps = Storage.at(tmp_path), len(trace(done.storage))
    for after in (steps // 4 + 1, steps // 2):
        with pytest.raises(Stop):
            run(done.config, storage, after=after)
    run(done.config, storage)
    assert trace(storage) == trace(done.storage) and matrix(storage) == matrix(done.storage)
    assert exported(storage) == exported(done.storage)


def test_engines_and_accumulation_change_nothing(lab: Lab, tmp_path: Path) -> None:
    collected = []
    for name, size in (("torch", None), ("torch", 2), ("zero2", None), ("zero3", None)):
        sections = {"stream": {"objective": "mlm", "tasks": lab.tasks[:1]}, "train": {"micro_batch_size": size}}
        storage = Storage.at(tmp_path / f"{name}-{size}")
        run(lab.config("masked", "finetune", ENGINES[name], **sections), storage)
        collected.append(trace(storage))
    for others in collected[1:]:
        for mine, other in zip(others, collected[0], strict=True):
            assert mine == pytest.approx(other, abs=1e-4, rel=1e-3)


def test_end_tasks_begin_where_pre_training_ended(
    lab: Lab, learned: Callable[[str, str, str], Done], tmp_path: Path
) -> None:
    ends = Storage.at(tmp_path)
    folder = learned("masked", "mlm", "finetune").storage.path("learned/001-animal")
    assert not Path(folder, "label_head.safetensors").exists()
    config = lab.config("masked", ("separate", "finetune"), backbone={"name": folder})
    model = build(config, DistributedContext.alone(torch.device("cpu")))[0].backbone.model
    weights = load_file(f"{folder}/model.safetensors")
    mine = {f"bert.{name}": value for name, value in model.state_dict().items()}
    assert mine.keys() < weights.keys() and all(torch.equal(value, weights[name]) for name, value in mine.items())
    run(config, ends)
    results = ends.read_json("results.json")
    assert results["finished"] and results["phases"] == list(TASKS)
    assert matrix(ends)[1] == [matrix(ends)[0][0], matrix(ends)[1][1]], "each end task has a model of its own"


def test_adapters_of_texts_go_to_the_bank_without_a_label_head(learned: Callable[[str, str, str], Done]) -> None:
    bank = Bank(learned("masked", "mlm", "olora").storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None and newest.router.kind == "sum" and [task.labels for task in newest.tasks] == [None, None]
    for entry in newest.adapters:
        state = bank.fetch(entry, newest.layouts[entry.layout])
        assert state.labels == () and state.head_weight is None and state.rank == 8
