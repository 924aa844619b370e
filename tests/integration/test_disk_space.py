"""Tests of the estimate of what a run will write, beside what real runs wrote, and of its warning on small disks."""

from __future__ import annotations

import logging
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Lab, Stop, run

from raycl.storage import Storage
from raycl.training.phase import disk_space, trainer
from raycl.training.phase.disk_space import DiskPlan, Growth, growth, moments, shortage

Usage = namedtuple("Usage", "total used free")

LARGE = {"name": "lora", "r": 64}
METHODS: dict[str, Any] = {
    "lora": LARGE,
    "separate": ("separate", LARGE),
    "inclora": {"name": "inclora", "r": 64},
    "slm": {"name": "slm", "r": 32},
    "sapt": {"name": "sapt", "r": 64},
    "finetune": "finetune",
}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[DiskPlan]:
    """Plans of the runs of a test."""
    disk_plans: list[DiskPlan] = []
    real = trainer.plan_of
    monkeypatch.setattr(trainer, "plan_of", lambda *given: disk_plans.append(real(*given)) or disk_plans[-1])
    return disk_plans


def written(storage: Storage) -> int:
    return sum(file.size for file in storage.files().values())


@pytest.mark.parametrize(
    ("method", "publish"),
    [*((method, True) for method in METHODS), *((method, False) for method in METHODS if method != "finetune")],
)
def test_the_estimate_is_near_to_what_a_run_writes(
    lab: Lab, tmp_path: Path, planned: list[DiskPlan], method: str, publish: bool
) -> None:
    kind = "t5" if method == "sapt" else "bert"
    storage = Storage.at(tmp_path / "run")
    run(lab.config(kind, METHODS[method], bank={"publish": publish}), storage)
    last = list(moments(planned[0]))[-1]
    assert last.left + last.bank == pytest.approx(written(storage), rel=0.3)


@pytest.mark.parametrize("method", ["lora", "inclora", "slm"])
def test_a_resumed_run_is_estimated_as_one_from_the_start(
    lab: Lab, tmp_path: Path, planned: list[DiskPlan], method: str
) -> None:
    config, storage = lab.config("bert", METHODS[method]), Storage.at(tmp_path / "run")
    with pytest.raises(Stop):
        run(config, storage, after=7)
    before = written(storage)
    run(config, storage)
    first, resumed = planned
    ends = [item.left + item.bank for item in (list(moments(first))[-1], list(moments(resumed))[-1])]
    assert ends[1] == pytest.approx(ends[0], rel=0.1)
    left = growth(resumed, 1, 2)
    assert 0 < left.both < growth(resumed).both and before + left.both >= written(storage) * 0.7


def test_the_largest_moment_is_before_old_checkpoints_are_deleted() -> None:
    plan = DiskPlan(steps=[5, 5], every=2, keep=2, inside=300, end=100, published=[10, 20], stays=[1, 2])
    assert [(moment.phase, moment.step, moment.run, moment.left, moment.bank) for moment in moments(plan)] == [
        (0, 2, 300, 300, 0),
        (0, 4, 600, 600, 0),
        (0, 5, 701, 401, 10),
        (1, 2, 701, 401, 10),
        (1, 4, 701, 601, 10),
        (1, 5, 703, 403, 30),
    ]
    assert growth(plan) == Growth(run=703, bank=30, both=733)
    assert growth(plan, 1, 4) == Growth(run=102, bank=20, both=122)
    assert growth(plan, 1, 5) == Growth(0, 0, 0), "only evaluation is left"
    assert max(moment.run for moment in moments(DiskPlan([5], None, 2, 300, 100, [0], [0]))) == 100, (
        "only at ends of tasks"
    )


def test_only_a_disk_with_too_little_room_is_warned_of(tmp_path: Path, s3_uri: Callable[[str], str]) -> None:
    run_folder, bank = Storage.at(tmp_path / "runs/mine"), Storage.at(tmp_path / "runs/mine/bank")
    needed = Growth(run=3_000_000, bank=2_000_000_000, both=2_002_000_000)
    assert shortage(run_folder, bank, needed, lambda path: 2_002_000_000) == ""
    said = shortage(run_folder, bank, needed, lambda path: 2_001_000_000)
    assert f"will write about 2.0 GB to '{run_folder.uri}', where 2.0 GB are free" in said and "\n" not in said
    assert "`raycl clean`" in said and "another output.dir" in said
    remote = Storage.at(s3_uri("bank"))
    assert shortage(run_folder, remote, needed, lambda path: 3_000_000) == ""
    assert "about 3.0 MB to" in shortage(run_folder, remote, needed, lambda path: 2_900_000)
    assert "another bank.dir" in shortage(remote, bank, needed, lambda path: 2_900_000)
    assert shortage(remote, remote, needed, lambda path: 0) == ""


def test_a_run_warns_once_before_it_trains(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, planned: list[DiskPlan]
) -> None:
    caplog.set_level(logging.INFO, "raycl")
    monkeypatch.setattr(logging.getLogger("raycl"), "propagate", True)

    def said(folder: str, free: int) -> list[int]:
        """Return places of the warning among the lines of a run."""
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(disk_space.shutil, "disk_usage", lambda path: Usage(0, 0, free))
            run(lab.config("bert"), Storage.at(tmp_path / folder))
        return [number for number, line in enumerate(caplog.messages) if "the run will write about" in line]

    assert (
        said("full", 1000) == [0] and caplog.records[0].levelno == logging.WARNING and "step" not in caplog.messages[0]
    )
    needed = growth(planned[0]).both
    assert said("just", needed) == [] and said("less", needed - 1) == [0]
    assert disk_space.free_bytes(str(tmp_path / "not" / "there")) > needed, "the disk of this test, as it is"
