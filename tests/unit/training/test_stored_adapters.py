"""Adapters of a checkpoint become tensors when they are used, and are stored again without hashing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.sharing import PATHS, make_backbone
from raycl.bank import Bank
from raycl.bank import tensors as stored
from raycl.bank.bank import info_of
from raycl.bank.manifest import ObjectInfo
from raycl.bank.tensor_groups import TensorGroups
from raycl.bank.tensors import StoredTensors, pack
from raycl.errors import BankError, CheckpointError
from raycl.methods.base import packed, under
from raycl.methods.lora.inclora import IncLora, IncLoraConfig
from raycl.storage import Storage
from raycl.training.records import tensor_objects
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from raycl.training.records.tensor_objects import TensorObjects
from raycl.types import AdapterState, Mixture

WIDTH, RANK = 16, 2
NAMES = ("one", "two", "three")
VALUES = {
    "labels": [],
    "task": "",
    "trainable_labels": [],
    "learned": [[name, []] for name in NAMES],
    "owners": [[name, [name]] for name in NAMES],
}
shared_or_own = pytest.mark.parametrize("shared", [None, lambda storage: Bank(storage)], ids=["own", "shared"])


def adapter(seed: int) -> AdapterState:
    draw = torch.Generator().manual_seed(seed)
    return AdapterState(
        {path: (torch.randn(RANK, WIDTH, generator=draw), torch.randn(WIDTH, RANK, generator=draw)) for path in PATHS}
    )


STATES = {name: adapter(seed) for seed, name in enumerate(NAMES)}


def method() -> IncLora:
    return IncLora(IncLoraConfig(r=RANK), make_backbone(WIDTH), 0)


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return bytes of each tensor that is made from stored bytes."""
    collected: list[int] = []
    make = stored._flat
    monkeypatch.setattr(stored, "_flat", lambda memory: collected.append(len(memory)) or make(memory))
    return collected


@shared_or_own
def test_a_restored_adapter_is_created_when_a_mixture_names_it(
    tmp_path: Path, created: list[int], monkeypatch: pytest.MonkeyPatch, shared: Any
) -> None:
    run = Storage.at(tmp_path)
    write_checkpoint(run, "a", Checkpoint(0, 1, 1, VALUES, {}, frozen_state=packed(STATES)), TensorObjects(run))
    objects = TensorObjects(run, shared=shared)
    checkpoint = read_checkpoint(run, "a", objects)
    restored = method()
    restored.load_state_dict(checkpoint.method, checkpoint.frozen_state)
    monkeypatch.setattr(tensor_objects, "info_of", lambda tensors: pytest.fail("hashed again"))
    values, tensors = restored.state_dict()
    write_checkpoint(run, "b", Checkpoint(0, 1, 1, values, {}, frozen_state=tensors), objects)
    manifests = [run.read_json(f"checkpoints/{name}/manifest.json")["record"]["objects"] for name in "ab"]
    assert manifests[0] == manifests[1] and len(manifests[0]) == len(NAMES)
    assert created == [] and not restored.stack.table.rows, "nothing of an adapter was looked at"
    with restored.stack.activate(Mixture.same({"two": 1.0}, 1)):
        assert list(restored.stack.table.rows) == ["two"]
    rows = restored.stack.table.rows["two"]
    for path, (low, high) in STATES["two"].linears.items():
        a, b = restored.stack.pool.layer(path)
        assert torch.equal(a[rows], low) and torch.equal(b[rows], high.T)
    assert created and restored.state_dict()[1].groups["slot/two/"] is checkpoint.frozen_state.groups["slot/two/"]  # type: ignore[attr-defined]


@shared_or_own
def test_a_state_without_a_task_keeps_what_is_stored_as_it_is(tmp_path: Path, created: list[int], shared: Any) -> None:
    run = Storage.at(tmp_path)
    state = packed(STATES) | {"low/x": torch.ones(2)}
    write_checkpoint(run, "a", Checkpoint(0, 1, 1, VALUES, {}, frozen_state=state), TensorObjects(run))
    frozen = read_checkpoint(run, "a", TensorObjects(run, shared=shared)).frozen_state
    created.clear()
    values, left = IncLora.without_task(VALUES, frozen, "two", ["two"], keep=True)
    assert [name for name, _ in values["learned"]] == ["one", "three"] and created == []
    assert left.groups.keys() == {"slot/one/", "slot/three/", "low/x", "previous/two/"}
    assert left.groups["previous/two/"] is under("slot/two/", frozen)
    assert TensorObjects(run).info("previous/two/", left.groups["previous/two/"]) == info_of(STATES["two"].tensors())


