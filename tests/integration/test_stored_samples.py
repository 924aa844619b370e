"""Stored samples are inputs of users: counted, limited in number and days, left out of exports, and forgotten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_bank_start import begun, tree_of
from tiny import Lab, matrix, work

from raycl.backbone import load_codec
from raycl.bank import Bank
from raycl.bank.branches import head_of
from raycl.cli.commands import parsed
from raycl.errors import BankError
from raycl.launch import prepared_run
from raycl.operations.banks.commands import answer
from raycl.operations.banks.maintenance import prune, verify
from raycl.operations.banks.sample_listing import sample_texts, stored_samples
from raycl.operations.banks.unlearning import forget
from raycl.serve.snapshots.parts import backbone_of

SampleBank = Callable[[Path], Bank]


@pytest.fixture(scope="module")
def sampled(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> SampleBank:
    """Return a copy of a bank in which SAPT keeps half of each task's rows, three at most."""
    root = tmp_path_factory.mktemp("sampled")
    tree = tree_of(lab, "sapt", lab.tasks, root / "bank")
    tree["method"] = {"name": "sapt", "arm": {"fraction": 0.5, "max_samples": 3}}
    tree["bank"]["sample_days"] = 30
    begun(tree, root / "runs/first")

    def copy(folder: Path) -> Bank:
        shutil.copytree(root / "bank", folder / "bank")
        return Bank.at(folder / "bank")

    return copy


def command(bank: Bank, *words: str) -> str:
    return answer(parsed("bank", [words[0], bank.storage.uri, *words[1:]])).text


def test_they_are_counted_by_task_and_exported_on_request_only(sampled: SampleBank, tmp_path: Path) -> None:
    bank = sampled(tmp_path)
    assert stored_samples(bank, bank.open(2)) == {"animal": 3, "colour": 3}
    assert "'animal': 3, 'colour': 3" in command(bank, "show", "2")
    command(bank, "export", "--adapters", "animal", "--to", str(tmp_path / "plain"))
    assert not (tmp_path / "plain/samples").exists()
    command(bank, "export", "--adapters", "animal", "--to", str(tmp_path / "with"), "--with-samples")
    lines = (tmp_path / "with/samples/animal.jsonl").read_text().splitlines()
    words = set(" ".join(json.loads(line)["text"] for line in lines).split())
    assert len(lines) == 3 and words and words <= {"a", "it", "purrs", "sleeps", "the", "barks", "runs", "much"}
    assert not (tmp_path / "with/samples/colour.jsonl").exists()


def test_pruning_removes_what_is_older_than_its_run_allows(sampled: SampleBank, lab: Lab, tmp_path: Path) -> None:
    """Everything else stays whole: runs start from the bank, and reflect on the tasks that have samples."""
    bank = sampled(tmp_path)
    assert prune(bank).samples == [], "they are younger than 30 days"
    assert len(prune(bank, sample_days=0.0, dry_run=True).samples) == 2
    assert len(prune(bank, sample_days=0.0).samples) == 2
    assert stored_samples(bank, bank.open(2)) == {} and verify(bank).problems == []
    third = {**lab.tasks[0], "name": "third"}
    given = {"bank": {"start": f"{bank.storage.uri}@main"}, "stream": {"tasks": [third]}}
    later = begun(given, tmp_path / "later")
    assert matrix(later)[2][2] is not None
    assert stored_samples(bank, head_of(bank)) == {"third": 3}
    assert verify(bank).problems == []
    done = forget(bank, bank.open(2), "animal", scores=False)
    assert [info.name for info in bank.open(done.new).tasks] == ["colour"]


