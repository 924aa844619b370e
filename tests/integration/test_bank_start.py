"""A run that starts from a snapshot of a bank equals the extended run, and refuses settings that differ."""

from __future__ import annotations

import functools
import shutil
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import FULL
from tiny import Lab, matrix, trace, work

from raycl import config as configs
from raycl.bank import Bank, Snapshot
from raycl.bank.branches import Branch, head_of, line_of
from raycl.bank.manifest import FORMAT
from raycl.bank.states import get_record, get_router, put_state, state_objects
from raycl.errors import BankError, ConfigError, RayclError, RunError, StorageError, UnreachableError
from raycl.launch import prepared_run
from raycl.methods.base import at
from raycl.operations.banks.maintenance import prune, verify
from raycl.operations.banks.merge import merge
from raycl.operations.banks.unlearning import forget
from raycl.storage import Storage
from raycl.storage.records import seal, unseal
from raycl.training.records.bank_start import read_training_state
from raycl.training.records.journal import Journal, read_state
from raycl.training.records.tensor_objects import SharedReader, TensorObjects
from raycl.training.setup import run_config
from raycl.training.setup.run_config import RunConfig

GENERATED = {
    "name": "replay",
    "share": 0.2,
    "source": "generated",
    "generator": {"steps": 5, "rate": 0.02, "max_tokens": 8},
}
"""Replay of what it wrote itself, which needs no rows of earlier tasks."""

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "lora": ("bert", "lora", {}),
    "inclora": ("t5", "inclora", {}),
    "olora": ("llama", "olora", {}),
    "inflora": ("bert", "inflora", {}),
    "gainlora": ("llama", "gainlora", {}),
    "sdlora": ("t5", {"name": "sdlora", "drop_below": 9e-4}, {}),
    "slao": ("bert", "slao", {}),
    "replay": ("bert", {"name": "replay", "share": 0.2}, {}),
    "replay generated": ("t5", GENERATED, {}),
    "ewc": ("bert", "ewc", {}),
    "ogd text": ("llama", "ogd", {}),
    "slm": ("bert", "slm", {}),
    "slm text": ("llama", "slm", {}),
    "sapt": ("bert", "sapt", {}),
    "sapt text": ("t5", "sapt", {}),
    "separate": ("bert", "separate", {}),
    "migu": ("bert", "lora", {"modifiers": ["migu"]}),
}


def tree_of(lab: Lab, case: str, tasks: list[Any], bank: Path) -> dict[str, Any]:
    kind, method, more = CASES[case]
    tree = lab.tree(kind, method, **more)
    tree["stream"] = {**tree["stream"], "tasks": tasks}
    return {**tree, "bank": {"dir": str(bank)}}


def begun(tree: dict[str, Any], folder: Path, shared: SharedReader | None = None) -> Storage:
    """Return a run as `jobs/train_stream.py` prepares it, on one worker without Ray."""
    config = run_config.from_tree({**tree, "output": {"dir": str(folder.parent), "name": folder.name}})
    prepared = prepared_run.prepare(config)
    work(prepared, shared)
    prepared_run.finish(prepared)
    return Storage.at(folder)


def tensors(bank: Bank, snapshot: Snapshot) -> dict[str, Any]:
    """Return everything that answers: adapters, what is kept beside them, the router."""
    held = {entry.name: (entry.tensors.sha256, dict(entry.extras)) for entry in snapshot.adapters}
    return {**held, "router": get_router(bank, snapshot).tensors}


def equal(item: dict[str, Any], two: dict[str, Any]) -> bool:
    routers = item.pop("router"), two.pop("router")
    same = routers[0].keys() == routers[1].keys()
    return item == two and same and all(torch.equal(routers[0][key], routers[1][key]) for key in routers[0])


SAMPLE = [case for case in CASES if case not in ("lora", "inclora") and not case.endswith(" text")]
"""Those whose state is none of another one's: MIGU's run is a LoRA's, and O-LoRA is IncLoRA with a penalty."""


