"""Tests that a run reads what it began with: data, weights and tokenizers that changed are refused on resume.

Versions of libraries that differ are a warning, which stays in the results.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny import Lab, Stop, matrix, run, work

from raycl import config as configs
from raycl.bank import Bank
from raycl.errors import BankError, ResumeError
from raycl.launch import prepared_run, requested_run
from raycl.operations.banks.merge import merge
from raycl.operations.report.tables import matrix_table
from raycl.storage import Storage
from raycl.storage.records import seal, unseal
from raycl.training.records.journal import FORMAT, read_state
from raycl.training.setup import run_config
from raycl.training.setup.run_config import RunConfig


@dataclass(frozen=True)
class RunInputs:
    """A folder with a model, a sentence encoder, samples and data of its own, and the config tree of a run on them."""

    folder: Path
    tree: dict[str, Any]

    @property
    def third(self) -> str:
        """One more task, as on the command line."""
        return json.dumps({"name": "third", "path": str(self.folder / "tasks/colour")})


@pytest.fixture(scope="module")
def inputs(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> RunInputs:
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(lab.root / "tasks", folder / "tasks")
    for name in ("model", "encoder"):
        shutil.copytree(lab.model_folder("bert"), folder / name)
    tasks = [{"name": task["name"], "path": str(folder / "tasks" / task["name"])} for task in lab.tasks]
    slots = lab.slots(router="keys", encoder={"name": str(folder / "encoder"), "max_tokens": 64})
    tree = lab.tree("bert", slots, backbone={"name": str(folder / "model")}, stream={"tasks": tasks})
    return RunInputs(folder, {**tree, "output": {"dir": str(folder / "runs")}})


@pytest.fixture(scope="module")
def stopped(inputs: RunInputs) -> Storage:
    """Return a run that died inside its second task."""
    tree = {**inputs.tree, "output": {**inputs.tree["output"], "name": "stopped"}}
    prepared = prepared_run.prepare(configs.validate(RunConfig, tree))
    with pytest.raises(Stop):
        run(prepared.config, prepared.storage, after=6)
    return prepared.storage


@pytest.fixture(scope="module")
def first(inputs: RunInputs) -> Storage:
    """Return a finished run of the first task."""
    tree = {**inputs.tree, "output": {**inputs.tree["output"], "name": "first"}}
    tree["stream"] = {**tree["stream"], "tasks": tree["stream"]["tasks"][:1]}
    prepared = prepared_run.prepare(configs.validate(RunConfig, tree))
    work(prepared)
    return prepared.storage


def _other_weights(path: Path) -> None:
    tensors = load_file(path)
    name = next(name for name in tensors if "word_embeddings" in name)
    save_file({**tensors, name: tensors[name] + 0.5}, path, {"format": "pt"})


def _one_row_more(path: Path) -> None:
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")


def _another_answer(path: Path) -> None:
    row, *rest = path.read_text().splitlines()
    swapped = {"red": "blue", "blue": "red"}[json.loads(row)["label"]]
    path.write_text("\n".join([json.dumps({**json.loads(row), "label": swapped}), *rest]) + "\n")


def _another_setting(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ messages }}"}))


CHANGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "weights": ("model/model.safetensors", _other_weights, r"backbone '.*/model' has other weights \(SHA-256 \w{12} "),
    "tokenizer": ("model/tokenizer_config.json", _another_setting, r"backbone '.*/model' has other tokenizer \(SHA-"),
    "encoder": ("encoder/model.safetensors", _other_weights, r"method.encoder '.*/encoder' has other weights"),
    "train rows": (
        "tasks/colour/train.jsonl",
        _one_row_more,
        r"task 'colour' has other train rows in '.*/colour/train.jsonl' \(14 then, 15 now; SHA-256 \w{12} then, \w{12} "
        r"now\)",
    ),
    "test rows": ("tasks/colour/test.jsonl", _another_answer, r"task 'colour' has other test rows in '.*\(6 then, 6 "),
}


@contextmanager
def changed(position: RunInputs, case: str) -> Iterator[str]:
    """While it is entered, a file is another one; gives what the refusal says."""
    name, change, message = CHANGES[case]
    path = position.folder / name
    before = path.read_bytes()
    try:
        change(path)
        yield message
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("case", CHANGES)
def test_a_resume_with_other_inputs_is_refused(inputs: RunInputs, stopped: Storage, case: str, tmp_path: Path) -> None:
    """The command refuses other inputs before Ray starts, and so do the workers, which may see other files."""
    folder = Storage.at(shutil.copytree(stopped.root, tmp_path / "run"))
    prepared = prepared_run.reopen(folder.uri)
    with changed(inputs, case) as message:
        sentence = rf"^'{folder.uri}' cannot continue, since what it reads has changed: {message}.*; restore what it"
        with pytest.raises(ResumeError, match=sentence):
            prepared_run.reopen(folder.uri)
        with pytest.raises(ResumeError, match=sentence):
            work(prepared)
    assert len(read_state(folder).attempts) == 1


def test_the_restored_inputs_are_those_that_it_began_with(
    inputs: RunInputs, stopped: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are so on another node too, whose cache has none of the rows, and where files have other times."""
    for path in inputs.folder.glob("tasks/*/*.jsonl"):
        path.write_bytes(path.read_bytes())
    monkeypatch.setenv("RAYCL_CACHE", str(tmp_path))
    folder = Storage.at(shutil.copytree(stopped.root, tmp_path / "copy"))
    work(prepared_run.reopen(folder.uri))
    assert len(matrix(folder)) == 2 and not folder.read_json("results.json")["version_changes"]


