"""GainLoRA: what a gate is, what updates of it keep, and what that does on texts of earlier tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase
from tiny import ENGINES, KINDS, Complete, Lab, evaluated_by, matrix, opened, run, trace
from torch import Tensor, nn

from raycl.bank import Bank
from raycl.data.loader import Collate, eval_batches
from raycl.errors import BankError, ConfigError, RetrievalError
from raycl.methods.base import activate_batch, trained_names
from raycl.methods.lora.gainlora import FeatureSubspaces, GainLora
from raycl.methods.lora.inflora import Subspace
from raycl.operations.banks.unlearning import forget
from raycl.routing.gates import PARTS, GateRouter, TaskGates, gates, mean_embedding
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.engine import TorchEngine
from raycl.training.phase.step import train_step
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str = "bert", **settings: Any) -> tuple[GainLora, TrainingContext]:
    settings = {"name": "gainlora", "r": 3, "gate_width": 8, "gate_threshold": 0.9, **settings}
    context, _ = build(lab.config(kind, settings), WORLD)
    assert isinstance(context.method, GainLora)
    return context.method, context


def drawn(context: TrainingContext, index: int) -> None:
    """Set adapters and label rows in training to random numbers."""
    torch.manual_seed(index)
    for name, parameter in context.backbone.named_parameters():
        if ".lora_" in name or name.startswith("head."):
            torch.nn.init.normal_(parameter, std=0.1)


def trained(context: TrainingContext, index: int) -> None:
    begun = begin_phase(context, index)
    drawn(context, index)
    end_phase(context, begun)


def batch_of(context: TrainingContext, task: int = 0, rows: int = 6) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[task], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    return next(iter(eval_batches(Collate([table], codec.pad_id, labels), rows)))


# ---- a gate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "gate"), [([0, 3], 0), ([2, 0], 0.9640), ([-5, 0], 0.9640), ([1, 1], 0.8884)])
def test_a_gate_by_hand(key: list[float], gate: float) -> None:
    """u points along the first axis: 4 cos is 0, 4, -4 and 2.8284."""
    parts = {
        "down": torch.tensor([[[1.0, 0.0]]]),
        "up": torch.tensor([[[1.0], [0.0]]]),
        "key": torch.tensor([key]).float(),
    }
    assert float(gates(torch.tensor([[2.0, 7.0]]), parts)) == pytest.approx(gate, abs=1e-4)


def test_gates_of_tasks_do_not_depend_on_one_another() -> None:
    task_gates, texts = TaskGates(6, 4), torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    for number, task in enumerate("abc"):
        task_gates.begin(task, number)
        alone = task_gates(texts)[:, -1].detach()
        task_gates.end({part: getattr(task_gates, part) for part in PARTS})
        torch.testing.assert_close(task_gates(texts)[:, -1], alone)
    assert task_gates.names == ("a", "b", "c") and task_gates(texts).shape == (5, 3)
    assert torch.equal(task_gates.frozen["a"]["up"], task_gates.frozen["c"]["up"]), "D and U go from task to task"
    assert not torch.equal(task_gates.frozen["a"]["key"], task_gates.frozen["c"]["key"])


def test_what_gates_cannot_read_is_refused() -> None:
    router = GateRouter(TaskGates(2, 1))
    with pytest.raises(BankError, match="router is 'gates', which reads prompts with the backbone"):
        router.route(["x"], None)
    with pytest.raises(RetrievalError, match="of 2 dimensions, this backbone's have 3: use the"):
        router.route_embeddings(torch.zeros(1, 4, 3), torch.ones(1, 4))
    with pytest.raises(RetrievalError, match="no task has been learned yet: there are no gates"):
        router.route_embeddings(torch.zeros(1, 4, 2), torch.ones(1, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_texts_gates_do_not_depend_on_its_batch(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    trained(context, 0)
    begin_phase(context, 1)
    batch = batch_of(context)
    together = method.route(batch).weights.detach()
    assert together.shape == (6, 2) and len({tuple(row) for row in together.tolist()}) > 1
    for row in range(len(batch)):
        length = int(batch.source_mask[row].sum())
        fields = {name: getattr(batch, name)[row : row + 1] for name in ("target_ids", "label_ids", "weight", "rows")}
        ids, mask = batch.source_ids[row : row + 1, :length], batch.source_mask[row : row + 1, :length]
        alone = method.route(Batch(ids, mask, **fields)).weights.detach()
        torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=1e-5)


# ---- updates -------------------------------------------------------------------------------------------------------


def constraint_of(inputs: int, held: int, complement: bool) -> tuple[FeatureSubspaces, Tensor]:
    """Subspaces of `held` dimensions, and a basis of them."""
    draw = torch.Generator().manual_seed(1)
    whole = torch.linalg.qr(torch.randn(inputs, inputs, generator=draw, dtype=torch.float64))[0]
    basis, rest = whole[:, :held], whole[:, held:]
    feature_subspaces = FeatureSubspaces()
    for part in PARTS:
        feature_subspaces.set(part, Subspace(rest, complement=True) if complement else Subspace(basis))
    return feature_subspaces, basis


@pytest.mark.parametrize("complement", [False, True])
@pytest.mark.parametrize("shape", [(4, 6), (6,)])
def test_updates_keep_off_the_subspace(shape: tuple[int, ...], complement: bool) -> None:
    constraint, basis = constraint_of(6, 2, complement)
    draw = torch.Generator().manual_seed(2)
    before, after = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
    projected = constraint.projected("gates.down", before, after)
    torch.testing.assert_close(projected @ basis, before.double() @ basis)
    outside = torch.eye(6, dtype=torch.float64) - basis @ basis.T
    torch.testing.assert_close(projected @ outside, after.double() @ outside)
    result = constraint("gates.down", before, after)
    torch.testing.assert_close(result.norm(dim=-1), after.norm(dim=-1))
    cosines = torch.cosine_similarity(result.double(), projected, dim=-1)
    torch.testing.assert_close(cosines, torch.ones_like(cosines)), "rows are stretched, not turned"
    assert result.dtype == torch.float32 and set(constraint.names) == {"gates.down", "gates.up", "gates.key"}


class Halfway:
    """Values between those before and after an update."""

    names = ("head.bias",)

    def __call__(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        return (before + after) / 2


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "zero1"])
def test_every_engine_constrains_what_the_optimizer_did(lab: Lab, engine: str) -> None:
    """ZeRO 1 does as ZeRO 2.

    Two steps of Adam at a rate of 0.01, whose moments stay what they are: 0.01 a step, and half of that."""
    collected = {}
    for constraint in (None, Halfway()):
        context, open_engine = build(lab.config("bert", "lora", ENGINES[engine]), WORLD)
        begin_phase(context)
        item = open_engine(1, 4)
        item.restore(item.parameters(trained_names(context.backbone)), item.optimizer_state(), 0)
        values = []
        for _ in range(2):
            with activate_batch(context.method, batch_of(context)):
                item.backward(item.forward(batch_of(context)).loss_sum, 6.0)
            item.step(constraint=constraint)
            values.append(item.parameters(["head.bias", "head.weight"]))
        item.close()
        collected[constraint is None] = values
    free, bound = collected[True], collected[False]
    assert bool(free[0]["head.bias"].any())
    torch.testing.assert_close(bound[0]["head.bias"], free[0]["head.bias"] / 2)
    torch.testing.assert_close(bound[0]["head.weight"], free[0]["head.weight"])
    torch.testing.assert_close(bound[1]["head.bias"], free[1]["head.bias"] / 2, atol=1e-3, rtol=0.1)


# ---- tasks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "low"), [("inflora", False), ("olora", True)])
def test_the_newest_lora_and_gate_are_trained(lab: Lab, base: str, low: bool) -> None:
    method, context = started(lab, "t5", base=base)
    trained(context, 0)
    begin_phase(context, 1)
    drawn(context, 1)
    names = trained_names(context.backbone)
    assert [name for name in names if ".lora_" not in name] == [f"gates.{part}" for part in PARTS]
    assert any(".lora_A" in name for name in names) == low and any(".lora_B" in name for name in names)
    batch = batch_of(context, 1)
    with activate_batch(method, batch):
        output = context.backbone(batch)
        penalty = method.penalty(batch, output)
        output.loss_sum.backward()
    assert (penalty is not None) == low, "O-LoRA's overlap"
    assert bool(method._subspaces) == (not low)
    for part in PARTS:
        gradient = getattr(method.gates, part).grad
        assert gradient is not None and bool(gradient.any())
    assert not any(item.requires_grad for held in method.gates.frozen.values() for item in held.values())


def test_a_new_key_lies_outside_the_features_of_earlier_tasks(lab: Lab) -> None:
    """At a threshold of 1 the gate is shut on all of their texts."""
    method, context = started(lab, gate_threshold=1.0, gate_width=100)
    trained(context, 0)
    begin_phase(context, 1)
    key, first = method.gates.key, method.gates.frozen["colour"]["key"]
    assert key is not None
    space = method.spaces.held["key"]
    assert 0 < space.basis.shape[1] < 32
    outside = space.without(key.detach().double()[:, None])[:, 0]
    torch.testing.assert_close(outside.float(), key.detach(), atol=1e-5, rtol=1e-4)
    drawn_key = TaskGates(32, 100)
    drawn_key.begin("x", method.seed + 1)
    assert drawn_key.key is not None
    torch.testing.assert_close(key.detach().norm(), drawn_key.key.detach().norm())
    old, new = (method.route(batch_of(context, task, 14)).weights[:, 1].detach() for task in range(2))
    assert float(old.max()) < 1e-3 and float(new.min()) > 0.1, "shut on earlier texts, open on new ones"
    assert not torch.equal(first, key)


def test_a_trained_gate_stays_shut_on_earlier_texts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a threshold of 1, with rows as they are projected, the gate of task 2 is on texts of task 1 what it was."""
    kept, moved = (gate_on_earlier_texts(lab, monkeypatch, constrained) for constrained in (True, False))
    torch.testing.assert_close(kept[1], kept[0], atol=2e-3, rtol=0)
    assert float((moved[1] - moved[0]).abs().max()) > 0.02


