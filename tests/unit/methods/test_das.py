"""DAS: importance of units, what it scales, and the contrast between features, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase
from tiny import KINDS, Complete, Lab
from torch import Tensor

from raycl.backbone.base import loss_count
from raycl.backbone.gates import gated
from raycl.data.loader import Collate, eval_batches
from raycl.errors import ConfigError
from raycl.methods.base import trained_names
from raycl.methods.masks.das import Das, contrast, contrast_in_batch, standardized
from raycl.methods.masks.units import Units, parameters_of, units_of
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.data import PhaseData
from raycl.training.setup.method_checks import check_dropout
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str = "bert", sections: Any = None, **settings: Any) -> tuple[Das, TrainingContext]:
    context, _ = build(lab.config(kind, {"name": "das", **settings}, **(sections or {})), WORLD)
    assert isinstance(context.method, Das)
    return context.method, context


def batch_of(context: TrainingContext, rows: int = 4) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[0], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    return next(iter(eval_batches(Collate([table], codec.pad_id, labels), rows)))


# ---- units ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_attention_and_feed_forward_linear_has_its_units(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    model = context.backbone.model
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    blocks = [name for name in linears if name.rpartition(".")[2] not in ("lm_head", "dense_pooler")]
    covered = {name.removesuffix(".weight") for name in method.sides if name.endswith(".weight")}
    assert covered == {name for name in blocks if "pooler" not in name}
    heads = [unit for unit in method.units if unit.width > 1]
    assert all(unit.count == model.config.num_attention_heads and len(unit.writers) == 3 for unit in heads)
    inner = [unit for unit in method.units if unit.writers and unit.width == 1]
    gated_blocks = kind == "llama"
    assert all(len(unit.writers) == 1 + gated_blocks for unit in inner)


def test_grouped_heads_share_keys_and_values_and_two_linears_in_one_have_each_unit_twice() -> None:
    heads = Units("o", "input", 4, 2, {})
    values = torch.tensor([0.1, 0.4, 0.3, 0.2])
    assert heads.over_rows(values, 8).tolist() == heads.spread(values).tolist()
    torch.testing.assert_close(heads.over_rows(values, 4), torch.tensor([0.4, 0.4, 0.3, 0.3]))
    inner = Units("down", "input", 4, 1, {})
    assert inner.over_rows(values, 8).tolist() == [*values.tolist(), *values.tolist()]


def test_a_backbone_with_queries_keys_and_values_in_one_linear_is_refused() -> None:
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10))
    with pytest.raises(ConfigError, match="have linears of their own"):
        units_of(model, attention_outputs=False)


# ---- importance ----------------------------------------------------------------------------------------------------


def test_importance_is_standardized_in_each_layer() -> None:
    result = standardized(torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(result, torch.tensor([1.0, 0.0, 1.0]).tanh())
    assert standardized(torch.tensor([5.0, 5.0])).tolist() == [0.0, 0.0]
    torch.testing.assert_close(standardized(torch.tensor([10.0, 20.0, 30.0])), result)


@pytest.mark.parametrize("kind", KINDS)
def test_a_domains_importance_is_the_gradient_of_its_loss(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind, sample=100)
    phase = begin_phase(context)
    assert method.importance is None, "general=false"
    if context.backbone.head is not None:
        torch.nn.init.normal_(context.backbone.head.weight)  # type: ignore[arg-type]
    end_phase(context, phase)
    assert method.importance is not None
    unit = method.units[-1]
    ones = torch.ones(unit.count, requires_grad=True)
    batch = batch_of(context, rows=14)
    with gated(context.backbone.model, {unit.gate_point: lambda rows: unit.spread(ones)}):
        (gradient,) = torch.autograd.grad(context.backbone(batch).loss_sum, ones)
    torch.testing.assert_close(
        method.importance[method.slices[unit.gate_point]], standardized(gradient), atol=1e-3, rtol=1e-3
    )
    before = method.importance.clone()
    end_phase(context, begin_phase(context, 1))
    assert bool((method.importance >= before).all()) and not torch.equal(method.importance, before)
    assert float(method.importance.min()) >= 0 and float(method.importance.max()) <= 1


def test_general_knowledge_is_measured_once_by_two_passes_with_dropout(lab: Lab) -> None:
    dropout = {"backbone": {"dropout": 0.2}}
    method, context = started(lab, sections=dropout, general=True)
    begin_phase(context)
    first = method.importance
    assert first is not None and float(first.max()) > 0
    again, other = started(lab, sections=dropout, general=True)
    begin_phase(other)
    assert again.importance is not None and torch.equal(again.importance, first), "by the seed alone"
    again.load_state_dict(*method.state_dict())
    begin_phase(other, 1)
    assert torch.equal(again.importance, first), "a later task measures none"


def test_general_knowledge_needs_dropout(lab: Lab) -> None:
    settings = {"name": "das", "general": True}
    with pytest.raises(ConfigError, match=r"backbone\.dropout is 0: set it to 0\.1, or method\.general to false"):
        check_dropout(lab.config("bert", settings))
    with pytest.raises(ConfigError, match="method 'replay' compares passes with dropout"):
        check_dropout(lab.config("bert", {"name": "replay", "learner": settings}))
    check_dropout(lab.config("bert", settings, backbone={"dropout": 0.1}))
    check_dropout(lab.config("bert", "das"))


def test_the_disagreement_by_hand(lab: Lab) -> None:
    method, context = started(lab)
    begin_phase(context)
    batch = batch_of(context, rows=14)
    assert not batch.source_mask.all()
    assert float(method._disagreement(batch).detach()) == pytest.approx(0.0, abs=1e-5), (
        "without dropout both passes agree"
    )
    states = [torch.randn(14, batch.source_ids.shape[1], 32) for _ in range(2)]
    given = iter(states)
    method.backbone.text_states = lambda batch: (next(given), batch.source_mask)  # type: ignore[method-assign]
    total = 0.0
    for row, mask in enumerate(batch.source_mask):
        for index in range(int(mask.sum())):
            p, q = (state[row, index].softmax(0) for state in states)
            total += float((p * (p / q).log()).sum())
    assert float(method._disagreement(batch).detach()) == pytest.approx(total, rel=1e-4)


# ---- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_scaled_by_the_unit_of_their_row_or_head(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    begin_phase(context)
    own = dict(context.backbone.named_parameters())
    ones = {name: torch.ones_like(own[name]) for name in trained_names(context.backbone)}
    assert method.transform_gradients(ones) is ones, "nothing is important yet"
    method.importance = torch.rand(method.units[-1].count + method.slices[method.units[-1].gate_point].start)
    gradients = method.transform_gradients(ones)
    for unit in method.units:
        value = method.importance[method.slices[unit.gate_point]]
        weight = gradients[f"model.{unit.path}.weight"]
        if unit.side == "output":
            torch.testing.assert_close(weight[:, 0], 1 - value)
        elif unit.width > 1:
            torch.testing.assert_close(weight[0].view(unit.count, -1)[:, 0], 1 - value)
        for writer in unit.writers:
            rows = gradients[f"model.{writer}.weight"][:, 0]
            expected = 1 - value if unit.width == 1 else 1 - value.repeat_interleave(unit.width)
            torch.testing.assert_close(rows, expected)
    covered = {f"model.{name}" for name in parameters_of(context.backbone.model, method.units)}
    assert all(torch.equal(gradients[name], ones[name]) for name in ones if name not in covered)


def _cosine(item: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(item, other, dim=0))


def test_the_contrast_by_hand() -> None:
    torch.manual_seed(0)
    first, second, third = torch.randn(3, 3, 5)
    own = contrast(first, second, third, 0.5)
    real = torch.tensor([True, True, False])
    both, counts = contrast_in_batch(first, second, third, real, 0.5)
    assert counts.tolist() == [1.0, 1.0, 0.0] and both.isfinite().all()
    for row in range(2):
        scores = torch.tensor([_cosine(first[row], second[row]), _cosine(first[row], third[row])]) / 0.5
        assert float(own[row]) == pytest.approx(-float(scores.log_softmax(0)[0]), rel=1e-5)
        others = [_cosine(first[row], item) / 0.5 for item in (*second[:2], *third[:2])]
        assert float(both[row]) == pytest.approx(-float(torch.tensor(others).log_softmax(0)[row]), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_means_of_whole_texts_and_important_units_are_scaled(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    begin_phase(context)
    batch = batch_of(context)
    assert method.penalty(batch, None) is None  # type: ignore[arg-type]
    method.importance = torch.ones(method.slices[method.units[-1].gate_point].stop)
    context.backbone.eval()
    first = method.penalty(batch, None)  # type: ignore[arg-type]
    assert first is not None and float(first.detach()) == pytest.approx(math.log(2), abs=1e-4)
    method.importance = torch.rand(len(method.importance))
    second = method.penalty(batch, None)  # type: ignore[arg-type]
    assert second is not None and abs(float(second.detach()) - float(first.detach())) > 1e-4
    alone = [method.penalty(_row(batch, row), None) for row in range(4)]  # type: ignore[arg-type]
    counts = [loss_count(_row(batch, row)) for row in range(4)]
    mean = sum(float(item.detach()) * n for item, n in zip(alone, counts, strict=True)) / sum(counts)  # type: ignore[union-attr]
    assert float(second.detach()) == pytest.approx(mean, rel=1e-3), "no text depends on the others"


def _row(batch: Batch, row: int) -> Batch:
    length = int(batch.source_mask[row].sum())
    fields = {name: getattr(batch, name)[row : row + 1] for name in ("target_ids", "label_ids", "weight", "rows")}
    return Batch(batch.source_ids[row : row + 1, :length], batch.source_mask[row : row + 1, :length], **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_changes_neither_importance_nor_gradients(lab: Lab, kind: str) -> None:
    collected = []
    for again in (False, True):
        sections = {"backbone": {"dropout": 0.1, "gradient_checkpointing": again}}
        method, context = started(lab, kind, sections, general=True)
        begin_phase(context)
        assert method.importance is not None
        context.backbone.train()
        torch.manual_seed(0)
        penalty = method.penalty(batch_of(context), None)  # type: ignore[arg-type]
        assert penalty is not None
        penalty.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in context.backbone.parameters() if p.grad is not None]
        collected.append([method.importance, *gradients])
    assert len(collected[0]) > 10
    for item, other in zip(*collected, strict=True):
        torch.testing.assert_close(item, other, atol=1e-4, rtol=1e-3)


def test_hidden_words_are_put_back_for_features(lab: Lab) -> None:
    method, context = started(lab, sections={"stream": {"objective": "mlm"}, "backbone": {"name": masked(lab)}})
    begin_phase(context)
    data = PhaseData(context, context.phases[0], WORLD)
    seen: list[Batch] = []
    data.forward_pass(seen.append, 4)
    codec, backbone = context.backbone.codec, context.backbone
    whole, _ = backbone.whole_texts(seen[0])
    assert bool((seen[0].source_ids == codec.mask_id).any()) and not bool((whole == codec.mask_id).any())
    assert method.units


def masked(lab: Lab) -> str:
    return str(lab.model_folder("masked"))


def test_importance_is_kept_with_the_run(complete: Complete) -> None:
    method = complete("bert", "das", "torch").context.method
    assert isinstance(method, Das) and method.importance is not None and float(method.importance.max()) > 0.5
    assert torch.equal(method.state_dict()[1]["importance"], method.importance)
