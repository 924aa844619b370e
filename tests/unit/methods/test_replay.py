"""Replay: what is stored, and that it is learned again beside every later task."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phases import begin_phase
from tiny import TRAIN_ROWS, Lab, matrix, run, trace

from raycl.bank import Bank
from raycl.data.stream import StreamConfig, open_stream
from raycl.errors import ConfigError
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))


def texts_of_each_step(lab: Lab, folder: Path, phase: int, method: Any, epochs: int = 1) -> list[list[bytes]]:
    """Return what every optimizer step of a phase reads, as sorted token rows."""
    parts, _ = build(lab.config("t5", method, train={"epochs": epochs}), WORLD)
    loader = begin_phase(parts, phase).loader()
    order = loader.order
    steps = []
    for step in range(order.steps):
        (batch,) = loader.micro_batches(step)
        rows = zip(batch.source_ids.numpy(), batch.target_ids.numpy(), batch.source_mask.sum(1).tolist(), strict=True)
        steps.append(sorted(s[:n].tobytes() + t[t >= 0].tobytes() for s, t, n in rows if n > 1))
    return steps


def flat(steps: list[list[bytes]]) -> list[bytes]:
    return list(chain.from_iterable(steps))


@pytest.mark.parametrize(
    ("rows", "stored"), [(126, 2), (142, 2), (160, 3), (250, 5), (338, 6), (975, 19), (1000, 20), (20, 1)]
)
def test_two_percent_and_one_at_least(rows: int, stored: int) -> None:
    """SAPT's counts (appendix C), rounded as in the files released with its code."""
    stream = open_stream(StreamConfig(tasks=("topic",), train_rows=rows, test_rows=4, dev_fraction=0), 3)
    result = stream.stored(stream.tasks[0], 0.02)
    assert len(result) == stored and result.max() < rows
    assert np.array_equal(result, stream.stored(stream.tasks[0], 0.02)), "drawn once per task"


def test_old_samples_come_with_every_later_task_in_every_epoch(lab: Lab, tmp_path: Path) -> None:
    method = {"name": "replay", "share": 0.2}
    first = flat(texts_of_each_step(lab, tmp_path / "first", 0, method))
    alone = flat(texts_of_each_step(lab, tmp_path / "alone", 1, "lora"))
    mixed = texts_of_each_step(lab, tmp_path / "mixed", 1, method, epochs=2)
    assert len(first) == len(alone) == TRAIN_ROWS
    epochs = [flat(mixed[:4]), flat(mixed[4:])]
    for epoch in epochs:
        assert len(epoch) == TRAIN_ROWS + 2
        old = list(epoch)
        for row in alone:
            old.remove(row)
        assert len(old) == 2 and set(old) <= set(first)
    assert sorted(epochs[0]) == sorted(epochs[1]) and mixed[:4] != mixed[4:], "one data set, shuffled each time"


def test_full_replay_equals_multi_task_training(lab: Lab, tmp_path: Path) -> None:
    """Replay at 100 % has the joint data in its last phase (SAPT, appendix E.2)."""
    replayed = texts_of_each_step(lab, tmp_path / "replay", 1, {"name": "replay", "share": 1.0})
    joint = texts_of_each_step(lab, tmp_path / "joint", 0, "joint")
    assert len(replayed) == len(joint) == 7
    assert sorted(flat(replayed)) == sorted(flat(joint))


def test_the_first_task_is_the_learners_own_and_the_second_forgets_less(lab: Lab, tmp_path: Path) -> None:
    collected = {}
    for name, method in (("lora", "lora"), ("replay", {"name": "replay", "share": 0.5})):
        storage = Storage.at(tmp_path / name)
        run(lab.config("bert", method, train={"epochs": 4, "learning_rate": 0.03}), storage)
        collected[name] = (trace(storage), matrix(storage))
    assert collected["replay"][0][:16] == collected["lora"][0][:16]
    assert collected["replay"][1][0] == collected["lora"][1][0]
    assert collected["replay"][1][1][0] > collected["lora"][1][1][0]
    assert len(collected["replay"][0]) == 16 + 4 * 6, "14 rows, then 14 and 7"


def test_adapters_record_the_tasks_of_replayed_samples(lab: Lab, tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    run(lab.config("bert", {"name": "replay", "learner": "inclora"}), storage)
    newest = Bank(storage.sub("bank")).newest()
    assert newest is not None and newest.router.kind == "sum"
    assert {entry.name: entry.tasks for entry in newest.adapters} == {
        "colour": ("colour",),
        "animal": ("colour", "animal"),
    }


def test_a_learner_with_adapters_for_its_own_texts_is_refused(lab: Lab) -> None:
    with pytest.raises(
        ConfigError, match=r"method\.learner is slm, which trains each task's adapters on its own texts"
    ):
        build(lab.config("bert", {"name": "replay", "learner": lab.slots()}), WORLD)
    with pytest.raises(ConfigError, match=r"method\.learner is sapt, which trains each task's"):
        build(lab.config("bert", {"name": "replay", "learner": "sapt"}), WORLD)
    with pytest.raises(ConfigError, match=r"'method\.learner' names 'replay'"):
        lab.config("bert", {"name": "replay", "learner": "replay"})
