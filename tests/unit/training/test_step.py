"""One optimizer step: what counts once, what is refused, and what plain PyTorch would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from axes import sampled
from phases import begin_phase
from tiny import Lab
from torch import Tensor, nn

from raycl.backbone import Output
from raycl.backbone.base import loss_count
from raycl.data.loader import Collate, GlobalOrder, Loader
from raycl.errors import RunError
from raycl.methods.base import Method, activate_batch
from raycl.methods.modifier import Modifiers
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.engine import Engine, TorchEngine
from raycl.training.phase.data import stable_seed
from raycl.training.phase.step import token_count, train_step
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))
STEPS = 4


def started(lab: Lab, kind: str = "bert", method: str = "lora", **train: Any) -> tuple[TrainingContext, Engine, Loader]:
    """Return a run at the beginning of its first task."""
    context, open_engine = build(lab.config(kind, method, train=train), WORLD)
    begin_phase(context)
    size = context.train.batch_size
    table = context.stream.table(context.stream.tasks[0], "train", context.backbone.codec)
    labels = context.backbone.label_ids() if context.backbone.codec.needs_labels else None
    micro = context.train.micro_batch_size or size
    order = GlobalOrder(len(table), size, 1, seed=0)
    loader = Loader(Collate([table], context.backbone.codec.pad_id, labels), order, micro)
    return context, open_engine(loader.accumulation, STEPS), loader


class Beside(Method):
    """Routes as the run's own method does."""

    def __init__(self, context: TrainingContext) -> None:
        super().__init__(context.method.config, context.backbone, 0)
        self.stack = context.method.stack
        self.route = context.method.route  # type: ignore[method-assign]


class Constant(Beside):
    """A penalty without a batch: the sum of all trained weights."""

    def penalty(self, batch: Batch, output: Output) -> Tensor:
        return torch.stack([p.sum() for p in self.backbone.parameters() if p.requires_grad]).sum()


@pytest.mark.parametrize(
    ("kind", "micro"), sampled([(kind, micro) for micro in (None, 1, 2) for kind in ("t5", "bert")])
)
def test_a_penalty_counts_once_a_step_whatever_the_accumulation(lab: Lab, kind: str, micro: int | None) -> None:
    context, engine, loader = started(lab, kind, micro_batch_size=micro, max_grad_norm=0)
    seen: dict[str, Tensor] = {}
    own_step = engine.step

    def step(*given: Any) -> float:
        seen.update({name: p.grad.clone() for name, p in context.backbone.named_parameters() if p.grad is not None})
        return own_step(*given)

    engine.step = step  # type: ignore[method-assign]
    batches = loader.micro_batches(STEPS - 1)
    train_step(engine, Constant(context), batches, WORLD, 0)
    penalised = dict(seen)
    context, engine, loader = started(lab, kind, micro_batch_size=micro, max_grad_norm=0)
    own_step, engine.step = engine.step, step  # type: ignore[method-assign]
    seen.clear()
    train_step(engine, context.method, loader.micro_batches(STEPS - 1), WORLD, 0)
    assert seen.keys() == penalised.keys()
    for name, gradient in penalised.items():
        torch.testing.assert_close(gradient, seen[name] + 1.0, atol=1e-5, rtol=1e-5)


class Gaps:
    """The squared largest logit of each example in place of the cross-entropy, by the number of examples."""

    def count(self, batch: Batch) -> int:
        return int(batch.weight.sum())

    def __call__(self, batch: Batch, output: Output) -> Tensor:
        at = output.positions()
        best = output.logits.new_zeros(len(batch)).scatter_reduce(0, output.rows[at], output.logits[at].amax(1), "amax")
        return best.square().sum()


