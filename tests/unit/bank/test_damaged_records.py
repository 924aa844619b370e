"""Every small record that decides something carries its own hash: any change of a single bit is noticed on reading."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from run_records import HASH, phase_record

from raycl.bank import AdapterRef, Bank, NewSnapshot
from raycl.bank.activations import Activations, activated
from raycl.bank.branches import Branch, explain_empty, missing_branch
from raycl.bank.manifest import FORMAT, AdapterManifest, ModelInfo, RouterInfo, Snapshot
from raycl.bank.pruning import hold_lease, leased, record_removal, removed_from
from raycl.bank.states import get_state, put_state, state_file
from raycl.bank.tensors import views
from raycl.errors import BankError, DamagedError, RayclError, RunError, StorageError
from raycl.storage import Storage
from raycl.storage.numbered import NOTE
from raycl.storage.records import MAX_BYTES, seal
from raycl.training.records import fork_points
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from raycl.training.records.journal import Journal, read_state
from raycl.training.records.run_folder import read_decision, write_decision
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.workers.stopping import request_stop, stop_of
from raycl.types import AdapterState

MODEL = ModelInfo(name="tiny", sha256="a" * 64)


@dataclass(frozen=True)
class Record:
    """A record on disk, its neighbour of another number or name, and what reads it."""

    file: str
    other: str
    read: Callable[[Storage], Any]
    error: type[RayclError]


RECORDS = {
    "manifest": Record(
        "bank/adapters/one/000001.json",
        "bank/adapters/one/000002.json",
        lambda s: Bank(s.sub("bank")).manifest(AdapterRef(name="one", version=1)),
        BankError,
    ),
    "snapshot": Record(
        "bank/snapshots/000002.json", "bank/snapshots/000001.json", lambda s: Bank(s.sub("bank")).open(2), BankError
    ),
    "activation": Record(
        "bank/serving/main/000002.json",
        "bank/serving/main/000001.json",
        lambda s: Activations(Bank(s.sub("bank"))).latest(),
        BankError,
    ),
    "claim": Record("journal/attempt-0002/000000.json", "journal/attempt-0001/000000.json", read_state, RunError),
    "journal": Record("journal/attempt-0002/000001.json", "journal/attempt-0001/000001.json", read_state, RunError),
    "checkpoint": Record(
        "checkpoints/b/manifest.json", "checkpoints/a/manifest.json", lambda s: read_checkpoint(s, "b"), RunError
    ),
    "fork point": Record(
        "place/fork_point.json", "", lambda s: fork_points.read_fork_point(s.sub("place")), StorageError
    ),
    "stop request": Record("stop/two.json", "", lambda s: stop_of(s, "two"), StorageError),
    "decision": Record("decisions/002.json", "decisions/001.json", lambda s: read_decision(s, 2), StorageError),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """Return a run with a bank beside it: two of each record."""
    storage = Storage.at(tmp_path_factory.mktemp("written"))
    bank = Bank(storage.sub("bank"))
    for seed in range(2):
        torch.manual_seed(seed)
        state = AdapterState({"q": (torch.randn(2, 6), torch.randn(5, 2))}, 1e-05)
        bank.snapshot(NewSnapshot([bank.publish("one", state, MODEL)], MODEL, RouterInfo(kind="task")))
        Activations(bank).add(1 + seed, "test")
        journal = Journal.claim(storage, workers=1)
        name = "ab"[seed]
        checkpoint = Checkpoint(0, 2 + seed, 3, {"labels": ["ä"], "by": {2: 1e-05, 10: 0.5}}, {"w": torch.randn(3)}, {})
        journal.checkpoint(name, write_checkpoint(storage, name, checkpoint, TensorObjects(storage)), keep=2)
        write_decision(storage, 1 + seed, continues=bool(seed))
    journal.phase_done(phase_record(0, row={"t": {"value": 12.5}}))
    for driver in ("one", "two"):
        request_stop(storage, driver, "SIGTERM")
    fork_points.save_fork_point(storage, 1, storage.sub("place"))
    return storage


@pytest.mark.parametrize("kind", RECORDS)
def test_a_flipped_bit_is_detected_in_every_byte(written: Storage, kind: str) -> None:
    """Another bit in each, so that every kind of character is changed in every way."""
    record = RECORDS[kind]
    path = Path(written.path(record.file))
    whole = path.read_bytes()
    expected, unseen = record.read(written), []
    try:
        for index in range(len(whole)):
            flipped = bytearray(whole)
            flipped[index] ^= 1 << index % 8
            path.write_bytes(flipped)
            try:
                record.read(written)
                unseen.append(bytes(flipped[max(0, index - 10) : index + 10]))
            except record.error:
                pass
    finally:
        path.write_bytes(whole)
    assert unseen == []
    assert repr(record.read(written)) == repr(expected)


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize(
    "damage", ["{}", "[]", "", "cut", "3", "null", "not utf-8", "[" * 100_000, "neighbour", "newer", "older"]
)
def test_invalid_records_give_one_sentence(written: Storage, kind: str, damage: str) -> None:
    record = RECORDS[kind]
    path = Path(written.path(record.file))
    whole = path.read_bytes()
    if damage == "neighbour" and not record.other:
        return
    text: bytes = {
        "cut": whole[: len(whole) // 2],
        "not utf-8": b"\xff" + whole,
        "neighbour": Path(written.path(record.other)).read_bytes() if record.other else b"",
        "newer": _of_format(99, whole),
        "older": _of_format(0, whole),
    }.get(damage, damage.encode())
    path.write_bytes(text)
    try:
        with pytest.raises(record.error) as raised:
            record.read(written)
    finally:
        path.write_bytes(whole)
    said = str(raised.value)
    assert "\n" not in said and path.name.removesuffix("manifest.json") in said, said
    assert damage != "newer" or re.search(r"has format 99, this version reads \d+: upgrade raycl", said), said
    assert damage != "older" or re.search(r"has format 0, this version reads \d+: write it again, or use ", said), said


def test_records_of_a_stranger_with_a_right_hash_are_checked(written: Storage) -> None:
    """Each field missing, or something else."""
    bank = Bank(written.sub("bank"))
    state = put_state(bank, {"a": 1}, {})
    whole = bank.open(2).model_copy(update={"number": 3, "training": state})
    Branch(bank, "side").advance(bank.open(2), "test")
    explain_empty(Bank(written.sub("empty")), "a reason")
    record_removal(bank.storage, [7], ["one@7"])
    hold_lease(bank.storage, "run", [2])
    lease = next(file for file in bank.storage.files("leases"))
    reads: dict[str, Callable[[], Any]] = {
        "bank/serving/main/000002.json": Activations(bank).latest,
        "bank/branches/side/000001.json": lambda: Branch(bank, "side").move(1),
        "empty/not_served.json": lambda: missing_branch(Bank(written.sub("empty")), "main"),
        "bank/pruned/000001.json": lambda: [BankError(problem) for problem in removed_from(bank.storage).problems],
        f"bank/{lease}": lambda: leased(bank.storage),
        f"bank/{state_file(state)}": lambda: get_state(bank, whole),
        "checkpoints/b/manifest.json": lambda: read_checkpoint(written, "b"),
        "journal/attempt-0002/000001.json": lambda: read_state(written),
        "place/fork_point.json": lambda: fork_points.read_fork_point(written.sub("place")),
        "stop/two.json": lambda: stop_of(written, "two"),
        "decisions/002.json": lambda: read_decision(written, 2),
    }
    for file, read in reads.items():
        path = Path(written.path(file))
        before = path.read_bytes()
        record = json.loads(before)["record"]
        for name in record.keys() - {"format"}:
            for changed in ({key: value for key, value in record.items() if key != name}, {**record, name: [[]]}):
                path.write_bytes(seal(changed))
                if "/states/" in file:  # named by its content
                    whole = whole.model_copy(update={"training": hashlib.sha256(path.read_bytes()).hexdigest()})
                    bank.storage.write(state_file(str(whole.training)), path.read_bytes())
                with pytest.raises(RayclError, match=f"no valid record.*{name}"):
                    for problem in read() or ():
                        raise problem
        path.write_bytes(before)


@pytest.mark.parametrize("kind", RECORDS)
def test_records_that_would_fill_memory_are_one_sentence(written: Storage, kind: str) -> None:
    """They have a right hash: nested as deeply as Python just reads, and of a size that no record has."""
    record = RECORDS[kind]
    path = Path(written.path(record.file))
    whole = path.read_bytes()
    fields = json.loads(whole)["record"]
    try:
        for depth in (70, 600, *range(900, 1000, 9)):
            nested = f'{{"record": {{"format": {fields["format"]}, "x": {"[" * depth}{"]" * depth}}}, "sha256": ""}}'
            path.write_text(nested)
            with pytest.raises(record.error, match=r"more than 64 levels|RecursionError"):
                record.read(written)
        os.truncate(path, MAX_BYTES + 1)  # a sparse file takes no disk
        with pytest.raises(record.error, match="expected at most 67,108,864"):
            record.read(written)
    finally:
        path.write_bytes(whole)


def test_a_decision_says_why_and_when(written: Storage) -> None:
    path = Path(written.path(RECORDS["activation"].file))
    whole = path.read_bytes()
    record = json.loads(whole)["record"]
    junk: tuple[dict[str, Any], ...] = (
        {},
        {"why": 1},
        {"time": float("nan")},
        {"time": "now"},
        {"rejected": [[1]]},
        {"why": {"a": []}},
    )
    try:
        for changed in junk:
            reason = {**record["provenance"], **changed} if changed else {}
            path.write_bytes(seal({**record, "provenance": reason}))
            with pytest.raises(BankError, match=r"no valid record \(provenance\.\w+: .*activate a snapshot again"):
                Activations(Bank(written.sub("bank"))).latest()
        path.write_bytes(seal({**record, "provenance": {**record["provenance"], "number": [1], "more": 2}}))
        latest = Activations(Bank(written.sub("bank"))).latest()
        assert latest is not None and dict(latest.provenance) == record["provenance"]  # nothing else is shown
    finally:
        path.write_bytes(whole)


NAMES = ("", ".", "..", "../other", "/root", "a/b", ".hidden", "a\\b", "x" * 181, "a\n")


@pytest.mark.parametrize("name", NAMES)
def test_names_in_a_strangers_journal_stay_in_its_folder(tmp_path: Path, name: str) -> None:
    """A run that is resumed deletes checkpoints that it needs no more, and copies predictions of phases."""
    storage = Storage.at(tmp_path / "run")
    journal = Journal.claim(storage, workers=1)
    for change in (
        {"checkpoints": [name], "manifests": {name: HASH}},
        {"phases": [phase_record(0, times={"phase": name})]},
    ):
        file = "journal/attempt-0001/000001.json"
        storage.write(file, seal({"format": 5, "attempt": 1, "number": 1, "change": change}))
        with pytest.raises(
            RunError, match=r"journal/attempt-0001' is no valid record \((checkpoints|phases)\.0"
        ) as said:
            read_state(storage)
        assert "\n" not in str(said.value)
    point = {"run": storage.uri, "checkpoint": name, "sha256": HASH, "phases": []}
    storage.write("fork_point.json", seal({"format": 4, **point}))
    with pytest.raises(DamagedError, match=r"no valid record \(checkpoint"):
        fork_points.read_fork_point(storage)
    assert journal.attempt == 1


@pytest.mark.parametrize(
    ("change", "field_path"),
    [
        ({"checkpoints": ["a"]}, "hash of checkpoint 'a' is missing"),
        ({"checkpoints": {"a": 1}}, "checkpoints: "),
        ({"manifests": {"a": "../x"}}, "manifests.a"),
        ({"phases": [{"phase": 0}]}, "phases.0.row"),
        ({"phases": [phase_record(0, row={"t": 3})]}, "phases.0.row.t"),
        ({"phases": [phase_record(0, bank={"snapshot": "one"})]}, "phases.0.bank.snapshot"),
        ({"phases": [phase_record(-1)]}, "phases.0.phase"),
        ({"attempts": [{"attempt": 1}]}, "attempts.0.started"),
        ({"config": []}, "config"),
        ({"inputs": {"models": 3}}, "inputs.models"),
    ],
)
def test_what_a_strangers_journal_adds_up_to_is_checked(
    tmp_path: Path, change: dict[str, Any], field_path: str
) -> None:
    storage = Storage.at(tmp_path)
    Journal.claim(storage, workers=1)
    storage.write("journal/attempt-0001/000001.json", seal({"format": 5, "attempt": 1, "number": 1, "change": change}))
    with pytest.raises(RunError, match=f"no valid record.*{field_path}"):
        read_state(storage)


def test_a_snapshot_is_younger_than_its_parent(written: Storage) -> None:
    """Otherwise walks over parents (log, prune, ancestors) might never end."""
    bank = Bank(written.sub("bank"))
    path = Path(written.path(RECORDS["snapshot"].file))
    whole = path.read_bytes()
    for parent in (2, 3, 0):
        path.write_bytes(seal({**json.loads(whole)["record"], "parent": parent}))
        with pytest.raises(BankError, match="parent"):
            bank.open(2)
    path.write_bytes(whole)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """Reading a pipe without a writer, or a device, would never end."""
    storage = Storage.at(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        for read in (storage.read, storage.read_json, lambda name: storage.read_from(name, 0), _opened(storage)):
            with pytest.raises(StorageError, match=f"cannot read '.*{name}': it is no regular file"):
                read(name)


def _opened(storage: Storage) -> Callable[[str], Any]:
    def read(name: str) -> Any:
        with storage.open(name) as stream:
            return stream.read(1)

    return read


def _of_format(number: int, whole: bytes) -> bytes:
    """Return the same record of another format, its hash as it should be."""
    return seal({**json.loads(whole)["record"], "format": number})


def test_a_damaged_activation_is_repaired_by_the_next_one(written: Storage) -> None:
    bank = Bank(written.sub("bank"))
    path = Path(written.path(RECORDS["activation"].file))
    whole = path.read_bytes()
    try:
        for damage in (whole[:40], b"", b"{}", b"[]"):
            path.write_bytes(damage)
            with pytest.raises(BankError, match="activate a snapshot again"):
                activated(bank)
            repaired = Activations(bank).add(1, "repaired")
            assert Activations(bank).latest() == repaired and repaired.number == 3 and repaired.snapshot == 1
            assert activated(bank) == {1}
            for file in ("000003.json", NOTE):
                bank.storage.delete(f"serving/main/{file}")
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [0.0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [-1, 0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [0] * 65, "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 1]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0], "data_offsets": [0]},
        {"dtype": "F32", "shape": [0]},
        {"dtype": "C64", "shape": [0], "data_offsets": [0, 0]},
        [[]],
    ],
    ids=str,
)
def test_a_header_of_tensors_that_cannot_be_is_one_sentence(entry: Any) -> None:
    text = json.dumps({"w": entry}).encode()
    with pytest.raises(BankError, match="the adapter is no whole safetensors file"):
        views(len(text).to_bytes(8, "little") + text, "the adapter")


def test_many_empty_tensors_are_read(many: int = 20_000) -> None:
    header = {f"w{number}": {"dtype": "F32", "shape": [0, 2], "data_offsets": [0, 0]} for number in range(many)}
    text = json.dumps(header).encode()
    result = views(len(text).to_bytes(8, "little") + text, "the adapter")
    assert len(result) == many and all(tensor.shape == (0, 2) for tensor in result.values())


def test_changed_fields_have_a_format_of_their_own() -> None:
    """A snapshot's hash is that of all its fields: one more, with a default, would make each stored hash wrong."""

    def plain(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: plain(item) for key, item in node.items() if key not in ("description", "title")}
        return [plain(item) for item in node] if isinstance(node, list) else node

    schemas = [plain(model.model_json_schema()) for model in (AdapterManifest, Snapshot)]
    digest = hashlib.sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()[:16]
    assert (FORMAT, digest) == (6, "b2b07ac99a738409"), "fields have changed: raise FORMAT, then renew both here"
