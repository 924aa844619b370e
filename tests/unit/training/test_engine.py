"""Schedules moved on, optimizer state put back, and nothing left behind by engines that were closed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from axes import sampled
from built import built
from phases import begin_phase
from tiny import ENGINES, Lab, run, trace
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import get_scheduler

from raycl.backbone import Backbone
from raycl.data.loader import Collate
from raycl.methods.base import activate_trainable, trained_names
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.engines.engine import TorchEngine, advance, schedule
from raycl.training.optimizers.settings import DECAYS, TrainConfig
from raycl.training.phase.step import train_step
from raycl.training.workers.distributed import DistributedContext, whole
from raycl.types import AdapterState, Mixture

WORLD, LINEAR = DistributedContext.alone(torch.device("cpu")), nn.functional.linear


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, {}),
        ({"method": {"attention_learning_rate": 0.3}}, {"attention.down": 0.3, "attention.up": 0.3}),
        (
            {"method": {"attention_learning_rate": 0.3}, "train": {"head_learning_rate": 0.5}},
            {"head.weight": 0.5, "head.bias": 0.5, "attention.down": 0.3, "attention.up": 0.3},
        ),
    ],
    ids=["one", "attention", "both"],
)
def test_label_head_and_projection_learn_at_rates_of_their_own(
    lab: Lab, settings: dict[str, dict[str, float]], rates: dict[str, float]
) -> None:
    """Keys and layer norm of SAPT's attention learn at the main rate, as in its released code."""
    context, open_engine = build(
        lab.config(
            "bert",
            {"name": "sapt", **settings.get("method", {})},
            train={"learning_rate": 0.1, **settings.get("train", {})},
        ),
        WORLD,
    )
    begin_phase(context)
    engine = open_engine(1, 4)
    assert isinstance(engine, TorchEngine) and engine.learning_rate == 0.1
    result = {id(parameter): group["lr"] for group in engine.optimizer.param_groups for parameter in group["params"]}
    own = {name: result[id(parameter)] for name, parameter in engine.trained.items()}
    assert {"attention.key", "attention.norm_weight", *rates} < own.keys()
    assert {name: rate for name, rate in own.items() if rate != 0.1} == rates


@pytest.mark.parametrize("engine", ["torch", "fsdp", "zero2"])
def test_each_phase_learns_at_the_rate_of_its_task(lab: Lab, tmp_path: Path, engine: str) -> None:
    train = {"learning_rate": 0.01, "learning_rate_by_task": {"animal": 0.03}, "max_steps": 1}
    run(lab.config("bert", "lora", ENGINES[engine], train=train), storage := Storage.at(tmp_path))
    assert {(phase, rate) for phase, _, _, _, rate, _ in trace(storage)} == {(0, 0.01), (1, 0.03)}


@pytest.mark.parametrize(("head", "expected"), [(None, 0.3), (0.5, 0.5)])
def test_a_label_head_without_a_rate_of_its_own_follows_that_of_the_task(head: float | None, expected: float) -> None:
    train = TrainConfig(learning_rate=0.1, learning_rate_by_task={"sky": 0.3})
    trained = {name: nn.Parameter(torch.zeros(2)) for name in ("body", "head.bias")}
    for task, rates in (("sky", [0.3, expected]), ("sea", [0.1, head or 0.1])):
        groups = built(trained, train.of_task(task), {"head.bias": head})[1].param_groups
        result = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
        assert [result[id(parameter)] for parameter in trained.values()] == rates
    with pytest.raises(ValueError, match="greater than 0"):
        TrainConfig(learning_rate_by_task={"sky": 0.0})


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("warmup", [0, 3])
def test_schedules_are_those_of_hugging_face(name: str, warmup: int) -> None:
    """Bit for bit, up to the rate after the last step."""
    train = TrainConfig(lr_scheduler=name, warmup_steps=0 if name == "constant" else warmup)

    def fresh() -> Optimizer:
        trained = {name: nn.Parameter(torch.zeros(2)) for name in ("body", "head.bias")}
        return built(trained, train, {"head.bias": 0.5})[1]

    ours = schedule(fresh(), train, 10)
    theirs = get_scheduler(name, fresh(), num_warmup_steps=train.warmup_steps, num_training_steps=10)
    for _ in range(10):
        assert ours.get_last_lr() == theirs.get_last_lr()
        for scheduler in (ours, theirs):
            scheduler.optimizer.step()
            scheduler.step()
    assert ours.get_last_lr() == theirs.get_last_lr()


