"""IDBR: what a step's objective is, how texts are cut in two, and which rows are stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from phases import begin_phase, end_phase
from tiny import Lab, run
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, mse_loss

from raycl.backbone.base import loss_count
from raycl.errors import BankError, ConfigError
from raycl.methods.context import Step
from raycl.methods.replay.idbr import (
    HALVES,
    DisentangledHead,
    Idbr,
    IdbrConfig,
    TaskHead,
    halves_of,
    is_halves,
    is_real,
    nearest_to_centroids,
    orders,
)
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.engine import TorchEngine
from raycl.training.phase.data import PhaseData
from raycl.training.records.named_bank import snapshot_at
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext
from raycl.types import IGNORE, Batch

WORLD = DistributedContext.alone(torch.device("cpu"))
SETTINGS = {"width": 6, "share": 0.3, "every": 2, "order_weight": 0.7, "task_weight": 1.3, "generic_weight": 0.4}
STORED = 4
"""Rows: 0.3 of 14."""


def second_task(lab: Lab, micro: int | None = None) -> tuple[Idbr, TrainingContext, PhaseData]:
    """Return the second task begun, and weights other than those that gave the features before."""
    context, _ = build(lab.config("bert", {"name": "idbr", **SETTINGS}, train={"micro_batch_size": micro}), WORLD)
    first = begin_phase(context, 0)
    changed(context, 0)
    end_phase(context, first)
    second = begin_phase(context, 1)
    assert isinstance(context.method, Idbr)
    context.backbone.eval()  # no dropout: passes must repeat
    return context.method, context, second


def changed(context: TrainingContext, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in context.backbone.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)


def prepared(context: TrainingContext, task: PhaseData, index: int) -> list[Batch]:
    loader = task.loader()
    batches = loader.micro_batches(index)
    task.step = Step(index, 5, len(batches))
    return [context.method.prepare_batch(batch) for batch in batches]


def objective(context: TrainingContext, batches: list[Batch]) -> float:
    """Return what a step minimises, as the trainer computes it."""
    total, value = sum(map(loss_count, batches)), 0.0
    for batch in batches:
        output = context.backbone(batch)
        penalty = context.method.penalty(batch, output)
        assert penalty is not None
        value += float((output.loss_sum + penalty * loss_count(batch)).detach()) / total
    return value


@torch.no_grad()
def by_hand(method: Idbr, context: TrainingContext, batch: Batch, replays: bool) -> float:
    """Return the paper's sum of means over the joined batch of a step."""
    head, task_head = method.head, method.task_head
    pooled = context.backbone.pooled(batch)
    g, s = (linear(pooled, item.weight, item.bias).tanh() for item in (head.generic, head.specific))
    scores = linear(torch.cat([g, s], 1), head.weight, head.bias)
    real, halves = is_real(batch), is_halves(batch)
    entropy = cross_entropy(scores, batch.label_ids, ignore_index=IGNORE)
    entropy += 0.7 * cross_entropy(linear(g[halves], head.order.weight, head.order.bias), orders(batch))
    if replays:
        tasks = (batch.rows[real] >= 0).long().repeat(2)
        entropy += 1.3 * cross_entropy(linear(torch.cat([s[real], s[halves]]), task_head.weight, task_head.bias), tasks)
    rows = [method.before["new"][n] if n >= 0 else method.before["stored"][-2 - n] for n in batch.rows[real].tolist()]
    before = torch.stack(rows)
    held = 0.4 * mse_loss(g[real], before[:, :6]) + 0.5 * mse_loss(s[real], before[:, 6:])
    return float(entropy + (5.0 if replays else 0.5) * held)


@pytest.mark.parametrize(("index", "replays"), [(0, False), (1, True)])
def test_a_steps_objective_is_the_papers_whatever_the_accumulation(lab: Lab, index: int, replays: bool) -> None:
    method, context, task = second_task(lab)
    changed(context, 1)
    (whole,) = prepared(context, task, index)
    assert len(whole) == (16 if replays else 8), "4 new rows, 4 stored ones, and the halves of each"
    expected = by_hand(method, context, whole, replays)
    assert objective(context, [whole]) == pytest.approx(expected, rel=1e-5)
    parted, context, task = second_task(lab, micro=1)
    changed(context, 1)
    assert objective(context, prepared(context, task, index)) == pytest.approx(expected, rel=1e-5)
    assert parted.head.features is None, "no graph outlives its micro-batch"


