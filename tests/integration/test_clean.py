"""`raycl clean` shows sizes first, and removes what no run, bank or unfinished sweep needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny import Complete, run

from raycl import config as configs
from raycl.bank import Bank
from raycl.bank.states import has_state
from raycl.cli import main
from raycl.launch.status import status_of
from raycl.operations.banks.maintenance import verify
from raycl.storage import Storage
from raycl.training.records.run_folder import CONFIG


def files(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_what_is_shown_is_removed_and_nothing_else(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done, runs, cache = complete("bert", "slm", "torch"), tmp_path / "runs", tmp_path / "cache"
    monkeypatch.setenv("RAYCL_CACHE", str(cache))
    for name in ("finished", "unfinished", "sweep/trials/sweep-0000"):
        shutil.copytree(done.storage.root, runs / name)
        (runs / name / CONFIG).write_text(configs.to_yaml(done.config))
    shutil.rmtree(runs / "unfinished")
    run(done.config, Storage.at(runs / "unfinished"), on_phase=lambda record: False)
    (runs / "unfinished" / CONFIG).write_text(configs.to_yaml(done.config))
    for sweep, names in (("sweep", ("sweep.yaml", "best.yaml")), ("going", ("sweep.yaml",))):
        (runs / sweep / "prefixes/key").mkdir(parents=True)
        (runs / sweep / "prefixes/key/file").write_bytes(b"x" * 1000)
        for name in names:
            (runs / sweep / name).write_text("name: sweep\n")
    cache.mkdir(exist_ok=True)
    (cache / "table").write_bytes(b"x" * 500)
    before = files(runs)

    assert main.main(["clean", str(tmp_path / "rusn"), "--remove"]) == 1, "a mistyped folder removes no cache either"
    assert f"'{tmp_path / 'rusn'}' does not exist" in capsys.readouterr().err and (cache / "table").is_file()
    assert main.main(["clean", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "nothing was removed: add --remove" in shown and files(runs) == before
    lines = [line.split() for line in shown.splitlines() if " MB  " in line]
    gone = {"finished/checkpoints", "sweep/trials/sweep-0000/checkpoints", "sweep/prefixes"}
    assert {line[-1].removeprefix(f"{runs}/") for line in lines} == {*gone, str(cache)}

    assert main.main(["clean", str(runs), "--only", "checkpoints", "prefixes", "--remove"]) == 0
    assert "removed" in capsys.readouterr().out
    assert files(runs) == {name: size for name, size in before.items() if not name.startswith(tuple(gone))}
    assert (cache / "table").is_file()
    assert status_of(str(runs / "finished")).state == "finished"
    bank = Bank.at(runs / "finished/bank")
    assert verify(bank).problems == [] and has_state(bank, bank.open(2))
    assert main.main(["report", str(runs / "finished")]) == 0 and "after animal" in capsys.readouterr().out
    assert main.main(["clean", str(runs), "--only", "checkpoints"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
