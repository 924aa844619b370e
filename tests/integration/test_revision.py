"""A learned task is learned again, or forgotten and then learned: everything else stays, and the report says so."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import FULL
from test_bank_start import begun, equal, tensors, tree_of
from tiny import Lab, matrix, trace

from raycl.bank import Bank, Snapshot
from raycl.bank.branches import Branch, head_of
from raycl.bank.states import get_state
from raycl.errors import BankError, ConfigError, RunError
from raycl.launch import requested_run
from raycl.operations.banks.maintenance import verify
from raycl.operations.banks.unlearning import forget
from raycl.operations.report.tables import matrix_table
from raycl.serve.gate.judge import judge
from raycl.serve.settings import ServeConfig
from raycl.storage import Storage
from raycl.training.setup import run_config

SAMPLE = ("slm", "olora", "sapt text", "separate tasks")
"""O-LoRA is IncLoRA with a penalty."""

METHODS = (*SAMPLE, "slm text", "sapt", "inclora") if FULL else SAMPLE
Learned = Callable[[str], tuple[Bank, Storage]]


@pytest.fixture(scope="module")
def three(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Method -> a bank whose branch `main` has learned three tasks, and the run; learned when first asked for."""
    done: dict[str, tuple[Bank, Storage]] = {}

    def learned(case: str) -> tuple[Bank, Storage]:
        if case not in done:
            root = tmp_path_factory.mktemp("three")
            tasks = [*lab.tasks, {**lab.tasks[0], "name": "third"}]
            if case == "separate tasks":
                tree = lab.tree("bert", ("separate", "inclora"))
                tree = {**tree, "stream": {**tree["stream"], "tasks": tasks}, "bank": {"dir": str(root / "bank")}}
            else:
                tree = tree_of(lab, case, tasks, root / "bank")
            done[case] = Bank.at(root / "bank"), begun(tree, root / "runs/first")
        return done[case]

    return learned


def revised(bank: Bank, folder: Path, task: str = "animal", reference: str = "3", **settings: Any) -> Storage:
    """Return a run that learns a task again, on a branch of its own."""
    given = {"start": f"{bank.storage.uri}@{reference}", "branch": folder.name, "revise": task, **settings}
    return begun({"bank": given}, folder)


def results(run: Storage) -> dict[str, Any]:
    return dict(run.read_json("results.json"))


def versions(snapshot: Snapshot) -> dict[str, int]:
    return {entry.name: entry.version for entry in snapshot.adapters}


@pytest.mark.parametrize("case", METHODS)
def test_a_task_that_is_learned_anew_is_one_that_was_forgotten_and_is_learned(
    three: Learned, lab: Lab, case: str, tmp_path: Path
) -> None:
    """The other tasks keep their versions; the task's score before is the snapshot's."""
    bank, first = three(case)
    old = bank.open(3)
    anew = revised(bank, tmp_path / f"{case.split()[0]}-anew", revise_from="new")
    result, head = results(anew), head_of(bank, anew.uri.rsplit("/", 1)[-1])
    assert result["stream"]["tasks"] == ["colour", "third", "animal"] and head.parent == 3
    own = {entry.name for entry in old.adapters if entry.tasks == ("animal",)}
    assert {name for name, version in versions(head).items() if versions(old)[name] != version} == own
    last = dict(zip(("colour", "animal", "third"), matrix(first)[2], strict=True))
    assert {name: cell["value"] for name, cell in result["revision"]["before"].items()} == last
    assert result["revision"]["after"]["animal"]["value"] == matrix(anew)[2][2]
    assert "animal learned again" in str(matrix_table(result))

    done = forget(bank, old, "animal", scores=False)
    given = {"start": f"{bank.storage.uri}@{done.new}", "branch": "later"}
    later = begun({"bank": given, "stream": {"tasks": lab.tasks[1:]}}, tmp_path / "later")
    assert (trace(later), matrix(later)) == (trace(anew), matrix(anew))
    assert equal(tensors(bank, head_of(bank, "later")), tensors(bank, head))
    Branch(bank, "later").delete("test")
    assert verify(bank).problems == [], "every snapshot is whole"
    values, groups = get_state(bank, bank.open(done.new))
    assert "animal" not in json.dumps([values, list(groups), [list(held) for held in groups.values()]])


