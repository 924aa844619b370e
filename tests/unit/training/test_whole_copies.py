"""No worker takes a whole copy of a backbone that another already holds: of frozen weights, of masters, of the best."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from mapped_file import copied_bytes, files_at
from phases import begin_phase
from safetensors.torch import load
from tiny import ENGINES, Lab, run, save_model
from torch import Tensor, nn

from raycl.data.loader import Collate
from raycl.methods.base import activate_trainable
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.engines.deepspeed import DeepSpeedEngine, gathered_elements
from raycl.training.engines.engine import Share, scattered
from raycl.training.phase import selection
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint
from raycl.training.workers.distributed import DistributedContext, Scattered, whole

WORLD = DistributedContext.alone(torch.device("cpu"))
READS_MODELS = True
"""Weights stay in the files from which they are read."""


def files_of(tensors: Iterable[Tensor]) -> list[str]:
    return files_at(tensor.data_ptr() for tensor in tensors)


@pytest.mark.parametrize("engine", ["zero0", "zero2", "zero3"])
def test_frozen_weights_stay_in_their_file(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Over two tasks: in training, where ZeRO 3 has parts of them, and between tasks, on a worker that is sent them.

    The file is no other test's, whose models may be in memory still.
    """
    real = torch.distributed.broadcast

    def received(tensor: Tensor, *given: Any, **named: Any) -> Any:
        tensor.copy_(tensor.clone())
        return real(tensor, *given, **named)

    monkeypatch.setattr(torch.distributed, "broadcast", received)
    folder = save_model("llama", tmp_path / "model")
    config = lab.config("llama", "lora", ENGINES[engine], backbone={"name": str(folder)})
    file = str(folder / "model.safetensors")
    context, open_engine = build(config, WORLD)
    backbone, phase = context.backbone, context.phases[0]
    begin_phase(context)
    names, weights = zip(*backbone.named_parameters(), strict=True)
    frozen = {name for name, at in zip(names, files_of(weights), strict=True) if at == file}
    assert len(frozen) > 10
    table = context.stream.table(phase.tasks[0], "train", backbone.codec)
    batch = Collate([table], backbone.codec.pad_id)(torch.arange(4).numpy(), 4)
    for _ in range(2):
        begin_phase(context)
        opened = open_engine(1, 1)
        held = {name: p for name, p in backbone.named_parameters() if name in frozen}
        parts = [getattr(parameter, "ds_tensor", parameter) for parameter in held.values()]
        assert set(files_of(parts)) == {file}
        with activate_trainable(context.method, len(batch)):
            opened.backward(opened.forward(batch).loss_sum, 1.0)
        opened.step()
        opened.close()
        held = {name: p for name, p in backbone.named_parameters() if name in frozen}
        assert set(files_of(held.values())) == {file}
        assert all(parameter.requires_grad is False for parameter in held.values())
    assert copied_bytes(file) == 0


