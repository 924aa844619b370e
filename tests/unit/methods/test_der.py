"""DER++: what a step's objective is, what is stored of a task, and which rows are replayed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase
from tiny import Lab, exported, run, trace
from torch import Tensor

from raycl.backbone.base import loss_count
from raycl.errors import ConfigError
from raycl.methods.base import activate_batch
from raycl.methods.context import Step
from raycl.methods.replay.der import Der, DerConfig, StoredOutputs, squared_error
from raycl.methods.replay.stored_rows import StoredRows, numbers_of
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.data import PhaseData
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))
KINDS = ("bert", "t5", "llama", "masked")


def second_task(lab: Lab, kind: str, micro: int | None = None, **settings: Any) -> tuple[TrainingContext, PhaseData]:
    """Return the second task begun, its weights other than those whose outputs were stored."""
    learner = "finetune" if kind == "masked" else "lora"
    method = {"name": "der++", "learner": learner, "share": 0.5, **settings}
    stream = {"objective": "mlm"} if kind == "masked" else {}
    context, _ = build(lab.config(kind, method, train={"micro_batch_size": micro}, stream=stream), WORLD)
    first = begin_phase(context, 0)
    changed(context, 0)
    end_phase(context, first)
    second = begin_phase(context, 1)
    changed(context, 1)
    context.backbone.eval()  # no dropout: passes must repeat
    return context, second


def changed(context: TrainingContext, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in context.backbone.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)


def prepared(context: TrainingContext, task: PhaseData) -> tuple[list[Batch], list[Batch]]:
    """Return the first step's micro-batches as the loader gives them, and as the method prepares them."""
    loader = task.loader()
    batches = loader.micro_batches(0)
    task.step = Step(0, 5, len(batches))
    return batches, [context.method.prepare_batch(batch) for batch in batches]


def objective(context: TrainingContext, mixed: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """Return what a step minimises, as the trainer computes it, and its gradients."""
    total, value = sum(map(loss_count, mixed)), 0.0
    context.backbone.zero_grad()
    for batch in mixed:
        with activate_batch(context.method, batch):
            output = context.backbone(batch)
            penalty = context.method.penalty(batch, output)
            part = output.loss_sum if penalty is None else output.loss_sum + penalty * loss_count(batch)
            (part / total).backward()
        value += float(part) / total
    named = context.backbone.named_parameters()
    return value, {name: p.grad.clone() for name, p in named if p.grad is not None}


@torch.no_grad()
def by_hand(context: TrainingContext, batches: list[Batch], mixed: list[Batch]) -> float:
    """Return `L(new) + alpha MSE + beta L(stored)`, each from passes over its own rows one by one."""
    method, backbone = context.method, context.backbone
    assert isinstance(method, Der) and method._rows is not None and method._stored is not None
    loss, count = 0.0, 0
    for batch in batches:
        with activate_batch(method, batch):
            loss, count = loss + float(backbone(batch).loss_sum), count + loss_count(batch)
    again, errors = [], []
    for number in [int(n) for batch in mixed for n in numbers_of(batch)[1]]:
        row = method._rows.batch([number])
        with activate_batch(method, row):
            output = backbone(row)
        values, columns = method._stored.select(torch.tensor([number]))
        logits = output.logits[output.positions()]
        again += output.losses()[output.positions()].tolist()
        for now, value, column in zip(logits, values, columns, strict=True):
            known = torch.isfinite(value)
            errors.append(float((now[column[known]] - value[known]).square().mean()))
    config = method.config
    return loss / count + config.alpha * sum(errors) / len(errors) + config.beta * sum(again) / len(again)


@pytest.mark.parametrize("kind", KINDS)
def test_a_steps_objective_is_the_papers_whatever_the_accumulation(lab: Lab, kind: str) -> None:
    collected = []
    for micro in (None, 1):
        context, task = second_task(lab, kind, micro, alpha=0.7, beta=0.3)
        batches, mixed = prepared(context, task)
        value, gradients = objective(context, mixed)
        assert value == pytest.approx(by_hand(context, batches, mixed), rel=1e-4)
        collected.append((value, gradients))
    (whole, gradients), (parts, others) = collected
    assert whole == pytest.approx(parts, rel=1e-5)
    assert all(torch.allclose(gradient, others[name], atol=1e-5) for name, gradient in gradients.items())


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_did_not_change_are_at_no_distance(lab: Lab, kind: str) -> None:
    context, _ = second_task(lab, kind)
    method = context.method
    assert isinstance(method, Der) and method._rows is not None
    rows = method._rows
    now = method._outputs(rows)
    assert squared_error(_dense(now), now.values, now.columns.long()) == 0
    assert len(rows) == 7 and int(now.counts.sum()) == len(now.values) >= 7
    stored = method._stored
    assert stored is not None and torch.equal(now.counts, stored.counts)
    assert squared_error(_dense(now), stored.values, stored.columns.long()) > 0
    words = context.backbone.codec.vocabulary
    assert now.values.shape[1] == (4 if kind == "bert" else min(32, words)), "all labels, or the largest logits"
    assert stored.values.shape[1] == (2 if kind == "bert" else min(32, words)), "the labels that were known then"


def _dense(outputs: StoredOutputs) -> Tensor:
    """Return logits of all columns, 0 where none was stored."""
    width = int(outputs.columns.max()) + 1
    return torch.zeros(len(outputs.values), width).scatter(1, outputs.columns.long(), outputs.values)


def test_the_squared_error_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, -torch.inf, 5.0]])
    values = torch.tensor([[3.0, -torch.inf], [4.0, 1.0]])
    columns = torch.tensor([[2, 0], [1, 2]])
    assert float(squared_error(logits, values, columns)) == 16, "unknown labels do not count"
    assert float(squared_error(logits, torch.zeros(2, 2), torch.tensor([[0, 1], [0, 2]]))) == 2.5 + 12.5