def test_those_of_a_training_state_are_counted_and_removed_too(lab: Lab, tmp_path: Path) -> None:
    """Replay's pseudo-samples are in no adapter's record; runs that start from there go on with those that are left."""
    (tmp_path / "given").mkdir()
    for task in lab.tasks:
        rows = (Path(task["path"]) / "train.jsonl").read_text().splitlines()[:4]
        (tmp_path / f"given/{task['name']}.jsonl").write_text("\n".join(rows) + "\n")
    tree = tree_of(lab, "olora", lab.tasks, tmp_path / "bank")
    tree["method"] = {"name": "replay", "source": "file", "files": str(tmp_path / "given"), "share": 0.3}
    begun(tree, tmp_path / "runs/first")
    bank = Bank.at(tmp_path / "bank")
    kept = stored_samples(bank, bank.open(2))
    assert set(kept) == {task["name"] for task in lab.tasks} and min(kept.values()) >= 1
    removed = prune(bank, sample_days=0.0).samples
    assert len(removed) == 2 and stored_samples(bank, bank.open(2)) == {} and verify(bank).problems == []
    rows = (Path(lab.tasks[0]["path"]) / "train.jsonl").read_text().splitlines()[4:8]  # the removed ones stay away
    (tmp_path / "given/third.jsonl").write_text("\n".join(rows) + "\n")
    third = {**lab.tasks[0], "name": "third"}
    given = {"bank": {"start": f"{bank.storage.uri}@main"}, "stream": {"tasks": [third]}}
    assert matrix(begun(given, tmp_path / "later"))[2][2] is not None
    assert list(stored_samples(bank, head_of(bank))) == ["third"]


def test_a_run_that_still_has_removed_samples_does_not_put_them_back(lab: Lab, tmp_path: Path) -> None:
    tree = tree_of(lab, "sapt text", lab.tasks, tmp_path / "bank")
    first, bank = begun(tree, tmp_path / "runs/first"), Bank.at(tmp_path / "bank")
    removed = prune(bank, sample_days=0.0).samples
    prepared = prepared_run.extend(first.uri, [json.dumps({**lab.tasks[0], "name": "third"})])
    work(prepared)
    assert prepared_run.finish(prepared_run.reopen(first.uri))["finished"]
    assert removed and not any(bank.storage.exists(file) for file in removed)
    assert list(stored_samples(bank, head_of(bank))) == ["third"] and verify(bank).problems == []


def test_exported_texts_have_no_prompt(lab: Lab, tmp_path: Path) -> None:
    tree = tree_of(lab, "sapt text", lab.tasks[:1], tmp_path / "bank")
    tree["stream"]["prompt"] = "superni"
    begun(tree, tmp_path / "runs/first")
    snapshot = Bank.at(tmp_path / "bank").open(1)
    assert snapshot.tasks[0].prompt[0].startswith("Now complete")
    codec = load_codec(backbone_of(snapshot), 1, 1)
    texts = sample_texts(Bank.at(tmp_path / "bank"), snapshot, snapshot.adapters, codec)["colour"]
    known = {json.loads(line)["text"] for line in (Path(lab.tasks[0]["path"]) / "train.jsonl").read_text().splitlines()}
    assert {json.loads(line)["text"] for line in texts.splitlines()} <= known


def test_a_forgotten_task_leaves_none(sampled: SampleBank, tmp_path: Path) -> None:
    bank = sampled(tmp_path)
    done = forget(bank, bank.open(2), "colour", scores=False)
    assert stored_samples(bank, bank.open(done.new)) == {"animal": 3}
    assert len(prune(bank, keep_snapshots=1, grace_s=0.0).snapshots) >= 1


@pytest.mark.parametrize("harm", ["missing", "flipped"])
def test_lost_or_damaged_samples_are_an_error(sampled: SampleBank, tmp_path: Path, harm: str) -> None:
    bank = sampled(tmp_path)
    (info,) = bank.open(2).adapter("animal").extras.values()
    path = Path(bank.storage.path(info.file))
    data = path.read_bytes()
    path.unlink()
    if harm == "flipped":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BankError, match=r"animal@1 \(pseudo\) are (missing|damaged)"):
        stored_samples(bank, bank.open(2))
    assert verify(bank).problems