WITHOUT_DATA = ("slm", "sapt", "replay generated")
"""Cases whose earlier tasks lose their data in a later test."""

TWO_BEFORE = (*WITHOUT_DATA, "gainlora", "migu")
"""Cases with two earlier tasks; the others have one. MIGU masks the only task of a run, and not the first of several,
so a run of one task is not the beginning of a longer one."""


@dataclass(frozen=True)
class Continued:
    """A run of some tasks that knew them all, and one that learned the last of them from a bank.

    Attributes:
        known: number of tasks that the bank has learned before. before: the matrix of the run that learned them, whose
            folder is gone. old: folder with the data of the first task.
    """

    tasks: list[Any]
    known: int
    whole: Storage
    other: Bank
    before: list[list[Any]]
    bank: Bank
    later: Storage
    old: Path


@pytest.fixture(scope="module")
def continued(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Continued]:
    """Return the two runs of a case.

    The bank's tensors are mapped read-only, as they are from Ray's object store, and not copied.
    """

    @functools.cache
    def made(case: str) -> Continued:
        root, known = tmp_path_factory.mktemp("case"), 2 if case in TWO_BEFORE else 1
        shutil.copytree(lab.tasks[0]["path"], root / "old")
        first = {**lab.tasks[0], "path": str(root / "old")}
        tasks = [first, lab.tasks[1], {**lab.tasks[0], "name": "third"}][: known + 1]
        whole = begun(tree_of(lab, case, tasks, root / "other"), root / "runs/whole")
        before = matrix(begun(tree_of(lab, case, tasks[:known], root / "bank"), root / "runs/first"))
        shutil.rmtree(root / "runs/first")
        start = {"bank": {"start": f"{root / 'bank'}@main"}, "stream": {"tasks": tasks[known:]}}
        later = begun(start, root / "runs/later", Bank)
        other, bank = Bank.at(root / "other"), Bank.at(root / "bank")
        return Continued(tasks, known, whole, other, before, bank, later, root / "old")

    return made


@pytest.mark.parametrize("case", CASES if FULL else SAMPLE)
def test_it_equals_the_run_that_knew_all_tasks(continued: Callable[[str], Continued], case: str) -> None:
    """Tasks learned by a run whose folder is gone, and the last one from the bank alone."""
    made = continued(case)
    known, whole, other, bank, later = made.known, made.whole, made.other, made.bank, made.later
    first_objects = {info.file for info in state_objects(bank, bank.open(known)).values()}
    assert not first_objects & later.files("objects").keys(), "a tensor of the snapshot was copied"
    assert not whole.files("objects").keys() & other.storage.files("objects").keys(), "a published tensor was copied"
    assert matrix(later) == matrix(whole) and matrix(later)[:known] == [[*row, None] for row in made.before]
    assert trace(later) == [step for step in trace(whole) if step[0] == known] != []
    head = head_of(bank)
    assert list(line_of(bank, "main")) == [*range(known + 1, 0, -1)] and head.parent == known
    assert equal(tensors(bank, head), tensors(other, head_of(other)))
    assert head.provenance["config"]["bank"]["start"].endswith(f"@{bank.open(known).sha256}")
    assert verify(bank).problems == [] and verify(bank).leftovers == []
    assert bank.storage.files("leases") == {}, "a finished run holds no lease"