@pytest.mark.parametrize("case", ["slm", "olora", "sapt text"])
def test_a_task_is_trained_on_from_its_previous_weights(three: Learned, case: str, tmp_path: Path) -> None:
    """With next to no learning rate the new version equals the old one."""
    bank, _ = three(case)
    name = f"{case.split()[0]}-on"
    given = {"start": f"{bank.storage.uri}@3", "branch": name, "revise": "animal"}
    run = begun({"bank": given, "train": {"learning_rate": 1e-12, "weight_decay": 0.0}}, tmp_path / name)
    pairs = [(entry, head_of(bank, name).adapter(entry.name)) for entry in bank.open(3).adapters]
    for old, new in pairs:
        states = [bank.fetch(bank.manifest(_ref(entry))).tensors() for entry in (old, new)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.allclose(states[0][part], states[1][part], atol=1e-6) for part in states[0]), old
    if case == "olora":
        assert results(run)["revision"]["after"] == results(run)["revision"]["before"]


def test_a_task_may_get_another_size_with_new_weights_alone(three: Learned, tmp_path: Path) -> None:
    """SAPT's rank is settable by task; the others keep theirs, and their scale."""
    bank, _ = three("sapt text")
    given = {"start": f"{bank.storage.uri}@3", "branch": "sized", "revise": "animal"}
    method = {"method": {"r_by_task": {"animal": 3}}}
    with pytest.raises(RunError, match=r"adapter 'animal' has rank 8 .* the settings give it rank 3 .*revise_from=new"):
        begun({"bank": given, **method}, tmp_path / "kept")
    begun({"bank": {**given, "revise_from": "new"}, **method}, tmp_path / "new")
    sizes = {entry.name: (entry.rank, entry.scale) for entry in head_of(bank, "sized").adapters}
    assert sizes == {"colour": (8, 4.0), "third": (8, 4.0), "animal": (3, pytest.approx(32 / 3))}


def _ref(entry: Any) -> Any:
    from raycl.bank import AdapterRef

    return AdapterRef(name=entry.name, version=entry.version)


def test_new_data_with_a_new_label(three: Learned, lab: Lab, tmp_path: Path) -> None:
    """The old snapshot stays as it was, and answers as before."""
    bank, _ = three("slm")
    for split in ("train", "test"):
        rows = (Path(lab.tasks[1]["path"]) / f"{split}.jsonl").read_text()
        (tmp_path / f"{split}.jsonl").write_text(rows.replace('"dog"', '"fish"'))
    given = {"start": f"{bank.storage.uri}@3", "branch": "labels", "revise": "animal"}
    task = {"name": "animal", "path": str(tmp_path)}
    record = bank.storage.read(bank.open(3).file)
    run = begun({"bank": given, "stream": {"tasks": [task]}, "train": {"epochs": 12}}, tmp_path / "labels")
    head = head_of(bank, "labels")
    assert {info.name: info.labels for info in head.tasks}["animal"] == ("cat", "fish")
    scores = [results(run)["revision"][side]["animal"]["value"] for side in ("before", "after")]
    assert scores[0] <= 50 < scores[1]
    assert bank.storage.read(bank.open(3).file) == record
    assert "fish" not in bank.open(3).adapter("animal.0").labels and "dog" not in head.adapter("animal.0").labels


