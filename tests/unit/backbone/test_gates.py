"""Virtual gates on linears: what they scale, their gradients, under recomputation and in generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import KINDS, Lab
from torch import Tensor, nn

from raycl.backbone.gates import gated
from raycl.data.loader import Collate, eval_batches
from raycl.generation.batch_answers import predict
from raycl.training.assembly import build
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))


def two_linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_an_input_gate_scales_columns_and_an_output_gate_rows() -> None:
    model, x = two_linears(), torch.randn(5, 6, 3)
    inner, outer = torch.tensor([0.0, 1.0, 2.0, 0.5]), torch.tensor([3.0, -1.0])
    with gated(model, {("2", "input"): lambda rows: inner, ("2", "output"): lambda rows: outer}):
        result = model(x)
    hidden = model[1](model[0](x))
    torch.testing.assert_close(result, model[2](hidden * inner) * outer)


def test_each_example_has_its_own_factors_and_closed_gates_change_no_bit() -> None:
    model, x = two_linears(), torch.randn(5, 6, 3)
    factor = torch.rand(5, 2)
    with gated(model, {("2", "output"): lambda rows: factor if rows == 5 else None}):
        torch.testing.assert_close(model(x), two_linears()(x) * factor[:, None])
        assert torch.equal(model(x[:4]), two_linears()(x[:4]))
    assert torch.equal(model(x), two_linears()(x))
    assert not model[2]._forward_hooks and not model[2]._forward_pre_hooks


def batch_of(lab: Lab, kind: str, **backbone: Any) -> tuple[Any, Batch]:
    context, _ = build(lab.config(kind, backbone=backbone), WORLD)
    task, codec = context.stream.tasks[0], context.backbone.codec
    labels = None
    if codec.needs_labels:
        context.backbone.learn_labels(task.labels)
        nn.init.normal_(context.backbone.head.weight)
        labels = context.backbone.label_ids()
    return context.backbone, next(
        iter(eval_batches(Collate([context.stream.table(task, "train", codec)], 0, labels), 4))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gates_survive_recomputation(lab: Lab, kind: str) -> None:
    """They are the derivative of the loss, by differences, with and without gradient checkpointing."""
    collected = []
    path = {"bert": "encoder.layer.0.output.dense", "t5": "encoder.block.0.layer.1.DenseReluDense.wo"}.get(
        kind, "model.layers.0.mlp.down_proj"
    )
    for again in (False, True):
        backbone, batch = batch_of(lab, kind, gradient_checkpointing=again)
        backbone.train()
        ones = torch.ones(32, requires_grad=True)
        with gated(backbone.model, {(path, "output"): lambda rows, ones=ones: ones}):
            collected.append(torch.autograd.grad(backbone(batch).loss_sum, ones)[0])
    torch.testing.assert_close(*collected)

    def loss(value: float) -> float:
        factor = torch.ones(32)
        factor[3] = value
        with torch.no_grad(), gated(backbone.model, {(path, "output"): lambda rows: factor}):
            return float(backbone(batch).loss_sum)

    assert float(collected[0][3]) == pytest.approx((loss(1.05) - loss(0.95)) / 0.1, abs=2e-2)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_generation_asks_for_the_rows_that_it_has(lab: Lab, kind: str) -> None:
    backbone, batch = batch_of(lab, kind)
    backbone.eval()
    path = "lm_head"
    vocabulary = backbone.model.get_output_embeddings().weight.shape[0]
    word = int(backbone.codec.encode_target(["cat"])[0][0])

    seen = set()

    def only(rows: int) -> Tensor:
        seen.add(rows)
        factor = torch.zeros(rows, vocabulary)
        factor[0, word] = 1.0
        factor[1:] = 1.0
        return factor

    plain = predict(backbone, batch, 3)
    with gated(backbone.model, {(path, "output"): only}):
        answers = predict(backbone, batch, 3)
    assert answers[1:] == plain[1:] and len(batch) in seen
