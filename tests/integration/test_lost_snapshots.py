"""Lost snapshots: verify names them, resume publishes them again from a checkpoint, prune records its removals."""

from __future__ import annotations

import json
import logging
import re
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from axes import sampled
from tiny import Complete, Lab, Stop, exported, matrix, run

from raycl import config as configs
from raycl.bank import Bank, NewSnapshot
from raycl.bank.activations import Activations
from raycl.bank.branches import Branch, head_of
from raycl.bank.manifest import Layout, ObjectInfo, SnapshotAdapter
from raycl.bank.pruning import release_lease
from raycl.errors import BankError, RunError
from raycl.launch import driver, prepared_run
from raycl.operations.banks.maintenance import prune, verify
from raycl.storage import Storage
from raycl.training.records.run_folder import CONFIG
from raycl.training.setup.run_config import RunConfig

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def finished(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """Return a finished run of three phases: its config and its folder."""
    tasks = [*lab.tasks, {**lab.tasks[0], "name": "third"}]
    config = lab.config("bert", "separate", stream={"tasks": tasks})
    storage = Storage.at(tmp_path_factory.mktemp("run"))
    run(config, storage)
    storage.write(CONFIG, configs.to_yaml(config).encode())
    return config, Path(storage.root)


@pytest.fixture
def three(finished: tuple[RunConfig, Path], tmp_path: Path) -> tuple[Any, Storage, Bank]:
    """Return the config of a finished run of three phases, a copy of the run, and its bank."""
    config, folder = finished
    storage = Storage.at(shutil.copytree(folder, tmp_path / "run"))
    return config, storage, Bank(storage.sub("bank"))


def job(bank: Bank, capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str]:
    """Exit status and everything printed by `jobs/bank.py`."""
    main = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]
    status = main([command[0], bank.storage.uri, *command[1:]])
    said = capsys.readouterr()
    return status, said.out + said.err


@pytest.mark.parametrize("number", [1, 2, 3])
def test_verify_names_a_snapshot_of_a_run_that_is_gone(
    three: tuple[Any, Storage, Bank], tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    _, storage, bank = three
    other = Bank(Storage.at(shutil.copytree(bank.storage.root, tmp_path / "elsewhere")))
    for item in (bank, other):
        assert job(item, capsys, "verify", "--run", storage.uri)[0] == 0
        item.storage.delete(f"snapshots/{number:06d}.json")
        status, said = job(item, capsys, "verify", "--run", storage.uri)
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


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_resume_publishes_the_last_snapshot_again(
    three: tuple[Any, Storage, Bank], caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    """A finished run, through the same door as `--resume`."""
    _, storage, bank = three
    path = Path(bank.storage.path("snapshots/000003.json"))
    whole = path.read_bytes()
    path.unlink()
    if harm == "cut":
        path.write_bytes(whole[:50])
    with caplog.at_level(logging.WARNING, logger="raycl"):
        driver.train(prepared_run.reopen(storage.uri))
    assert path.read_bytes() == whole and verify(bank).problems == []
    assert [
        record.message
        for record in caplog.records
        if "snapshot 3" in record.message and "published again" in record.message
    ]
    assert prepared_run.reopen(storage.uri).done == 3


def test_resume_logs_what_it_cannot_publish_again(
    three: tuple[Any, Storage, Bank], caplog: pytest.LogCaptureFixture
) -> None:
    _, storage, bank = three
    bank.storage.delete("snapshots/000001.json")
    with caplog.at_level(logging.WARNING, logger="raycl"):
        driver.train(prepared_run.reopen(storage.uri))
    (said,) = [record.message for record in caplog.records if "snapshot 1" in record.message]
    assert "no checkpoint of phase 0 is kept" in said
    first = bank.open(3).adapter("colour").tensors.file
    bank.storage.delete("snapshots/000003.json")
    bank.storage.delete(first)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="raycl"):
        driver.train(prepared_run.reopen(storage.uri))
    assert any("snapshot 3" in record.message and "is missing" in record.message for record in caplog.records)
    said = [record.message for record in caplog.records if "tensors of colour@1" in record.message]
    assert len(said) == 1 and f"no checkpoint of the run holds them; restore '{first}' from a copy" in said[0]
    assert bank.snapshots() == [2]


def damage(path: Path, harm: str) -> None:
    """Take an object away, or flip one bit in its middle."""
    whole = path.read_bytes()
    middle = len(whole) // 2
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])


def resumed(done: Complete, tmp_path: Path, kind: str, method: str, copies: bool = False) -> tuple[Storage, Bank]:
    """Return a copy of a finished run, with what `--resume` reads.

    Args:
        copies: as if it had been run with `bank.copies`.
    """
    complete = done(kind, method, "torch")
    storage = complete.copy(tmp_path)
    config = configs.validate(RunConfig, {**configs.as_tree(complete.config), "bank": {"copies": copies}})
    storage.write(CONFIG, configs.to_yaml(config).encode())
    bank = Bank(storage.sub("bank"))
    for file in named(storage) & bank.storage.files().keys() if copies else ():
        storage.write(file, bank.storage.read(file))
    return storage, bank


