"""Gradients of chosen rows equal the masked dense ones to rounding, and Adam moves chosen rows as torch's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from raycl.kernels import row_gradient
from raycl.kernels.magnitude import in_few_kernels, summed_gated_magnitude, summed_magnitude
from raycl.kernels.row_gradient import (
    Products,
    RowChoice,
    WeightRows,
    adamw_rows,
    choose_rows,
    rows_of,
    weight_gradient,
)

ROWS = torch.tensor([0, 3, 4, 9])


def chosen(rows: Tensor = ROWS, outputs: int = 10, width: int | None = None) -> WeightRows:
    kept = torch.zeros(1, outputs, dtype=torch.bool)
    kept[0, rows] = True
    return rows_of(kept, None if width is None else len(rows), width)[0]


def gradients(layer: nn.Linear, x: Tensor, run: Any = None) -> list[Tensor]:
    """Return the gradients of x, weight and bias, under a loss that weighs every output differently."""
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
    undo = choose_rows(layer, RowChoice(chosen()))
    result = gradients(layer, x)
    undo()
    others = torch.ones(10, dtype=torch.bool).index_fill_(0, ROWS, False)
    torch.testing.assert_close(result[1][ROWS], dense[1][ROWS], rtol=1e-6, atol=1e-6)
    assert not result[1][others].any()
    for mine, other in zip((result[0], *result[2:]), (dense[0], *dense[2:]), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(mine, other) for mine, other in zip(gradients(layer, x), dense, strict=True))
    assert "forward" not in vars(layer)


def test_the_choice_may_come_after_the_forward_pass_and_none_means_all() -> None:
    layer, x = made()
    dense, choice = gradients(layer, x), RowChoice()
    choose_rows(layer, choice)
    assert all(torch.allclose(mine, other) for mine, other in zip(gradients(layer, x), dense, strict=True))
    y = layer(x)
    choice.rows = chosen(torch.tensor([], dtype=torch.long))
    layer.zero_grad()
    y.sum().backward()
    assert layer.weight.grad is not None and not layer.weight.grad.any() and choice.formed


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("width", [1, 4, 8, 16])
def test_a_width_forms_other_rows_too_and_drops_them(width: int, known: bool) -> None:
    """Rows are formed as on a GPU; the memory is taken in turn, by more and by fewer rows."""
    draw, products = torch.Generator().manual_seed(0), Products()
    g, x = torch.randn(7, 13, generator=draw), torch.randn(7, 5, generator=draw)
    for count in (5, 13, 1, 0, 6, 5):
        order = torch.rand(3, 13, generator=draw).argsort(1)
        kept = torch.zeros(3, 13, dtype=torch.bool).scatter_(1, order[:, :count], True)
        for mask, rows in zip(kept, rows_of(kept, count if known else None, width), strict=True):
            assert len(rows.formed) == rows.number == min(13, -(-count // width) * width)
            assert rows.formed[:count].tolist() == mask.nonzero().flatten().tolist()
            assert len(set(rows.formed.tolist())) == rows.number, "no row is formed twice"
            gradient = weight_gradient(g, x, rows, products)
            torch.testing.assert_close(gradient, (g.T @ x) * mask.unsqueeze(1), rtol=1e-6, atol=1e-6)
            assert not gradient[~mask].any()


def test_weights_keep_as_many_rows_as_their_masks_say() -> None:
    kept = torch.tensor([[True, False, True, False], [False, False, True, False], [False] * 4])
    assert [rows.formed.tolist() for rows in rows_of(kept)] == [[0, 2], [2], []]
    assert [rows.places.tolist() for rows in rows_of(kept)] == [[1, 0, 2, 0], [0, 0, 1, 0], [0] * 4]
    assert [rows.formed.tolist() for rows in rows_of(kept, width=2)] == [[0, 2], [2, 0], []]


def test_a_product_is_written_wider_where_a_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and types of what only a GPU computes."""
    x = torch.empty(7, 6, dtype=torch.bfloat16)
    assert not row_gradient.widens(x, torch.float32)
    gradient = weight_gradient(torch.randn(7, 10).bfloat16(), x, chosen(), dtype=torch.float32)
    assert gradient.dtype == torch.bfloat16, "autograd converts it"
    monkeypatch.setattr(row_gradient, "widens", lambda x, dtype: True)
    rows = WeightRows(*(part.to("meta") for part in chosen(width=8)[:2]), 8)
    wide = weight_gradient(torch.empty(7, 10, dtype=torch.bfloat16, device="meta"), x.to("meta"), rows)
    assert wide.dtype == torch.float32 and wide.shape == (10, 6)


