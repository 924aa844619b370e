"""A number that is used again after a deletion means the new snapshot, for pins, for who follows and for the log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_client import listening, problem
from service_client import WAIT_S, bank_of, examples, is_piece, serving
from test_adapter_loading import LONG
from tiny import Taught

from raycl.bank import Bank, NewSnapshot
from raycl.bank.activations import Activations
from raycl.storage.numbered import NOTE

FOLLOW = {"follow": {"enabled": True, "poll_s": 0.01}}


def swapped(bank: Bank) -> dict[str, str]:
    """Delete snapshot 2 and publish one that gives each adapter of it the other's tensors, under the same versions."""
    second = bank.open(2)
    states = {entry.name: bank.fetch(entry, second.layouts[entry.layout]) for entry in second.adapters}
    bank.storage.delete("snapshots/000002.json")
    for name in states:
        bank.storage.delete(f"adapters/{name}/000001.json")
    other = dict(zip(states, reversed(states), strict=True))
    manifests = [bank.publish(name, states[other[name]], second.backbone, [name]) for name in states]
    assert [manifest.version for manifest in manifests] == [1, 1]
    again = bank.snapshot(
        NewSnapshot(
            manifests, second.backbone, second.router, second.tasks, second.encoder, provenance=second.provenance
        )
    )
    assert again.number == 2 and [str(entry) for entry in again.adapters] == [str(entry) for entry in second.adapters]
    return other


@pytest.mark.parametrize("active", [1, 2])
def test_a_republished_snapshot_replaces_the_deleted_one(taught: Taught, tmp_path: Path, active: int) -> None:
    """Snapshot, names and versions are the same, tensors are not; 2 is pinned, or answers itself."""
    bank = bank_of(taught("llama", "separate"), tmp_path)
    texts = ["fire is", "the sea", "it purrs a"]
    Activations(bank).add(active, "test")
    with listening(bank) as wire:

        def answers(name: str) -> list[str]:
            ask = {"max_tokens": 12, "extra_body": {"raycl": {"adapters": {name: -2.0}, "task": "colour"}}}
            return [wire.chat(text, model="snapshot:2", **ask).choices[0].message.content for text in texts]

        before = {name: answers(name) for name in ("colour", "animal")}
        assert before["colour"] != before["animal"], "the test shows nothing"
        other = swapped(bank)
        after = {name: before[other[name]] for name in before}
        wire.until(lambda: {name: answers(name) for name in before} == after)
        assert wire.get("/readyz")["snapshot"] == active
        assert wire.chat(texts[0], model="colour@1", max_tokens=2).raycl["adapters"] == {"colour": 1.0}
        wire.settle()
        wire.until(lambda: len(wire.engine.model._all) <= 2)


def test_a_running_request_keeps_its_snapshot(taught: Taught, tmp_path: Path, slow: None) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    with serving(bank, **FOLLOW) as client:
        expected = client.ask("fire is", weights={"colour": -2.0}, sampling=LONG).text
        loaded = client.snapshot_manager.acquire()
        running = client.ask("fire is", weights={"colour": -2.0}, sampling=LONG)
        running.wait(is_piece)
        swapped(bank)
        client.until(
            lambda: client.snapshot_manager.active is not loaded and client.snapshot_manager.active.snapshot.number == 2
        )
        late = client.ask("fire is", weights={"colour": -2.0}, sampling=LONG)
        assert running.text == expected != late.text
        client.snapshot_manager.release(loaded)
        client.until(lambda: client.snapshot_manager._replaced == [])


def test_a_deleted_snapshot_is_not_answered_from_a_cache(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "lora"), tmp_path)
    with listening(bank) as wire:
        ask = {"input": "fire is", "model": "snapshot:1", "raycl": {"task": "colour"}}
        assert wire.post("/v1/route", ask).status_code == 200
        bank.storage.delete("snapshots/000001.json")
        wire.until(lambda: problem(wire.post("/v1/route", ask))[0] == 404 if not _ok(wire, ask) else False)


def _ok(wire: Any, ask: Any) -> bool:
    return bool(wire.post("/v1/route", ask).status_code == 200)


def test_a_reused_decision_number_is_read_again(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "lora"), tmp_path)
    log = Activations(bank)
    log.add(1, "first")
    first = log.latest()
    assert first is not None and first.snapshot == 1
    for file in ("000001.json", NOTE):
        bank.storage.delete(f"serving/main/{file}")
    Activations(bank).add(2, "another decision under the same number")
    again = log.latest()
    assert again is not None and (again.number, again.snapshot) == (1, 2)


def test_a_record_that_is_only_copied_over_changes_nothing(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = taught("llama", "lora")
    bank = bank_of(done, tmp_path)
    with serving(bank, **FOLLOW) as client:
        active, polled = client.snapshot_manager.active, threading.Event()
        path = Path(bank.storage.path("snapshots/000002.json"))
        path.write_bytes(path.read_bytes())
        branch = client.snapshot_manager.activations.branch
        real = branch.newest_first

        def counting(after: int = 0) -> Iterator[int]:
            polled.set()
            return real(after)

        monkeypatch.setattr(branch, "newest_first", counting)
        assert polled.wait(WAIT_S)
        assert client.snapshot_manager.active is active and examples(done, bank, 2)