def named(storage: Storage) -> set[str]:
    """Return files of objects that the run's checkpoints name."""
    manifests = [storage.read_json(f"checkpoints/{name}/manifest.json") for name in storage.list("checkpoints")]
    return {ObjectInfo(**info).file for manifest in manifests for info in manifest["record"]["objects"].values()}


def test_published_tensors_are_copied_where_that_is_asked_for(complete: Complete, tmp_path: Path) -> None:
    """With `bank.copies` the run's folder has all tensors of its checkpoints, else those that no snapshot names."""
    done = complete("bert", "sapt", "torch")
    own = done.storage.files("objects").keys()
    assert named(done.storage) > own and not own & done.storage.sub("bank").files().keys()
    config = configs.validate(RunConfig, {**configs.as_tree(done.config), "bank": {"copies": True}})
    storage = run(config, Storage.at(tmp_path)).storage
    assert named(storage) == named(done.storage) == storage.files("objects").keys()
    assert matrix(storage) == matrix(done.storage) and exported(storage) == exported(done.storage)


@pytest.mark.parametrize("harm", ["gone", "flip"])
def test_without_copies_the_newest_adapter_is_learned_again(complete: Complete, tmp_path: Path, harm: str) -> None:
    """The checkpoint before does not name the adapter, so it is learned again; an older one is in the bank alone."""
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


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what a run warns of, but for the few rows that SAPT keeps of tasks as short as these."""
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [said for said in messages if "keeps a handful of training rows" not in said]


METHODS = [(kind, method) for kind in ("bert", "llama") for method in ("lora", "inclora", "olora", "slm", "sapt")]
METHODS += [("t5", "sapt-prompt"), ("bert", "slm-adapter")]


@pytest.mark.parametrize(
    ("kind", "method", "harm"),
    sampled(
        [(*method, harm) for method in METHODS for harm in ("gone", "flip")],
        keep=[("bert", "slm", "gone"), ("bert", "slm", "flip"), ("llama", "sapt", "gone"), ("bert", "sapt", "flip")],
    ),
)
def test_tensors_that_a_checkpoint_holds_are_published_again(
    complete: Complete, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, method: str, harm: str
) -> None:
    """Adapters, routers and pseudo-samples of a finished run, byte for byte under the versions that they had."""
    storage, bank = resumed(complete, tmp_path, kind, method, copies=True)
    last = bank.open(2)
    objects = [entry.tensors for entry in last.adapters]
    objects += [summary for entry in last.adapters for summary in entry.extras.values()]
    objects += [last.router.tensors] if last.router.tensors else []
    assert len(objects) > 1 or method == "lora"
    before = {file: bank.storage.read(file) for file in bank.storage.files()}
    for summary in objects:
        damage(Path(bank.storage.path(summary.file)), harm)
    assert verify(bank).problems
    with caplog.at_level(logging.WARNING, logger="raycl"):
        driver.train(prepared_run.reopen(storage.uri))
    assert {file: bank.storage.read(file) for file in bank.storage.files()} == before
    assert verify(bank).problems == []
    said = next(said for said in warnings(caplog) if "published again from the run's checkpoints" in said)
    assert f"{last.adapters[0]}" in said and said.count("@") == len(objects) - bool(last.router.tensors)
    assert ("the router of snapshot 2" in said) is bool(last.router.tensors)
    caplog.clear()
    driver.train(prepared_run.reopen(storage.uri))
    assert warnings(caplog) == [], "what is whole is not mentioned"


@pytest.mark.parametrize("method", ["lora", "slm", "sapt"])
def test_tensors_that_no_checkpoint_holds_are_named_once(
    complete: Complete, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """The first version of a LoRA that every task changes; and anything at all, once the checkpoints are damaged."""
    storage, bank = resumed(complete, tmp_path, "bert", method, copies=True)
    second = bank.open(2)
    lost = {
        "lora": bank.open(1).adapters[0].tensors,
        "slm": second.router.tensors,
        "sapt": second.adapters[0].extras.get("pseudo"),
    }[method]
    assert lost is not None
    if method != "lora":
        for name in storage.list("checkpoints"):
            damage(Path(storage.path(f"checkpoints/{name}/manifest.json")), "flip")
    bank.storage.delete(lost.file)
    with caplog.at_level(logging.WARNING, logger="raycl"):
        driver.train(prepared_run.reopen(storage.uri))
    (said,) = warnings(caplog)
    what = {"lora": "lora@1", "slm": "the router of snapshot 2", "sapt": "animal@1 (pseudo)"}[method]
    assert said.startswith(f"the tensors of {what} are gone from the bank '{bank.storage.uri}' or damaged: ")
    assert said.endswith(f"no checkpoint of the run holds them; restore '{lost.file}' from a copy")
    assert not bank.storage.exists(lost.file)


@pytest.mark.parametrize("method", ["lora", "olora", "slm", "sapt"])
def test_an_unfinished_run_republishes_its_tensors(complete: Complete, tmp_path: Path, method: str) -> None:
    done, storage = complete("bert", method, "torch"), Storage.at(tmp_path)
    config = configs.validate(RunConfig, {**configs.as_tree(done.config), "bank": {"copies": True}})
    run(config, storage, on_phase=lambda record: False)
    bank = Bank(storage.sub("bank"))
    for file in [file for file in bank.storage.files() if file.startswith("objects/")]:
        damage(Path(bank.storage.path(file)), "gone")
    run(config, storage)
    assert matrix(storage) == matrix(done.storage) and exported(storage) == exported(done.storage)
    assert verify(bank).problems == []


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
    with pytest.raises(BankError, match=r"tensors of colour@1 are gone .*the next phase is built on them") as raised:
        run(config, storage, after=0)
    assert file in str(raised.value) and "\n" not in str(raised.value)


def test_pruned_snapshots_are_not_published_again(
    three: tuple[Any, Storage, Bank], caplog: pytest.LogCaptureFixture
) -> None:
    _, storage, bank = three
    prune(bank, keep_snapshots=1, grace_s=0.0)
    with caplog.at_level(logging.WARNING, logger="raycl"):
        driver.train(prepared_run.reopen(storage.uri))
    assert bank.snapshots() == [3] and [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def prune_first(bank: Bank, storage: Storage, kept: Sequence[tuple[SnapshotAdapter, Layout]]) -> None:
    """Another run continues with these adapters on another branch, and the first run's snapshot is pruned."""
    first = bank.open(1)
    third = bank.snapshot(NewSnapshot(kept, first.backbone, first.router, provenance={"by": "another run"}))
    Branch(bank, "other").advance(third, "test")
    Branch(bank).delete("test")
    assert 1 not in prune(bank, keep_snapshots=1, grace_s=0.0).snapshots, "the run may continue from the first"
    release_lease(bank.storage, storage.address)
    prune(bank, keep_snapshots=1, grace_s=0.0)
    assert bank.snapshots() == [third.number]


