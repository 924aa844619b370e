"""Gradients of chosen rows equal the masked dense ones to rounding, and Adam moves chosen rows as torch's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from raycl.kernels.magnitude import summed_gated_magnitude, summed_magnitude
from raycl.kernels.row_gradient import RowChoice, adamw_rows, choose_rows

ROWS = torch.tensor([0, 3, 4, 9])


def gradients(layer: nn.Linear, x: Tensor, run: Any = None) -> list[Tensor]:
    """Of x, weight and bias, under a loss that weighs every output differently."""
    layer.zero_grad()
    x = x.detach().requires_grad_(True)
    y = layer(x) if run is None else run(layer, x)
    (y.float() * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    return [x.grad, layer.weight.grad.clone(), *([] if layer.bias is None else [layer.bias.grad.clone()])]  # type: ignore[union-attr]


def made(bias: bool = True) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(6, 10, bias=bias), torch.randn(3, 5, 6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 6), (15, 6)])
def test_chosen_rows_are_those_of_the_dense_gradient_and_the_others_zero(bias: bool, shape: tuple[int, ...]) -> None:
    layer, x = made(bias)
    x = x.view(shape)
    dense = gradients(layer, x)
    undo = choose_rows(layer, RowChoice(ROWS))
    found = gradients(layer, x)
    undo()
    others = torch.ones(10, dtype=torch.bool).index_fill_(0, ROWS, False)
    torch.testing.assert_close(found[1][ROWS], dense[1][ROWS], rtol=1e-6, atol=1e-6)
    assert not found[1][others].any()
    for mine, other in zip((found[0], *found[2:]), (dense[0], *dense[2:]), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(mine, other) for mine, other in zip(gradients(layer, x), dense, strict=True))
    assert "forward" not in vars(layer)


def test_the_choice_may_come_after_the_forward_pass_and_none_means_all() -> None:
    layer, x = made()
    dense, choice = gradients(layer, x), RowChoice()
    choose_rows(layer, choice)
    assert all(torch.allclose(mine, other) for mine, other in zip(gradients(layer, x), dense, strict=True))
    y = layer(x)
    choice.rows = torch.tensor([], dtype=torch.long)
    layer.zero_grad()
    y.sum().backward()
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def test_recomputation_reads_the_choice_again() -> None:
    layer, x = made()
    choose_rows(layer, RowChoice(ROWS))
    plain = gradients(layer, x)
    again = gradients(layer, x, lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    assert all(torch.equal(mine, other) for mine, other in zip(plain, again, strict=True))


def test_under_autocast_the_master_gets_a_gradient_of_its_own_type() -> None:
    layer, x = made()

    def run(layer: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)  # type: ignore[no-any-return]

    dense = gradients(layer, x, run)
    choose_rows(layer, RowChoice(ROWS))
    found = gradients(layer, x, run)
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[1][ROWS], dense[1][ROWS], rtol=2e-2, atol=2e-2)


def test_a_frozen_weight_and_no_grad_take_the_plain_way() -> None:
    layer, x = made()
    choose_rows(layer, RowChoice(ROWS))
    with torch.no_grad():
        assert layer(x).grad_fn is None
    layer.weight.requires_grad_(False)
    y = layer(x)
    y.sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None


@pytest.mark.parametrize("axis", [0, 1])
def test_adam_on_rows_is_torchs_adam_there_and_nothing_elsewhere(axis: int) -> None:
    torch.manual_seed(1)
    parameter = nn.Parameter(torch.randn(10, 10))
    twin = nn.Parameter(parameter.detach().clone())
    optimizer = AdamW([twin], lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    moments, start = (torch.zeros(10, 10), torch.zeros(10, 10)), parameter.detach().clone()
    for step in (1, 2, 3):
        twin.grad = parameter.grad = torch.randn(10, 10)
        optimizer.step()
        adamw_rows(parameter, moments, ROWS, axis, step, optimizer.param_groups[0])
    state = optimizer.state[twin]
    others = torch.ones(10, dtype=torch.bool).index_fill_(0, ROWS, False).nonzero().squeeze(1)
    for mine, other in ((parameter, twin), (moments[0], state["exp_avg"]), (moments[1], state["exp_avg_sq"])):
        torch.testing.assert_close(mine.index_select(axis, ROWS), other.index_select(axis, ROWS), rtol=1e-5, atol=1e-6)
    assert torch.equal(parameter.index_select(axis, others), start.index_select(axis, others))
    assert not any(moment.index_select(axis, others).any() for moment in moments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_magnitudes_are_float32_sums_over_the_tokens_that_count(dtype: torch.dtype) -> None:
    y = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = (torch.arange(4000) % 3 > 0).float()
    for given in (None, weight):
        found = summed_magnitude(y, given)
        expected = (y.double().abs() * (1 if given is None else given.unsqueeze(1))).sum(0)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)


def test_gated_magnitudes_weigh_examples_by_their_gates() -> None:
    h = torch.tensor([[[1.0, -2.0], [3.0, 0.5]], [[-1.0, 1.0], [5.0, 5.0]]])
    gate, weight = torch.tensor([[2.0, 0.0], [-1.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert summed_gated_magnitude(h, gate, weight).tolist() == [2 * 4 + 1, 1]
    assert summed_gated_magnitude(h, gate).tolist() == [2 * 4 + 6, 6]
