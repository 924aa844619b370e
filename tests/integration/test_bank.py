"""The bank on local disk and on a real S3-compatible server: writes are atomic and exclusive, damage is detected."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bank_samples import MODEL, ROUTER, adapter
from fork_server import Call, ForkServer
from safetensors.torch import load_file
from tiny import on_main

from raycl.bank import AdapterManifest, AdapterRef, Bank, NewSnapshot
from raycl.bank.manifest import ModelInfo, TaskInfo
from raycl.errors import BankError, StorageError
from raycl.operations.banks.maintenance import diff, prune, verify
from raycl.storage import Storage
from raycl.storage.records import seal
from raycl.types import AdapterState


def same(mine: AdapterState, other: AdapterState) -> bool:
    """Equal bit for bit."""
    pairs = [*zip(mine.linears.values(), other.linears.values(), strict=True)]
    pairs.append(((mine.prompt, mine.head_weight, mine.head_bias), (other.prompt, other.head_weight, other.head_bias)))
    tensors = [(a, b) for left, right in pairs for a, b in zip(left, right, strict=True)]
    facts = [(item.scale, item.labels, list(item.linears), item.activation) for item in (mine, other)]
    return facts[0] == facts[1] and all(torch.equal(a, b) for a, b in tensors)


@pytest.fixture(params=["local", "s3"])
def bank(request: pytest.FixtureRequest, tmp_path: Path) -> Bank:
    """Return an empty bank on either side."""
    if request.param == "local":
        return Bank.at(tmp_path / "bank")
    return Bank.at(request.getfixturevalue("s3_uri")(tmp_path.name))


@pytest.fixture
def local(tmp_path: Path) -> Bank:
    return Bank.at(tmp_path / "bank")


def test_what_is_published_is_fetched_and_versions_stay(bank: Bank) -> None:
    assert (bank.names(), bank.snapshots(), bank.newest()) == ([], [], None)
    first = bank.publish("agnews", adapter(0), MODEL, ["agnews"], {"run": "r"})
    second = bank.publish("agnews", adapter(1), MODEL, ["agnews"], {"run": "r"})
    again = bank.publish("agnews", adapter(1), MODEL, ["agnews"], {"run": "r"})
    assert (first.version, second.version, again) == (1, 2, second)
    assert bank.names() == ["agnews"] and bank.versions("agnews") == [1, 2]
    for version, seed in ((1, 0), (2, 1)):
        assert same(bank.fetch(bank.manifest(AdapterRef(name="agnews", version=version))), adapter(seed))
    with pytest.raises(BankError, match=r"has no agnews@3: versions of 'agnews' are 1, 2"):
        bank.manifest(AdapterRef(name="agnews", version=3))


def test_a_snapshot_names_everything_and_never_changes(bank: Bank) -> None:
    item = bank.publish("one", adapter(1), MODEL, ["t1"])
    first = bank.snapshot(NewSnapshot([item], MODEL, ROUTER, [TaskInfo(name="t1", labels=("yes", "no"))]))
    assert bank.snapshot(NewSnapshot([item], MODEL, ROUTER, [TaskInfo(name="t1", labels=("yes", "no"))])) == first
    two = bank.publish("two", adapter(2, rank=3), MODEL, ["t2"])
    kept = [(entry, first.layouts[entry.layout]) for entry in first.adapters]
    second = bank.snapshot(NewSnapshot([*kept, two], MODEL, ROUTER, parent=first.number))
    assert bank.snapshots() == [1, 2] and bank.open(1) == first and bank.newest() == second
    for name, seed, rank in (("one", 1, 2), ("two", 2, 3)):
        entry = second.adapter(name)
        assert same(bank.fetch(entry, second.layouts[entry.layout]), adapter(seed, rank))
    changed = diff(first, second)
    assert (changed["added"], changed["removed"], changed["replaced"]) == (["two@1"], [], [])
    with pytest.raises(BankError, match="snapshot 2 has no adapter 'three': expected one of one, two"):
        second.adapter("three")
    with pytest.raises(BankError, match="made for backbone 'tiny'"):
        bank.snapshot(NewSnapshot([item], replace_hash(MODEL), ROUTER))
    with pytest.raises(BankError, match="has no snapshot 9: it has 1, 2"):
        bank.open(9)


def replace_hash(model: ModelInfo) -> ModelInfo:
    return ModelInfo(name="other", sha256="b" * 64, kind=model.kind)


def test_of_racing_writers_every_one_gets_a_version_of_its_own(bank: Bank) -> None:
    writers = 8 if bank.storage.is_local else 4
    with ThreadPoolExecutor(writers) as pool:
        result = list(
            pool.map(lambda seed: bank.publish("hot", adapter(seed), MODEL, provenance={"w": seed}), range(writers))
        )
    assert sorted(manifest.version for manifest in result) == list(range(1, writers + 1))
    for seed, manifest in enumerate(result):
        assert same(bank.fetch(manifest), adapter(seed))

    with ThreadPoolExecutor(writers) as pool:
        numbers = list(
            pool.map(
                lambda w: bank.snapshot(NewSnapshot([], MODEL, ROUTER, provenance={"w": w})).number, range(writers)
            )
        )
    assert sorted(numbers) == list(range(1, writers + 1))
    assert verify(bank).problems == []


def die_before_the_manifest(folder: str) -> None:
    bank = Bank.at(folder)
    bank._create = lambda record_of, numbers: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]
    bank.publish("late", adapter(3), MODEL)


def test_killed_between_tensors_and_manifest_the_bank_is_clean(
    local: Bank, fork_server: ForkServer, tmp_path: Path
) -> None:
    local.snapshot(NewSnapshot([local.publish("one", adapter(1), MODEL)], MODEL, ROUTER))
    writer = Call("test_bank:die_before_the_manifest", (local.storage.uri,), tmp_path / "log")
    assert fork_server.codes([writer], 60) == [-signal.SIGKILL]
    result = verify(local)
    assert result.problems == [] and len(result.leftovers) == 1 and local.names() == ["one"]
    assert prune(local).files == [], "it is young: its writer might be about to publish"
    pruned = prune(local, grace_s=0.0)
    assert len(pruned.files) == 1 and verify(local).leftovers == []
    assert local.publish("late", adapter(3), MODEL).version == 1


def test_prune_removes_only_what_no_snapshot_names(bank: Bank) -> None:
    old = bank.publish("a", adapter(0), MODEL)
    on_main(bank, bank.snapshot(NewSnapshot([old], MODEL, ROUTER)))
    bank.publish("a", adapter(1), MODEL)
    new = bank.publish("a", adapter(2), MODEL)
    on_main(bank, bank.snapshot(NewSnapshot([new], MODEL, ROUTER)))
    time.sleep(1.1)  # ages on S3 have whole seconds
    assert prune(bank, grace_s=0.0, dry_run=True).adapters == ["a@2"] and bank.versions("a") == [1, 2, 3]
    assert prune(bank, grace_s=0.0).adapters == ["a@2"]
    assert bank.versions("a") == [1, 3] and same(bank.fetch(old), adapter(0))
    assert prune(bank, keep_snapshots=1, grace_s=0.0).snapshots == [1]
    assert bank.versions("a") == [3] and bank.snapshots() == [2]
    assert verify(bank).problems == [] and verify(bank).objects == 1
    with pytest.raises(BankError, match="at least the newest snapshot must stay"):
        prune(bank, keep_snapshots=0)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a..b", "x" * 181, "/etc", "a\n", "a@1", "a\0b"])
def test_names_cannot_leave_the_bank(local: Bank, name: str) -> None:
    with pytest.raises(BankError, match="cannot name an adapter"):
        local.publish(name, adapter(), MODEL)
    assert not local.storage.exists()


def test_every_kind_of_damage_is_refused_by_name(local: Bank) -> None:
    manifest = local.publish("one", adapter(1), MODEL)
    other = local.publish("two", adapter(2, rank=3), MODEL)
    local.snapshot(NewSnapshot([manifest, other], MODEL, ROUTER))
    tensors, record = Path(local.storage.path(manifest.tensors.file)), Path(local.storage.path(manifest.file))
    whole, text = tensors.read_bytes(), record.read_text()

    flipped = bytearray(whole)
    flipped[-1] ^= 1
    tensors.write_bytes(flipped)
    with pytest.raises(BankError, match="tensors of one@1 are damaged: SHA-256 is"):
        local.fetch(manifest)
    assert len(verify(local).problems) == 1
    tensors.write_bytes(whole)

    for bad, said in (
        (text.replace('"scale": 4.0', '"scale": 5.0'), "was changed after it was written"),
        (text[:-9], "is damaged: not the JSON"),
        (Path(local.storage.path(other.file)).read_text(), "holds two@1"),
    ):
        assert bad != text
        record.write_text(bad)
        with pytest.raises(BankError, match=said):
            local.manifest(manifest.ref)
    record.write_text(text)

    def claims(**changes: object) -> AdapterManifest:
        return manifest.model_copy(update=changes)

    for changed, said in (
        (claims(rank=3), "has rank 2, its manifest has 3"),
        (claims(layout={"q": (6, 5)}), "holds tensors that its manifest does not name: v.lora_A"),
        (claims(layout={"q": (7, 5), "v": (6, 5)}), r"'q': A \[2, 6\] and B \[5, 2\] are no LoRA of a linear from 7"),
        (claims(dtype="bfloat16"), "'q' is float32, its manifest has bfloat16"),
        (claims(labels=("yes", "no", "so")), "'head.weight' has shape"),
        (claims(prompt=None), "does not name: prompt"),
    ):
        with pytest.raises(BankError, match=said):
            local.fetch(changed)
    tensors.unlink()
    with pytest.raises(BankError, match="tensors of one@1 are missing"):
        local.fetch(manifest)


def test_a_full_disk_or_a_store_out_of_reach_leaves_the_bank_as_it_was(
    local: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.snapshot(NewSnapshot([local.publish("one", adapter(1), MODEL)], MODEL, ROUTER))
    before = local.storage.files().keys()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left on device"):
            local.publish("two", adapter(2), MODEL)
    assert local.storage.files().keys() == before and verify(local).problems == []
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    away = "s3://bank/x?endpoint_override=127.0.0.1:1&scheme=http&retry_max_attempts=1"
    with pytest.raises(StorageError):
        Bank(Storage.at(away)).publish("two", adapter(2), MODEL)


def test_ten_thousand_adapters_open_without_reading_tensors(local: Bank) -> None:
    manifest = local.publish("one", adapter(1), MODEL)
    many = [manifest.model_copy(update={"name": f"task{number}"}) for number in range(10_000)]
    local.snapshot(NewSnapshot(many, MODEL, ROUTER))
    Path(local.storage.path(manifest.tensors.file)).unlink()
    snapshot = local.open(1)
    assert len(snapshot.adapters) == 10_000 and len(snapshot.layouts) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is read from /proc")
def test_tensors_on_disk_are_mapped_not_copied(local: Bank) -> None:
    big = replace(adapter(), linears={"q": (torch.randn(64, 8192), torch.randn(8192, 64))})
    manifest = local.publish("big", big, MODEL)
    before = anonymous_bytes()
    held = [local.fetch(manifest) for _ in range(50)]
    assert same(held[-1], big)
    assert anonymous_bytes() - before < 4 * manifest.tensors.bytes, "50 copies would be 50 times that"


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def test_manifests_are_small_json_and_nothing_is_called_latest(local: Bank) -> None:
    local.snapshot(NewSnapshot([local.publish("one", adapter(1), MODEL)], MODEL, ROUTER))
    files = local.storage.files()
    assert {name.rpartition(".")[2] for name in files} == {"json", "safetensors"}
    assert not any("latest" in name for name in files)
    assert json.loads(local.storage.read("adapters/one/000001.json"))["record"]["scale"] == 4.0


def test_the_activation_is_stored_and_empty_by_default(local: Bank) -> None:
    bent, plain = replace(adapter(), activation="relu"), adapter()
    first, second = (local.publish("one", state, MODEL) for state in (bent, plain))
    assert (first.version, second.version, first.tensors) == (1, 2, second.tensors)
    assert same(local.fetch(first), bent) and same(local.fetch(second), plain) and not same(bent, plain)
    for manifest, state in ((first, bent), (second, plain)):
        snapshot = local.snapshot(NewSnapshot([manifest], MODEL, ROUTER))
        entry = local.open(snapshot.number).adapters[0]
        assert same(local.fetch(entry, snapshot.layouts[entry.layout]), state)
    for file in (second.file, snapshot.file):  # as they were written before there were activations
        where = Path(local.storage.path(file))
        record = json.loads(where.read_text())["record"]
        for facts in record.get("adapters", [record]):
            assert facts.pop("activation") == ""
        where.write_bytes(seal(record))
    assert local.manifest(second.ref) == second and local.open(snapshot.number) == snapshot
    assert (
        local.publish("one", plain, MODEL) == second
        and local.snapshot(NewSnapshot([second], MODEL, ROUTER)) == snapshot
    )
    assert same(local.fetch(local.manifest(second.ref)), plain) and verify(local).problems == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_libraries_read_the_files(local: Bank, dtype: torch.dtype) -> None:
    state = adapter()
    pairs = {path: (a.to(dtype), b.to(dtype)) for path, (a, b) in state.linears.items()}
    manifest = local.publish("a", replace(state, linears=pairs), MODEL)
    tensors = load_file(local.storage.path(manifest.tensors.file))
    assert torch.equal(tensors.pop("q.lora_A"), pairs["q"][0]) and torch.equal(tensors.pop("v.lora_B"), pairs["v"][1])
    assert state.prompt is not None and torch.equal(tensors.pop("prompt"), state.prompt)
    assert sorted(tensors) == ["head.bias", "head.weight", "q.lora_B", "v.lora_A"]
    assert same(local.fetch(manifest), replace(state, linears=pairs))