def test_a_run_whose_snapshot_was_pruned_names_the_way_on(complete: Complete, tmp_path: Path) -> None:
    done, storage = complete("bert", "slm", "torch"), Storage.at(tmp_path)
    run(done.config, storage, on_phase=lambda record: False)
    bank = Bank(storage.sub("bank"))
    prune_first(bank, storage, [])
    with pytest.raises(
        BankError, match=r"snapshot 1, from which the run continues, was pruned .*bank.start="
    ) as raised:
        run(done.config, storage, after=0)
    assert "\n" not in str(raised.value) and bank.snapshots() == [2]


@pytest.mark.parametrize("way", ["deleted", "pruned"])
def test_an_unfinished_run_republishes_its_last_snapshot(complete: Complete, tmp_path: Path, way: str) -> None:
    done, storage = complete("bert", "separate", "torch"), Storage.at(tmp_path)
    run(done.config, storage, on_phase=lambda record: False)
    bank = Bank(storage.sub("bank"))
    if way == "pruned":
        first = bank.open(1)
        bank.snapshot(NewSnapshot([], first.backbone, first.router, provenance={"by": "another run"}))
        kept = [(entry, first.layouts[entry.layout]) for entry in first.adapters]
        prune_first(bank, storage, kept)
    else:
        bank.storage.delete("snapshots/000001.json")
    run(done.config, storage)
    assert matrix(storage) == matrix(done.storage) and exported(storage) == exported(done.storage)
    assert 1 in bank.snapshots() and verify(bank).problems == []


def test_an_unfinished_run_that_lost_its_bank_publishes_it_again_before_training(
    complete: Complete, tmp_path: Path
) -> None:
    done, storage = complete("bert", "separate", "torch"), Storage.at(tmp_path)
    run(done.config, storage, on_phase=lambda record: False)
    bank = storage.sub("bank")
    before = {file: bank.read(file) for file in bank.files() if not file.startswith(("branches/", "leases/"))}
    shutil.rmtree(bank.root)
    with pytest.raises(Stop):
        run(done.config, storage, after=0)
    assert {file: bank.read(file) for file in before} == before and head_of(Bank(bank)).number == 1


def test_a_checkpoint_holds_the_banks_snapshot_record(complete: Complete) -> None:
    done = complete("bert", "separate", "torch")
    name = done.storage.list("checkpoints")[-1]
    assert done.storage.read(f"checkpoints/{name}/snapshot.json") == done.storage.read("bank/snapshots/000002.json")
    assert json.loads(done.storage.read(f"checkpoints/{name}/manifest.json"))["record"]["sha256"].keys() >= {
        "snapshot.json"
    }
