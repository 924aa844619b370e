"""Ctrl-C in any command, at any time: one line, status 130, no traceback; a run in progress writes a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from fork_server import Call, ForkServer
from tiny import Complete, Lab

STORAGE = "raycl.storage.folder:Storage.at"
COMMANDS = {
    "train": (["train", "--resume", "{bank}/.."], STORAGE),
    "train checks": (["train", "stream.tasks=[{{name: mine, path: {data}}}]"], "raycl.data.stream:ingest"),
    "sweep": (["sweep", "sweeps/seeds.yaml", "--dir", "{out}"], STORAGE),
    "compare": (["compare", "jobs/configs/compare/demo.yaml", "--dir", "{out}"], STORAGE),
    "data check": (["data", "check", "{data}"], "raycl.data.check:check_task"),
    "predict": (
        ["predict", "{bank}", "{data}/test.jsonl", "--to", "{out}"],
        "raycl.serve.offline.model:OfflineModel.open",
    ),
    "evaluate": (["evaluate", "{bank}", "{data}/test.jsonl"], "raycl.serve.offline.model:OfflineModel.open"),
    "serve": (["serve", "{bank}"], STORAGE),
    "bank": (["bank", "verify", "{bank}"], "raycl.operations.banks.maintenance:numbered_folders"),
    "status": (["status", "{bank}/.."], STORAGE),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_with_one_line(
    complete: Complete, lab: Lab, fork_server: ForkServer, tmp_path: Path, name: str
) -> None:
    places = {"bank": complete("bert", "lora", "torch").storage.path("bank"), "data": lab.tasks[0]["path"]}
    words, position = COMMANDS[name]
    words = [word.format(**places, out=tmp_path / "out") for word in words]
    log, result = tmp_path / "log", tmp_path / "status"
    fork_server.run([Call("interrupted:interrupted", (words, position, result), log)], seconds=60)
    said = log.read_text()
    assert result.read_text() == "130" and "Traceback" not in said, said
    assert said.splitlines()[-1].startswith("stopped by Ctrl-C"), said
