"""The words of the gate's decisions, and of the command that serves, for people."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from bank_samples import child

from raycl.bank import Bank
from raycl.bank.activations import Activations
from raycl.bank.branches import Branch
from raycl.serve.deployment.endpoint import News
from raycl.serve.gate.judge import GateResult
from raycl.serve.settings import ServeConfig
from raycl.storage import Storage
from raycl.types import Score


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (80.0, "no task falls"),
        (81.0, "no task falls"),
        (79.96, "no task falls"),
        (79.5, "no task falls by more than 0.5 points, allowed are 1"),
        (70.0, "colour falls by 10.0 points, allowed are 1"),
    ],
)
def test_the_reason_of_a_decision(after: float, reason: str) -> None:
    result = GateResult(1, 2, {"colour": Score(80.0, 10)}, {"colour": Score(after, 10), "new": Score(5.0, 10)}, 1.0)
    assert result.reason == reason and result.passed == (after > 79)


def test_a_rejection_names_the_way_back(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    bank = Bank(Storage.at(tmp_path))
    first = child(bank, "a")
    branch, decisions = Branch(bank), Activations(bank)
    branch.advance(first, "run")
    decisions.add(first, "start")
    news = News(ServeConfig(bank=str(tmp_path)))
    second = child(bank, "b", first)
    branch.advance(second, "run")
    caplog.set_level(logging.INFO, logger="raycl")
    decisions.add(first, "snapshot 2 was rejected: a falls by 9.0 points", rejected=second.number)
    news.log()
    command = f"raycl bank rollback {bank.storage.address} --branch main --to 1"
    assert "branch 'main' still points at snapshot 2" in caplog.text and caplog.text.count(command) == 1
    branch.go_back(first, "b is wrong")
    decisions.add(first, "it answered before: b is wrong")
    news.log()
    assert caplog.text.count(command) == 1 and "decision 3" in caplog.text


def test_no_way_back_is_named_to_a_snapshot_that_the_branch_never_had(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    bank = Bank(Storage.at(tmp_path))
    others, first = child(bank, "a"), child(bank, "b")
    Branch(bank).advance(first, "run")
    decisions = Activations(bank)
    decisions.add(others, "an operator wanted it")
    news = News(ServeConfig(bank=str(tmp_path)))
    second = child(bank, "c", first)
    Branch(bank).advance(second, "run")
    caplog.set_level(logging.INFO, logger="raycl")
    decisions.add(others, "snapshot 3 was rejected: a falls by 9.0 points", rejected=second.number)
    news.log()
    assert "snapshot 3 was rejected" in caplog.text and "raycl bank rollback" not in caplog.text
