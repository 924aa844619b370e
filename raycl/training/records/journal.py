"""The run's own record of how far it got, fenced by attempt numbers.

Ray Train can forget a checkpoint reported within two seconds of a crash, and after a restart a worker of the former
attempt may still be writing. So the run trusts only this journal:

    journal/attempt-0001/000000.json     claim: created exclusively, carries the state that this attempt starts from
    journal/attempt-0001/000001.json     one record per event, created exclusively, never rewritten
    journal/attempt-0002/000000.json     a later claim; whatever attempt 1 writes from now on is ignored

A claim *copies* the state it inherits, so a late writer cannot change what a newer attempt believes: the fence needs no
clock and no lock. What a record names (a checkpoint, by the hash of its manifest) was written before it. The first
claim also identifies the run: it carries the config, and a later claim must come from the same one.
"""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass, field, replace
from typing import Any

from raycl import config as configs
from raycl.bank.manifest import Sha256
from raycl.config.names import FolderName
from raycl.errors import AlreadyExistsError, DamagedError, FormatError, ResumeError, RunError, StaleAttemptError
from raycl.storage import Storage
from raycl.storage.records import fields_of, numbered, numbers, read_fields, seal
from raycl.training.definition.inputs import Inputs, changes, joined
from raycl.training.definition.settings import EXEMPT
from raycl.training.definition.training_context import RunInfo
from raycl.training.records.schema import AttemptRecord, PhaseRecord

FOLDER = "journal"
FORMAT = 5
LISTINGS = 5
"""Listings of an attempt's folder before absent records count as lost, since a listing may lack a new file."""

_ATTEMPT = re.compile(r"attempt-(\d{4,})")


@dataclass
class RunState:
    """The progress of a run.

    Attributes:
        checkpoints: names of usable checkpoints, oldest first; the last one is where to continue.
        manifests: SHA-256 of the manifest of each: a checkpoint of the same name that another run wrote is none.
        phases: one record per phase that is trained **and** evaluated, in order.
        attempts: number, start time, time of the last record and seconds up to it, host and process of rank 0,
            number of inherited phases, and the rest of the claim, for every attempt so far.
        config: resolved tree of the run, as its first claim recorded it, or the one that added tasks.
        fingerprint: fingerprint of that config; empty for runs of versions that did not record it.
        inputs: fingerprints of what the run reads (`raycl.training.definition.inputs`), as the claims recorded them.
    """

    checkpoints: list[str] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    inputs: Inputs = field(default_factory=dict)
    manifests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Record:
    attempt: int
    number: int
    change: dict[str, Any]


@dataclass(frozen=True)
class _State:
    """Accumulates the records of an attempt into a `RunState`."""

    checkpoints: list[FolderName]
    phases: list[PhaseRecord]
    attempts: list[AttemptRecord]
    config: dict[str, Any]
    fingerprint: str
    inputs: dict[str, dict[str, Any]]
    manifests: dict[FolderName, Sha256]

    def __post_init__(self) -> None:
        if unknown := [name for name in self.checkpoints if name not in self.manifests]:
            raise ValueError(f"the hash of checkpoint '{unknown[0]}' is missing")


