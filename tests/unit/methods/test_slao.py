"""SLAO: how a task begins, how it is merged, and that evaluation and training use different values of B."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from phases import begin_phase, end_phase
from tiny import KINDS, Lab
from torch import Tensor

from raycl.errors import BackboneError
from raycl.methods.base import Learned, trained_names
from raycl.methods.lora.slao import Slao, orthonormal_rows
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import AdapterState

WORLD = DistributedContext.alone(torch.device("cpu"))
Array = NDArray[np.float64]


def started(lab: Lab, kind: str = "bert", **settings: Any) -> tuple[Slao, TrainingContext]:
    context, _ = build(lab.config(kind, {"name": "slao", "r": 3, **settings}), WORLD)
    assert isinstance(context.method, Slao)
    return context.method, context


def values(context: TrainingContext) -> dict[str, Tensor]:
    own = dict(context.backbone.named_parameters())
    return {name: own[name].detach().clone() for name in trained_names(context.backbone)}


def phase(context: TrainingContext, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Learned]:
    """Return the values that a phase begins with, those that it is trained to (random ones), and what it gives."""
    begun = begin_phase(context, index)
    first = values(context)
    torch.manual_seed(100 + index)
    for name, parameter in context.backbone.named_parameters():
        if name in first:
            parameter.data.add_(torch.randn_like(parameter))
    trained = values(context)
    learned = end_phase(context, begun)
    assert learned is not None
    return first, trained, learned


def gram_schmidt(low: Array) -> Array:
    """Return the rows of A made orthonormal one after another, which is QR with a positive diagonal of R."""
    rows: list[Array] = []
    for row in low:
        rest = row - sum((row @ other) * other for other in rows)
        rows.append(rest / np.linalg.norm(rest))
    return np.stack(rows)


def test_qr_gives_the_basis_that_gram_schmidt_gives() -> None:
    low = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 9)))
    np.testing.assert_allclose(orthonormal_rows(low).numpy(), gram_schmidt(low.numpy()), atol=1e-12)
    basis = orthonormal_rows(low)
    torch.testing.assert_close(orthonormal_rows(basis), basis, msg="a basis stays what it is")


@pytest.mark.parametrize("kind", KINDS)
def test_every_task_begins_with_the_last_ones_trained_values(lab: Lab, kind: str) -> None:
    """B is the trained one, which the merged one would differ from; A spans what it spanned, with orthonormal rows."""
    _, context = started(lab, kind)
    _, trained, _ = phase(context, 0)
    merged = values(context)
    first, again, _ = phase(context, 1)
    for name, value in trained.items():
        if name.endswith(".lora_A"):
            np.testing.assert_allclose(first[name].numpy(), gram_schmidt(value.double().numpy()), atol=1e-5)
        else:
            assert torch.equal(first[name][: len(value)], value)
            torch.testing.assert_close(merged[name], value, msg="one task is merged with nothing")
    third = values(context)
    for name, value in again.items():
        assert torch.equal(third[name], value) is name.endswith(".lora_A"), "between tasks the merged B is used"


@pytest.mark.parametrize("exponent", [0.5, 1.0, 0.0])
def test_b_is_merged_by_the_definition(lab: Lab, exponent: float) -> None:
    """Algorithm 1, line by line in numpy, over three tasks (the third one is the second again)."""
    method, context = started(lab, "t5", merge_exponent=exponent)
    expected: dict[str, Array] = {}
    for number, index in enumerate((0, 1, 1), start=1):
        _, trained, learned = phase(context, index)
        state = learned.adapters["slao"]
        for path, (low, high) in state.linears.items():
            a, b = (trained[f"model.{path}.lora_{part}"].double().numpy() for part in "AB")
            before = expected.get(path, b)
            expected[path] = before + (1 / math.pow(number, exponent)) * (b - before)
            np.testing.assert_allclose(low.numpy(), a, atol=1e-6)
            np.testing.assert_allclose(high.numpy(), expected[path], atol=1e-6)
    assert len(method._merged) == len(state.linears), "as many tensors as after one task"


def test_label_rows_are_merged_as_b_is_and_new_ones_kept(lab: Lab) -> None:
    _, context = started(lab)
    _, one, _ = phase(context, 0)
    _, two, learned = phase(context, 1)
    state: AdapterState = learned.adapters["slao"]
    assert state.head_weight is not None and state.head_bias is not None
    known = len(one["head.weight"])
    for name, result in (("head.weight", state.head_weight), ("head.bias", state.head_bias)):
        expected = one[name] + (two[name][:known] - one[name]) / math.sqrt(2)
        torch.testing.assert_close(result[:known], expected)
        torch.testing.assert_close(result[known:], two[name][known:])


def test_a_rank_above_the_inputs_is_refused(lab: Lab) -> None:
    with pytest.raises(BackboneError, match=r"method.r is 33, and '.*' has 32 inputs"):
        started(lab, r=33)
