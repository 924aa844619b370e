"""Two snapshots merged into one: it answers as one run's would; what cannot be merged is refused in one sentence."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Complete, Lab, opened, run

from raycl.bank import Bank, Snapshot
from raycl.bank.branches import head_of
from raycl.bank.states import get_router
from raycl.errors import BankError
from raycl.launch import prepared_run
from raycl.operations.banks.maintenance import verify
from raycl.operations.banks.merge import merge
from raycl.operations.banks.unlearning import forget
from raycl.storage import Storage
from raycl.training.setup import run_config

REPO = Path(__file__).resolve().parents[2]


def tasks_of(lab: Lab) -> list[Any]:
    return [*lab.tasks, {**lab.tasks[0], "name": "third"}]


SIZES = {"r_by_task": {"third": 6, "animal": 3}, "keys": {"slots_by_task": {"third": 5}}}
"""The sizes of tasks on either side."""


@pytest.fixture(scope="module")
def learned(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bank]:
    """Return a bank of a run over three tasks, learned once for each method."""
    made: dict[str, Bank] = {}

    def bank(kind: str, method: Any) -> Bank:
        key = f"{kind} {method}"
        if key not in made:
            storage = Storage.at(tmp_path_factory.mktemp("run"))
            run(lab.config(kind, method, stream={"tasks": tasks_of(lab)}), storage)
            made[key] = Bank(storage.sub("bank"))
        return made[key]

    return bank


def copied(bank: Bank, folder: Path) -> Bank:
    return Bank.at(shutil.copytree(bank.storage.root, folder))


def without(bank: Bank, task: str) -> Snapshot:
    return bank.open(forget(bank, bank.open(3), task, scores=False).new)


def mixtures(bank: Bank, snapshot: Snapshot, tasks: list[str] | None) -> list[dict[str, float]]:
    """Return the weight of each adapter for some texts."""
    texts = ["fire is warm", "the barks runs much", "it purrs a sleeps"]
    mixture = opened(bank, snapshot).router.route(texts, tasks)
    return [dict(zip(mixture.names, row, strict=True)) for row in mixture.weights.tolist()]


@pytest.mark.parametrize(
    ("kind", "method", "elsewhere"),
    [
        ("bert", {"name": "slm", "router": "keys", **SIZES}, False),
        ("bert", {"name": "slm", "router": "keys", **SIZES}, True),
        ("llama", {"name": "slm", "router": "discriminant"}, True),
        ("t5", "separate", False),
    ],
    ids=["slm-keys-one-bank", "slm-keys-two-banks", "slm-discriminant-two-banks", "separate-one-bank"],
)
def test_two_halves_are_the_whole(
    learned: Callable[..., Bank], kind: str, method: Any, elsewhere: bool, tmp_path: Path
) -> None:
    bank = copied(learned(kind, method), tmp_path / "ours")
    other = copied(learned(kind, method), tmp_path / "theirs") if elsewhere else bank
    whole = bank.open(3)
    item, two = without(bank, "third"), without(other, "animal")
    merged = merge(bank, item, two, other)
    assert sorted(task.name for task in merged.tasks) == ["animal", "colour", "third"]
    assert [entry.tensors for entry in merged.adapters] == [entry.tensors for entry in whole.adapters]
    mine, theirs = get_router(bank, merged), get_router(bank, whole)
    assert (mine.kind, mine.settings) == (theirs.kind, theirs.settings) and mine.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(mine.tensors[name], tensor) for name, tensor in theirs.tensors.items())
    given = ["colour", "animal", "third"] if method == "separate" else None
    assert mixtures(bank, merged, given) == mixtures(bank, whole, given)
    assert verify(bank).problems == [] and merged.parent == item.number
    assert merged.provenance["config"]["method"] == whole.provenance["config"]["method"] and merged.is_derived


def test_branches_of_one_snapshot_are_merged_by_the_command_with_the_router_selected_anew(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Router `auto`: the kind is selected by dev texts of all tasks, as a run over all of them does."""
    tree = lab.tree("bert", "slm")
    base, (one, two) = {**tree["stream"], "dev_fraction": 0.2}, tasks_of(lab)[1:]
    first = run_config.from_tree({**tree, "stream": {**base, "tasks": lab.tasks[:1]}})
    run(first, Storage.at(tmp_path / "first"))
    bank = Bank.at(tmp_path / "first/bank")
    from tiny import work

    for name, task, tokens in (("main", one, 24), ("team", two, 40)):
        stream = {"tasks": [task], "max_source_tokens": tokens}
        given = {"bank": {"start": f"{bank.storage.uri}@1", "branch": name}, "stream": stream}
        config = run_config.from_tree({**given, "output": {"dir": str(tmp_path), "name": f"run-{name}"}})
        work(prepared_run.prepare(config))
    main = runpy.run_path(str(REPO / "jobs/bank.py"))["main"]
    assert main(["merge", bank.storage.uri, "main", "team"]) == 0
    said = capsys.readouterr().out
    assert "branch 'main' points at it: colour, animal, third\nit has no training state: it answers" in said, said
    assert "no run can start from it; `rollback --to 2` goes back to one that has" in said, said
    merged = head_of(bank)
    assert merged.router.kind in ("keys", "discriminant") and merged.parent == 2
    assert len(mixtures(bank, merged, None)) == 3
    limits = [merged.token_limits(name)[0] for name in ("colour", "animal", "third", "")]
    assert limits == [24, 24, 40, 40], "each task is read as it was learned"
    assert main(["merge", bank.storage.uri, "main", str(tmp_path / "nowhere") + "@main"]) == 1
    assert "there is no bank at '" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (("bert", "olora"), ("bert", "olora"), "with method 'olora' .* depends on the tasks before it"),
        (("bert", "sapt"), ("bert", "sapt"), "with method 'sapt'"),
        (("bert", "separate"), ("t5", "separate"), "backbone '.*bert' and '.*t5' differ"),
        (("bert", "separate"), ("bert", "slm"), "encoder|method lora .* and slm"),
    ],
)
def test_what_depends_on_earlier_tasks_or_differs_is_refused(
    complete: Complete, ours: tuple[str, str], theirs: tuple[str, str], message: str
) -> None:
    item, two = (Bank(complete(*case, "torch").storage.sub("bank")) for case in (ours, theirs))
    before = item.snapshots()
    with pytest.raises(BankError, match=message):
        merge(item, item.open(2), two.open(1), two)
    assert item.snapshots() == before


def test_names_that_mean_different_things_are_refused(lab: Lab, learned: Callable[..., Bank], tmp_path: Path) -> None:
    bank = learned("t5", "separate")
    config = lab.config("t5", "separate", seed=7, stream={"tasks": tasks_of(lab)[:2]})
    run(config, Storage.at(tmp_path))
    other = Bank.at(tmp_path / "bank")
    with pytest.raises(BankError, match="adapter 'animal' has different weights in snapshots 3 and 2: rename one"):
        merge(bank, bank.open(3), other.open(2), other)
