"""DEMix: what a task's adapter begins as, how earlier ones are compared, and who answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase
from tiny import Complete, Lab, opened
from torch.nn.functional import cross_entropy

from raycl.backbone.base import loss_count
from raycl.bank import Bank
from raycl.data.loader import Collate, eval_batches
from raycl.methods.base import activate, trained_names
from raycl.methods.context import TaskContext
from raycl.methods.demix import Demix
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.data import PhaseData
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Mixture

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str = "llama", **sections: Any) -> tuple[Demix, TrainingContext]:
    """Start three tasks: the third has the rows of the first."""
    stream = {"tasks": [*lab.tasks, {**lab.tasks[0], "name": "again"}]}
    context, _ = build(lab.config(kind, {"name": "demix", "bottleneck_size": 3}, stream=stream, **sections), WORLD)
    assert isinstance(context.method, Demix)
    return context.method, context


def learn(context: TrainingContext, index: int, value: float) -> TaskContext:
    """Return a phase whose adapter ends with this value in all of B."""
    phase = begin_phase(context, index)
    with torch.no_grad():
        for name, parameter in context.backbone.named_parameters():
            if name.endswith("lora_B") and parameter.requires_grad:
                parameter.fill_(value)
    end_phase(context, phase)
    return phase


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_task_begins_as_the_earlier_adapter_with_the_lowest_loss(lab: Lab, kind: str) -> None:
    starts = []
    for values in ((0.0, 5.0), (5.0, 0.0)):
        method, context = started(lab, kind)
        for index, value in enumerate(values):
            learn(context, index, value)
        losses = losses_of(method, context)
        begin_phase(context, 2)
        start = method.starts["again"]
        assert losses["colour"] != losses["animal"] and start == min(losses, key=losses.__getitem__)
        for path, layer in method.stack.layers.items():
            low, high = method.stack.states[start].linears[path]
            assert layer.lora_A is not None and torch.equal(layer.lora_A, low)
            assert layer.lora_B is not None and torch.equal(layer.lora_B, high)
        starts.append(start)
    assert len(set(starts)) == 2, "the adapter of zeros is nearer, whichever task left it"


def losses_of(method: Demix, context: TrainingContext) -> dict[str, float]:
    """Return the loss of each earlier adapter on the rows of the third task."""
    data, losses = PhaseData(context, context.phases[2], WORLD), {}
    for name in ("colour", "animal"):
        method._compared = name
        losses[name] = data.mean_loss()
    method._compared = ""
    return losses


def test_the_mean_loss_by_hand_and_of_no_more_rows_than_asked_for(lab: Lab) -> None:
    method, context = started(lab)
    learn(context, 0, 1.0)
    backbone, codec = context.backbone, context.backbone.codec
    data = PhaseData(context, context.phases[1], WORLD)
    method._compared = "colour"
    mean_loss = data.mean_loss()
    (batch,) = eval_batches(Collate([context.stream.table(context.stream.tasks[1], "train", codec)], codec.pad_id), 14)
    with torch.no_grad(), activate(method, Mixture.same({"colour": 1.0}, len(batch))):
        guesses = backbone.guesses(batch)
    total = cross_entropy(guesses.logits, guesses.labels, reduction="sum", ignore_index=-100)
    assert mean_loss == pytest.approx(float(total) / loss_count(batch), rel=1e-5)
    assert data.mean_loss(4) != pytest.approx(mean_loss, rel=1e-5), "one batch of 4 rows"


def test_without_shared_labels_a_task_goes_on_from_the_newest_adapter(lab: Lab) -> None:
    method, context = started(lab, "bert")
    learn(context, 0, 0.5)
    begin_phase(context, 1)
    assert method.starts == {"animal": "colour"}, "the only one there is"
    method, context = started(lab, "bert")
    learn(context, 1, 0.5)
    learn(context, 0, 0.5)
    begin_phase(context, 2)
    assert method.starts["again"] == "colour", "its labels are those of task 'colour'"
    head = context.backbone.head
    assert head is not None and set(head.trainable_labels) == {"red", "blue"}  # type: ignore[attr-defined]


def test_of_equal_losses_the_newest_adapters_counts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    method, context = started(lab, "bert")
    learn(context, 0, 0.5)
    learn(context, 1, 0.5)
    monkeypatch.setattr(PhaseData, "mean_loss", lambda data, examples: float("nan"))
    begin_phase(context, 2)
    assert method.starts["again"] == "animal"


def test_earlier_adapters_stay_and_a_resumed_task_compares_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    method, context = started(lab)
    learn(context, 0, 1.0)
    before = {name: value.clone() for name, value in method.stack.states["colour"].tensors().items()}
    learn(context, 1, 2.0)
    begin_phase(context, 2)
    values, tensors = method.state_dict()
    again, other = started(lab)
    again.load_state_dict(values, tensors)
    monkeypatch.setattr(PhaseData, "mean_loss", None)
    begin_phase(other, 2, resumed=True)
    assert again.starts == method.starts and set(again.starts) == {"animal", "again"}
    assert trained_names(other.backbone) == trained_names(context.backbone)
    now = method.stack.states["colour"].tensors()
    assert all(torch.equal(value, now[name]) for name, value in before.items())


def test_tasks_trained_alone_begin_anew(lab: Lab) -> None:
    method, context = started(lab)
    method.task_id_given = True
    learn(context, 0, 1.0)
    begin_phase(context, 1)
    assert method.starts == {}
    assert not any(layer.lora_B.any() for layer in method.stack.layers.values())  # type: ignore[union-attr]


def test_each_task_is_answered_by_its_own_adapter(complete: Complete) -> None:
    done = complete("bert", "demix", "torch")
    bank = Bank(done.storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None and newest.router.kind == "task"
    assert {entry.name: entry.tasks for entry in newest.adapters} == {"colour": ("colour",), "animal": ("animal",)}
    assert done.storage.read_json("results.json")["phase_times"]
    model, codec = opened(bank, newest), done.context.backbone.codec
    for task in done.context.stream.tasks:
        table = done.context.stream.table(task, "test", codec)
        (batch,) = eval_batches(Collate([table], codec.pad_id), 6)
        texts = table.texts(batch.rows.tolist())
        assert set(model.predict(batch, texts, [task.name] * 6, 4)) <= set(task.labels or ())