def test_a_polynomial_begins_above_its_end() -> None:
    with pytest.raises(ValueError, match="'polynomial' falls to 1e-07, and the learning rate is 1e-08: use a higher"):
        TrainConfig(lr_scheduler="polynomial", learning_rate_by_task={"sky": 1e-8})


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("done", [0, 1, 4, 9])
def test_advance_equals_stepping(name: str, done: int) -> None:
    train = TrainConfig(lr_scheduler=name, warmup_steps=0 if name == "constant" else 3)

    def fresh() -> tuple[Optimizer, Any]:
        trained = {name: nn.Parameter(torch.zeros(2)) for name in ("body", "head.bias")}
        optimizer = built(trained, train, {"head.bias": 0.5})[1]
        return optimizer, schedule(optimizer, train, 10)

    (slow, stepped), (fast, jumped) = fresh(), fresh()
    for _ in range(done):
        slow.step()
        stepped.step()
    advance(jumped, done)
    for _ in range(10 - done):
        assert [group["lr"] for group in fast.param_groups] == [group["lr"] for group in slow.param_groups]
        assert jumped.get_last_lr() == stepped.get_last_lr()
        for part in (slow, stepped, fast, jumped):
            part.step()


def test_every_task_starts_with_a_fresh_optimizer_and_schedule(lab: Lab, tmp_path: Any) -> None:
    storage = Storage.at(tmp_path)
    run(lab.config("bert", train={"lr_scheduler": "linear"}), storage)
    rates = [step[4] for step in trace(storage)]
    assert rates == [0.01, 0.0075, 0.005, 0.0025] * 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["lora", "finetune"])
def test_state_comes_back_as_it_was(lab: Lab, engine: str, method: str) -> None:
    context, open_engine = build(lab.config("bert", method, ENGINES[engine]), WORLD)
    begin_phase(context)
    opened = open_engine(1, 4)
    names = trained_names(context.backbone)
    torch.manual_seed(3)
    parameters = {name: torch.randn_like(value) for name, value in opened.parameters(names).items()}
    trainable = [name for name, parameter in context.backbone.named_parameters() if parameter.requires_grad]
    optimizer = {
        f"{name}/{moment}": torch.rand_like(parameters[name])
        for name in trainable
        for moment in ("exp_avg", "exp_avg_sq")
    }
    opened.restore(parameters, optimizer, 2)
    for result, expected in ((opened.parameters(names), parameters), (opened.optimizer_state(), optimizer)):
        assert result.keys() == expected.keys()
        assert [name for name in result if not torch.equal(result[name], expected[name])] == []
    opened.close()
    left = dict(context.backbone.named_parameters())
    assert [name for name in parameters if not torch.equal(whole(left[name]), parameters[name])] == []
    assert nn.functional.linear is LINEAR, "later runs of this process would compute in another way"


KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def outside(backbone: Backbone) -> dict[str, Any]:
    """Return what libraries could leave on the modules: hooks, attributes, the kind of dict that holds the
    parameters."""
    collected = {}
    for name, module in backbone.named_modules():
        hooks = {kind: len(getattr(module, kind)) for kind in KINDS}
        collected[name] = (hooks, set(vars(module)), type(module._parameters), set(module._parameters))
    return collected


def living() -> dict[str, int]:
    """Return how many engines, optimizers, modules and tensors there are in this process."""
    gc.collect()
    types = Counter(map(type, gc.get_objects()))
    ours = {
        kind: sum(types[other] for other in types if issubclass(other, kind)) for kind in (AdamW, nn.Module, Tensor)
    }
    libraries = {kind: count for kind, count in types.items() if str(kind.__module__).startswith("deepspeed.")}
    return {kind.__name__: count for kind, count in (ours | libraries).items()}


