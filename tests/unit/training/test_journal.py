"""The journal: one writer an attempt, and late writers of older attempts change nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_records import HASH, phase_record

from raycl.errors import AlreadyExistsError, StaleAttemptError
from raycl.storage import Storage
from raycl.training.records.journal import Journal, RunState, last_attempt, read_state


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage.at(tmp_path)


def test_a_run_that_never_started_has_an_empty_state(storage: Storage) -> None:
    assert read_state(storage) == RunState()
    assert last_attempt(storage) == 0


def test_records_fold_into_the_state_and_old_checkpoints_are_named(storage: Storage) -> None:
    journal = Journal.claim(storage, workers=2)
    assert [journal.checkpoint(name, HASH, keep=2) for name in ("a", "b", "c", "d")] == [[], [], ["a"], ["b"]]
    journal.phase_done(phase_record(0))
    journal.phase_done(phase_record(1))
    state = read_state(storage)
    assert (state.checkpoints, state.phases) == (["c", "d"], [phase_record(0), phase_record(1)])
    assert state == journal.state
    assert [(entry["attempt"], entry["workers"]) for entry in state.attempts] == [(1, 2)]


def test_a_claim_inherits_everything_and_adds_itself(storage: Storage) -> None:
    first = Journal.claim(storage, workers=1)
    first.checkpoint("a", HASH, keep=2)
    first.phase_done(phase_record(0))
    second = Journal.claim(storage, workers=4, driver="x")
    assert second.attempt == 2
    assert (second.state.checkpoints, second.state.phases) == (["a"], [phase_record(0)])
    assert [entry["workers"] for entry in read_state(storage).attempts] == [1, 4]
    second.checkpoint("b", HASH, keep=2)
    assert read_state(storage).checkpoints == ["a", "b"]


def test_racing_claims_get_numbers_of_their_own(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        journals = list(pool.map(lambda number: Journal.claim(storage, workers=number), range(24)))
    assert sorted(journal.attempt for journal in journals) == list(range(1, 25))
    numbers = [entry["attempt"] for entry in read_state(storage).attempts]
    assert numbers == list(range(1, 25)), "every claim records all claims before it"


def test_a_stale_attempt_fails_and_changes_nothing(storage: Storage) -> None:
    old = Journal.claim(storage, workers=1)
    old.checkpoint("a", HASH, keep=2)
    new = Journal.claim(storage, workers=1)
    new.checkpoint("b", HASH, keep=2)
    for write in (
        lambda: old.checkpoint("late", HASH, keep=1),
        lambda: old.phase_done(phase_record(9)),
        old.ensure_current,
    ):
        with pytest.raises(StaleAttemptError, match=r"attempt 1 of '.*' was replaced by attempt 2: it stops here"):
            write()
    storage.write("journal/attempt-0001/000009.json", json.dumps({"checkpoints": ["late"], "phases": [9]}).encode())
    assert (read_state(storage).checkpoints, read_state(storage).phases) == (["a", "b"], [])
    new.ensure_current()


def test_a_folder_without_its_claim_is_no_attempt(storage: Storage) -> None:
    Journal.claim(storage, workers=1).checkpoint("a", HASH, keep=2)
    storage.write("journal/attempt-0007/000003.json", json.dumps({"checkpoints": ["ghost"]}).encode())
    assert last_attempt(storage) == 1
    assert read_state(storage).checkpoints == ["a"]


def test_records_are_never_rewritten(storage: Storage) -> None:
    journal, twin = Journal.claim(storage, workers=1), Journal(storage, 1, RunState())
    journal.checkpoint("a", HASH, keep=2)
    with pytest.raises(AlreadyExistsError):
        twin.checkpoint("b", HASH, keep=2)
    assert read_state(storage).checkpoints == ["a"]


@dataclass(frozen=True)
class Interrupted(Storage):
    """Storage on which another worker gets a record in just before a claim is created."""

    other: Any = None

    def create(self, name: str, data: bytes) -> None:
        if name.endswith("attempt-0002/000000.json"):
            self.other()
        super().create(name, data)


def test_what_the_former_attempt_recorded_during_a_claim_is_not_lost(storage: Storage) -> None:
    old = Journal.claim(storage, workers=1)
    old.checkpoint("a", HASH, keep=1)
    unlucky = Interrupted(
        storage.uri, storage.filesystem, storage.root, other=lambda: old.checkpoint("b", HASH, keep=1)
    )
    new = Journal.claim(unlucky, workers=1)
    assert new.state.checkpoints == read_state(storage).checkpoints == ["b"], "the files of 'a' may be gone already"
    new.checkpoint("c", HASH, keep=2)
    assert read_state(storage).checkpoints == ["b", "c"]
