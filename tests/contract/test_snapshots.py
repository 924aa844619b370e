"""A snapshot alone answers as the evaluated run did, and tasks can be removed from it."""

from __future__ import annotations

import json
import runpy
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from tiny import (
    KINDS,
    NOT_SERVED,
    SAMPLE,
    VARIANTS,
    WRITERS,
    Complete,
    Done,
    last_checkpoint,
    matrix,
    opened,
    routing_family,
)

from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.bank.states import get_router
from raycl.bank.tensor_groups import PUBLISHED
from raycl.errors import BankError
from raycl.methods.base import under
from raycl.methods.registry import METHODS, method_class
from raycl.operations.banks.unlearning import evaluate, forget
from raycl.testing.checks import check_snapshot
from raycl.training.phase.evaluation import score_phase
from raycl.training.phase.routing import PublishedRouter
from raycl.training.workers.distributed import DistributedContext

REPO = Path(__file__).resolve().parents[2]


def newest(done: Done) -> tuple[Bank, Snapshot | None]:
    """Return the run's bank and its last snapshot."""
    bank = Bank(done.storage.sub("bank"))
    return bank, bank.newest()


def copied(done: Done, folder: Any) -> tuple[Bank, Snapshot]:
    """Return a copy that a test may change."""
    bank = Bank(done.copy(folder).sub("bank"))
    snapshot = bank.newest()
    assert snapshot is not None
    return bank, snapshot


def routed(case: tuple[str, str]) -> tuple[Hashable, ...]:
    """Return what a sample must have of a case: each kind of backbone, and of methods that evaluation asks alike, one.

    It asks the router of a published family, not the class whose `route` training calls; what is not served, and whole
    models, it asks otherwise.
    """
    kind, method = case
    made = method_class(
        str((VARIANTS | WRITERS).get(method, {"name": method if method in METHODS else "lora"})["name"])
    )
    asked = next(parent.__name__ for parent in made.__mro__ if "route" in parent.__dict__)
    return kind, (routing_family(method), made.trains_backbone, method in NOT_SERVED and method, asked)


@pytest.mark.parametrize(("kind", "method"), sampled(SAMPLE, needed=routed))
def test_evaluation_routes_by_the_router_that_is_published(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, method: str
) -> None:
    """The method is not asked."""
    done = complete(kind, method, "torch")
    context, last = done.context, last_checkpoint(done)
    if context.method.local_adaptation is None:  # a step on neighbours is training
        monkeypatch.setattr(context.method, "route", None)
    world, storage = DistributedContext.alone(torch.device("cpu")), done.copy(tmp_path)
    phase = score_phase(context, context.phases[-1], world, storage, lambda task: None, last)
    row = dict(zip((task.name for task in context.stream.tasks), matrix(done.storage)[-1], strict=True))
    assert {name: cell["value"] for name, cell in phase.row.items()} == {name: row[name] for name in phase.row}


@pytest.mark.parametrize(("kind", "method"), SAMPLE)
def test_the_last_checkpoint_keeps_the_router_that_is_published(complete: Complete, kind: str, method: str) -> None:
    done = complete(kind, method, "torch")
    context, last = done.context, last_checkpoint(done)
    bank, snapshot = newest(done)
    if snapshot is not None and method != "separate":  # which gives adapters the names of their tasks
        published, kept = get_router(bank, snapshot), PublishedRouter.of(context.method, last)
        assert kept is not None and kept.owners == {entry.name: entry.tasks for entry in snapshot.adapters}
        assert {**last.router, "owners": []} == {
            "kind": published.kind,
            "settings": published.settings,
            "encoder": published.encoder,
            "encoder_sha256": published.encoder_sha256,
            "package": "",
            "owners": [],
        }
        tensors = under(f"{PUBLISHED}/", last.frozen_state)
        assert tensors.keys() == published.tensors.keys()
        assert all(torch.equal(tensors[name], value) for name, value in published.tensors.items())