def test_the_gate_judges_a_revised_task_on_the_rows_that_it_had_too(
    three: Learned, lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New rows with the labels of each other: right on these alone, a snapshot has lost those before."""
    bank, _ = three("slm")
    trained = {"train": {"epochs": 12}}
    for split in ("train", "test"):
        rows = (Path(lab.tasks[1]["path"]) / f"{split}.jsonl").read_text()
        swapped = rows.replace('"dog"', '"?"').replace('"cat"', '"dog"').replace('"?"', '"cat"')
        (tmp_path / f"{split}.jsonl").write_text(swapped)
    given = {"start": f"{bank.storage.uri}@3", "revise": "animal"}
    caplog.set_level(logging.INFO, logger="raycl")
    begun({"bank": {**given, "branch": "good"}, **trained}, tmp_path / "good")
    assert "without 'animal', which is learned next:" in caplog.text
    poisoned = {"stream": {"tasks": [{"name": "animal", "path": str(tmp_path)}]}, **trained}
    begun({"bank": {**given, "branch": "poisoned"}, **poisoned}, tmp_path / "poisoned")
    good, bad = head_of(bank, "good").number, head_of(bank, "poisoned").number
    gate = {"split": "test", "max_drop": 50.0}
    tree = {"bank": bank.storage.uri, "branch": "good", "device": "cpu", "gate": gate}
    result = judge(ServeConfig(**tree), bad)
    had, has = f"animal (rows of snapshot {good})", f"animal (rows of snapshot {bad})"
    assert set(result.before) == set(result.after) == {"colour", "third", had, has}
    drops = result.drops
    assert drops[had] > 50 and drops[has] < -50 and not result.passed
    assert result.reason == f"{had} falls by {drops[had]:.1f} points, allowed are 50"
    tree["branch"] = "poisoned"
    back = judge(ServeConfig(**{**tree, "gate": {**gate, "max_drop": 100.0}}), good)
    assert back.passed and back.reason.endswith(f" (animal: rows of snapshot {bad} and rows of snapshot {good})")
    rows = (tmp_path / "test.jsonl").read_text()
    for gone in (rows.replace('"cat"', '"dog"'), ""):  # changed where they lie, and removed
        (tmp_path / "test.jsonl").write_text(gone) if gone else (tmp_path / "test.jsonl").unlink()
        alone = judge(ServeConfig(**tree), good)
        assert set(alone.after) == {"colour", "third", "animal"} and alone.drops["animal"] < -50
        note = f" (animal: rows of snapshot {good} alone, since the rows of snapshot {bad} are gone)"
        assert alone.passed and alone.reason.endswith(note)
    assert set(judge(ServeConfig(**{**tree, "branch": "main"}), good).after) == {"colour", "third", "animal"}


def test_on_the_command_line_a_finished_run_names_the_bank(three: Learned, lab: Lab, tmp_path: Path) -> None:
    bank, first = three("slm")
    spec = json.dumps({**lab.tasks[1], "path": lab.tasks[1]["path"]})
    prepared = requested_run.prepared(None, [f"output.dir={tmp_path}", "bank.branch=mine"], first.uri, [], spec)
    config = prepared.config
    assert config.bank.start == f"{bank.storage.address}@{bank.open(3).sha256}"
    assert (config.bank.revise, config.bank.revise_from, config.bank.branch) == ("animal", "previous", "mine")
    assert [phase.name for phase in prepared.phases] == ["colour", "third", "animal"]
    resolved = run_config.from_tree(run_config.configs.as_tree(config))
    assert run_config.fingerprint(resolved) == run_config.fingerprint(config), "the config of the run, given as it is"
    by_name = requested_run.prepared(
        None, [f"output.dir={tmp_path}", "bank.branch=mine"], first.uri, [], "animal"
    ).config
    assert run_config.fingerprint(by_name) == run_config.fingerprint(config)
    for added, task, message in (([], "{path: x}", "names no task"), (["x"], "animal", "use one after the other")):
        with pytest.raises(ConfigError, match=message):
            requested_run.prepared(None, [], first.uri, added, task)
    with pytest.raises(ConfigError, match="--add names the next tasks of a run"):
        requested_run.prepared(None, [], None, ["x"], None)


def test_what_cannot_be_revised_is_refused(three: Learned, lab: Lab, tmp_path: Path) -> None:
    bank, _ = three("slm")
    for settings, tasks, message in (
        ({"revise": "weather"}, [], "has not learned it: expected one of colour, animal, third"),
        ({"revise": "animal"}, [{**lab.tasks[0], "name": "new"}], "learns that task alone, but stream.tasks names new"),
    ):
        given = {"start": f"{bank.storage.uri}@3", **settings}
        with pytest.raises(ConfigError, match=message):
            run_config.from_tree({"bank": given, "stream": {"tasks": tasks}})
    begun(tree_of(lab, "inflora", lab.tasks, tmp_path / "inflora"), tmp_path / "runs/inflora")
    with pytest.raises(ConfigError, match="method 'inflora' cannot learn a task again, since what it keeps"):
        run_config.from_tree({"bank": {"start": f"{tmp_path / 'inflora'}@main", "revise": "animal"}})
    begun(tree_of(lab, "lora", lab.tasks, tmp_path / "bank"), tmp_path / "runs/lora")
    shared = Bank.at(tmp_path / "bank")
    with pytest.raises(BankError, match=r"learned 'animal' together with colour, and no part of it is of one task"):
        run_config.from_tree({"bank": {"start": f"{shared.storage.uri}@main", "revise": "animal"}})
    with pytest.raises(ConfigError, match="only task that was learned: start a new run"):
        run_config.from_tree({"bank": {"start": f"{bank.storage.uri}@1", "revise": "colour"}})