@pytest.mark.parametrize("engine", ["zero0", "zero2", "zero3"])
def test_tasks_leak_no_memory(lab: Lab, engine: str) -> None:
    context, open_engine = build(lab.config("bert", "lora", ENGINES[engine]), WORLD)
    phase = context.phases[0]
    begin_phase(context)
    table = context.stream.table(phase.tasks[0], "train", context.backbone.codec)
    batch = Collate([table], 0, context.backbone.label_ids())(torch.arange(4).numpy(), 4)
    before, counts = outside(context.backbone), {}
    for task in range(1, 7):
        begin_phase(context)
        opened = open_engine(1, 1)
        for _ in range(2):  # in the second step, ZeRO-3 follows what it saw in the first
            with activate_trainable(context.method, len(batch)):
                opened.backward(opened.forward(batch).loss_sum, 1.0)
            opened.step()
        opened.close()
        del opened
        assert outside(context.backbone) == before
        assert all(type(p) is nn.Parameter and p.numel() and p.grad is None for p in context.backbone.parameters())
        if task in (2, 6):
            counts[task] = living()
    more = Counter(counts[6]) - Counter(counts[2])  # fewer may be left: what earlier tests held goes any time
    assert all(count < 4 for count in more.values()), f"one object a task would be four more: {more}"


def mixed_losses(lab: Lab, kind: str, engine: str) -> list[float]:
    """Return three losses with a frozen adapter beside the one in training, of which not a bit may move."""
    context, open_engine = build(lab.config(kind, "lora", ENGINES[engine]), WORLD)
    method, phase = context.method, context.phases[0]
    begin_phase(context)
    stack = method.stack
    assert stack is not None
    torch.manual_seed(0)
    pairs = {
        path: (torch.randn(3, layer.inputs) * 0.3, torch.randn(layer.outputs, 3) * 0.3)
        for path, layer in stack.layers.items()
    }
    stack.load("old", AdapterState(pairs, 1.5))
    stack.need(["old"])
    frozen = [block.clone() for blocks in (stack.pool.a, stack.pool.b) for block in blocks.values()]
    method.route = lambda batch: Mixture(("old", "lora"), torch.tensor([[0.4, 1.0], [0.0, 1.0]]))  # type: ignore[method-assign]
    table = context.stream.table(phase.tasks[0], "train", context.backbone.codec)
    labels = context.backbone.label_ids() if context.backbone.codec.needs_labels else None
    collate = Collate([table], context.backbone.codec.pad_id, labels)
    batches = [collate(np.array([2 * number, 2 * number + 1]), 2) for number in range(4)]
    opened = open_engine(2, 2)
    context.backbone.train()
    losses = [train_step(opened, method, batches[at : at + 2], WORLD, at).loss for at in (0, 2, 0)]
    opened.close()
    left = [block for blocks in (stack.pool.a, stack.pool.b) for block in blocks.values()]
    assert all(torch.equal(old, new) for old, new in zip(frozen, left, strict=True))
    return losses


@pytest.fixture(scope="module")
def mixed_on_torch(lab: Lab) -> Callable[[str], list[float]]:
    """Backbone kind -> `mixed_losses` under plain torch."""
    return cache(lambda kind: mixed_losses(lab, kind, "torch"))


@pytest.mark.parametrize(
    ("kind", "engine"),
    sampled([(kind, engine) for kind in ("bert", "t5", "llama") for engine in ENGINES if engine != "torch"]),
)
def test_frozen_and_trainable_adapters_mix_in_every_engine(
    lab: Lab, mixed_on_torch: Callable[[str], list[float]], kind: str, engine: str
) -> None:
    """Frozen adapters beside the one in training: the same losses, and not a bit of the frozen ones moves."""
    expected = mixed_on_torch(kind)
    assert expected[2] < expected[0]
    assert mixed_losses(lab, kind, engine) == pytest.approx(expected, abs=1e-5)
