"""Tests of the snapshots that an endpoint may answer from: the branch's newest, unless another decision came since."""

from __future__ import annotations

from pathlib import Path

import pytest
from bank_samples import child

from raycl.bank import Bank
from raycl.bank.activations import Activations
from raycl.bank.branches import Branch
from raycl.errors import BankError
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import decide_first, wanted_snapshots


def test_an_endpoint_follows_its_branch_and_no_other(tmp_path: Path) -> None:
    bank = Bank.at(tmp_path)
    first = child(bank, "a")
    second, other = child(bank, "b", first), child(bank, "c", first)
    config = ServeConfig(bank=bank.storage.uri)
    with pytest.raises(BankError, match="has no branch 'main'"):
        wanted_snapshots(bank, Activations(bank), config)
    for snapshot in (first, second):
        Branch(bank).advance(snapshot, "run")
    Branch(bank, "trial").advance(other, "trial")
    assert decide_first(bank, config) == 2
    log = Activations(bank)
    assert wanted_snapshots(bank, log, config) == [2, 1], "the head, although the first decision names it too"
    log.add(1, "rolled back")
    assert wanted_snapshots(bank, log, config) == [1]
    third = child(bank, "d", second)
    assert wanted_snapshots(bank, log, config) == [1], "on no branch yet"
    Branch(bank).advance(third, "run")
    assert wanted_snapshots(bank, log, config) == [third.number, 1]
    Branch(bank).go_back(second, "the third is wrong")
    assert wanted_snapshots(bank, log, config) == [second.number, third.number, 1], "where the branch went back to"
    trial = config.model_copy(update={"branch": "trial"})
    assert decide_first(bank, trial) == other.number
    assert wanted_snapshots(bank, Activations(bank, "trial"), trial) == [other.number]
