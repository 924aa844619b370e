"""Self-activation: weights of a memory's rows by their definition, which compete, and where the threshold counts."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from raycl.adapters import AdapterStack
from raycl.adapters.formula import SelfActivation
from raycl.types import Activation, AdapterState, Mixture

MEMORY = SelfActivation(top_k=3, temperature=0.1, threshold=0.25)


def by_definition(z: list[float], memory: SelfActivation, training: bool) -> list[float]:
    """Return the weights of one position's rows, in plain Python."""
    length = math.sqrt(sum(value * value for value in z))
    scores = [value / length for value in z]
    chosen = sorted(range(len(z)), key=lambda row: -scores[row])[: memory.top_k]
    powers = {row: math.exp((scores[row] - max(scores)) / memory.temperature) for row in chosen}
    total = sum(powers.values())
    used = {row for row in chosen if training or scores[row] >= memory.threshold}
    return [powers[row] / total if row in used else 0.0 for row in range(len(z))]


@pytest.mark.parametrize("training", [True, False])
def test_weights_are_those_of_the_definition(training: bool) -> None:
    z = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor([by_definition(row, MEMORY, training) for row in z.tolist()])
    found = MEMORY.weights(z, torch.ones(5, 7), training)
    torch.testing.assert_close(found, expected)
    assert int((found > 0).sum(-1).max()) <= 3
    if training:
        torch.testing.assert_close(found.sum(-1), torch.ones(5))


def test_rows_of_inactive_adapters_and_rows_without_a_key_take_no_part() -> None:
    z = torch.tensor([[3.0, -1.0, 0.5, 0.0, 2.0]])
    gate = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]])
    found = MEMORY.weights(z, gate, training=True)
    expected = by_definition([-1.0, 0.5, 2.0], MEMORY, training=True)
    torch.testing.assert_close(found[0, [1, 2, 4]], torch.tensor(expected))
    assert float(found[0, 0]) == 0.0 and float(found[0, 3]) == 0.0
    assert not MEMORY.weights(z, torch.zeros(1, 5), training=True).any()


def pair(inputs: int, outputs: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rank, inputs, generator=draw), torch.randn(outputs, rank, generator=draw)


@pytest.mark.parametrize("training", [True, False])
def test_loaded_rows_and_those_in_training_are_one_memory(training: bool) -> None:
    """`W x + B (s w z)` with A and B of both below each other; the threshold counts outside of training alone."""
    net = nn.Sequential(nn.Linear(6, 5))
    stack = AdapterStack(net, ["0"], activation=str(MEMORY))
    old, new = pair(6, 5, 3, 1), pair(6, 5, 2, 2)
    stack.load("old", AdapterState({"0": old}, 2.0, activation=str(MEMORY)))
    stack.begin_training({"new": 2}, 0.5, lambda low, outputs: low.copy_(new[0]))
    layer = stack.layers["0"]
    assert layer.lora_B is not None
    layer.lora_B.data.copy_(new[1])
    net.train(training)
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(3))
    with stack.activate(Mixture.same({"old": 1.0, "new": 1.0}, 3)):
        found = net(x)
    z = x @ torch.cat([old[0], new[0]]).T
    weights = torch.tensor([by_definition(row, MEMORY, training) for row in z.view(-1, 5).tolist()]).view(3, 4, 5)
    scales = torch.tensor([2.0, 2.0, 2.0, 0.5, 0.5])
    expected = layer.base(x) + (scales * weights * z) @ torch.cat([old[1], new[1]], dim=1).T
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (scale,) = torch.autograd.grad(found.square().sum(), layer.lora_A)
    assert bool(scale.any()), "keys learn which texts choose them"


def test_a_key_recalls_its_value() -> None:
    """A text that is a stored key gets that key's value, whichever adapter holds it."""
    net = nn.Sequential(nn.Linear(8, 8, bias=False))
    net[0].weight.data.zero_()
    memory = SelfActivation(top_k=2, temperature=0.01, threshold=0.2)
    keys, values = torch.eye(8), torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    stack = AdapterStack(net, ["0"], activation=str(memory))
    for task in range(4):
        rows = slice(2 * task, 2 * task + 2)
        stack.load(f"t{task}", AdapterState({"0": (keys[rows], values[:, rows])}, activation=str(memory)))
    net.eval()
    with torch.no_grad(), stack.activate(Mixture.same({f"t{task}": 1.0 for task in range(4)}, 8)):
        torch.testing.assert_close(net(keys), values.T)


def test_banks_hold_it_as_text() -> None:
    kept = TypeAdapter(Activation).validate_python(str(MEMORY))
    assert SelfActivation.of(kept) == MEMORY
    assert all(SelfActivation.of(other) is None for other in ("", "relu", "softmax"))
    for other in ("tanh", "self()", "relu "):
        with pytest.raises(ValidationError):
            TypeAdapter(Activation).validate_python(other)
