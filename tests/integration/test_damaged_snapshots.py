"""A damaged snapshot is never activated: the old one stays active, and the endpoint reports the reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_client import listening, problem
from service_client import bank_of, examples, serving
from tiny import Complete, on_main

from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.bank.activations import Activations
from raycl.errors import BankError
from raycl.operations.banks.maintenance import verify
from raycl.serve.deployment.endpoint import activate
from raycl.serve.gate.judge import judge
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import decide_first

FOLLOW = {"follow": {"enabled": True, "poll_s": 0.01}}


def path_of(bank: Bank, file: str) -> Path:
    return Path(bank.storage.path(file))


def flip(path: Path) -> bytes:
    """Change one bit in the middle; returns what was there."""
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    return whole


def withheld(bank: Bank) -> Callable[[], None]:
    """Take the newest move of the branch away; what is returned publishes it again."""
    path = path_of(bank, f"branches/main/{max(bank.snapshots()):06d}.json")
    aside = path.with_name("withheld")
    path.rename(aside)
    return lambda: aside.rename(path) and None  # type: ignore[func-returns-value]


def new_adapter(bank: Bank) -> tuple[Snapshot, Path]:
    """Return the newest snapshot, and the object that only it names."""
    first, last = bank.open(1), bank.open(max(bank.snapshots()))
    old = {entry.tensors.sha256 for entry in first.adapters}
    (fresh,) = [entry for entry in last.adapters if entry.tensors.sha256 not in old]
    return last, path_of(bank, fresh.tensors.file)


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_a_snapshot_with_a_damaged_adapter_is_never_activated(complete: Complete, tmp_path: Path, harm: str) -> None:
    done = complete("llama", "separate", "torch")
    bank = bank_of(done, tmp_path)
    _, path = new_adapter(bank)
    publish = withheld(bank)
    with listening(bank, **FOLLOW) as wire:
        assert wire.get("/readyz")["snapshot"] == 1
        whole = path.read_bytes()
        if harm == "flip":
            flip(path)
        elif harm == "cut":
            path.write_bytes(whole[:-5])
        else:
            path.unlink()
        publish()
        wire.until(lambda: bool(wire.get("/v1/snapshots")["problem"]))
        said = wire.get("/v1/snapshots")
        assert said["active"] == 1 and "animal@1" in said["problem"] and "\n" not in said["problem"]
        for example in examples(done, bank, 1):
            assert wire.post("/v1/route", {"input": example.text, "raycl": {"task": example.task}}).status_code == 200
        status, message = problem(wire.post("/admin/activate", {"snapshot": 2}))
        assert status == 503 and "animal@1" in message
        assert wire.get("/readyz")["snapshot"] == 1 and Activations(bank).latest() is None, "nothing was decided"
        path.write_bytes(whole)
        wire.until(lambda: wire.get("/readyz")["snapshot"] == 2)
        assert wire.get("/v1/snapshots")["problem"] == ""


def test_a_snapshot_with_a_damaged_router_is_never_activated(complete: Complete, tmp_path: Path) -> None:
    bank = bank_of(complete("bert", "slm", "torch"), tmp_path)
    router = bank.open(2).router.tensors
    assert router is not None
    publish = withheld(bank)
    with listening(bank, **FOLLOW) as wire:
        flip(path_of(bank, router.file))
        publish()
        wire.until(lambda: "the router of snapshot 2" in wire.get("/v1/snapshots")["problem"])
        assert wire.get("/readyz")["snapshot"] == 1


def test_replicas_load_the_newest_undamaged_snapshot(complete: Complete, tmp_path: Path) -> None:
    """Snapshot 3 is damaged, 2 is not: both who follows and who starts now answer from 2."""
    bank = bank_of(complete("llama", "separate", "torch"), tmp_path)
    second = bank.open(2)
    animal = second.adapter("animal")
    state = bank.fetch(animal, second.layouts[animal.layout])
    other = bank.publish("extra", state, second.backbone, ["animal"], extras={"pseudo": dict(state.tensors())})
    kept = [(entry, second.layouts[entry.layout]) for entry in second.adapters]
    louder = bank.publish("louder", _doubled(state), second.backbone, ["animal"])
    fields = ([*kept, other, louder], second.backbone, second.router, second.tasks)
    third = on_main(bank, bank.snapshot(NewSnapshot(*fields, provenance=second.provenance)))
    flip(path_of(bank, louder.tensors.file))
    with serving(bank, **FOLLOW) as client:
        assert client.snapshot_manager.active.snapshot.number == 2 and "louder@1" in client.snapshot_manager.problem
    config = ServeConfig(bank=bank.storage.uri)
    assert decide_first(bank, config) == third.number
    with serving(bank, **FOLLOW) as client:
        assert client.snapshot_manager.active.snapshot.number == 2, "only a snapshot that is requested must load"
    Activations(bank).add(1, "asked for")
    with serving(bank, **FOLLOW) as client:
        assert client.snapshot_manager.active.snapshot.number == 1 and client.snapshot_manager.problem == ""
    with pytest.raises(BankError, match="louder@1 are damaged"):
        activate(config, str(third.number))
    with pytest.raises(BankError, match="louder@1 are damaged"):
        judge(config.model_copy(update={"device": "cpu"}), third.number)
    latest = Activations(bank).latest()
    assert latest is not None and latest.snapshot == 1


def _doubled(state: Any) -> Any:
    from dataclasses import replace

    return replace(state, linears={path: (2 * a, b) for path, (a, b) in state.linears.items()})


def test_a_damaged_active_snapshot_is_refused_at_startup(complete: Complete, tmp_path: Path) -> None:
    bank = bank_of(complete("llama", "separate", "torch"), tmp_path)
    flip(new_adapter(bank)[1])
    Activations(bank).add(2, "asked for")
    with pytest.raises(BankError, match="animal@1 are damaged"), serving(bank):
        pass


def test_only_new_tensors_are_verified_and_pseudo_samples_are_not_read(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = bank_of(complete("bert", "sapt", "torch"), tmp_path)
    first, second = bank.open(1), bank.open(2)
    kinds = {summary.file for entry in second.adapters for summary in entry.extras.values()}
    assert kinds, "SAPT keeps pseudo-samples"
    for file in kinds:
        flip(path_of(bank, file))
    read: list[str] = []
    real = Bank.read_object

    def counting(self: Bank, summary: Any, what: str) -> Any:
        read.append(summary.sha256)
        return real(self, summary, what)

    publish = withheld(bank)
    with listening(bank, **FOLLOW) as wire:
        wire.settle()
        monkeypatch.setattr(Bank, "read_object", counting)
        monkeypatch.setattr(wire.engine.model, "ahead", lambda loaded: [])  # what goes to the device is another matter
        began = time.monotonic()
        publish()
        wire.until(lambda: wire.get("/readyz")["snapshot"] == 2)
        assert time.monotonic() - began < 2.0
        old = {entry.tensors.sha256 for entry in first.adapters}
        fresh = {entry.tensors.sha256 for entry in second.adapters} - old
        assert fresh and set(read) >= fresh and not set(read) & old
        before = len(read)
        for _ in range(3):
            for number in (1, 2):
                assert wire.post("/admin/activate", {"snapshot": number}).status_code == 200
        again = [sha256 for sha256 in read[before:] if sha256 in fresh | old]
        assert again == [], "each is hashed once and remembered"
    assert len([problem for problem in verify(bank).problems if "missing" in problem]) == 0
