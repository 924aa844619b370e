"""A run whose newest checkpoint is damaged continues from the one before, and ends as the undamaged run."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from axes import sampled
from tiny import Complete, Lab, Stop, exported, matrix, run, trace

from raycl.bank import Bank
from raycl.errors import CheckpointError, RunError
from raycl.operations.banks.maintenance import verify
from raycl.storage import Storage
from raycl.storage.numbered import NOTE
from raycl.training.phase.evaluation import StreamEvaluation
from raycl.training.records.fork_points import read_fork_point, save_fork_point, start_from
from raycl.training.records.journal import last_attempt, read_state

FILES = ("parameters.safetensors", "optimizer.safetensors", "manifest.json")


def damage(path: Path, how: str) -> None:
    """Cut it, flip a bit in its middle, empty it, or take it away."""
    whole = path.read_bytes()
    middle = len(whole) // 2
    if how == "gone":
        path.unlink()
    else:
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        path.write_bytes({"cut": whole[:middle], "flip": flipped, "{}": b"{}", "[]": b"[]"}[how])


def checkpoint(storage: Storage, index: int = -1) -> Path:
    """Return the folder of a checkpoint that the journal names."""
    return Path(storage.path(f"checkpoints/{read_state(storage).checkpoints[index]}"))


def unchanging(bank: Bank) -> dict[str, bytes]:
    """Return files of a bank without those that a run writes again."""
    names = [name for name in bank.storage.files() if not name.startswith("leases/") and not name.endswith(NOTE)]
    return {name: bank.storage.read(name) for name in names}


def stop(*args: Any, **named: Any) -> None:
    raise Stop


def stopped_after(config: Any, storage: Storage, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends after a checkpoint inside its last phase, before that phase is evaluated, or when it is over."""
    if where == "inside":
        with pytest.raises(Stop):
            run(config, storage, after=7)
    elif where == "before evaluation":
        real = StreamEvaluation.row
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(StreamEvaluation, "row", lambda self, phase: (stop if phase.index else real)(self, phase))
            run(config, storage)
    else:
        with pytest.raises(Stop):
            run(config, storage, on_phase=lambda record: stop() if record["phase"] else None)


@pytest.mark.parametrize(
    ("where", "method"),
    sampled(
        [(w, m) for w in ("inside", "before evaluation", "finished") for m in ("lora", "separate", "slm", "finetune")],
        keep=[("inside", "slm"), ("before evaluation", "separate"), ("finished", "slm")],
    ),
)
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, where: str
) -> None:
    done, storage = complete("bert", method, "torch"), Storage.at(tmp_path)
    stopped_after(done.config, storage, where, monkeypatch)
    bank = Bank(storage.sub("bank"))
    published = unchanging(bank)
    damage(checkpoint(storage) / "parameters.safetensors", "flip")
    run(done.config, storage)
    assert trace(storage) == trace(done.storage)
    assert matrix(storage) == matrix(done.storage)
    assert exported(storage) == exported(done.storage)
    after = unchanging(bank)
    assert {file: after[file] for file in published} == published, "what was published is never changed"
    if method != "finetune":
        assert bank.snapshots() == [1, 2] and len(after) == len(unchanging(Bank(done.storage.sub("bank"))))
        assert verify(bank).problems == []


HARM = ("cut", "flip", "gone", "{}", "[]")