@pytest.mark.parametrize("case", CHANGES)
def test_what_starts_from_a_run_or_its_snapshots_reads_the_same(inputs: RunInputs, first: Storage, case: str) -> None:
    """`--add`, `bank.start`, `--revise` of another task; the task that is revised may have other rows."""
    bank = f"{first.uri}/bank"
    start = {"bank": {"start": bank, "branch": "other"}, "output": inputs.tree["output"]}
    third = {**start, "stream": {"tasks": [json.loads(inputs.third)]}}
    with changed(inputs, case) as message:
        with pytest.raises(ResumeError, match=f"cannot continue, since what it reads has changed: {message}"):
            requested_run.prepared(None, [], first.uri, [inputs.third], None)
        with pytest.raises(BankError, match=rf"cannot start from snapshot 1, which was learned .* inputs: .*{message}"):
            prepared_run.prepare(run_config.from_tree(third))


def test_a_task_is_learned_again_from_other_rows_and_beside_the_same_ones(
    inputs: RunInputs, lab: Lab, tmp_path: Path
) -> None:
    tree = {**inputs.tree, "output": {"dir": str(tmp_path), "name": "two"}}
    prepared = prepared_run.prepare(configs.validate(RunConfig, tree))
    work(prepared)
    folder = prepared.storage
    with changed(inputs, "train rows") as message:
        assert requested_run.prepared(None, ["output.name=a"], folder.uri, [], "colour").config.bank.revise == "colour"
        with pytest.raises(BankError, match=message):
            requested_run.prepared(None, ["output.name=b"], folder.uri, [], "animal")
    _check_merge(inputs, folder)


def _check_merge(inputs: RunInputs, folder: Storage) -> None:
    """Snapshots on both sides of a changed file are not merged; other libraries are a warning that is kept."""
    bank = Bank(folder.sub("bank"))
    item = bank.open(2)
    provenance = json.loads(json.dumps(item.provenance))
    provenance["versions"]["torch"] = "0.4.1"
    two = bank.open(_published(bank, provenance))
    assert merge(bank, item, two, bank).provenance["version_changes"] == [
        f"snapshots 2 and {two.number} were learned with other libraries: torch "
        f"{item.provenance['versions']['torch']}, before 0.4.1"
    ]
    provenance["inputs"]["tasks"]["colour"]["train"] |= {"sha256": "0" * 64, "rows": 3}
    with pytest.raises(BankError, match=r"cannot be merged, .* other inputs: task 'colour' has other train rows in"):
        merge(bank, item, bank.open(_published(bank, provenance)), bank)


def _published(bank: Bank, provenance: dict[str, Any]) -> int:
    """Return the number of a snapshot as the second one, with this provenance."""
    item = bank.open(2)
    tree = item.model_dump(mode="json") | {"number": max(bank.snapshots()) + 1, "provenance": provenance}
    bank.storage.create(f"snapshots/{tree['number']:06d}.json", seal(tree))
    return int(tree["number"])


def test_other_libraries_are_a_warning_that_stays_in_the_results(
    inputs: RunInputs, stopped: Storage, tmp_path: Path
) -> None:
    """The first claim records another version, as if the run had begun with it."""
    folder = Storage.at(shutil.copytree(stopped.root, tmp_path / "run"))
    torch = read_state(folder).attempts[0]["versions"]["torch"]
    for name in sorted(folder.files("journal")):
        record = unseal(folder.read(name), name, FORMAT)
        record["change"]["attempts"][0]["versions"]["torch"] = "0.4.1"
        folder.write(name, seal(record))
    prepared = prepared_run.reopen(folder.uri)
    work(prepared)
    sentence = f"attempt 2 computes with other libraries than the one before it: torch {torch}, before 0.4.1"
    results = prepared_run.finish(prepared_run.reopen(folder.uri))
    assert results["version_changes"] == [sentence] and f"warning: {sentence}" in str(matrix_table(results))
    assert any(sentence in folder.read_text(f"log/{name}") for name in folder.list("log"))


def test_samples_in_files_are_inputs_too(lab: Lab, tmp_path: Path) -> None:
    """A file for a task that comes later is no change."""
    samples = tmp_path / "samples"
    samples.mkdir()
    for task in ("colour", "animal"):
        (samples / f"{task}.jsonl").write_text('{"text": "the sea is cold"}\n')
    replay = {"name": "replay", "source": "file", "files": str(samples), "share": 0.5}
    tree = {**lab.tree("t5", replay), "output": {"dir": str(tmp_path), "name": "run"}}
    prepared = prepared_run.prepare(configs.validate(RunConfig, tree))
    with pytest.raises(Stop):
        run(prepared.config, prepared.storage, after=6)
    (samples / "third.jsonl").write_text('{"text": "fire is warm"}\n')
    prepared_run.reopen(prepared.storage.uri)
    (samples / "colour.jsonl").write_text('{"text": "fire is warm"}\n')
    with pytest.raises(ResumeError, match=r"method.files has another file '.*/samples/colour.jsonl' \(SHA-256 "):
        prepared_run.reopen(prepared.storage.uri)


def test_a_run_that_has_learned_nothing_may_get_other_rows(inputs: RunInputs) -> None:
    """A file that was mended before the first step is mixed with nothing."""
    tree = {**inputs.tree, "output": {**inputs.tree["output"], "name": "begun"}}
    prepared = prepared_run.prepare(configs.validate(RunConfig, tree))
    with pytest.raises(Stop):
        run(prepared.config, prepared.storage, after=1)
    with changed(inputs, "train rows"):
        assert prepared_run.reopen(prepared.storage.uri).done == 0