class Journal:
    """The journal of one attempt, which alone may write to it.

    Attributes:
        attempt: number of this attempt, from 1.
        state: the state as of the last record.
    """

    def __init__(self, storage: Storage, attempt: int, state: RunState) -> None:
        self.storage = storage
        self.attempt = attempt
        self.state: RunState = state
        self._records, self._began = 1, time.monotonic()

    @staticmethod
    def claim(storage: Storage, run: RunInfo | None = None, **summary: Any) -> Journal:
        """Start the next attempt on what the last one left; of two racing claims each gets its own number.

        Args:
            run: whose config the claim records, or must find recorded.
            summary: kept in `RunState.attempts` (workers, driver, ...).

        Raises:
            ResumeError: another run has claimed the folder.
        """
        while True:
            last = last_attempt(storage)
            state = read_state(storage)
            if run is not None:
                check_owner(storage, state, run)
                if state.fingerprint != run.fingerprint:
                    state.config, state.fingerprint = run.tree, run.fingerprint
                state.inputs = joined(state.inputs if has_begun(state) else {}, run.inputs)
            number = last + 1
            me = {"started": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
            state.attempts.append({"attempt": number, **me, **summary})
            try:
                storage.create(_record(number, 0), _sealed(number, 0, vars(state)))
            except AlreadyExistsError:
                continue
            journal = Journal(storage, number, state)
            journal._catch_up(last)
            return journal

    def _catch_up(self, former: int) -> None:
        """Take over what the former attempt recorded while this one was claiming; from now on it records in vain."""
        state = JournalReader(self.storage).state_of(former)
        if (state.checkpoints, state.phases) != (self.state.checkpoints, self.state.phases):
            self._append({"checkpoints": state.checkpoints, "phases": state.phases, "manifests": state.manifests})

    def checkpoint(self, name: str, sha256: str, keep: int) -> list[str]:
        """Record a checkpoint whose files are all written; returns the names that are no longer needed.

        Args:
            sha256: hash of its manifest.
        """
        names, known = [*self.state.checkpoints, name], {**self.state.manifests, name: sha256}
        kept = names[-keep:]
        self._append({"checkpoints": kept, "manifests": {name: known[name] for name in kept}})
        return names[:-keep]

    def phase_done(self, record: dict[str, Any]) -> None:
        """Record a phase that is trained and evaluated."""
        self._append({"phases": [*self.state.phases, record]})

    def go_back(self, checkpoints: list[str], phases: list[dict[str, Any]]) -> None:
        """Record that the run continues from an older checkpoint, and that what was recorded after it is ignored."""
        manifests = {name: self.state.manifests[name] for name in checkpoints}
        self._append({"checkpoints": checkpoints, "manifests": manifests, "phases": phases})

    def begin_with(self, name: str, sha256: str, phases: list[dict[str, Any]]) -> None:
        """Record a checkpoint of what another run has done for this one, which has done nothing yet (`fork_points`)."""
        assert not self.state.checkpoints and not self.state.phases, "the run has begun already"
        self.state.attempts[-1]["inherited"] = len(phases)
        self._append({"checkpoints": [name], "manifests": {name: sha256}, "phases": phases})

    def ensure_current(self) -> None:
        """Check that no newer attempt has claimed the run.

        Raises:
            StaleAttemptError: one has.
        """
        newest = last_attempt(self.storage)
        if newest != self.attempt:
            raise StaleAttemptError(
                f"attempt {self.attempt} of '{self.storage.uri}' was replaced by attempt {newest}: it stops here"
            )

    def _append(self, change: dict[str, Any]) -> None:
        self.ensure_current()
        times = {"ended": time.time(), "seconds": time.monotonic() - self._began}  # clocks are set back
        mine = [{**attempt, **times} for attempt in self.state.attempts[-1:]]
        change = {**change, "attempts": [*self.state.attempts[:-1], *mine]}
        key = (self.attempt, self._records)
        self.storage.create(_record(*key), _sealed(*key, change))
        self._records += 1
        self.state = replace(self.state, **change)


def check_owner(storage: Storage, state: RunState, run: RunInfo) -> None:
    """Check that the folder was claimed by this run, or is not claimed yet.

    Raises:
        ResumeError: the run has other settings, data or pretrained models; the message names them.
    """
    if state.fingerprint in ("", run.fingerprint, run.replaces):
        check_inputs(storage, state, run.inputs)
        return
    changed = configs.differences(state.config, run.tree, without=EXEMPT)
    listed = ", ".join(f"{key} is {theirs!r} there, {mine!r} here" for key, (theirs, mine) in changed.items())
    host, process = state.attempts[0]["host"], state.attempts[0]["pid"]
    raise ResumeError(
        f"'{storage.uri}' is a run with other settings, claimed on {host} by process {process}: {listed}; "
        "choose another output.name"
    )


def has_begun(state: RunState) -> bool:
    """Return whether anything was learned, which a changed input would be mixed with."""
    return bool(state.checkpoints or state.phases)


def check_inputs(storage: Storage, state: RunState, inputs: Inputs) -> None:
    """Refuse to go on with other data or pretrained models than the run began with.

    Raises:
        ResumeError: some differ; names them.
    """
    if changed := changes(state.inputs, inputs) if has_begun(state) else []:
        raise ResumeError(
            f"'{storage.uri}' cannot continue, since what it reads has changed: {'; '.join(changed)}; restore what it "
            "began with, or start a new run"
        )


def last_attempt(storage: Storage) -> int:
    """Return the number of the newest claimed attempt, 0 if there is none."""
    attempts = [int(match[1]) for name in storage.list(FOLDER) if (match := _ATTEMPT.fullmatch(name))]
    return max((number for number in attempts if storage.exists(_record(number, 0))), default=0)


class JournalReader:
    """Reads the journal of a run, again and again while it runs: records never change, so each is read once."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._changes: dict[tuple[int, int], dict[str, Any]] = {}

    def state(self) -> RunState:
        """Return the state that the newest attempt recorded; an empty one if the run never started.

        Raises:
            RunError: a record is damaged, missing, or of another version.
        """
        return self.state_of(last_attempt(self.storage))

    def state_of(self, attempt: int) -> RunState:
        """Return the state that an attempt recorded; 0: none. Callers may replace its records and not change them."""
        if attempt == 0:
            return RunState()
        tree: dict[str, Any] = {}
        for number in _numbers(self.storage, attempt):
            key = (attempt, number)
            if key not in self._changes:
                self._changes[key] = _change(self.storage, attempt, number)
            tree.update(self._changes[key])
        try:
            state = fields_of(tree, f"{self.storage.uri}/{FOLDER}/{_folder(attempt)}", _State)
        except DamagedError as error:
            raise RunError(str(error)) from error
        return RunState(**vars(state))


def read_state(storage: Storage) -> RunState:
    """Return the state of a run (`JournalReader.state`)."""
    return JournalReader(storage).state()


def _numbers(storage: Storage, attempt: int) -> list[int]:
    folder = f"{FOLDER}/{_folder(attempt)}"
    for _ in range(LISTINGS):
        existing = numbers(storage, folder, first=0)
        if existing == list(range(len(existing))):
            return existing
    missing = next(number for number, there in enumerate(existing) if number != there)
    raise RunError(
        f"'{storage.uri}/{_record(attempt, missing)}' is missing, though later records are there: restore it from a "
        "copy, or remove the later ones as well, and the run continues from what is left"
    )


def _change(storage: Storage, attempt: int, number: int) -> dict[str, Any]:
    file = _record(attempt, number)
    try:
        record = read_fields(storage, file, FORMAT, _Record)
    except DamagedError as error:
        rest = "it and the records after it" if number else f"the folder {_folder(attempt)}"
        raise RunError(f"{error}, or remove {rest}, and the run continues from what is left") from error
    except FormatError as error:
        raise RunError(str(error)) from error
    if (record.attempt, record.number) != (attempt, number):
        raise RunError(
            f"'{storage.uri}/{file}' holds record {record.number} of attempt {record.attempt}: it was moved; restore a "
            "copy"
        )
    return record.change


def _sealed(attempt: int, number: int, change: dict[str, Any]) -> bytes:
    return seal({"format": FORMAT, "attempt": attempt, "number": number, "change": change})


def _folder(attempt: int) -> str:
    return f"attempt-{attempt:04d}"


def _record(attempt: int, number: int) -> str:
    return f"{FOLDER}/{_folder(attempt)}/{numbered(number)}"
