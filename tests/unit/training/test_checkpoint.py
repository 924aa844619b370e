"""Checkpoints come back bit for bit."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_records import phase_record
from safetensors.torch import save

from raycl.bank import Bank
from raycl.bank.tensor_groups import TensorGroups
from raycl.bank.tensors import packed
from raycl.errors import CheckpointError, RunError
from raycl.storage import Storage
from raycl.training.records.checkpoint import (
    Checkpoint,
    begin_checkpoint,
    commit_checkpoint,
    copy_checkpoint,
    delete_checkpoints,
    read_checkpoint,
    read_snapshot,
    write_checkpoint,
    write_share,
)
from raycl.training.records.journal import Journal, read_state
from raycl.training.records.resume import newest_resume_point
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.workers.distributed import DistributedContext


def made(step: int = 3) -> Checkpoint:
    torch.manual_seed(0)
    parameters = {"a": torch.randn(3, 2), "b": torch.randn(4).to(torch.bfloat16), "empty": torch.zeros(0, 5)}
    optimizer = {"a/exp_avg": torch.randn(3, 2), "a/exp_avg_sq": torch.full((3, 2), 1e-38)}
    return Checkpoint(1, step, 9, {"labels": ["ä", "b"]}, parameters, optimizer, {"train_s": 1.5, "tokens": 7.0})


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    storage, checkpoint = Storage.at(tmp_path), made()
    write_checkpoint(storage, checkpoint.name(2), checkpoint, TensorObjects(storage))
    result = read_checkpoint(storage, "phase001-step0000003-attempt0002")
    for mine, other in ((result.parameters, checkpoint.parameters), (result.optimizer, checkpoint.optimizer)):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) and mine[key].dtype == other[key].dtype for key in mine)
    assert (result.phase, result.step, result.steps, result.method, result.spent) == (
        1,
        3,
        9,
        {"labels": ["ä", "b"]},
        checkpoint.spent,
    )
    assert not result.is_phase_end


def test_the_end_of_a_phase_has_no_optimizer(tmp_path: Path) -> None:
    storage, checkpoint = Storage.at(tmp_path), made(step=9)
    checkpoint.optimizer = {}
    write_checkpoint(storage, "end", checkpoint, TensorObjects(storage))
    result = read_checkpoint(storage, "end")
    assert result.is_phase_end and result.optimizer == {}


def shares(storage: Storage, flat: bool = False) -> Checkpoint:
    """Three workers write a checkpoint together, some rows each, or some elements; returns what it holds."""
    whole, objects = made(), TensorObjects(storage)
    written = {}
    for rank in range(3):
        first, end = [(0, 3), (3, 6), (6, 6)][rank] if flat else [(0, 2), (2, 3), (3, 3)][rank]
        mine = replace(whole, places={"a": (first, [3, 2] if flat else 3)}, is_part=True)
        mine.parameters = {"a": (whole.parameters["a"].view(-1) if flat else whole.parameters["a"])[first:end]}
        mine.optimizer = {name: (v.view(-1) if flat else v)[first:end] for name, v in whole.optimizer.items()}
        if rank == 0:
            mine.parameters |= {name: whole.parameters[name] for name in ("b", "empty")}
        written |= write_share(storage, "c", mine, rank)
    commit_checkpoint(storage, "c", begin_checkpoint(storage, "c", whole, objects), written)
    return whole


@pytest.mark.parametrize("flat", [False, True])
def test_shares_of_several_workers_are_joined(tmp_path: Path, flat: bool) -> None:
    whole = shares(Storage.at(tmp_path), flat)
    checkpoint = read_checkpoint(Storage.at(tmp_path), "c")
    for mine, other in ((checkpoint.parameters, whole.parameters), (checkpoint.optimizer, whole.optimizer)):
        assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in other)


def test_one_tensor_at_a_time_is_in_memory_while_a_file_is_written(tmp_path: Path) -> None:
    tensors, storage = made().optimizer | made().parameters, Storage.at(tmp_path)
    alive: list[weakref.ref[Any]] = []

    def fetch(name: str) -> torch.Tensor:
        assert not any(item() is not None for item in alive), "the tensor before it is still held"
        value = tensors[name]
        memory = value.reshape(-1).view(torch.uint8).numpy().copy()
        alive.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(value.dtype).view(value.shape) if value.numel() else value

    described = {name: value.to("meta") for name, value in tensors.items()}
    storage.write_parts("f.safetensors", lambda: packed(described, fetch, {"format": "pt"}))
    assert storage.read("f.safetensors") == save(tensors, {"format": "pt"}) and len(alive) == len(tensors)


@pytest.mark.parametrize("file", ["parameters-00001.safetensors", "optimizer-00002.safetensors"])
@pytest.mark.parametrize("harm", ["gone", "cut", "flipped", "neighbour"])
def test_a_damaged_share_is_refused(tmp_path: Path, file: str, harm: str) -> None:
    storage = Storage.at(tmp_path)
    shares(storage)
    path = Path(storage.path(f"checkpoints/c/{file}"))
    data = path.read_bytes()
    neighbour = path.with_name("parameters.safetensors").read_bytes()
    path.unlink()
    if harm != "gone":
        path.write_bytes({"cut": data[:-1], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "neighbour": neighbour}[harm])
    with pytest.raises(CheckpointError, match=rf"it has no {file}" if harm == "gone" else rf"{file}' is damaged"):
        read_checkpoint(storage, "c")


def test_without_its_manifest_it_does_not_exist(tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    write_checkpoint(storage, "c", made(), TensorObjects(storage))
    storage.delete("checkpoints/c/manifest.json")
    with pytest.raises(RunError, match=r"c' is incomplete: it has no manifest.json"):
        read_checkpoint(storage, "c")
    with pytest.raises(RunError, match="is incomplete"):
        read_checkpoint(storage, "none")


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """It has the same name and is whole; the journal names each by the hash of its manifest."""
    mine, theirs = Storage.at(tmp_path / "mine"), Storage.at(tmp_path / "theirs")
    journal = Journal.claim(mine, workers=1)
    journal.phase_done(phase_record(0))
    for name in ("older", "newer"):
        journal.checkpoint(name, write_checkpoint(mine, name, made(), TensorObjects(mine)), keep=2)
    other = made()
    other.parameters["a"] += 1
    write_checkpoint(theirs, "newer", other, TensorObjects(theirs))
    for name in theirs.files("checkpoints/newer"):
        mine.write(name, theirs.read(name))
    state = read_state(mine)
    with pytest.raises(CheckpointError, match=r"newer/manifest.json' is of another checkpoint than the run wrote"):
        read_checkpoint(mine, "newer", sha256=state.manifests["newer"])
    point = newest_resume_point(mine, state, DistributedContext.alone(torch.device("cpu")))
    assert point.checkpoints == ["older"] and "is of another checkpoint" in point.explanation
    assert point.checkpoint is not None and torch.equal(point.checkpoint.parameters["a"], made().parameters["a"])
    with pytest.raises(CheckpointError, match="is of another checkpoint"):
        copy_checkpoint(mine, "checkpoints/newer", theirs, "copy", state.manifests["newer"])
    with pytest.raises(CheckpointError, match="is of another checkpoint"):
        read_snapshot(mine, "newer", state.manifests["newer"])


def test_objects_stay_where_a_kept_checkpoint_is_of_another_run(tmp_path: Path) -> None:
    """It is unknown what the kept checkpoint names, so nothing that it may need is deleted."""
    storage, objects = Storage.at(tmp_path), TensorObjects(Storage.at(tmp_path))
    checkpoint = made()
    checkpoint.frozen_state = frozen("one")
    manifests = {name: write_checkpoint(storage, name, checkpoint, objects) for name in ("old", "kept")}
    held = storage.files("objects").keys()
    write_checkpoint(storage, "kept", made(), objects)
    delete_checkpoints(storage, ["old"], {"kept": manifests["kept"]}, objects)
    assert storage.files("objects").keys() == held and storage.list("checkpoints") == ["kept"]


def frozen(*tasks: str) -> dict[str, torch.Tensor]:
    """Return state of learned tasks: an adapter of two tensors and a query each, and one tensor of all."""
    state = {"projection": torch.ones(3, dtype=torch.float64)}
    for number, task in enumerate(tasks):
        state |= {f"slot/{task}/a": torch.full((2, 3), float(number)), f"slot/{task}/b": torch.zeros(0, 2)}
        state[f"dev/{task}"] = torch.arange(number + 1)
    return state


def test_what_is_frozen_is_stored_once_and_named(tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    objects, state = TensorObjects(storage), frozen("one", "two")
    for name, tasks in (("a", frozen("one")), ("b", state), ("c", {**state, "projection": torch.zeros(3)})):
        checkpoint = made()
        checkpoint.frozen_state = tasks
        manifest = write_checkpoint(storage, name, checkpoint, objects)
    assert len(storage.files("objects")) == len(TensorGroups.of(state).groups) + 1
    assert TensorGroups.of(state).keys() == state.keys()
    frozen_state = read_checkpoint(storage, "b").frozen_state
    assert frozen_state.keys() == state.keys() and all(torch.equal(frozen_state[name], state[name]) for name in state)
    assert all(frozen_state[name].dtype == state[name].dtype for name in state)
    delete_checkpoints(storage, ["a", "b"], {"c": manifest}, objects)
    assert storage.list("checkpoints") == ["c"] and len(storage.files("objects")) == len(TensorGroups.of(state).groups)
    assert read_checkpoint(storage, "c").frozen_state.keys() == state.keys()


def test_a_tensor_that_was_changed_in_place_is_stored_again(tmp_path: Path) -> None:
    objects, tensor = TensorObjects(Storage.at(tmp_path)), torch.ones(4)
    first = objects.put("x", {"tensor": tensor})
    assert objects.put("x", {"tensor": tensor}) == first
    tensor += 1
    assert objects.put("x", {"tensor": tensor}) != first


@pytest.mark.parametrize("harm", ["gone", "cut", "flipped", "neighbour"])
def test_a_damaged_object_is_read_from_the_bank_or_refused(tmp_path: Path, harm: str) -> None:
    storage, bank = Storage.at(tmp_path / "run"), Storage.at(tmp_path / "bank")
    checkpoint = made()
    checkpoint.frozen_state = frozen("one", "two")
    write_checkpoint(storage, "a", checkpoint, TensorObjects(storage))
    for file in storage.files("objects"):
        bank.write(file, storage.read(file))
    first, second = list(storage.files("objects"))[:2]
    path, data = Path(storage.path(first)), storage.read(first)
    changed = {"cut": data[:-1], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "neighbour": storage.read(second)}
    path.unlink()
    if harm != "gone":
        path.write_bytes(changed[harm])
    with pytest.raises(CheckpointError, match=rf"{first}' .* is missing or damaged"):
        read_checkpoint(storage, "a")
    frozen_state = read_checkpoint(storage, "a", TensorObjects(storage, bank)).frozen_state
    assert frozen_state.keys() == checkpoint.frozen_state.keys()
    if harm == "gone":
        assert not storage.exists(first), "what only the bank has is not copied"
    else:
        assert storage.read(first) == data, "it is written again"
    shared = TensorObjects(storage, bank, lambda item: Bank(item))
    path.unlink(missing_ok=True)
    frozen_state = read_checkpoint(storage, "a", shared).frozen_state
    assert all(torch.equal(frozen_state[name], tensor) for name, tensor in checkpoint.frozen_state.items())
    Path(bank.path(first)).write_bytes(changed.get(harm, b""))
    with pytest.raises(CheckpointError, match=rf"{first}' .* is missing or damaged"):
        read_checkpoint(storage, "a", shared)
    partial = read_checkpoint(storage, "a", shared, partial=True).frozen_state
    assert 0 < len(partial) < len(checkpoint.frozen_state)


def test_tensors_of_routers_are_grouped_by_task() -> None:
    """A new task adds a group, and those of earlier tasks are stored already."""
    names = ["key/a.0", "key/a.1", "count/a", "scatter/b", "key/b.0-1", "projection"]
    state = {f"router/{name}": torch.tensor([float(number)]) for number, name in enumerate(names)}
    state |= {"slot/a.0/q.lora_A": torch.ones(1), "abar/a": torch.ones(2)}
    groups = TensorGroups.of(state).groups
    assert set(groups) == {"router//a", "router//b", "router/projection", "slot/a.0/", "abar/a"}
    back = TensorGroups(groups)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
