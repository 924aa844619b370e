"""Tests of files that the bank and the run did not write: they change nothing, and verify lists each once."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from http_client import listening
from service_client import bank_of
from tiny import Complete, Taught, matrix, run, trace

from raycl.bank import Bank
from raycl.bank.activations import Activations, activated
from raycl.operations.banks.maintenance import prune, verify
from raycl.storage import Storage

REPO = Path(__file__).resolve().parents[2]
NAMES = (
    *(".DS_Store", "Thumbs.db", "desktop.ini", "000001.json~", ".000001.json.swp", "._000001.json", "#000001.json#"),
    *(".nfs000000000089ab", "000001 (1).json", "1.json", "000000.json", "000002.json.bak", "notes.json", "٠٠٠٠٠١.json"),
)
FOLDERS = (
    "",
    "snapshots",
    "adapters",
    "adapters/colour",
    "objects",
    "objects/ab",
    "serving",
    "serving/main",
    "pruned",
)


def litter(storage: Storage, folders: tuple[str, ...]) -> list[str]:
    """Put every kind of stray file into folders."""
    written = [f"{folder}/{name}".lstrip("/") for folder in folders for name in NAMES]
    for file in written:
        path = Path(storage.path(file))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x00\xff not ours")
    (Path(storage.path("snapshots/.ipynb_checkpoints"))).mkdir(parents=True)
    (Path(storage.path("adapters/.Trash"))).mkdir(parents=True)
    return written


def test_a_bank_with_stray_files_works(taught: Taught, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bank = bank_of(taught("bert", "separate"), tmp_path)
    Activations(bank).add(2, "before")
    clean, files = verify(bank), set(bank.storage.files())
    written = litter(bank.storage, FOLDERS)
    assert bank.names() == ["animal", "colour"] and bank.versions("colour") == [1] and bank.snapshots() == [1, 2]
    newest = bank.newest()
    assert newest is not None and newest.number == 2
    assert activated(bank) == {2}
    result = verify(bank)
    assert (result.problems, result.leftovers) == ([], [])
    assert (result.adapters, result.snapshots, result.objects, result.bytes) == (
        *(clean.adapters, clean.snapshots, clean.objects, clean.bytes),
    )
    assert sorted(result.strays) == sorted(written) and clean.strays == []
    main = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]
    for command in (["list"], ["show", "2"], ["show", "colour"], ["verify"], ["prune", "--grace-s", "0"]):
        assert main([command[0], bank.storage.uri, *command[1:]]) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert command != ["verify"] or [said.count(f"stray: {file}\n") for file in written] == [1] * len(written)
    assert main(["verify", bank.storage.uri, "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["strays"]) == sorted(written)
    assert prune(bank, grace_s=0.0).files == []
    assert files | set(written) <= set(bank.storage.files()), "prune removes what the bank wrote, and nothing else"


def test_an_endpoint_with_stray_files_answers(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("bert", "separate"), tmp_path)
    litter(bank.storage, FOLDERS)
    with listening(bank, follow={"enabled": True, "poll_s": 0.01}) as wire:
        assert wire.get("/v1/snapshots")["data"] == [1, 2] and wire.get("/v1/snapshots")["problem"] == ""
        assert "snapshot:2" in [model["id"] for model in wire.get("/v1/models")["data"]]
        assert wire.post("/admin/activate", {"snapshot": 1}).json()["active"] == 1


@pytest.mark.parametrize("method", ["lora", "separate"])
def test_a_run_with_stray_files_completes(complete: Complete, tmp_path: Path, method: str) -> None:
    done, storage = complete("bert", method, "torch"), Storage.at(tmp_path)
    run(done.config, storage, on_phase=lambda record: False)
    for folder in ("", "journal", "journal/attempt-0001", "checkpoints", "trace", "predictions", "log", "decisions"):
        for name in (
            *(name for name in NAMES if name != "000000.json"),
            "attempt-0001 copy",
            "attempt-x",
            "._attempt-0001.jsonl",
            ".~attempt-0001.jsonl",
        ):
            Path(storage.path(folder), name).parent.mkdir(exist_ok=True)
            Path(storage.path(folder), name).write_bytes(b"\x00\xff not ours")
    litter(storage.sub("bank"), FOLDERS)
    run(done.config, storage)
    assert matrix(storage) == matrix(done.storage) and trace(storage) == trace(done.storage)
    assert Bank(storage.sub("bank")).snapshots() == [1, 2]
