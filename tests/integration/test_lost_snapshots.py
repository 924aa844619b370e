"""Lost snapshots: verify names them, a run that needs one is refused, prune records its removals."""

from __future__ import annotations

import logging
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import Complete, Lab, Stop, exported, matrix, run

from raycl import config as configs
from raycl.bank import Bank
from raycl.bank.activations import Activations
from raycl.errors import BankError, RunError
from raycl.launch import driver
from raycl.operations.banks.maintenance import prune, verify
from raycl.run.folder import CONFIG
from raycl.storage import Storage

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def three(lab: Lab, tmp_path: Path) -> tuple[Any, Storage, Bank]:
    """A finished run of three phases, and its bank."""
    tasks = [*lab.tasks, {**lab.tasks[0], "name": "third"}]
    config, storage = lab.config("bert", "separate", stream={"tasks": tasks}), Storage.at(tmp_path / "run")
    run(config, storage)
    storage.write(CONFIG, configs.to_yaml(config).encode())
    return config, storage, Bank(storage.sub("bank"))


def job(bank: Bank, capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str]:
    """Exit status and everything printed by `jobs/bank.py`."""
    main = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]
    status = main(["--bank", bank.storage.uri, *command])
    said = capsys.readouterr()
    return status, said.out + said.err


@pytest.mark.parametrize("number", [1, 2, 3])
def test_verify_names_a_snapshot_of_a_run_that_is_gone(
    three: tuple[Any, Storage, Bank], tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    _, storage, bank = three
    other = Bank(Storage.at(shutil.copytree(bank.storage.root, tmp_path / "elsewhere")))
    for one in (bank, other):
        assert job(one, capsys, "verify", "--run", storage.uri)[0] == 0
        one.storage.delete(f"snapshots/{number:06d}.json")
        status, said = job(one, capsys, "verify", "--run", storage.uri)
        assert status == 1 and f"snapshot {number} is gone, which phase {number - 1}" in said
    assert job(bank, capsys, "verify")[0] == 1, "the bank in a run's folder is compared with that run"
    assert job(other, capsys, "verify")[0] == 1, "the branch and parents name all"
    status, said = job(other, capsys, "verify", "--run", str(tmp_path / "nowhere"))
    assert status == 1 and "holds no run" in said and said.count("\n") == 1


def test_verify_names_what_a_parent_and_an_activation_name(three: tuple[Any, Storage, Bank]) -> None:
    bank = three[2]
    Activations(bank).add(3, "test")
    Activations(bank, "other").add(2, "test")
    assert verify(bank).problems == []
    bank.storage.delete("snapshots/000003.json")
    bank.storage.delete("snapshots/000002.json")
    problems = " ".join(verify(bank).problems)
    assert "snapshot 3 is gone, which decision 1 of the endpoints that follow 'main' names" in problems
    assert "snapshot 2 is gone, which decision 1 of the endpoints that follow 'other' names" in problems
    record = Path(bank.storage.path("serving/main/000001.json"))
    record.write_bytes(record.read_bytes()[:-9])
    assert any("serving/main/000001.json' is damaged" in problem for problem in verify(bank).problems)


def test_what_prune_removed_is_no_problem(
    three: tuple[Any, Storage, Bank], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, storage, bank = three
    assert prune(bank, keep_snapshots=1, grace_s=0.0, dry_run=True).snapshots == [1, 2]
    assert not bank.storage.exists("pruned"), "a dry run leaves no record"
    assert prune(bank, keep_snapshots=2, grace_s=0.0).snapshots == [1]
    assert prune(bank, keep_snapshots=1, grace_s=0.0).snapshots == [2]
    assert bank.storage.list("pruned") == ["000001.json", "000002.json"]
    prune(bank, keep_snapshots=1, grace_s=0.0)
    assert len(bank.storage.list("pruned")) == 2, "what removes nothing records nothing"
    assert verify(bank).problems == [] and verify(bank).strays == []
    assert job(bank, capsys, "verify", "--run", storage.uri)[0] == 0
    record = Path(bank.storage.path("pruned/000002.json"))
    whole = record.read_bytes()
    for damage in (whole[:30], b"{}", b"[]", whole.replace(b"2", b"3", 1)):
        record.write_bytes(damage)
        problems = verify(bank).problems
        assert any("pruned/000002.json" in problem for problem in problems)
        assert any("snapshot 2 is gone" in problem for problem in problems), "an unreadable record explains nothing"
    record.write_bytes(whole)
    bank.storage.delete("snapshots/000003.json")
    assert job(bank, capsys, "verify", "--run", storage.uri)[0] == 1


def test_an_interrupted_prune_has_recorded_its_removals(
    three: tuple[Any, Storage, Bank], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = three[2]

    def stop(self: Storage, name: str) -> None:
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Storage, "delete", stop)
        prune(bank, keep_snapshots=1, grace_s=0.0)
    assert bank.snapshots() == [1, 2, 3] and verify(bank).problems == []
    assert prune(bank, keep_snapshots=1, grace_s=0.0).snapshots == [1, 2] and verify(bank).problems == []


def damage(path: Path, harm: str) -> None:
    """Take an object away, or flip one bit in its middle."""
    whole = path.read_bytes()
    middle = len(whole) // 2
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])