@pytest.mark.parametrize(("kind", "method"), SAMPLE)
def test_a_snapshot_alone_answers_as_the_run_did(complete: Complete, kind: str, method: str) -> None:
    """The state that is read from the bank is the state that was trained."""
    done = complete(kind, method, "torch")
    if newest(done)[1] is None:
        assert method in NOT_SERVED or done.context.method.trains_backbone, "only whole models leave no snapshot"
    check_snapshot(done)


def test_a_snapshot_of_two_activations_is_refused(complete: Complete, tmp_path: Any) -> None:
    bank, snapshot = copied(complete("bert", "separate", "torch"), tmp_path)
    entries = [(entry, snapshot.layouts[entry.layout]) for entry in snapshot.adapters]
    entries[0] = (entries[0][0].model_copy(update={"activation": "relu"}), entries[0][1])
    mixed = bank.snapshot(
        NewSnapshot(entries, snapshot.backbone, snapshot.router, snapshot.tasks, provenance=snapshot.provenance)
    )
    with pytest.raises(BankError, match=r"activations 'none' \(colour@1\), 'relu' \(animal@1\), but a model"):
        opened(bank, mixed)


@pytest.mark.parametrize("kind", KINDS)
def test_forgetting_a_task_costs_the_others_nothing(complete: Complete, tmp_path: Any, kind: str) -> None:
    done = complete(kind, "separate", "torch")
    bank, snapshot = copied(done, tmp_path)
    result = forget(bank, snapshot, "colour")
    assert (result.old, result.new, result.removed) == (snapshot.number, snapshot.number + 1, ["colour"])
    assert set(result.before) == {"animal"} and result.before == result.after
    assert result.before["animal"].value == matrix(done.storage)[-1][1], "before must be what the run measured"
    new = bank.open(result.new)
    assert [entry.name for entry in new.adapters] == ["animal"] and [task.name for task in new.tasks] == ["animal"]
    assert new.parent == snapshot.number and new.provenance["forgotten"] == ["colour"] and new.is_derived
    assert bank.open(snapshot.number) == snapshot, "old snapshots stay"
    with pytest.raises(BankError, match="no adapter was trained on colour: expected animal"):
        opened(bank, new).router.route(["red"], ["colour"])
    with pytest.raises(BankError, match="'animal' is the only task of snapshot"):
        forget(bank, new, "animal")


def test_impossible_unlearning_is_refused_before_any_change(complete: Complete, tmp_path: Any) -> None:
    bank, snapshot = copied(complete("bert", "lora", "torch"), tmp_path)
    with pytest.raises(BankError, match=r"adapter lora@2 learned 'colour' together with animal"):
        forget(bank, snapshot, "colour")
    with pytest.raises(BankError, match=r"has no task 'shape': expected one of colour, animal"):
        forget(bank, snapshot, "shape")
    assert bank.snapshots() == [1, 2]


def test_a_snapshot_without_its_run_cannot_be_evaluated(complete: Complete, tmp_path: Any) -> None:
    bank, snapshot = copied(complete("bert", "separate", "torch"), tmp_path)
    entries = [(entry, snapshot.layouts[entry.layout]) for entry in snapshot.adapters]
    bare = bank.snapshot(NewSnapshot(entries, snapshot.backbone, snapshot.router, snapshot.tasks))
    with pytest.raises(BankError, match="has no record of its training data"):
        evaluate(bank, bare)
    assert forget(bank, bare, "colour", scores=False).removed == ["colour"]


def test_forgetting_by_the_command(complete: Complete, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bank, snapshot = copied(complete("llama", "separate", "torch"), tmp_path)
    main = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]
    assert main(["forget", bank.storage.uri, "colour", "--rows", "4"]) == 0
    shown = capsys.readouterr().out
    assert "before" in shown and "animal" in shown and "+0.0" in shown and "(removed: colour)" in shown
    assert main(["forget", bank.storage.uri, "colour"]) == 1
    assert "has no task 'colour'" in capsys.readouterr().err
    assert main(["diff", bank.storage.uri, "--json", str(snapshot.number), str(snapshot.number + 1)]) == 0
    assert json.loads(capsys.readouterr().out)["tasks_removed"] == ["colour"]
