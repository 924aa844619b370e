"""SD-LoRA: what a direction and its magnitude are, that a new task begins without a jump, and what is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase
from tiny import ENGINES, KINDS, Complete, Lab, opened, run
from torch import Tensor

from raycl.bank import Bank
from raycl.data.loader import Collate, eval_batches
from raycl.errors import BankError
from raycl.methods.base import activate_batch, trained_names
from raycl.methods.lora.sdlora import SdLora, least_squares, norm_of, product, scaled
from raycl.operations.banks.unlearning import forget
from raycl.routing.routers import make_router, without
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import AdapterState, Batch, RouterState

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str = "bert", **settings: Any) -> tuple[SdLora, TrainingContext]:
    context, _ = build(lab.config(kind, {"name": "sdlora", "r": 3, **settings}), WORLD)
    assert isinstance(context.method, SdLora)
    return context.method, context


def drawn(context: TrainingContext, seed: int) -> None:
    """Set everything that is trained to random numbers, magnitudes above zero."""
    torch.manual_seed(seed)
    for name, parameter in context.backbone.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
            if name == "magnitudes.values":
                torch.nn.init.uniform_(parameter, 0.5, 2.0)


def trained(context: TrainingContext, index: int) -> None:
    begun = begin_phase(context, index)
    drawn(context, index)
    end_phase(context, begun)


def batch_of(context: TrainingContext) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[0], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    return next(iter(eval_batches(Collate([table], codec.pad_id, labels), 6)))


def outputs(context: TrainingContext, batch: Batch) -> Tensor:
    context.backbone.eval()
    with torch.no_grad(), activate_batch(context.method, batch):
        logits: Tensor = context.backbone(batch).logits
    return logits


def pair(low: list[list[float]], high: list[list[float]]) -> AdapterState:
    return AdapterState({"one": (torch.tensor(low).float(), torch.tensor(high).float())})


# ---- directions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "norm"), [("product", 1.0), ("factors", 0.5**0.5)])
def test_the_norm_of_a_direction_by_hand(kind: str, norm: float) -> None:
    """B = A = I_2: |B A|_F is the root of 2, |B|_F |A|_F is 2."""
    state = pair([[1, 0], [0, 1]], [[1, 0], [0, 1]])
    direction = scaled(state, 1 / norm_of(state, kind))
    low, high = direction.linears["one"]
    assert float((high @ low).norm()) == pytest.approx(norm)


def test_products_of_factors_are_those_of_whole_updates() -> None:
    torch.manual_seed(0)
    first, other = (
        AdapterState({path: (torch.randn(rank, 5), torch.randn(7, rank)) for path in ("x", "y")}) for rank in (2, 3)
    )
    whole = [[high @ low for low, high in state.linears.values()] for state in (first, other)]
    expected = sum(float((a * b).sum()) for a, b in zip(*whole, strict=True)) / 2
    assert product(first, other) == pytest.approx(expected, rel=1e-5)


def test_least_squares_by_hand() -> None:
    first, second = pair([[1, 0]], [[1], [0]]), pair([[0, 1]], [[1], [0]])
    shares, left = least_squares(pair([[2, 3]], [[1], [0]]), [first, second])
    assert shares == pytest.approx([2, 3]) and left == pytest.approx(0, abs=1e-7)
    shares, left = least_squares(pair([[3, 0]], [[1], [4 / 3]]), [first, first])
    assert sum(shares) == pytest.approx(3) and left == pytest.approx(0.8), "3 of 5 is in the span, 4 of 5 is not"


# ---- tasks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_ends_and_begins_without_a_jump(lab: Lab, kind: str) -> None:
    """The norm goes into the magnitude, all magnitudes stay, and B_t = 0 adds nothing."""
    method, context = started(lab, kind)
    begun = begin_phase(context, 0)
    batch = batch_of(context)
    bare = outputs(context, batch)
    drawn(context, 0)
    before = outputs(context, batch)
    assert not torch.allclose(before, bare, atol=1e-3)
    end_phase(context, begun)
    for state in method._learned.values():
        assert norm_of(state, "product") == pytest.approx(1, rel=1e-5) and state.scale == 1
    torch.testing.assert_close(outputs(context, batch), before, atol=1e-5, rtol=1e-4)
    begin_phase(context, 1)
    kept = slice(0, 2) if kind == "bert" else slice(None)  # the new task's labels are new columns
    torch.testing.assert_close(outputs(context, batch)[:, kept], before[:, kept], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_all_magnitudes_are_trained_and_no_earlier_direction(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    trained(context, 0)
    begin_phase(context, 1)
    drawn(context, 1)
    names = {name for name in trained_names(context.backbone) if ".lora_" not in name}
    assert names == {"magnitudes.values"} | ({"head.weight", "head.bias"} if kind == "bert" else set())
    batch = batch_of(context)
    with activate_batch(method, batch):
        context.backbone(batch).loss_sum.backward()
    values = method.magnitudes.values
    assert values is not None and values.grad is not None and values.shape == (2,)
    assert bool((values.grad != 0).all()), "the magnitude of the frozen direction learns too"
    assert all(layer.lora_B is not None and layer.lora_B.grad is not None for layer in method.stack.layers.values())
    assert not any(block.requires_grad for block in (*method.stack.pool.a.values(), *method.stack.pool.b.values()))


def test_ranks_fall_from_task_to_task(lab: Lab) -> None:
    method, context = started(lab, rank_reduction={2: 2, 8: 1})
    trained(context, 0)
    begin_phase(context, 1)
    assert method.stack.trainable == {"animal": 2} and method._learned["colour"].rank == 3


@pytest.mark.parametrize(("drop_below", "dropped"), [(9e-4, True), (None, False)])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_direction_that_is_there_already_is_dropped(
    lab: Lab, kind: str, drop_below: float | None, dropped: bool
) -> None:
    """D_2 = D_1: nothing is left, and the magnitude of the first grows by that of the second."""
    method, context = started(lab, kind, drop_below=drop_below)
    trained(context, 0)
    begun = begin_phase(context, 1)
    drawn(context, 1)
    for path, layer in method.stack.layers.items():
        low, high = method._learned["colour"].linears[path]
        assert layer.lora_A is not None and layer.lora_B is not None
        layer.lora_A.data.copy_(2 * low)
        layer.lora_B.data.copy_(high)
    batch = batch_of(context)
    before, values = outputs(context, batch), method.magnitudes.values
    assert values is not None
    first, second = values.tolist()
    end_phase(context, begun)
    torch.testing.assert_close(outputs(context, batch), before, atol=1e-5, rtol=1e-4)
    expected = {"colour": first + 2 * second * 10 / 3} if dropped else {"colour": first, "animal": second * 20 / 3}
    assert method.magnitudes.frozen == pytest.approx(expected, rel=1e-4)
    assert bool(method._learned["animal"].linears) == (not dropped)


# ---- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["torch", "zero3"])
def test_magnitudes_learn_under_every_engine(lab: Lab, tmp_path: Path, engine: str) -> None:
    storage = Storage.at(tmp_path)
    method = {"name": "sdlora", "drop_below": 9e-4}
    run(lab.config("bert", method, ENGINES[engine], train={"max_steps": 2}), storage)
    phase_summaries = storage.read_json("results.json")["phase_summaries"]
    first, second = (item["magnitudes"] for item in phase_summaries)
    assert set(first) == {"colour"} and set(second) == {"colour", "animal"}
    assert second["colour"] != first["colour"]


def test_the_snapshot_holds_the_magnitudes(complete: Complete, tmp_path: Path) -> None:
    done = complete("bert", "sdlora", "torch")
    bank = Bank(done.copy(tmp_path).sub("bank"))
    snapshot = bank.newest()
    assert snapshot is not None and snapshot.router.kind == "weighted_sum" and isinstance(done.context.method, SdLora)
    mixture = opened(bank, snapshot).router.route(["x", "y"], None)
    result = dict(zip(mixture.names, mixture.weights[1].tolist(), strict=True))
    assert result == done.context.method.magnitudes.frozen
    new = bank.open(forget(bank, snapshot, "colour", scores=False).new)
    assert opened(bank, new).router.route(["x"], None).names == ("animal",)


def test_weights_of_a_task_leave_with_it() -> None:
    state = RouterState("weighted_sum", {}, {"weight/a": torch.tensor(2.0), "weight/b": torch.tensor(0.5)})
    owners = {"a": ("a",), "b": ("b",)}
    assert make_router(state, owners).route(["x"], None).weights.tolist() == [[2.0, 0.5]]
    assert make_router(without(state, "a"), {"b": ("b",)}).route(["x"], None).names == ("b",)
    with pytest.raises(BankError, match="router 'weighted_sum' has no weight of a"):
        make_router(without(state, "a"), owners)