@pytest.mark.parametrize("case", WITHOUT_DATA)
def test_earlier_tasks_without_data_are_listed_and_their_cells_stay_empty(
    continued: Callable[[str], Continued], case: str, tmp_path: Path
) -> None:
    """Learning does not need their rows: losses, adapters and router are those of the run that has them."""
    made = continued(case)
    bank = Bank.at(shutil.copytree(made.bank.storage.root, tmp_path / "bank"))
    away, third = made.old.rename(made.old.with_name("away")), made.tasks[2]
    given = {"bank": {"start": f"{bank.storage.uri}@2", "branch": "without"}, "stream": {"tasks": [third]}}
    run = begun(given, tmp_path / "runs/without")
    assert trace(made.later) == trace(run) != []
    assert equal(tensors(bank, head_of(bank)), tensors(bank, head_of(bank, "without")))
    full, bare = matrix(made.later), matrix(run)
    assert bare[1:] == [[None, *row[1:]] for row in full[1:]] and None not in full[2]
    (note,) = [item for item in run.read_json("results.json")["stream"]["notes"] if "out of reach" in item]
    assert note.endswith(": colour")
    tasks = {info.name: info for info in head_of(bank, "without").tasks}
    assert tasks == {info.name: info for info in head_of(bank).tasks}
    again = {
        "bank": {"start": f"{bank.storage.uri}@without", "branch": "more"},
        "stream": {"tasks": [{**third, "name": "fourth"}]},
    }
    if case == "slm":
        assert matrix(begun(again, tmp_path / "runs/again"))[3][0] is None
    away.rename(made.old)
    back = run_config.from_tree({**again, "bank": {**again["bank"], "branch": "back"}}).stream.tasks
    assert back is not None and all(getattr(task, "recorded", None) is None for task in back), "it is there again"


