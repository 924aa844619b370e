"""FOREVER: the model's clock against its definition, when stored rows join, and what they are held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phases import begin_phase, end_phase
from pydantic import ValidationError
from tiny import Complete, Lab, run, trace

from raycl.data.loader import Collate, eval_batches
from raycl.methods.context import Step
from raycl.methods.replay.forever import Forever, ForeverConfig, ModelClock
from raycl.methods.replay.stored_rows import FIRST
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.data import PhaseData
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))
DAYS = (1.0, 2.0, 4.0, 7.0, 15.0, 30.0)


def by_definition(sizes: Any, warm_up: int) -> tuple[list[int], list[float]]:
    """Return the updates at which intervals pass, and the ratio mu_t / mu_0 after each update, in numpy."""
    times = np.cumsum(sizes)
    day = times[warm_up - 1]
    passed = [int(np.argmax(times >= days * day)) + 1 for days in DAYS if (times >= days * day).any()]
    first = mean = float(np.mean(sizes[:warm_up]))
    ratios = [1.0] * warm_up
    for size in sizes[warm_up:]:
        mean = 0.95 * mean + 0.05 * size
        ratios.append(mean / first)
    return passed, ratios


@pytest.mark.parametrize("warm_up", [1, 5, 24])
def test_the_clock_is_that_of_the_definition(warm_up: int) -> None:
    sizes = np.random.default_rng(warm_up).random(400) * np.linspace(2, 0.2, 400)
    clock, passed, factors = ModelClock(), [], []
    for number, size in enumerate(sizes, start=1):
        if clock.add(float(size), warm_up, DAYS):
            passed.append(number)
        factors.append(clock.intensity(2.0))
    expected, ratios = by_definition(sizes, warm_up)
    assert passed == expected and len(passed) >= 3
    np.testing.assert_allclose(factors[warm_up:], np.clip(1 + 2 * (np.array(ratios[warm_up:]) - 1), 0.5, 3), rtol=1e-9)


def test_equal_updates_make_the_intervals_steps() -> None:
    clock = ModelClock()
    assert [n for n in range(1, 101) if clock.add(1.0, 10, DAYS)] == [10, 20, 40, 70]
    assert clock.intensity(5.0) == pytest.approx(1.0)


def second_task(lab: Lab, **settings: Any) -> tuple[Forever, TrainingContext, PhaseData, Batch]:
    config = lab.config("bert", {"name": "forever", "share": 0.5, "warm_up": 2, "days": [1, 2.9], **settings})
    context, _ = build(config, WORLD)
    assert isinstance(context.method, Forever)
    end_phase(context, begin_phase(context))
    data = begin_phase(context, 1)
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[1], "train", codec)
    batch = next(iter(eval_batches(Collate([table], codec.pad_id, context.backbone.label_ids()), 3)))
    return context.method, context, data, batch


def test_stored_rows_join_the_steps_after_an_interval(lab: Lab) -> None:
    """Of updates of equal size one day ends after two, 2.9 after six; a replay takes so many steps as the
    rows need."""
    method, context, data, batch = second_task(lab)
    assert method._rows is not None
    lasts = -(-len(method._rows) // data.batch_size)
    joined = []
    for index in range(12):
        data.step = Step(index, seed=index)
        mixed = method.prepare_batch(batch)
        again = method.prepare_batch(batch)  # another micro-batch of the step
        assert len(mixed) == len(again)
        stored = (mixed.rows <= FIRST).sum()
        assert int(stored) in (0, 3)
        if stored:
            joined.append(index)
        for name, parameter in context.backbone.named_parameters():
            if name.endswith(".lora_B"):
                parameter.data.add_(0.01)
    assert joined == [*range(2, 2 + lasts), *range(6, 6 + lasts)]


def test_steps_of_a_replay_are_held_to_the_weights_before_the_task(lab: Lab) -> None:
    method, context, data, batch = second_task(lab, beta=0.5)
    for index in range(3):
        data.step = Step(index, seed=index)
        method.prepare_batch(batch)
        penalty = method.penalty(batch, None)  # type: ignore[arg-type]
        assert (penalty is None) is (index < 2)
        for name, parameter in context.backbone.named_parameters():
            if name.endswith(".lora_B"):
                parameter.data.add_(0.1)
    moved = sum(p.numel() * 0.3**2 for n, p in context.backbone.named_parameters() if n.endswith(".lora_B"))
    penalty = method.penalty(batch, None)  # type: ignore[arg-type]
    assert penalty is not None and float(penalty) == pytest.approx(0.5 * moved, rel=1e-4)


def test_without_a_replay_it_is_its_learner(lab: Lab, complete: Complete, tmp_path: Path) -> None:
    traces = {"lora": trace(complete("bert", "lora", "torch").storage)}
    others: dict[str, dict[str, Any]] = {"never": {"warm_up": 1000}, "soon": {"warm_up": 1, "share": 0.5}}
    for name, settings in others.items():
        storage = Storage.at(tmp_path / name)
        run(lab.config("bert", {"name": "forever", **settings}), storage)
        traces[name] = trace(storage)
    steps = len(traces["lora"]) // 2
    assert traces["never"] == traces["lora"]
    assert traces["soon"][:steps] == traces["lora"][:steps] and traces["soon"][steps:] != traces["lora"][steps:]


def test_days_must_rise() -> None:
    with pytest.raises(ValidationError, match="days are 1, 4, 2: expected each later than the last"):
        ForeverConfig(days=(1.0, 4.0, 2.0))