@pytest.fixture(scope="module")
def stopped(complete: Complete, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a LoRA's run that was stopped inside its last phase, to be copied."""
    storage = Storage.at(tmp_path_factory.mktemp("stopped"))
    with pytest.raises(Stop):
        run(complete("bert", "lora", "torch").config, storage, after=7)
    return Path(storage.root)


@pytest.mark.parametrize(
    ("file", "how"),
    sampled([(file, how) for file in FILES for how in HARM], keep=[("manifest.json", how) for how in HARM]),
)
def test_every_kind_of_damage_is_logged_once(
    complete: Complete, stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, how: str
) -> None:
    done, storage = complete("bert", "lora", "torch"), Storage.at(shutil.copytree(stopped, tmp_path / "copy"))
    older = checkpoint(storage, -2).name
    damage(checkpoint(storage) / file, how)
    with caplog.at_level(logging.WARNING, logger="raycl"):
        run(done.config, storage)
    (said,) = [record.message for record in caplog.records if "continues from" in record.message]
    assert f"continues from checkpoint '{older}'" in said and file in said and "\n" not in said
    assert matrix(storage) == matrix(done.storage) and trace(storage) == trace(done.storage)


def test_the_checkpoint_folder_of_another_run_is_not_continued(
    complete: Complete, stopped: Path, tmp_path: Path, caplog: Any
) -> None:
    """One with the same settings but its seed, stopped at the same step."""
    done, other = complete("bert", "lora", "torch"), Storage.at(tmp_path / "other")
    storage = Storage.at(shutil.copytree(stopped, tmp_path / "copy"))
    with pytest.raises(Stop):
        run(done.config.model_copy(update={"seed": 9}), other, after=7)
    newest = checkpoint(storage)
    assert newest.name == checkpoint(other).name
    shutil.rmtree(newest)
    shutil.copytree(checkpoint(other), newest)
    with caplog.at_level(logging.WARNING, logger="raycl"):
        run(done.config, storage)
    assert "is of another checkpoint than the run wrote" in caplog.text
    assert matrix(storage) == matrix(done.storage) and trace(storage) == trace(done.storage)


@pytest.mark.parametrize("how", ["cut", "flip", "gone"])
def test_a_run_that_goes_on_holds_its_lease_again(complete: Complete, tmp_path: Path, how: str) -> None:
    """Pruning is refused where a lease is damaged, and may take what a run needs where it is gone."""
    done, storage = complete("bert", "lora", "torch"), Storage.at(tmp_path)
    with pytest.raises(Stop):
        run(done.config, storage, after=7)
    bank = Bank(storage.sub("bank"))
    (file,) = bank.storage.files("leases")
    whole = bank.storage.read(file)
    damage(Path(bank.storage.path(file)), how)
    with pytest.raises(Stop):
        run(done.config, storage, after=1)
    assert bank.storage.read(file) == whole and verify(bank).problems == []


def test_phases_after_an_older_checkpoint_are_trained_again(lab: Lab, tmp_path: Path, caplog: Any) -> None:
    """With checkpoints at the ends of phases alone, the one before the newest is that of the phase before."""
    tasks = [*lab.tasks, {**lab.tasks[0], "name": "third"}]
    config = lab.config("bert", stream={"tasks": tasks}, checkpoint={"every_steps": None, "keep": 3})
    whole, storage = Storage.at(tmp_path / "whole"), Storage.at(tmp_path / "damaged")
    run(config, whole)
    with pytest.raises(Stop):
        run(config, storage, on_phase=lambda record: stop() if record["phase"] == 2 else None)
    for index in (-1, -2):
        damage(checkpoint(storage, index) / "manifest.json", "flip")
    with caplog.at_level(logging.WARNING, logger="raycl"):
        run(config, storage)
    assert "learns the last 2 finished phases again" in caplog.text
    assert (trace(storage), matrix(storage), exported(storage)) == (trace(whole), matrix(whole), exported(whole))
    banks = [Bank(item.sub("bank")) for item in (storage, whole)]
    assert banks[0].versions("lora") == banks[1].versions("lora") == [1, 2, 3]
    assert banks[0].snapshots() == banks[1].snapshots() == [1, 2, 3]
    phases = [[record["bank"]["snapshot"] for record in read_state(item).phases] for item in (storage, whole)]
    assert phases[0] == phases[1] == [1, 2, 3]


def test_without_checkpoints_only_the_first_phase_restarts(complete: Complete, stopped: Path, tmp_path: Path) -> None:
    done = complete("bert", "lora", "torch")
    first, later = Storage.at(tmp_path / "first"), Storage.at(shutil.copytree(stopped, tmp_path / "later"))
    with pytest.raises(Stop):
        run(done.config, first, after=3)
    damage(checkpoint(first) / "manifest.json", "cut")
    run(done.config, first)
    assert matrix(first) == matrix(done.storage) and trace(first) == trace(done.storage)
    for index in (-1, -2):
        damage(checkpoint(later, index) / "manifest.json", "cut")
    with pytest.raises(RunError, match=r"no checkpoint of '.*later' is whole, though 1 phases are finished") as raised:
        run(done.config, later)
    assert "\n" not in str(raised.value)


def test_a_damaged_fork_point_is_not_used(lab: Lab, tmp_path: Path) -> None:
    config = lab.config("bert")
    lender, fork_storage, storage = (Storage.at(tmp_path / name) for name in ("lender", "place", "borrower"))
    run(config, lender, on_phase=lambda record: save_fork_point(lender, 1, fork_storage))
    fork_point = read_fork_point(fork_storage)
    assert fork_point is not None
    damage(Path(fork_storage.path(f"{fork_point.checkpoint}/parameters.safetensors")), "flip")
    with pytest.raises(CheckpointError, match="is damaged"):
        start_from(fork_storage, storage, fork_point.phases)
    assert last_attempt(storage) == 0 and storage.list("checkpoints") == []
