"""HAT: masks, their schedule and gradients by hand; what adapters of all tasks share, and what holds earlier ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase, routed
from tiny import Complete, Lab, Taught, evaluated_by, opened
from torch import Tensor

from raycl.bank import Bank
from raycl.data.loader import Collate, eval_batches
from raycl.errors import ConfigError
from raycl.methods.base import activate, activate_batch, trained_names
from raycl.methods.context import Step
from raycl.methods.masks.hard_attention import HardAttention, annealed, freedom
from raycl.methods.masks.hat_adapter import HatAdapter
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.setup.method_checks import check_optimizer
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Mixture

WORLD = DistributedContext.alone(torch.device("cpu"))


def attention(values: list[float], scale: float = 2.0, max_scale: float = 400.0) -> HardAttention:
    hard_attention = HardAttention({("a", "units"): len(values)}, max_scale, torch.device("cpu"), lambda: scale)
    hard_attention.embedding = torch.nn.Parameter(torch.tensor(values))
    return hard_attention


def started(lab: Lab, kind: str = "bert", **settings: Any) -> tuple[HatAdapter, TrainingContext]:
    context, _ = build(lab.config(kind, {"name": "hat-adapter", "bottleneck_size": 6, **settings}), WORLD)
    assert isinstance(context.method, HatAdapter)
    return context.method, context


def batch_of(context: TrainingContext, task: int = 0, rows: int = 4) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[task], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    return next(iter(eval_batches(Collate([table], codec.pad_id, labels, texts=True), rows)))


# ---- the formulas --------------------------------------------------------------------------------------------------


def test_the_scale_rises_within_each_epoch_and_masks_become_binary() -> None:
    assert [annealed(step, 3, 4.0) for step in range(5)] == [0.25, 2.125, 4.0, 0.25, 2.125]
    assert annealed(0, 1, 400.0) == 400.0, "an epoch of one step trains the masks that are used"
    soft = attention([0.5, -0.5, 0.001], scale=1 / 400)()
    assert (soft - 0.5).abs().max() < 1e-3
    hard = attention([0.5, -0.5, 0.2])
    hard.end("colour", hard.embedding)
    assert hard.masks["colour"].tolist() == pytest.approx([1.0, 0.0, 1.0], abs=1e-30)


def test_the_compensated_gradient_is_that_of_the_steepest_sigmoid_at_e() -> None:
    """sigmoid'(s e) s * s_max / s * (cosh(s e) + 1) / (cosh(e) + 1) = s_max sigmoid'(e)."""
    masks = attention([0.3, -1.2, 2.0], scale=3.0, max_scale=7.0)
    masks.sparsity()
    (gradient,) = torch.autograd.grad(masks().sum(), masks.embedding)
    item = torch.sigmoid(masks.embedding.detach())
    torch.testing.assert_close(masks.compensated(gradient), 7.0 * item * (1 - item), rtol=1e-3, atol=1e-4)
    extreme = attention([6.0, -6.0], scale=400.0)
    extreme.sparsity()
    assert extreme.compensated(torch.ones(2)).isfinite().all(), "cosh(2400) would not be"


def test_a_unit_at_the_bound_gets_gradients_and_comes_back(lab: Lab) -> None:
    method, _ = started(lab)
    assert method.constraint is not None
    (name,) = method.constraint.names
    far = method.constraint(name, torch.zeros(3), torch.tensor([-7.0, 2.0, 6.5]))
    assert far.tolist() == [-6.0, 2.0, 6.0]
    masks = attention(far.tolist(), scale=0.5)
    (gradient,) = torch.autograd.grad(masks().sum(), masks.embedding)
    assert bool((gradient > 0).all()), "a gradient of zero would keep it there"


def test_the_sparsity_counts_free_units_alone() -> None:
    masks = attention([0.0, 1.0, -1.0], scale=1.0)
    assert float(masks.sparsity().detach()) == pytest.approx((0.5 + 0.731059 + 0.268941) / 3, abs=1e-5)
    masks.used = torch.tensor([1.0, 0.25, 0.0])
    assert float(masks.sparsity().detach()) == pytest.approx((0.75 * 0.731059 + 0.268941) / 1.75, abs=1e-5)


def test_a_weight_is_held_as_far_as_both_its_units_are_in_use() -> None:
    outputs, inputs = torch.tensor([1.0, 0.2]), torch.tensor([0.5, 1.0, 0.0])
    expected = torch.tensor([[0.5, 0.0, 1.0], [0.8, 0.8, 1.0]])
    torch.testing.assert_close(freedom(outputs, inputs), expected)
    assert freedom(outputs, None).tolist() == (1 - outputs)[:, None].tolist()
    assert freedom(None, inputs).tolist() == (1 - inputs)[None].tolist()


# ---- the method ----------------------------------------------------------------------------------------------------


def test_what_is_published_computes_what_was_trained(lab: Lab) -> None:
    method, context = started(lab)
    phase = begin_phase(context)
    assert "unit_masks.embedding" in trained_names(context.backbone)
    for layer in method.stack.layers.values():
        torch.nn.init.normal_(layer.lora_B)  # type: ignore[arg-type]
    context.backbone.eval()
    batch = batch_of(context)
    with activate_batch(method, batch):
        trained = context.backbone.states(batch)
    learned = end_phase(context, phase)
    assert learned is not None and list(learned.adapters) == ["colour"] and learned.router.kind == "task"
    with activate(method, routed(method, learned, batch, "colour")):
        torch.testing.assert_close(context.backbone.states(batch), trained, atol=1e-5, rtol=1e-4)
    with activate(method, None):
        assert not torch.allclose(context.backbone.states(batch), trained, atol=1e-2)
    (low, high), *_ = learned.adapters["colour"].linears.values()
    dead = ~high.any(0)
    assert dead.any() and not low[dead].any() and low[~dead].any(1).all()


def test_masks_of_training_are_of_the_step(lab: Lab) -> None:
    method, context = started(lab)
    phase = begin_phase(context)
    context.backbone.train()
    scales = []
    for step in range(4):
        phase.step = Step(step)
        scales.append(method._scale())
    assert scales == [annealed(step, 4, 400.0) for step in range(4)], "14 rows in batches of 4"
    context.backbone.eval()
    assert method._scale() == 400.0


def test_shared_weights_in_use_do_not_move_by_one_bit(complete: Complete) -> None:
    """The second task of a whole run, with AdamW: rows of A and entries of B whose units the first one uses."""
    done = complete("bert", "hat-adapter", "torch")
    method = done.context.method
    assert isinstance(method, HatAdapter)
    bank = Bank(done.storage.sub("bank"))
    first, last = bank.open(1), bank.open(2)
    before, after = (_adapter(bank, snapshot, "colour") for snapshot in (first, last))
    binary = method.masks.masks["colour"]
    moved, held = False, 0
    for path, (low, high) in before.linears.items():
        units = binary[method.masks.places[path, "units"]]
        used = units == 1
        outputs = binary[method.masks.places[path, "outputs"]] == 1
        low_now, high_now = after.linears[path]
        assert torch.equal(low[used], low_now[used])
        assert torch.equal(high[outputs][:, used], high_now[outputs][:, used])
        held += int(used.sum())
        other = _adapter(bank, last, "animal").linears[path][1]
        moved |= bool(other.any())
    assert held and moved


def _adapter(bank: Bank, snapshot: Any, name: str) -> Any:
    (entry,) = [entry for entry in snapshot.adapters if entry.name == name]
    assert entry.tasks == (name,)
    return bank.fetch(entry, snapshot.layouts[entry.layout])


def test_gradients_of_a_later_task_are_masked_and_the_first_ones_are_not(lab: Lab) -> None:
    method, context = started(lab)
    phase = begin_phase(context)
    names = [name for name in trained_names(context.backbone) if ".lora_" in name]
    own = dict(context.backbone.named_parameters())
    ones = {name: torch.ones_like(own[name]) for name in names}

    def transformed() -> dict[str, Tensor]:
        method.penalty(None, None)  # type: ignore[arg-type]
        given = {**ones, "unit_masks.embedding": torch.zeros_like(method.masks.embedding)}
        return method.transform_gradients(given)

    assert all(bool((transformed()[name] == 1).all()) for name in names)
    with torch.no_grad():
        method.masks.embedding.copy_(torch.linspace(-0.02, 0.02, len(method.masks.embedding)))
    end_phase(context, phase)
    begin_phase(context, 1)
    after, mask = transformed(), method.masks.masks["colour"]
    for path in method.stack.layers:
        units, outputs = (mask[method.masks.places[path, which]] for which in ("units", "outputs"))
        torch.testing.assert_close(after[f"model.{path}.lora_A"][:, 0], 1 - units)
        least = torch.minimum(outputs[:, None], units[None])
        torch.testing.assert_close(after[f"model.{path}.lora_B"], 1 - least)


def test_an_earlier_task_that_later_ones_move_is_published_again(lab: Lab) -> None:
    method, context = started(lab)
    phase = begin_phase(context)
    with torch.no_grad():
        method.masks.embedding.zero_()  # masks of one half: nothing is held wholly
        for layer in method.stack.layers.values():
            layer.lora_B.fill_(1.0)  # type: ignore[union-attr]
    end_phase(context, phase)
    phase = begin_phase(context, 1)
    layer = next(iter(method.stack.layers.values()))
    assert layer.lora_B is not None and bool((layer.lora_B == 1).all()), "the shared weights go on"
    with torch.no_grad():
        layer.lora_B.fill_(3.0)
    learned = end_phase(context, phase)
    assert learned is not None and list(learned.adapters) == ["colour", "animal"]
    assert learned.owners == {"colour": ["colour"], "animal": ["animal"]}
    (_, high), *_ = learned.adapters["colour"].linears.values()
    torch.testing.assert_close(high, torch.full_like(high, 0.75))
    (_, kept), *_ = method.stack.states["colour"].linears.values()
    assert torch.equal(kept, high)


def test_tasks_trained_alone_share_nothing(lab: Lab) -> None:
    method, context = started(lab)
    method.task_id_given = True
    phase = begin_phase(context)
    with torch.no_grad():
        for layer in method.stack.layers.values():
            layer.lora_B.fill_(1.0)  # type: ignore[union-attr]
    end_phase(context, phase)
    begin_phase(context, 1)
    assert not method.masks.used.any()
    assert not any(layer.lora_B.any() for layer in method.stack.layers.values())  # type: ignore[union-attr]


def test_the_snapshot_answers_each_task_as_measured(taught: Taught) -> None:
    done = taught("bert", "hat-adapter")
    bank = Bank(done.storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None
    model, context = opened(bank, newest), done.context
    context.backbone.eval()
    for number, task in enumerate(context.stream.tasks):
        batch = batch_of(context, number)
        texts, tasks = list(batch.texts), [task.name] * len(batch)
        with activate(context.method, evaluated_by(done).mixture(batch, task.name)):
            scores, labels = context.backbone.score_labels(batch)
        expected = [labels[column] for column in scores.argmax(1).tolist()]
        assert model.predict(batch, texts, tasks, 4) == expected


def test_weight_decay_is_refused(lab: Lab) -> None:
    config = lab.config("bert", "hat-adapter", train={"weight_decay": 0.01})
    with pytest.raises(ConfigError, match=r"would move them: set train\.weight_decay to 0"):
        check_optimizer(config)
    check_optimizer(lab.config("bert", "hat-adapter"))


def test_texts_of_both_tasks_in_one_batch_get_their_own_masks(taught: Taught) -> None:
    done = taught("bert", "hat-adapter")
    method, backbone = done.context.method, done.context.backbone
    backbone.eval()
    batch = batch_of(done.context, 0, rows=2)
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    with activate(method, Mixture(("colour", "animal"), weights)):
        together = backbone.states(batch)
    for row, name in enumerate(("colour", "animal")):
        with activate(method, Mixture.same({name: 1.0}, 2)):
            alone = backbone.states(batch)
        torch.testing.assert_close(together[row], alone[row], atol=1e-5, rtol=1e-5)
    assert math.isfinite(float(together.sum()))
