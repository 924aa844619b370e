"""Checkpoints come back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raycl.errors import RunError
from raycl.storage import Storage
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint, write_checkpoint


def made(step: int = 3) -> Checkpoint:
    torch.manual_seed(0)
    parameters = {"a": torch.randn(3, 2), "b": torch.randn(4).to(torch.bfloat16), "empty": torch.zeros(0, 5)}
    optimizer = {"a/exp_avg": torch.randn(3, 2), "a/exp_avg_sq": torch.full((3, 2), 1e-38)}
    return Checkpoint(1, step, 9, {"labels": ["ä", "b"]}, parameters, optimizer, {"train_s": 1.5, "tokens": 7.0})


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    storage, checkpoint = Storage.at(tmp_path), made()
    write_checkpoint(storage, checkpoint.name(2), checkpoint)
    found = read_checkpoint(storage, "phase001-step0000003-attempt0002")
    for mine, other in ((found.parameters, checkpoint.parameters), (found.optimizer, checkpoint.optimizer)):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) and mine[key].dtype == other[key].dtype for key in mine)
    assert (found.phase, found.step, found.steps, found.method, found.spent) == (
        1,
        3,
        9,
        {"labels": ["ä", "b"]},
        checkpoint.spent,
    )
    assert not found.is_phase_end


def test_the_end_of_a_phase_has_no_optimizer(tmp_path: Path) -> None:
    storage, checkpoint = Storage.at(tmp_path), made(step=9)
    checkpoint.optimizer = {}
    write_checkpoint(storage, "end", checkpoint)
    found = read_checkpoint(storage, "end")
    assert found.is_phase_end and found.optimizer == {}


def test_without_its_manifest_it_does_not_exist(tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    write_checkpoint(storage, "c", made())
    storage.delete("checkpoints/c/manifest.json")
    with pytest.raises(RunError, match=r"c' is incomplete: it has no manifest.json"):
        read_checkpoint(storage, "c")
    with pytest.raises(RunError, match="is incomplete"):
        read_checkpoint(storage, "none")