@pytest.mark.parametrize("micro", [None, 1, 2])
def test_a_methods_own_loss_takes_the_place_of_the_cross_entropy(
    lab: Lab, micro: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mean is over what it counts, whatever the accumulation, and a penalty still counts once a step."""
    context, engine, loader = started(lab, "t5", micro_batch_size=micro, max_grad_norm=0)
    method, gradients = Constant(context), dict[str, Tensor]()
    method.objective = Gaps()
    own_step = engine.step

    def step(*given: Any) -> float:
        gradients.update(
            {name: p.grad.clone() for name, p in context.backbone.named_parameters() if p.grad is not None}
        )
        return own_step(*given)

    monkeypatch.setattr(engine, "step", step)
    batches = loader.micro_batches(STEPS - 1)
    (whole,) = started(lab, "t5")[2].micro_batches(STEPS - 1)
    loss = torch.zeros(())
    for batch in batches:
        with activate_batch(context.method, batch):
            loss = loss + Gaps()(batch, context.backbone(batch)) / Gaps().count(whole)
    trained = {name: p for name, p in context.backbone.named_parameters() if p.requires_grad}
    by_hand = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    result = train_step(engine, method, batches, WORLD, 0)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6) and Gaps().count(whole) == 2
    for name, gradient in by_hand.items():
        torch.testing.assert_close(gradients[name], gradient + 1.0, atol=1e-5, rtol=1e-5)


def test_the_reported_loss_leaves_penalties_out(lab: Lab) -> None:
    losses = []
    for penalised in (False, True):
        context, engine, loader = started(lab)
        method = Constant(context) if penalised else context.method
        losses.append(train_step(engine, method, loader.micro_batches(0), WORLD, 0).loss)
    assert losses[0] == losses[1]


class Broken(Beside):
    """A penalty that is not a number."""

    def penalty(self, batch: Batch, output: Output) -> Tensor:
        return output.loss_sum * float("nan")


def test_a_loss_that_is_not_finite_ends_the_run(lab: Lab) -> None:
    context, engine, loader = started(lab)
    with pytest.raises(RunError, match=r"gradient norm nan: lower train.learning_rate \(now 0.01\)"):
        train_step(engine, Broken(context), loader.micro_batches(0), WORLD, 0)
    with torch.no_grad():
        next(context.backbone.parameters()).fill_(float("inf"))
    with pytest.raises(RunError, match="the loss is nan"):
        train_step(engine, context.method, loader.micro_batches(0), WORLD, 0)


def by_hand(context: TrainingContext, steps: Sequence[list[Batch]]) -> list[float]:
    """Return the plainest training loop: mean loss over the targets of the whole step."""
    named = {name: p for name, p in context.backbone.named_parameters() if p.requires_grad}
    trainable = list(named.values())
    kept = [p for name, p in named.items() if "bias" in name or "norm" in name.lower()]
    decayed = {"params": [p for p in trainable if not any(p is other for other in kept)]}
    groups = [decayed, {"params": kept, "weight_decay": 0.0}] if kept else [decayed]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True)
    losses = []
    for batches in steps:
        count, losses_sum = sum(map(loss_count, batches)), 0.0
        for batch in batches:
            with activate_batch(context.method, batch):
                loss = context.backbone(batch).loss_sum
                (loss / count).backward()
            losses_sum += loss.item()
        for parameter in trainable:  # the pooler has none, and whether it counts may round the norm otherwise
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(losses_sum / count)
    return losses


@pytest.mark.parametrize(
    ("kind", "method"), [("bert", "lora"), *((kind, "finetune") for kind in ("bert", "t5", "llama"))]
)
def test_the_torch_engine_equals_a_loop_by_hand_bit_for_bit(lab: Lab, kind: str, method: str) -> None:
    context, engine, loader = started(lab, kind, method, micro_batch_size=2, weight_decay=0.1)
    steps = [loader.micro_batches(step) for step in range(STEPS)]
    loss = [train_step(engine, context.method, batches, WORLD, 0).loss for batches in steps]
    other, _, _ = started(lab, kind, method, micro_batch_size=2, weight_decay=0.1)
    assert loss == by_hand(other, steps)
    mine, theirs = (dict(p.backbone.named_parameters()) for p in (context, other))
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_dropout_is_drawn_from_the_steps_seed_alone(lab: Lab) -> None:
    def losses(noise: int) -> list[float]:
        config = lab.config("bert", {"name": "lora", "lora_dropout": 0.5}, backbone={"dropout": 0.3})
        context = build(config, WORLD)[0]
        begin_phase(context)
        context.backbone.train()
        nn.init.normal_(context.backbone.head.weight, generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr]
        engine = TorchEngine(context.backbone, context.train, STEPS, WORLD)
        table = context.stream.table(context.stream.tasks[0], "train", context.backbone.codec)
        order = GlobalOrder(len(table), 4, 1, seed=0)
        loader = Loader(Collate([table], 0, context.backbone.label_ids()), order, 4)
        torch.manual_seed(noise)
        return [train_step(engine, context.method, loader.micro_batches(s), WORLD, 5 + s).loss for s in range(2)]

    assert losses(1) == losses(2)


def test_tokens_are_counted_without_padding_and_fill_ups(lab: Lab) -> None:
    context, _, loader = started(lab, "t5")
    batch = loader.micro_batches(STEPS - 1)[0]
    assert batch.weight.tolist() == [1, 1, 0, 0]
    table = context.stream.table(context.stream.tasks[0], "train", context.backbone.codec)
    columns = table.columns(batch.rows[:2].tolist())
    assert token_count(batch) == sum(map(len, [*columns.source_ids, *columns.target_ids]))


class Turned(Modifiers):
    """Changes nothing; gradients come back with their memory the other way round, as matrix products may leave it."""

    def __init__(self, weight: str) -> None:
        super().__init__()
        self.weight = weight

    @property
    def names(self) -> list[str]:
        return [self.weight]

    def __call__(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.mT.contiguous().mT

    def held(self, name: str) -> None:
        return None


def test_how_a_gradient_lies_in_memory_changes_nothing(lab: Lab) -> None:
    weights = []
    for turns in (False, True):
        context, engine, loader = started(lab, "bert", "finetune")
        name = next(
            name for name, p in context.backbone.named_parameters() if p.dim() == 2 and p.shape[0] != p.shape[1]
        )
        train_step(engine, context.method, loader.micro_batches(0), WORLD, 0, Turned(name) if turns else Modifiers())
        weights.append(dict(context.backbone.named_parameters())[name].detach())
    assert torch.equal(*weights)


# ---- gradients on chosen rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "objective"), [("bert", "answer"), ("llama", "answer"), ("masked", "mlm")])
def test_gradients_on_chosen_rows_are_those_of_their_mean_loss(lab: Lab, kind: str, objective: Any) -> None:
    """They are so in float32, whatever the micro-batches, and beside the gradients that the optimizer will use."""
    stream = {"objective": objective}
    context, _ = build(lab.config(kind, "finetune", stream=stream, train={"micro_batch_size": 2}), WORLD)
    asked = begin_phase(context)
    context.backbone.eval()
    tasks = context.stream.tasks
    backbone = context.backbone
    backbone.learn_labels([label for task in tasks for label in task.labels or ()])
    trained = {name: p for name, p in backbone.named_parameters() if p.numel()}
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    gradients = asked.gradients([(tasks[0], np.array([0, 5, 7])), (tasks[1], np.array([2, 3]))])
    assert all(bool((p.grad == 1).all()) for p in trained.values() if p.grad is not None)
    tables = [context.stream.table(tasks[0], "train", backbone.codec).part(np.array([0, 5, 7]))]
    tables += [context.stream.table(tasks[1], "train", backbone.codec).part(np.array([2, 3]))]
    labels = backbone.label_ids() if objective == "answer" and kind == "bert" else None
    hidden = context.stream.text_objective(backbone.codec, stable_seed(context.info.seed, "exercise", 0))
    batch = Collate(tables, backbone.codec.pad_id, labels, text_objective=hidden)(np.arange(5), 5)
    loss = backbone(batch).loss_sum / loss_count(batch)
    expected = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    assert gradients.keys() == trained.keys() and float(loss.detach()) > 0
    for name, gradient in zip(trained, expected, strict=True):
        assert gradients[name].dtype == torch.float32
        whole = torch.zeros_like(trained[name]) if gradient is None else gradient
        torch.testing.assert_close(gradients[name], whole, atol=1e-6, rtol=1e-4)
    assert any(bool(gradient.any()) for gradient in gradients.values())