def test_a_run_that_died_before_its_first_record_starts_again(
    lab: Lab, learned: Callable[[Path], Bank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run starts from the snapshot, not from the bare backbone, and trains the new task alone."""
    bank = learned(tmp_path)
    given = {"bank": {"start": f"{bank.storage.uri}@main"}, "stream": {"tasks": lab.tasks[1:]}}
    tree = {**given, "output": {"dir": str(tmp_path), "name": "died"}}
    prepared = prepared_run.prepare(run_config.from_tree(tree))
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "begin_with", lambda *_: (_ for _ in ()).throw(UnreachableError("the store is away")))
        with pytest.raises(UnreachableError):
            work(prepared)
    assert read_state(prepared.storage).attempts and not read_state(prepared.storage).checkpoints
    work(prepared_run.reopen(prepared.storage.uri))
    assert {step[0] for step in trace(prepared.storage)} == {1}


def test_settings_by_task_of_tasks_that_are_not_learned_are_left_out(lab: Lab, tmp_path: Path) -> None:
    tree = tree_of(lab, "slm", lab.tasks, tmp_path / "bank")
    tree["train"] |= {"epochs_by_task": {"animal": 2}, "learning_rate_by_task": {"animal": 0.02}}
    tree["stream"]["train_rows_by_task"] = {"animal": 8}
    begun(tree, tmp_path / "runs/first")
    uri = str(tmp_path / "bank")
    again = run_config.from_tree({"bank": {"start": f"{uri}@main", "revise": "animal"}})
    assert again.stream.train_rows_by_task == {"animal": 8}
    forgotten = forget(Bank.at(uri), Bank.at(uri).open(2), "animal", scores=False).new
    for reference in ("1", str(forgotten)):
        config = started(uri, [{**lab.tasks[1], "name": "third"}], reference)
        assert config.stream.train_rows_by_task == {} == config.train.epochs_by_task
        assert config.train.learning_rate_by_task == {}


def test_a_new_task_may_have_longer_texts_than_those_that_were_learned(lab: Lab, tmp_path: Path) -> None:
    begun(tree_of(lab, "slm", lab.tasks[:1], tmp_path / "bank"), tmp_path / "runs/first")
    stream = {"max_source_tokens": 40, "max_source_tokens_by_task": {}}
    config = started(str(tmp_path / "bank"), lab.tasks[1:], stream=stream)
    assert [config.stream.limits_of(task["name"])[0] for task in lab.tasks] == [24, 40]
    assert run_config.from_tree(configs.as_tree(config)) == config, "its resolved config means the same"
    config = started(str(tmp_path / "bank"), lab.tasks[1:], stream={"max_source_tokens_by_task": {"animal": 30}})
    assert [config.stream.limits_of(task["name"])[0] for task in lab.tasks] == [24, 30]
    with pytest.raises(ConfigError, match=r"stream.max_source_tokens_by_task.colour was None, now 30"):
        started(str(tmp_path / "bank"), lab.tasks[1:], stream={"max_source_tokens_by_task": {"colour": 30}})


def test_replay_needs_the_rows_of_earlier_tasks(lab: Lab, tmp_path: Path) -> None:
    old = {**lab.tasks[0], "path": str(tmp_path / "old")}
    shutil.copytree(lab.tasks[0]["path"], tmp_path / "old")
    begun(tree_of(lab, "replay", [old], tmp_path / "bank"), tmp_path / "runs/first")
    shutil.rmtree(tmp_path / "old")
    config = started(str(tmp_path / "bank"), lab.tasks[1:], output={"dir": str(tmp_path), "name": "later"})
    with pytest.raises(ConfigError, match=r"method 'replay' trains on rows of colour again, and their data is out of"):
        prepared_run.prepare(config)


@pytest.fixture(scope="module")
def learned(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Bank]:
    """Return a copy of a bank with one learned task."""
    root = tmp_path_factory.mktemp("learned")
    begun(tree_of(lab, "lora", lab.tasks[:1], root / "bank"), root / "runs/first")

    def copy(folder: Path) -> Bank:
        shutil.copytree(root / "bank", folder / "bank")
        return Bank.at(folder / "bank")

    return copy


def started(uri: str, tasks: list[Any], reference: str = "main", **sections: Any) -> RunConfig:
    given = {**sections, "bank": {"start": f"{uri}@{reference}", **sections.get("bank", {})}}
    given["stream"] = {**sections.get("stream", {}), "tasks": tasks}
    return run_config.from_tree(given)


def test_what_differs_from_the_snapshots_run_is_refused_with_both_values(
    lab: Lab, learned: Callable[[Path], Bank], tmp_path: Path
) -> None:
    bank, (old, new) = learned(tmp_path), lab.tasks
    uri = bank.storage.uri
    config = started(uri, [new])
    assert config.method.name == "lora" and config.bank.dir == bank.storage.address
    assert (
        started(uri, [old, new]) == config == started(uri, [new], "1") == started(uri, [new], bank.open(1).sha256[:9])
    )
    own = started(uri, [new], train={"epochs": 7, "learning_rate": 0.5}, output={"name": "mine"})
    assert (own.train.epochs_of("animal"), own.train.learning_rate) == (7, 0.5), "they act on the new task alone"
    assert run_config.fingerprint(config) != run_config.fingerprint(own)
    for sections, tasks, kind, message in (
        ({"method": "sapt"}, [new], ConfigError, "method.name was 'lora', now 'sapt'"),
        ({"method": {"r": 3}}, [new], ConfigError, "method.r was 8, now 3"),
        (
            {"backbone": {"name": str(lab.model_folder("t5"))}},
            [new],
            ConfigError,
            "backbone.name was '.*bert', now '.*t5'",
        ),
        ({"seed": 7}, [new], ConfigError, "seed was 42, now 7"),
        ({"stream": {"per_class": 3}}, [new], ConfigError, "per_class was .*, now 3"),
        ({}, [], ConfigError, r"without new tasks: name those .* \(snapshot 1 has learned colour\)"),
        ({}, [new, old], ConfigError, "names colour, which snapshot 1 has learned already"),
        ({"bank": {"dir": str(tmp_path / "else")}}, [new], ConfigError, "leave bank.dir out"),
    ):
        with pytest.raises(kind, match=message):
            started(uri, tasks, **sections)
    for reference, message in (
        ("9", "has no snapshot 9"),
        ("other", r"has no 'other': expected a branch or tag \(main\)"),
    ):
        with pytest.raises(BankError, match=message):
            started(uri, [new], reference)
    with pytest.raises(BankError, match="there is no bank at"):
        started(str(tmp_path / "nothing"), [new])


def older(bank: Bank, number: int, *keys: str) -> None:
    """Record the snapshot as an older version did, without these settings of its run."""
    file = f"snapshots/{number:06d}.json"
    tree = unseal(bank.storage.read(file), file, FORMAT)
    for key in keys:
        holder, name = at(tree["provenance"]["config"], key)
        del holder[name]
    bank.storage.write(file, seal(tree))


def test_settings_that_an_older_bank_lacks_have_their_defaults(
    lab: Lab, learned: Callable[[Path], Bank], tmp_path: Path
) -> None:
    """A run that starts from the bank and a merge take the defaults; a value that was recorded counts as before."""
    bank, new = learned(tmp_path), lab.tasks[1]
    whole = bank.open(1)
    older(bank, 1, "method.lora_dropout", "backbone.bos", "stream.references", "eval.subsample", "modifiers")
    config = started(bank.storage.uri, [new], "1")
    assert (config.method.lora_dropout, config.backbone.bos) == (0.0, "tokenizer")  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"differ: method.lora_dropout was 0\.0, now 0\.1; leave"):
        started(bank.storage.uri, [new], "1", method={"lora_dropout": 0.1})
    with pytest.raises(BankError, match="what a task learns depends on the tasks before it"):
        merge(bank, whole, bank.open(1), bank)


def test_a_bank_without_permission_is_refused_before_anything_is_written(
    lab: Lab, s3_uri: Callable[[str], str], tmp_path: Path
) -> None:
    uri = s3_uri("closed")
    address = f"http://{uri.partition('endpoint_override=')[2].partition('&')[0]}/moto-api/reset-auth"

    def allow(requests: bytes) -> None:
        """Set the number of requests that the store answers before it requires permission."""
        headers = {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(address, data=requests, headers=headers))

    allow(b"0")
    try:
        with pytest.raises(StorageError, match=r"^cannot reach '[^\n]*closed[^\n]*ACCESS_DENIED[^\n]*$"):
            started(uri, lab.tasks[:1])
    finally:
        allow(b"inf")  # the server's store belongs to all tests of this process
    with pytest.raises(BankError, match="there is no bank at"):
        started(uri, lab.tasks[:1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["joint", "slm that reads ahead"])
def test_a_snapshot_of_a_run_that_used_all_tasks_at_once_is_refused(lab: Lab, method: str, tmp_path: Path) -> None:
    settings = "joint" if method == "joint" else lab.slots(train_scope="all")
    tree = {**lab.tree("bert", settings, stream={"tasks": lab.tasks[:1]}), "bank": {"dir": str(tmp_path / "bank")}}
    begun(tree, tmp_path / "first")
    third = {**lab.tasks[0], "name": "third"}
    given = {"bank": {"start": f"{tmp_path / 'bank'}@main"}, "stream": {"tasks": [third]}}
    with pytest.raises(RunError, match="start a new run instead"):
        prepared_run.prepare(run_config.from_tree({**given, "output": {"dir": str(tmp_path), "name": "later"}}))


def test_a_branch_that_has_moved_on_is_said_before_training_and_nothing_learned_is_lost(
    lab: Lab, learned: Callable[[Path], Bank], tmp_path: Path
) -> None:
    bank, tasks = learned(tmp_path), lab.tasks[1:]
    given = {"bank": {"start": f"{bank.storage.uri}@1"}, "stream": {"tasks": tasks}}
    held = {**given, "output": {"dir": str(tmp_path), "name": "slow"}}
    slow = prepared_run.prepare(run_config.from_tree(held))
    begun({**given, "train": {"epochs_by_task": {"animal": 2}}}, tmp_path / "fast")
    with pytest.raises(
        RunError, match=r"points at snapshot 2, not at 1, from which .*bank.branch=NAME.*bank.start=.*@main"
    ):
        prepared_run.prepare(run_config.from_tree({**held, "output": {"dir": str(tmp_path), "name": "late"}}))
    with pytest.raises(
        RayclError, match=r"snapshot \d is stored, but branch 'main' .* with --resume \S+ bank.branch=NAME"
    ):
        work(slow)
    assert head_of(bank).provenance["run"].endswith("fast") and len(read_state(slow.storage).checkpoints) >= 1
    slow.storage.delete("errors")  # the next driver has another name
    again = prepared_run.reopen(slow.storage.uri, overrides=("bank.branch=mine",))
    work(again)
    assert prepared_run.finish(prepared_run.reopen(slow.storage.uri))["finished"]
    assert head_of(bank, "mine").provenance["run"].endswith("slow") and head_of(bank, "mine").parent == 1
    with pytest.raises(RunError, match="is at snapshot 2, and this run starts from none: publish onto another branch"):
        prepared_run.prepare(run_config.from_tree(tree_of(lab, "lora", lab.tasks[:1], tmp_path / "bank")))


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "version"])
@pytest.mark.parametrize("part", ["record", "tensors"])
def test_a_damaged_training_state_starts_nothing(
    lab: Lab, learned: Callable[[Path], Bank], tmp_path: Path, part: str, damage: str
) -> None:
    from raycl.bank.states import state_file, state_objects

    bank = learned(tmp_path)
    snapshot = bank.open(1)
    assert snapshot.training is not None
    named = state_file(snapshot.training) if part == "record" else state_objects(bank, snapshot)["parameters"].file
    config = run_config.from_tree(
        {
            "bank": {"start": f"{bank.storage.uri}@main"},
            "stream": {"tasks": lab.tasks[1:]},
            "output": {"dir": str(tmp_path), "name": "run"},
        }
    )
    prepared, path = prepared_run.prepare(config), Path(bank.storage.path(named))
    data = path.read_bytes()
    changed = {"cut": data[:-7], "flipped": data[:-7] + bytes([data[-7] ^ 1]) + data[-6:], "version": b"{}" + data[2:]}
    path.unlink()
    if damage != "missing":
        path.write_bytes(changed[damage])
    with pytest.raises(BankError, match=r"training state of snapshot 1.*(missing|damaged)"):
        work(prepared)
    assert not read_state(prepared.storage).checkpoints
    assert any("training state" in problem or named in problem for problem in verify(bank).problems)


@pytest.mark.parametrize("field", ["phase", "router", "phases"])
def test_a_strangers_training_state_without_a_field_is_refused(
    learned: Callable[[Path], Bank], tmp_path: Path, field: str
) -> None:
    bank = learned(tmp_path)
    snapshot = bank.open(1)
    values, infos = get_record(bank, snapshot)
    sha256 = put_state(bank, {key: value for key, value in values.items() if key != field}, {}, infos)
    foreign = snapshot.model_copy(update={"training": sha256})
    with pytest.raises(BankError, match="the training state of snapshot 1 cannot be read"):
        read_training_state(bank, foreign, TensorObjects(Storage.at(tmp_path / "run"), bank.storage))


def test_prune_keeps_training_states_of_kept_snapshots_alone(
    lab: Lab, learned: Callable[[Path], Bank], tmp_path: Path
) -> None:
    bank = learned(tmp_path)
    given = {"bank": {"start": f"{bank.storage.uri}@main"}, "stream": {"tasks": lab.tasks[1:]}}
    begun(given, tmp_path / "second")
    assert len(bank.storage.files("states")) == 2
    assert prune(bank, keep_snapshots=1, grace_s=0.0).snapshots == [1]
    assert len(bank.storage.files("states")) == 1 and verify(bank).problems == [] == verify(bank).leftovers
    third = {**given, "stream": {"tasks": [{**lab.tasks[0], "name": "third"}]}}
    assert matrix(begun(third, tmp_path / "third"))[2][2] is not None
    assert Branch(bank).head() == 3