@shared_or_own
def test_a_file_that_is_no_safetensors_file_is_found_when_it_is_read(tmp_path: Path, shared: Any) -> None:
    """Though its hash is the one that the checkpoint names."""
    run, data = Storage.at(tmp_path), b"\x05\0\0\0\0\0\0\0{]}  "
    info = ObjectInfo(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    run.write(info.file, data)
    with pytest.raises(CheckpointError, match=r"slot/one/ is no whole safetensors file"):
        TensorObjects(run, shared=shared).get({"slot/one/": info})


def cut(data: bytes) -> bytes:
    return data[:-1]


def another_shape(data: bytes) -> bytes:
    return data.replace(b'"shape":[2]', b'"shape":[3]')


def no_header(data: bytes) -> bytes:
    return data[:4]


@pytest.mark.parametrize("harm", [cut, another_shape, no_header])
def test_stored_tensors_of_damaged_bytes_are_refused(harm: Callable[[bytes], bytes]) -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(0, 3)}
    data = b"".join(bytes(part) for part in pack(tensors))
    with pytest.raises(BankError, match="it is no whole safetensors file"):
        StoredTensors(harm(data), "it", info_of(tensors))


def test_stored_tensors_are_those_that_were_packed(created: list[int]) -> None:
    tensors: dict[str, Tensor] = {
        "a": torch.randn(2, 3), "half": torch.ones(5, dtype=torch.bfloat16), "none": torch.zeros(0, 3),
        "one": torch.tensor(7), "yes": torch.tensor([True]),
    }  # fmt: skip
    data = b"".join(bytes(part) for part in pack(tensors))
    stored_tensors = StoredTensors(data, "it", info_of(tensors))
    assert (
        stored_tensors.keys() == tensors.keys()
        and len(stored_tensors) == 5
        and "a" in stored_tensors
        and "x" not in stored_tensors
    )
    assert stored_tensors.shape("a") == (2, 3) and created == []
    assert all(
        torch.equal(stored_tensors[name], tensor) and stored_tensors[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )
    assert b"".join(bytes(part) for part in pack(stored_tensors)) == data
    assert stored_tensors["a"] is not stored_tensors["a"], "nothing is kept"


def test_groups_look_like_one_dict() -> None:
    state = {name: torch.tensor([number]) for number, name in enumerate(
        ["slot/a/x", "slot/a/y", "slot/b/x", "router/key/a.0", "router/key/a.1", "router/plain", "abar/a", "whole"]
    )}  # fmt: skip
    groups = TensorGroups.of(state)
    assert list(groups) == list(state) and len(groups) == len(state) and TensorGroups.of(groups) is groups
    assert all(groups[name] is tensor and name in groups for name, tensor in state.items())
    for name in ("slot/a/z", "slot/c/x", "router/key/b.0", "none"):
        assert name not in groups
        with pytest.raises(KeyError, match=name):
            groups[name]
    for start in ("slot/", "slot/a/", "router/", "router/key/", "abar/", "none/"):
        assert dict(groups.under(start)) == under(start, state), start
    more = {"slot/a/x": torch.tensor([9]), "slot/a/z": torch.tensor([8]), "slot/d/x": torch.tensor([7])}
    assert dict(groups | more) == state | more and (groups | more).groups["slot/b/"] is groups.groups["slot/b/"]
    assert dict(groups | TensorGroups.of(more)) == state | more
    left = groups.select(lambda name: name not in ("slot/a/x", "abar/a"))
    assert dict(left) == {name: item for name, item in state.items() if name not in ("slot/a/x", "abar/a")}
    assert left.groups["slot/b/"] is groups.groups["slot/b/"] and "abar/a" not in left.groups