def test_stored_outputs_of_rows_keep_their_positions() -> None:
    stored_outputs = StoredOutputs(
        torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, 1, dtype=torch.int32), torch.tensor([1, 2])
    )
    two = StoredOutputs(torch.tensor([[4.0, 5.0]]), torch.ones(1, 2, dtype=torch.int32), torch.tensor([1]))
    both = StoredOutputs.below([stored_outputs, two])
    assert both.select(torch.tensor([2, 1]))[0].tolist() == [[4, 5], [2, -torch.inf], [3, -torch.inf]]
    again = StoredOutputs.of(both.tensors())
    assert again.values.equal(both.values) and again.counts.equal(both.counts) and again.columns.equal(both.columns)


def test_every_stored_row_is_replayed_equally_often(lab: Lab) -> None:
    context, task = second_task(lab, "bert", share=0.2)  # 2 stored rows for 14 new ones
    loader = task.loader()
    order = loader.order
    seen: Counter[int] = Counter()
    for index in range(order.steps):
        task.step = Step(index, index, 1)
        for batch in loader.micro_batches(index):
            mixed = context.method.prepare_batch(batch)
            real = int((batch.rows >= 0).sum())
            assert len(mixed) == len(batch) + real, "fill-ups bring nothing along"
            seen.update(numbers_of(mixed)[1].tolist())
    assert seen == {0: 7, 1: 7}


def test_a_stored_text_hides_the_same_words_whenever_it_is_read(lab: Lab) -> None:
    context, task = second_task(lab, "masked")
    method = context.method
    assert isinstance(method, Der) and method._rows is not None
    alone = method._rows.batch([3])
    beside = method._rows.batch([0, 3, 5])
    width = alone.source_ids.shape[1]
    assert torch.equal(alone.source_ids[0], beside.source_ids[1, :width]) and int(beside.rows[1]) == -5
    stored = (context.stream.tasks[0], context.stream.stored(context.stream.tasks[0], 0.5)[3:4])
    again = StoredRows([stored], task, context.backbone, method.seed).batch([0])
    assert torch.equal(again.source_ids, alone.source_ids) and torch.equal(again.target_ids, alone.target_ids)


def test_without_weights_a_step_is_the_learners_own(lab: Lab, tmp_path: Path) -> None:
    settings = {"name": "der++", "alpha": 0, "beta": 0}
    collected = []
    for number, method in enumerate(("lora", settings)):
        storage = Storage.at(tmp_path / str(number))
        run(lab.config("bert", method, train={"optimizer": "sgd"}), storage)
        collected.append(storage)
    plain, held = (trace(storage) for storage in collected)
    assert [step[3] for step in held] == pytest.approx([step[3] for step in plain], rel=1e-3), "gradient norms"
    assert [step[2] for step in held[:4]] == [step[2] for step in plain[:4]] and exported(collected[0]).keys()


def test_the_first_phase_does_not_depend_on_the_weights() -> None:
    der_config, other = DerConfig(alpha=1, beta=0.2), DerConfig(alpha=2)
    assert der_config.cache_key(0, ("a", "b")) == other.cache_key(0, ("a", "b")) != {}
    assert der_config.cache_key(1, ("a", "b")) != other.cache_key(1, ("a", "b"))
    assert der_config.cache_key(0, ("a",)) != DerConfig(share=0.1).cache_key(0, ("a",)), "outputs are stored in it"


def test_a_learner_with_adapters_for_its_own_texts_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"method\.learner is slm, which trains each task's adapters on its own"):
        build(lab.config("bert", {"name": "der++", "learner": lab.slots()}), WORLD)
