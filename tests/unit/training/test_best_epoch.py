"""`eval.select=best_dev`: a task ends with the weights of its best epoch, also where the run was stopped in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ENGINES, Lab, Stop, run, trace

from raycl.config import as_tree, validate
from raycl.errors import ConfigError
from raycl.storage import Storage
from raycl.training.phase import selection
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint
from raycl.training.records.journal import read_state
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.setup.checks import check
from raycl.training.setup.run_config import RunConfig

SCORES = (10.0, 40.0, 40.0, 30.0)
"""Scores of the dev rows after each epoch; the second is the first of the best."""


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Dev rows are scored for real, and then count as `SCORES`, so that the best epoch is known."""
    real, collected, left = selection.dev_score, [], [*SCORES, *SCORES]

    def score(*given: Any) -> float:
        collected.append(real(*given))
        return left.pop(0)

    monkeypatch.setattr(selection, "dev_score", score)
    return collected


def config(lab: Lab, kind: str, method: str, engine: str = "torch", **sections: Any) -> RunConfig:
    """Two steps an epoch, and one checkpoint inside the task, in the third epoch."""
    stream = {"tasks": lab.tasks[:1], "dev_fraction": 0.3}
    sections = {"eval": {"select": "best_dev"}, "checkpoint": {"every_steps": 5}, **sections}
    train = {"epochs": 4, "batch_size": 8, **sections.pop("train", {})}
    return lab.config(kind, method, ENGINES[engine], stream=stream, train=train, **sections)


def last(storage: Storage) -> Checkpoint:
    return read_checkpoint(storage, read_state(storage).checkpoints[-1], TensorObjects(storage, storage.sub("bank")))


@pytest.mark.parametrize(
    ("kind", "method", "engine"),
    [("bert", "finetune", "torch"), ("t5", "lora", "zero2"), ("bert", "sapt", "torch"), ("bert", "slm", "zero0")],
)
def test_the_weights_are_those_of_the_best_epoch(
    lab: Lab, tmp_path: Path, scored: list[float], kind: str, method: str, engine: str
) -> None:
    best, short = Storage.at(tmp_path / "best"), Storage.at(tmp_path / "short")
    run(config(lab, kind, method, engine), best)
    per_epoch = len(trace(best)) // 4
    done = last(best)
    assert len(scored) == 4 and all(0 <= score <= 100 for score in scored)
    assert (done.spent["selected_score"], done.spent["selected_step"]) == (40.0, 2 * per_epoch)
    run(config(lab, kind, method, engine, eval={}, train={"epochs": 2}), short)
    wanted = last(short).parameters
    assert done.parameters.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in done.parameters.items())
    bank = [storage.sub("bank").files("objects").keys() for storage in (best, short)]
    assert bank[0] == bank[1], "what is published is the best epoch's too"


def test_a_run_that_was_stopped_still_knows_its_best_epoch(lab: Lab, tmp_path: Path, scored: list[float]) -> None:
    whole, parts = Storage.at(tmp_path / "whole"), Storage.at(tmp_path / "parts")
    wanted = config(lab, "bert", "lora")
    run(wanted, whole)
    per_epoch = len(trace(whole)) // 4
    with pytest.raises(Stop):
        run(wanted, parts, after=3 * per_epoch - 1)  # behind the best epoch, with a checkpoint in between
    scored.clear()
    run(wanted, parts)
    assert len(scored) == 2, "the epochs that were left"
    ends = [last(storage).parameters for storage in (whole, parts)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_dev_rows_and_whole_weights_are_needed(lab: Lab) -> None:
    tree = as_tree(config(lab, "bert", "lora"))
    without = validate(RunConfig, {**tree, "stream": {**tree["stream"], "dev_fraction": 0}})
    with pytest.raises(
        ConfigError, match=r"eval.select=best_dev, but colour has no dev rows: raise stream.dev_fraction"
    ):
        check(without)
    with pytest.raises(ConfigError, match=r"eval.select=best_dev evaluates inside a task, where engine.zero_stage=3"):
        check(config(lab, "bert", "lora", "zero3"))