def test_gradients_outlive_the_memory_that_they_were_computed_in() -> None:
    layers, products = [nn.Linear(6, 10, bias=False) for _ in range(2)], Products()
    for layer in layers:
        choose_rows(layer, RowChoice(chosen(), products))
    x = torch.randn(5, 6)
    (layers[0](x).sum() + 2 * layers[1](x).sum()).backward()
    first, second = (layer.weight.grad for layer in layers)
    assert first is not None and second is not None
    torch.testing.assert_close(second, 2 * first)
    assert first[ROWS].any(1).all()


def test_recomputation_reads_the_choice_again() -> None:
    layer, x = made()
    choose_rows(layer, RowChoice(chosen()))
    plain = gradients(layer, x)
    again = gradients(layer, x, lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    assert all(torch.equal(mine, other) for mine, other in zip(plain, again, strict=True))


def test_under_autocast_the_master_gets_a_gradient_of_its_own_type() -> None:
    layer, x = made()

    def run(layer: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)  # type: ignore[no-any-return]

    dense = gradients(layer, x, run)
    choose_rows(layer, RowChoice(chosen()))
    result = gradients(layer, x, run)
    assert result[1].dtype == torch.float32
    torch.testing.assert_close(result[1][ROWS], dense[1][ROWS], rtol=2e-2, atol=2e-2)


def test_a_frozen_weight_and_no_grad_take_the_plain_way() -> None:
    layer, x = made()
    choose_rows(layer, RowChoice(chosen()))
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
        magnitude = summed_magnitude(y, given, into_O=torch.zeros(3))
        assert torch.equal(magnitude, summed_magnitude(y, given))
        expected = (y.double().abs() * (1 if given is None else given.unsqueeze(1))).sum(0)
        assert magnitude.dtype == torch.float32
        torch.testing.assert_close(magnitude.double(), expected, rtol=1e-5, atol=1e-3)


def test_gated_magnitudes_weigh_examples_by_their_gates() -> None:
    h = torch.tensor([[[1.0, -2.0], [3.0, 0.5]], [[-1.0, 1.0], [5.0, 5.0]]])
    gate, weight = torch.tensor([[2.0, 0.0], [-1.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert summed_gated_magnitude(h, gate, weight).tolist() == [2 * 4 + 1, 1]
    assert summed_gated_magnitude(h, gate).tolist() == [2 * 4 + 6, 6]


@pytest.mark.parametrize("each_position", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_magnitudes_in_few_kernels_are_the_same(dtype: torch.dtype, each_position: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(3, 7, 4, generator=draw).to(dtype)
    gate = torch.randn(3, 7, 4, generator=draw) if each_position else torch.randn(3, 4, generator=draw)
    weight = (torch.rand(3, 7, generator=draw) > 0.4).float()
    for given in (None, weight):
        into = torch.zeros(4)
        kernels = in_few_kernels(h, gate, given, None if given is None else given.flatten().nonzero()[:, 0], into)
        assert kernels.data_ptr() == into.data_ptr() and kernels.dtype == torch.float32
        torch.testing.assert_close(into, summed_gated_magnitude(h, gate, given), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(in_few_kernels(h, gate, given), into, rtol=1e-6, atol=1e-6)