def gate_on_earlier_texts(lab: Lab, monkeypatch: pytest.MonkeyPatch, constrained: bool) -> tuple[Tensor, Tensor]:
    method, context = started(lab, gate_threshold=1.0, threshold=1.0)
    trained(context, 0)
    begin_phase(context, 1)
    drawn(context, 1)
    monkeypatch.setattr(FeatureSubspaces, "__call__", lambda self, *given: self.projected(*given).float(), raising=True)
    before = method.route(batch_of(context, 0)).weights[:, 1].detach()
    engine = TorchEngine(context.backbone, context.train, 8, WORLD)
    if not constrained:
        method.constraint = None  # type: ignore[assignment]
    for _ in range(8):
        train_step(engine, method, [batch_of(context, 1)], WORLD, 0)
    return before, method.route(batch_of(context, 0)).weights[:, 1].detach()


def test_a_method_around_it_keeps_its_constraint(lab: Lab) -> None:
    context, _ = build(lab.config("bert", {"name": "replay", "learner": "gainlora"}), WORLD)
    assert isinstance(context.method.constraint, FeatureSubspaces)


def test_texts_without_prompts_are_refused(lab: Lab) -> None:
    method, context = started(lab)
    with pytest.raises(ConfigError, match=r"'gainlora' reads prompts, which stream\.objective=clm of task 'colour'"):
        method.check([replace(context.phases[0].tasks[0], objective="clm")])


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_single_tasks_have_no_gates(lab: Lab, tmp_path: Path) -> None:
    collected = []
    for method in ("inflora", {"name": "gainlora", "gate_width": 8}):
        storage = Storage.at(tmp_path / str(len(collected)))
        run(lab.config("bert", ("separate", method)), storage)
        collected.append((trace(storage), matrix(storage)))
    assert collected[0] == collected[1]


def test_the_snapshot_holds_the_gates(complete: Complete, tmp_path: Path) -> None:
    done = complete("bert", "gainlora", "torch")
    bank = Bank(done.copy(tmp_path).sub("bank"))
    snapshot, method = bank.newest(), done.context.method
    assert snapshot is not None and snapshot.router.kind == "gates" and isinstance(method, GainLora)
    batch = batch_of(done.context)
    model = opened(bank, snapshot)
    embedded = model.backbone.embedded(batch.source_ids)
    served = model.router.route_embeddings(embedded, batch.source_mask)
    own = evaluated_by(done).mixture(batch)
    assert served.names == own.names == ("colour", "animal")
    torch.testing.assert_close(served.weights, own.weights)
    assert mean_embedding(embedded, batch.source_mask).shape == (6, 32) and isinstance(method.gates, nn.Module)
    new = bank.open(forget(bank, snapshot, "colour", scores=False).new)
    assert opened(bank, new).router.route_embeddings(embedded, batch.source_mask).names == ("animal",)
