"""Tests of the bank that a user means: by place, by run, with an @ in a folder; and what an endpoint takes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny import Complete, Lab

from raycl.bank import Bank
from raycl.bank.activations import Activations
from raycl.bank.branches import Branch
from raycl.cli import main
from raycl.errors import BackboneError, BankError
from raycl.serve.deployment.app import build_from
from raycl.serve.deployment.endpoint import activate
from raycl.serve.settings import ServeConfig, at_bank
from raycl.training.records.named_bank import snapshot_at


def uri(complete: Complete, kind: str) -> str:
    return complete(kind, "slm", "torch").storage.sub("bank").uri


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    return main.main(list(words)), *capsys.readouterr()


def test_an_endpoint_with_another_backbone_is_refused_before_anything_starts(complete: Complete, lab: Lab) -> None:
    with pytest.raises(BankError, match="is another model"):
        build_from(ServeConfig(bank=uri(complete, "bert"), backbone=str(lab.model_folder("llama"))))
    with pytest.raises(BackboneError, match="does not exist"):
        build_from(ServeConfig(bank=uri(complete, "bert"), backbone="/nowhere"))


def test_a_snapshot_is_activated_by_its_branch(complete: Complete, tmp_path: Path) -> None:
    shutil.copytree(uri(complete, "bert"), tmp_path / "bank")
    bank = Bank.at(tmp_path / "bank")
    Branch(bank, "other").advance(bank.open(1), "a test")
    activate(ServeConfig(bank=str(tmp_path / "bank")), "other")
    decided = Activations(bank).latest()
    assert decided is not None and decided.snapshot == 1 and decided.rejection == ""
    assert Activations(bank).add(1, "snapshot 2 was rejected: x falls", rejected=2).rejection.endswith("x falls")


def test_a_run_stands_for_its_bank_and_a_folder_may_have_an_at_in_its_name(
    complete: Complete, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that publishes onto a branch of a shared bank stands for that branch."""
    address = uri(complete, "bert")
    shutil.copytree(address, tmp_path / "me@host" / "bank")
    shared = f"{tmp_path}/me@host/bank"
    Branch(Bank.at(shared), "other").advance(Bank.at(shared).open(1), "a test")
    Branch(Bank.at(shared), "team/other").advance(Bank.at(shared).open(1), "a test")
    for reference, number in ((shared, 2), (f"{shared}@1", 1), (f"{shared}@other", 1), (f"{shared}@team/other", 1)):
        assert snapshot_at(reference)[1].number == number
    (tmp_path / "of@other").mkdir()
    (tmp_path / "of@other/config.yaml").write_text(f"bank: {{dir: {shared}, branch: other}}\n")
    assert snapshot_at(f"{tmp_path}/of@other")[1].number == 1
    assert snapshot_at(f"{tmp_path}/of@other@main")[1].number == 2
    bank = at_bank(ServeConfig(bank=f"{tmp_path}/of@other"))
    assert (bank.bank, bank.branch) == (shared, "other")
    assert at_bank(ServeConfig(bank=f"{tmp_path}/of@other", branch="main")).branch == "main"
    of_branch = at_bank(ServeConfig(bank=f"{shared}@other"))
    assert (of_branch.branch, of_branch.snapshot, of_branch.follow.enabled) == ("other", None, True)
    for reference, number in (("2", 2), ("latest", 2)):
        of_snapshot = at_bank(ServeConfig(bank=f"{shared}@{reference}"))
        assert (of_snapshot.bank, of_snapshot.snapshot, of_snapshot.follow.enabled) == (shared, number, False)
    with pytest.raises(BankError, match="there is no bank at"):
        snapshot_at(f"{tmp_path}/x@nowhere")
    with pytest.raises(BankError, match="there is no bank at"):
        snapshot_at(f"{tmp_path}/me@host/nowhere")
    of_run = command(capsys, "bank", "log", f"{tmp_path}/of@other")
    assert command(capsys, "bank", "tag", f"{shared}@1", "first")[0] == 0
    assert snapshot_at(f"{shared}@first")[1].number == 1
    assert of_run[0] == 0 and of_run == command(capsys, "bank", "log", f"{shared}@other")


def test_commands_on_one_snapshot_and_on_a_whole_bank(
    complete: Complete, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(uri(complete, "bert"), tmp_path / "bank")
    place = str(tmp_path / "bank")

    def listed(at: str) -> list[int]:
        status, out, _ = command(capsys, "bank", "list", f"{place}{at}", "--json")
        assert status == 0
        return [snapshot["number"] for snapshot in json.loads(out)["snapshots"]]

    assert (listed(""), listed("@main"), listed("@1")) == ([1, 2], [2], [1])
    for words in (("show", f"{place}@1"), ("show", place, "1")):
        assert json.loads(command(capsys, "bank", *words, "--json")[1])["number"] == 1
    assert json.loads(command(capsys, "bank", "show", place, "--json")[1])["number"] == 2
    for words in (("verify",), ("prune",), ("promote", "main")):
        name, *others = words
        status, _, error = command(capsys, "bank", name, f"{place}@main", *others)
        assert status == 1 and f"takes a whole bank: write '{place}', without '@main'" in error