def test_features_before_the_task_are_those_of_the_model_before_it(lab: Lab) -> None:
    method, _, _ = second_task(lab)
    assert method.before["new"].shape == (14, 12) and method.before["stored"].shape == (STORED, 12)
    features = torch.stack([method.before["new"][3], method.before["stored"][1]])
    generic, specific = features.chunk(2, dim=1)
    assert float(method._distance(torch.tensor([3, -3]), generic, specific)) == 0
    assert float(method._distance(torch.tensor([3, -3]), generic + 1, specific)) == pytest.approx(0.4 * 2)
    assert method.tasks == ["colour", "animal"] and method.task_head.weight.shape == (2, 6)


def test_the_first_task_is_held_to_nothing(lab: Lab) -> None:
    context, _ = build(lab.config("bert", {"name": "idbr", **SETTINGS}), WORLD)
    task = begin_phase(context, 0)
    method = context.method
    assert isinstance(method, Idbr) and not method.before
    task.step = Step(1, 5, 1)
    loader = task.loader()
    mixed = method.prepare_batch(loader.micro_batches(1)[0])
    assert len(mixed) == 8 and int(is_real(mixed).sum()) == 4, "nothing is replayed"
    end_phase(context, task)
    assert [len(rows) for rows in method.stored.values()] == [STORED]


# ---- halves --------------------------------------------------------------------------------------------------------

SPECIAL = (0, 101, 102)


def texts(*rows: list[int], positions: tuple[int, ...]) -> Batch:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels, weight = torch.arange(len(rows)), torch.tensor([float(row != -1) for row in positions])
    return Batch(ids, mask, torch.zeros(len(rows), 0, dtype=torch.int64), labels, weight, torch.tensor(positions))


def test_halves_in_their_own_order_or_swapped() -> None:
    row = [101, 1, 2, 3, 4, 102]
    seen = set()
    for seed in range(40):
        batch = texts(row, [101, 9, 102], [0], positions=(3, -2, -1))
        halves = halves_of(batch, seed, SPECIAL, 24, 0)
        assert len(halves) == 2 and halves.label_ids.tolist() == [0, 1], "fill-ups have none"
        order, short = orders(halves).tolist()
        ids = halves.source_ids[0].tolist()
        assert short == IGNORE and halves.source_ids[1].tolist()[:3] == [101, 9, 102]
        middle = ids.index(102)
        first, second = ids[1:middle], ids[middle + 1 : -1]
        assert ids[0] == 101 and ids[-1] == 102 and first and second
        assert (second + first if order else first + second) == [1, 2, 3, 4]
        seen.add((order, len(first)))
    assert seen == {(order, length) for order in (0, 1) for length in (1, 2, 3)}
    assert bool((halves.rows <= HALVES).all())


def test_halves_depend_on_the_example_alone_and_fit() -> None:
    item, other = [101, 1, 2, 3, 4, 102], [101, 5, 6, 7, 102]
    both = halves_of(texts(item, other, positions=(3, 8)), 7, SPECIAL, 24, 0)
    (alone,) = halves_of(texts(other, positions=(8,)), 7, SPECIAL, 24, 0).source_ids.tolist()
    assert both.source_ids[1].tolist()[:6] == alone
    cut = halves_of(texts(item, positions=(3,)), 7, SPECIAL, 6, 0).source_ids[0].tolist()
    assert len(cut) == 6 and sorted(cut) == [1, 2, 3, 101, 102, 102]


# ---- what is stored ------------------------------------------------------------------------------------------------


