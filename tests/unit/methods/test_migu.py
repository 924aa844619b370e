"""MIGU's properties (its section 3), each on real tiny models: which rows are masked and by what, and nothing else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from migu_started import WORLD, Started, sgd
from tiny import Lab
from torch import Tensor

from raycl.generation.batch_answers import predict
from raycl.methods.base import activate_batch
from raycl.methods.migu.row_selection import kept, masked_count
from raycl.training.phase.step import train_step
from raycl.types import IGNORE, Batch

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# ---- which rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "share", "count"), [(1024, 0.7, 308), (8, 0.7, 3), (1024, 0.95, 52), (1024, 0.99, 11), (100, 0.29, 71)]
)
def test_so_many_rows_are_kept(rows: int, share: float, count: int) -> None:
    n = torch.rand(3, rows, generator=torch.Generator().manual_seed(0))
    assert kept(n, share, "floor").sum(1).tolist() == [count] * 3
    assert rows - masked_count(share, rows) == count


def test_the_code_rule_keeps_what_lies_at_or_above_the_quantile() -> None:
    n = torch.rand(1, 1024, generator=torch.Generator().manual_seed(0))
    assert int(kept(n, 0.7, "quantile").sum()) == 307
    assert int(kept(n[:, :768], 0.1, "quantile").sum()) == 691
    assert int(kept(n[:, :8], 0.1, "quantile").sum()) == 7
    assert int(kept(n, 1.0, "quantile").sum()) == 1 and int(kept(n, 1.0, "floor").sum()) == 0


def test_the_smallest_are_masked_and_of_equal_ones_the_first() -> None:
    n = torch.tensor([[4.0, 1.0, 3.0, 2.0]])
    assert kept(n, 0.5, "floor").tolist() == [[True, False, True, False]]
    assert kept(n, 0.3, "floor").tolist() == [[True, False, True, True]]
    assert kept(torch.ones(1, 4), 0.5, "floor").tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("rule", ["floor", "quantile"])
def test_a_constant_factor_changes_nothing(rule: Any) -> None:
    n = torch.rand(4, 32, generator=torch.Generator().manual_seed(2))
    assert torch.equal(kept(n, 0.6, rule), kept(n * 1024, 0.6, rule))
    assert torch.equal(kept(n, 0.6, rule), kept(n / 128, 0.6, rule))


# ---- what the magnitudes are ---------------------------------------------------------------------------------------


def by_hand(started: Started, path: str, batch: Batch, real: Tensor) -> Tensor:
    """Return |output| of the layer, summed over `real` `[B, S]`."""
    units: list[Tensor] = []
    handle = started.parts.backbone.model.get_submodule(path).register_forward_hook(lambda *a: units.append(a[2]))
    with torch.no_grad(), activate_batch(started.parts.method, batch):
        started.parts.backbone(batch)
    handle.remove()
    return (units[0].abs() * real.unsqueeze(-1)).sum((0, 1))


PLACES = [
    ("bert", "encoder.layer.1.attention.self.query", "source"),
    ("bert", "encoder.layer.0.output.dense", "source"),
    ("t5", "encoder.block.0.layer.1.DenseReluDense.wi", "source"),
    ("t5", "decoder.block.1.layer.0.SelfAttention.q", "target"),
    ("t5", "decoder.block.1.layer.1.EncDecAttention.q", "target"),
    ("t5", "decoder.block.1.layer.1.EncDecAttention.k", "source"),
    ("t5", "decoder.block.0.layer.2.DenseReluDense.wo", "target"),
    ("llama", "layers.1.mlp.down_proj", "joined"),
]


@pytest.mark.parametrize(("kind", "path", "side"), PLACES)
def test_only_real_tokens_of_real_examples_count(lab: Lab, kind: str, path: str, side: str) -> None:
    started = Started(lab, kind)
    path = path if kind != "llama" else f"model.{path}"
    batch = started.batch([0, 1, 5], size=5)
    assert batch.weight.tolist() == [1, 1, 1, 0, 0] and not batch.source_mask.all(), "pads and fill-ups are there"
    real = {"source": batch.source_mask > 0, "target": batch.target_ids != IGNORE}.get(side)
    if real is None:
        lengths = (batch.source_mask.sum(1) + (batch.target_ids != IGNORE).sum(1)).unsqueeze(1)
        real = torch.arange(int(lengths.max())) < lengths
    expected = by_hand(started, path, batch, real & (batch.weight > 0).unsqueeze(1))
    units_slice = started.migu._layout.units[path, "output"].span
    result = started.magnitudes(batch)[units_slice]
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    alone = sum(started.magnitudes(started.batch([row]))[units_slice] for row in (0, 1, 5))
    torch.testing.assert_close(result, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "path", "side"), PLACES[:3])
def test_pads_count_on_demand(lab: Lab, kind: str, path: str, side: str) -> None:
    started = Started(lab, kind, count_pads=True)
    batch = started.batch([0, 1, 5], size=5)
    assert side == "source" and not batch.source_mask.all()
    everywhere = torch.ones_like(batch.source_mask, dtype=torch.bool) & (batch.weight > 0).unsqueeze(1)
    result = started.magnitudes(batch)[started.migu._layout.units[path, "output"].span]
    torch.testing.assert_close(result, by_hand(started, path, batch, everywhere), rtol=1e-5, atol=1e-5)


def test_accumulation_and_joined_batches_see_the_same(lab: Lab) -> None:
    started = Started(lab, "t5")
    joined = started.magnitudes(started.batch([0, 1, 2, 3]))
    parts = started.magnitudes(started.batch([0, 1]), started.batch([2]), started.batch([3], size=3))
    torch.testing.assert_close(joined, parts, rtol=1e-5, atol=1e-5)


def test_sign_does_not_matter_and_tokens_do_not_cancel(lab: Lab) -> None:
    started = Started(lab)
    units = started.migu._layout.units["encoder.layer.0.attention.self.query", "output"]
    layer = started.parts.backbone.model.get_submodule(units.path)
    batch = started.batch([0, 1])
    first = started.magnitudes(batch)[units.span]
    with torch.no_grad():
        layer.weight.neg_()
        layer.bias.neg_()
    assert torch.equal(started.magnitudes(batch)[units.span], first)
    started.migu.begin_step(1, 1, lambda tensor: tensor)
    started.migu._magnitudes._real, started.migu._magnitudes._counts = (
        {"source": torch.ones(1, 2, dtype=torch.bool)},
        True,
    )
    magnitudes = started.migu._magnitudes
    magnitudes._observe_output(
        units, magnitudes.sums[units.span], layer, None, torch.tensor([3.0, -3.0]).view(1, 2, 1).expand(1, 2, 32)
    )
    assert started.migu._magnitudes.sums[units.span].tolist() == [6.0] * 32


def test_evaluation_and_recomputation_do_not_count(lab: Lab) -> None:
    started = Started(lab, "t5")
    batch = started.batch([0, 1])
    units = started.magnitudes(batch)
    predict(started.parts.backbone, batch, 3)
    started.parts.backbone(batch)
    assert torch.equal(started.migu._magnitudes.sums, units)
    plain, saving = Started(lab), Started(lab, backbone={"gradient_checkpointing": True})
    for item in (plain, saving):
        item.step(item.batch([0, 1, 2]))
    assert torch.equal(plain.migu._magnitudes.sums, saving.migu._magnitudes.sums)
    assert all(torch.equal(value, saving.values()[name]) for name, value in plain.values().items())


def test_hooks_go_with_the_task_and_those_of_others_stay(lab: Lab) -> None:
    for method in ("finetune", "lora"):
        started = Started(lab, "bert", method)
        backbone = started.parts.backbone
        others = [module.register_forward_hook(lambda *given: None) for module in backbone.modules()]
        started.step(started.batch([0, 1]))
        started.parts.modifiers.end_task()
        left = [getattr(module, kind) for module in backbone.modules() for kind in HOOKS]
        assert sum(map(len, left)) == len(others)
        assert all(module.low_observer is None for module in backbone.modules() if hasattr(module, "low_observer"))


# ---- what is masked ------------------------------------------------------------------------------------------------


def test_attention_and_ffn_are_masked_and_nothing_else(lab: Lab) -> None:
    for kind, count in (("bert", 12), ("t5", 32), ("llama", 14)):
        names = set(Started(lab, kind).migu._layout.rows)
        assert len(names) == count
        assert not any(word in name for name in names for word in ("embed", "norm", "head", "bias", "pooler", "shared"))


@pytest.mark.parametrize(("kind", "name"), [("t5", "model.shared.weight"), ("llama", "model.lm_head.weight")])
def test_the_head_is_masked_on_demand(lab: Lab, kind: str, name: str) -> None:
    assert name not in Started(lab, kind).migu._layout.rows
    started = Started(lab, kind, include_lm_head=True)
    assert name in started.migu._layout.rows
    batch, backbone = started.batch([0, 1, 5], size=5), started.parts.backbone
    result = started.magnitudes(batch)[started.migu._layout.units["lm_head", "output"].span]
    backbone.every_position = True  # prompts' tokens count too, though their logits carry no loss
    real = backbone.real_tokens(batch)[backbone.side("lm_head")]
    torch.testing.assert_close(result, by_hand(started, "lm_head", batch, real), rtol=1e-5, atol=1e-5)


def test_masked_rows_have_no_gradient_and_do_not_move(lab: Lab) -> None:
    for bias in (False, True):
        started = Started(lab, bias=bias)
        sgd(started.engine)
        before = started.values()
        started.step(started.batch([0, 1, 2, 3]))
        after, rows = started.values(), started.migu._layout.rows
        assert any(name.endswith(".bias") for name in rows) is bias
        for name, own in rows.items():
            still = ~started.mask()[own.span]
            moved = (after[name] != before[name]).flatten(1).any(1) if own.dims == 2 else after[name] != before[name]
            assert int(still.sum()) == masked_count(0.5, len(still))
            assert not moved[still].any()
            if "self.key" not in name:  # a key's bias shifts all scores alike, and some FFN units are off
                assert moved[~still].float().mean() > 0.5


def test_a_threshold_of_one_stops_the_masked_layers(lab: Lab) -> None:
    started = Started(lab, "t5", threshold=1.0)
    sgd(started.engine)
    before = started.values()
    started.step(started.batch([0, 1]))
    moved = {name for name, value in started.values().items() if not torch.equal(value, before[name])}
    assert moved and not moved & set(started.migu._layout.rows)


def test_adam_moves_masked_rows_by_momentum_unless_the_update_is_masked(lab: Lab) -> None:
    """Masks (1, 0), then (0, 1) at lr 0.1, gradient 1: row 0 moves by 0.1 and then by 0.067 (Adam's own arithmetic)."""
    name = "model.encoder.layer.0.attention.self.query.weight"
    for mask_update, second in ((False, 0.067), (True, 0.0)):
        started = Started(lab, mask_update=mask_update)
        own, weights = started.migu._layout.rows[name], [started.values()[name]]
        for keeps_first in (True, False):
            started.migu.begin_step(1, 1, lambda tensor: tensor)
            mask = started.migu._mask.zero_()
            mask[own.span][: own.span.stop - own.span.start] = False
            mask[own.span.start] = keeps_first
            mask[own.span.start + 1] = not keeps_first
            started.migu._masked_rows.copy_(~mask)
            for parameter in started.engine.trained.values():  # type: ignore[attr-defined]
                parameter.grad = torch.ones_like(parameter)
            started.engine.step(started.parts.modifiers)
            weights.append(started.values()[name])
        moves = [(old - new)[0, 0].item() for old, new in pairwise(weights)]
        assert moves == pytest.approx([0.1, second], abs=5e-4)
        if mask_update:
            assert torch.equal(weights[0][2:], weights[2][2:]) and torch.equal(weights[0][1], weights[1][1])
            state = started.engine.optimizer_state([name])
            assert all(state[f"{name}/{moment}"][2:].count_nonzero() == 0 for moment in ("exp_avg", "exp_avg_sq"))


def test_mask_update_holds_against_weight_decay(lab: Lab) -> None:
    name = "model.encoder.layer.0.attention.self.query.weight"
    for mask_update in (False, True):
        started = Started(lab, mask_update=mask_update, train={"weight_decay": 0.5})
        before = started.values()[name]
        started.step(started.batch([0, 1]))
        still = ~started.mask()[started.migu._layout.rows[name].span]
        assert torch.equal(started.values()[name][still], before[still]) is mask_update


def test_the_mask_acts_before_clipping(lab: Lab) -> None:
    norms = {}
    for share in (0.0, 0.9):
        started = Started(lab, threshold=share, train={"max_grad_norm": 1.0})
        batch = started.batch([0, 1, 2])
        norms[share] = train_step(started.engine, started.parts.method, [batch], WORLD, 1, started.parts.modifiers)
    assert norms[0.9].grad_norm < norms[0.0].grad_norm
