"""A bank cannot send requests: the storage that its records name is asked where the user names it too."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from listener import Listener, listener
from service_client import bank_of
from tiny import Lab, Taught

from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.cli import main
from raycl.config.trust import Server, addresses, announce, require_named
from raycl.errors import ConfigError, DamagedError, RayclError
from raycl.operations.banks.unlearning import RecordedSources, forget
from raycl.serve.gate.judge import judge
from raycl.serve.settings import ServeConfig
from raycl.storage import Storage
from raycl.storage.records import seal
from raycl.training.records.fork_points import FORK_POINT, FORMAT, read_fork_point
from raycl.training.records.named_bank import find_bank
from raycl.training.setup.run_config import from_tree


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """Yield a server that gets the user's key if it is asked."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with listener() as server:
        yield server


def hostile(bank: Bank, change: Callable[[dict[str, Any]], Any]) -> Snapshot:
    """Return the newest snapshot once more, with another record of its run's stream."""
    old = bank.open(max(bank.snapshots()))
    config = copy.deepcopy(old.provenance["config"])
    change(config["stream"])
    kept = [(entry, old.layouts[entry.layout]) for entry in old.adapters]
    more = {"provenance": {**old.provenance, "config": config}, "training": old.training}
    return bank.snapshot(NewSnapshot(kept, old.backbone, old.router, old.tasks, **more))


@pytest.mark.parametrize("where", ["root", "path", "test"])
def test_the_storage_that_a_bank_names_is_not_asked(
    taught: Taught, lab: Lab, tmp_path: Path, elsewhere: Listener, where: str
) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    address = elsewhere.uri("data")

    def change(stream: dict[str, Any]) -> None:
        if where == "root":
            stream.update(root=address, tasks=["agnews", *stream["tasks"][1:]])
        else:
            stream["tasks"][1][where] = address

    snapshot = hostile(bank, change)
    serving = ServeConfig(bank=bank.storage.uri, snapshot=2, device="cpu")
    third = {**lab.tasks[0], "name": "third"}
    given = {"bank": {"start": f"{bank.storage.uri}@{snapshot.number}"}, "stream": {"tasks": [third]}}
    refused = (
        (lambda: forget(bank, snapshot, "colour"), "--allow-storage ADDRESS"),
        (lambda: judge(serving, snapshot.number), "gate.allow_storage"),
        (lambda: from_tree(given), r"bank.allow_storage=\[ADDRESS\]"),
    )
    for use, setting in refused:
        said = rf"snapshot 3 of '.*' names storage at 's3://bucket\?.*' \('stream\..*allow it with {setting}$"
        with pytest.raises(ConfigError, match=said):
            use()
    assert not elsewhere.asked
    with pytest.raises(RayclError):
        forget(bank, snapshot, "colour", sources=RecordedSources(storage=[elsewhere.uri("")]))
    assert elsewhere.asked and "AWS4-HMAC-SHA256 Credential=mine/" in elsewhere.asked[0][1], "what was refused"


def test_a_fork_point_of_a_sweep_names_runs_beside_it_alone(elsewhere: Listener, tmp_path: Path) -> None:
    for address in (elsewhere.uri("run"), str(tmp_path / "run")):
        folder = Storage.at(tmp_path / "fork")
        record = {"run": address, "checkpoint": "c", "sha256": "a" * 64, "phases": []}
        folder.write(FORK_POINT, seal({"format": FORMAT, **record}))
        if "://" not in address:
            assert getattr(read_fork_point(folder), "run", "") == address
            continue
        with pytest.raises(DamagedError, match="names a run on another storage: remove it"):
            read_fork_point(folder)
    assert not elsewhere.asked


def test_storage_that_the_caller_names_otherwise_is_known(elsewhere: Listener) -> None:
    tree = {"stream": {"root": elsewhere.uri("data"), "tasks": [{"path": "hf://a/b", "words": {"no": "x://y"}}]}}
    require_named(tree, [elsewhere.uri("other")], "it", "a flag")
    others = [
        "s3://bucket",
        "/bucket",
        f"{elsewhere.uri('')}&endpoint_override=a",
        elsewhere.uri("").replace("127", "128"),
    ]
    with pytest.raises(ConfigError, match="it names storage at 's3://bucket"):
        require_named(tree, others, "it", "a flag")
    assert set(addresses(tree)) == {"stream.root", "stream.tasks.0.path"}
    assert Server.of("file:///etc/x") is None and Server.of("data/x") is None
    assert Server.of("s3://me@bucket/a?scheme=https") == Server.of("s3://bucket") != Server.of("gs://bucket")


def test_addresses_are_printed_before_they_are_used(
    elsewhere: Listener, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("raycl"), "propagate", True)
    file = tmp_path / "config.yaml"
    file.write_text(f"stream: {{name: long-A, root: '{elsewhere.uri('data')}'}}\nbackbone: {{name: minilm}}\n")
    asked: list[int] = []
    monkeypatch.setattr(logging.getLogger("raycl"), "filters", [lambda record: asked.append(len(elsewhere.asked)) or 1])
    assert main.main(["train", "--plan", str(file)]) == 0
    address = f"s3://bucket?endpoint_override=127.0.0.1:{elsewhere.server_port}&scheme=http"
    assert caplog.messages.count(f"the config names '{address}': 'stream.root'") == 1
    assert asked[0] == 0 and elsewhere.asked
    caplog.clear()
    announce(
        {"output": {"dir": "s3://mine/runs"}, "bank": {"dir": "s3://mine/bank"}, "x": ["gs://a\x1b2J/b", "gs://[2J/b"]},
        "s3://mine",
    )
    unlike = ["'gs://a\\x1b2J': 'x.0'", "'gs://[2J/b': 'x.1'"]
    assert caplog.messages == [f"the config names {item}" for item in unlike]
    run = Storage.at(tmp_path / "run")
    run.write("config.yaml", f"bank: {{dir: '{elsewhere.uri('bank').replace('bucket', 'theirs')}'}}\n".encode())
    caplog.clear()
    find_bank(run.uri)
    assert caplog.messages == [f"the config names '{address.replace('bucket', 'theirs')}': 'bank.dir'"]