def test_the_rows_nearest_to_centroids() -> None:
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 2.0], [9.0, 0.0], [9.0, 1.0], [9.0, 2.0], [9.0, 9.0]])
    for seed in range(3):
        assert set(nearest_to_centroids(x, 2, seed).tolist()) & {1} and len(nearest_to_centroids(x, 2, seed)) == 2
        assert nearest_to_centroids(x, 9, seed).tolist() == list(range(7))
    apart = torch.tensor([[float(10 * (row // 3)), float(row % 3)] for row in range(6)])
    assert nearest_to_centroids(apart, 2, 0).tolist() == [1, 4]
    far = torch.tensor([[1e6, 0.0], [1e6, 3e5]])  # whose distances hide no differences of others
    assert nearest_to_centroids(torch.cat([apart, far]), 3, 0).tolist() == [1, 4, 6]


def test_of_two_rows_as_near_to_their_centroid_the_first_is_kept_on_every_device() -> None:
    pairs = torch.tensor([[0.1, 0.3], [0.7, 0.4], [5.2, 5.1], [5.9, 5.3]])
    for noise in (0.0, 1e-7, -1e-7):  # as arithmetic differs between devices
        moved = pairs + noise * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
        assert nearest_to_centroids(moved, 2, 0).tolist() == [0, 2]


# ---- the head ------------------------------------------------------------------------------------------------------


def test_a_new_label_changes_no_old_score_and_a_new_model_begins_as_the_first(lab: Lab) -> None:
    cpu, states = torch.device("cpu"), torch.randn(2, 8)
    head = DisentangledHead(8, 3, 1, cpu, TaskHead(3, cpu))
    head.grow(["a", "b"])
    torch.nn.init.normal_(head.weight)
    before: Tensor = head(states)
    head.grow(["b", "c"])
    assert head.labels == ["a", "b", "c"] and torch.equal(head(states)[:, :2], before)
    with torch.no_grad():
        head.generic.weight += 1
    head.clear()
    fresh = DisentangledHead(8, 3, 1, cpu, TaskHead(3, cpu))
    assert torch.equal(head.generic.weight, fresh.generic.weight) and head.labels == [] and not len(head.bias)


def test_the_task_head_has_a_rate_of_its_own(lab: Lab) -> None:
    method = {"name": "idbr", "task_learning_rate": 5e-4}
    context, open_engine = build(lab.config("bert", method, train={"learning_rate": 3e-5}), WORLD)
    begin_phase(context, 0)
    engine = open_engine(1, 4)
    assert isinstance(engine, TorchEngine)
    trained, groups = engine.trained, engine.optimizer.param_groups
    result = {id(p): group["lr"] for group in groups for p in group["params"]}
    own = {name: result[id(p)] for name, p in trained.items()}
    assert {name for name, rate in own.items() if rate == 5e-4} == {"task_head.weight", "task_head.bias"}
    assert len(result) == len(trained) and set(own.values()) == {3e-5, 5e-4}


# ---- what it cannot do ---------------------------------------------------------------------------------------------


def test_backbones_and_objectives_that_cannot_be_are_refused(lab: Lab) -> None:
    for kind in ("t5", "llama"):
        with pytest.raises(ConfigError, match="method 'idbr' classifies sentence states, and the backbone writes"):
            check(lab.config(kind, "idbr"))
    with pytest.raises(ConfigError, match=r"method 'idbr' learns answers, but stream.objective is mlm"):
        check(lab.config("masked", "idbr", stream={"objective": "mlm"}))


def test_serving_is_refused_in_one_sentence(lab: Lab, tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    run(lab.config("bert", {"name": "idbr", "selection": "random"}, stream={"tasks": lab.tasks[:1]}), storage)
    with pytest.raises(BankError, match="has no snapshot: method 'idbr' puts two learned projections between"):
        snapshot_at(f"{storage.root}/bank")


def test_the_first_phase_does_not_depend_on_replay() -> None:
    idbr_config, other = IdbrConfig(every=3, hold=1), IdbrConfig(hold_replayed=0, task_weight=2)
    assert idbr_config.cache_key(0, ("a", "b")) == other.cache_key(0, ("a", "b")) != {}
    assert idbr_config.cache_key(1, ("a", "b")) != other.cache_key(1, ("a", "b"))
