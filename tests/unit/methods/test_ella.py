"""ELLA: its penalty against the definition, what it costs where, and that it shrinks updates as its paper derives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from phases import begin_phase, end_phase
from tiny import Complete, Lab, exported, matrix, run, trace

from raycl.methods.lora.ella import Ella, alignment
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))
Array = NDArray[np.float64]


def third_task(lab: Lab, kind: str = "bert", **settings: Any) -> tuple[Ella, TrainingContext]:
    """Return the beginning of a third task, with two adapters and a new one of random numbers."""
    context, _ = build(lab.config(kind, {"name": "ella", **settings}), WORLD)
    assert isinstance(context.method, Ella)
    torch.manual_seed(1)
    for index in (0, 1):
        begun = begin_phase(context, index)
        _randomise(context)
        end_phase(context, begun)
    context.method._begin("third", [])
    _randomise(context)
    return context.method, context


def _randomise(context: TrainingContext) -> None:
    for name, parameter in context.backbone.named_parameters():
        if ".lora_B" in name and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)


def by_definition(method: Ella) -> float:
    """Return `|| dW_t * W_past ||_F^2`, summed over linears, entry by entry."""
    total = 0.0
    for path, layer in method.stack.layers.items():
        past: Any = 0.0
        for state in method._learned.values():
            low, high = (part.double().numpy() for part in state.linears[path])
            past = past + state.scale * high @ low
        assert layer.lora_A is not None and layer.lora_B is not None
        new = layer.update.scale * (layer.lora_B.detach().double() @ layer.lora_A.detach().double()).numpy()
        total += float(((new * past) ** 2).sum())
    return total


@pytest.mark.parametrize(
    "settings", [{}, {"rank_pattern": {"attention.query": 3}, "alpha_pattern": {"attention": 5.0}}]
)
@pytest.mark.parametrize("kind", ["bert", "t5", "llama"])
def test_the_penalty_is_that_of_the_definition(lab: Lab, kind: str, settings: dict[str, Any]) -> None:
    method, _ = third_task(lab, kind, weight=7.0, **settings)
    penalty = method.penalty(None, None)  # type: ignore[arg-type]
    assert penalty is not None and float(penalty) > 0
    assert float(penalty) == pytest.approx(7 * by_definition(method), rel=1e-4)


def test_its_gradients_are_those_of_autograd() -> None:
    draw = torch.Generator().manual_seed(0)
    low, high, past = (torch.randn(*shape, generator=draw).double() for shape in ((2, 5), (4, 2), (4, 5)))
    low, high = low.float().requires_grad_(), high.float().requires_grad_()
    result = 3 * alignment(low, high, 0.5, past.float())
    expected = 3 * (0.5 * (high @ low) * past.float()).square().sum()
    torch.testing.assert_close(result, expected)
    for mine, other in zip(
        torch.autograd.grad(result, (low, high)), torch.autograd.grad(expected, (low, high)), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_an_update_shrinks_where_earlier_ones_are_large() -> None:
    """The minimum of 1/2 |dW - G|^2 + weight/2 |dW * E|^2 is G / (1 + weight E^2), the paper's closed form."""
    draw = torch.Generator().manual_seed(0)
    target, past = torch.randn(4, 5, generator=draw), torch.randn(4, 5, generator=draw)
    past[0, 0], past[1, 1] = 0.0, 30.0
    low, high = torch.eye(5), torch.zeros(4, 5, requires_grad=True)
    optimizer = torch.optim.LBFGS([high], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Any:
        optimizer.zero_grad()
        value = 0.5 * (high @ low - target).square().sum() + 0.5 * 4.0 * alignment(low, high, 1.0, past)
        value.backward()
        return value

    optimizer.step(loss)
    torch.testing.assert_close(high.detach(), target / (1 + 4.0 * past.square()), atol=1e-4, rtol=1e-3)
    assert float(high[0, 0]) == pytest.approx(float(target[0, 0]), abs=1e-3), "free where nothing was changed before"
    assert abs(float(high[1, 1])) < 1e-3, "held where much was"


def test_without_weight_it_is_inclora_bit_for_bit(lab: Lab, complete: Complete, tmp_path: Path) -> None:
    stores, traces = {"inclora": complete("bert", "inclora", "torch").storage}, {}
    for name, weight in {"free": 0.0, "ella": 1e4}.items():
        stores[name] = Storage.at(tmp_path / name)
        run(lab.config("bert", {"name": "ella", "weight": weight}), stores[name])
    for name, storage in stores.items():
        traces[name] = trace(storage), matrix(storage), exported(storage)
    assert traces["free"] == traces["inclora"]
    steps = len(traces["ella"][0]) // 2
    assert traces["ella"][0][:steps] == traces["inclora"][0][:steps], "the first task has no earlier ones"
    assert traces["ella"][0][steps + 1 :] != traces["inclora"][0][steps + 1 :]