def test_two_layers_are_whole_at_a_time(lab: Lab) -> None:
    context, open_engine = build(lab.config("llama", "lora", ENGINES["zero3"]), WORLD)
    begin_phase(context)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in context.backbone.model.model.layers]
    opened = open_engine(1, 1)
    result = opened.engine.zero_max_live_parameters(), opened.engine.zero_max_reuse_distance()  # type: ignore[attr-defined]
    opened.close()
    assert result == (2 * max(layers),) * 2 and gathered_elements(context.backbone) == 2 * max(layers)


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_masters_are_written_and_exported_from_where_they_lie(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """In bfloat16, masters are none of the backbone's weights; they are put together one at a time, for the export."""
    alive: list[weakref.ref[Any]] = []
    real = Scattered.joined

    def joined(item: Scattered) -> Tensor:
        assert not any(other() is not None for other in alive), "the one before it is still held"
        result = real(item)
        alive.append(weakref.ref(result))
        return result

    monkeypatch.setattr(Scattered, "joined", joined)
    monkeypatch.setattr(DeepSpeedEngine, "parameters", None)
    storage = Storage.at(tmp_path)
    sections = {"backbone": {"dtype": "bfloat16"}, "stream": {"tasks": lab.tasks[:1]}}
    config = lab.config("llama", "finetune", ENGINES[engine], **sections)
    run(config, storage)
    (name,) = storage.list("learned")[-1:]
    weights = load(storage.read(f"learned/{name}/model.safetensors"))
    end = read_checkpoint(storage, storage.list("checkpoints")[-1]).parameters
    assert {f"model.{name}" for name in weights} == end.keys() and len(alive) >= len(weights)
    assert all(torch.equal(weights[name], end[f"model.{name}"]) for name in weights)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert any((value.bfloat16().float() != value).any() for value in weights.values()), "rounded, so not the masters"


class First(DistributedContext):
    """The first of two workers; the second has four elements, from the third on."""

    def gather(self, value: Any) -> list[Any]:
        return [value, (2, 4)]


def test_parts_are_put_together_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.tensor([0, -(2**31), 0x7FC0_0001, 1, -1, 0x3F80_0000], dtype=torch.int32)  # 0, -0, NaN, tiny, NaN, 1
    value = bits.view(torch.float32)
    world = First(0, 2, 0, torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, rank: rank and tensor.copy_(value[2:]))
    share = Share({"rows": value[:2].view(1, 2), "flat": value[:2]}, places={"rows": (0, 3), "flat": (0, [3, 2])})
    parts = scattered(share, {name: torch.empty(3, 2, device="meta") for name in ("rows", "flat")}, world)
    for part in parts.values():
        assert part.shape == (3, 2) and part.dtype == torch.float32
        assert torch.equal(whole(part).view(torch.int32).flatten(), bits)
        with pytest.raises(AssertionError, match="needs the parts of all workers"):
            part + 1


class Half:
    """An engine on a worker that has the last row of each weight, and no way to have all."""

    def __init__(self, weights: nn.Module) -> None:
        self.weights = weights

    def share(self, names: Any) -> Share:
        own = dict(self.weights.named_parameters())
        return Share(
            {name: own[name].detach()[1:] for name in names}, places=dict.fromkeys(names, (1, 2)), is_part=True
        )


def test_each_worker_keeps_its_part_of_the_best_weights(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    context, _ = build(lab.config("bert", "lora", eval={"select": "best_dev"}, stream={"dev_fraction": 0.3}), WORLD)
    scores = [10.0, 20.0, 15.0]
    monkeypatch.setattr(selection, "dev_score", lambda *given: scores.pop(0))
    weights = nn.ParameterDict({"a": torch.rand(2, 3), "b": torch.rand(2)})
    monkeypatch.setattr(selection, "trained_names", lambda backbone: ["a", "b"])
    phase, engine = context.phases[0], Half(weights)
    result = selection.Selection(context, phase, WORLD, 1, engine, None)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        with torch.no_grad():
            weights["a"].fill_(step)
        result.after_step(step, 3)
    assert result.spent == {"selected_score": 20.0, "selected_step": 2.0}
    assert result.best is not None and result.best.places == {"a": (1, 2), "b": (1, 2)}
    assert sum(part.numel() for part in result.best.parameters.values()) == 3 + 1
    assert torch.equal(result.best.parameters["a"], torch.full((1, 3), 2.0)), "a copy, not the weights in training"
    kept = {
        f"{name}/selected": torch.cat([torch.rand_like(part), part]) for name, part in result.best.parameters.items()
    }
    resumed = Checkpoint(0, 2, 3, {}, {"a": torch.zeros(2, 3), "b": torch.zeros(2)}, kept, result.spent)
    again = selection.Selection(context, phase, WORLD, 1, engine, resumed)  # type: ignore[arg-type]
    assert again.best is not None and again.tensors().keys() == kept.keys()
    assert all(torch.equal(part, result.best.parameters[name]) for name, part in again.best.parameters.items())