@pytest.mark.parametrize("harm", ["gone", "flip"])
def test_without_copies_the_newest_adapter_is_learned_again(complete: Complete, tmp_path: Path, harm: str) -> None:
    """From the checkpoint before, which does not name it; an older one is in the bank alone."""
    done = complete("bert", "inclora", "torch")
    storage = Storage.at(tmp_path)
    bank = Bank(storage.sub("bank"))
    run(done.config, storage, on_phase=lambda record: False)
    file = bank.open(1).adapter("colour").tensors.file
    damage(Path(bank.storage.path(file)), harm)
    with pytest.raises(Stop):
        run(done.config, storage, after=5)
    assert verify(bank).problems == []
    whole = Path(bank.storage.path(file)).read_bytes()
    damage(Path(bank.storage.path(file)), harm)
    with pytest.raises(
        RunError, match=rf"'{re.escape(bank.storage.uri)}/{file}' \(slot/colour/\) is missing or dam"
    ) as raised:
        run(done.config, storage, after=0)
    assert "\n" not in str(raised.value)
    Path(bank.storage.path(file)).write_bytes(whole)
    run(done.config, storage)
    assert matrix(storage) == matrix(done.storage) and exported(storage) == exported(done.storage)


def test_a_run_that_needs_lost_tensors_fails_before_training(complete: Complete, tmp_path: Path) -> None:
    """One model per task: inside the second task no checkpoint holds the first one's adapter any more."""
    done, storage = complete("bert", "separate", "torch"), Storage.at(tmp_path)
    config = done.config.model_copy(
        update={"checkpoint": done.config.checkpoint.model_copy(update={"every_steps": 1, "keep": 1})}
    )
    with pytest.raises(Stop):
        run(config, storage, after=7)
    bank = Bank(storage.sub("bank"))
    file = bank.open(1).adapter("colour").tensors.file
    bank.storage.delete(file)
    with pytest.raises(BankError, match=r"is missing from the bank .*the next phase is built on snapshot 1") as raised:
        run(config, storage, after=0)
    assert file in str(raised.value) and "\n" not in str(raised.value)


def test_pruned_snapshots_are_not_published_again(
    three: tuple[Any, Storage, Bank], caplog: pytest.LogCaptureFixture
) -> None:
    _, storage, bank = three
    prune(bank, keep_snapshots=1, grace_s=0.0)
    with caplog.at_level(logging.WARNING, logger="raycl"):
        driver.train(driver.reopen(storage.uri))
    assert bank.snapshots() == [3] and caplog.records == []


def test_an_unfinished_run_whose_snapshot_is_gone_is_refused(complete: Complete, tmp_path: Path) -> None:
    done, storage = complete("bert", "separate", "torch"), Storage.at(tmp_path)
    run(done.config, storage, on_phase=lambda record: False)
    bank = Bank(storage.sub("bank"))
    whole = bank.storage.read("snapshots/000001.json")
    bank.storage.delete("snapshots/000001.json")
    with pytest.raises(BankError, match="snapshot 1") as raised:
        run(done.config, storage, after=0)
    assert "\n" not in str(raised.value)
    bank.storage.write("snapshots/000001.json", whole)
    run(done.config, storage)
    assert matrix(storage) == matrix(done.storage) and exported(storage) == exported(done.storage)
