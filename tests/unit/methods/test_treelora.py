"""TreeLoRA: its tree and penalty by their definitions, what its bandit chooses, and that the first task is a LoRA's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phases import begin_phase, end_phase
from tiny import Complete, Lab, matrix, run, trace

from raycl.backbone import Output
from raycl.methods.lora.treelora import Node, TreeLora
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))
Tree = tuple[tuple[int, ...], tuple[Any, ...]]


def by_definition(tasks: list[int], directions: Any, depth: int = 0) -> Tree:
    """Return a node as tasks and children: tasks whose direction is at or above the median similarity come first."""
    if len(tasks) < 2 or depth == directions.shape[1]:
        return tuple(tasks), ()
    own = directions[tasks, depth]
    similarity = own @ own.mean(0)
    median = np.sort(similarity)[(len(tasks) - 1) // 2]
    near = [task for task, value in zip(tasks, similarity, strict=True) if value >= median]
    far = [task for task in tasks if task not in near]
    if not far:
        near, far = tasks[: len(tasks) // 2], tasks[len(tasks) // 2 :]
    return tuple(tasks), (by_definition(near, directions, depth + 1), by_definition(far, directions, depth + 1))


def as_tuples(node: Node) -> Tree:
    return node.tasks, tuple(as_tuples(child) for child in node.children)


@pytest.mark.parametrize("tasks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("linears", [1, 3])
def test_the_tree_is_that_of_the_definition(tasks: int, linears: int) -> None:
    directions = torch.randn(tasks, linears, 6, generator=torch.Generator().manual_seed(tasks))
    node = Node.of(range(tasks), [list(task) for task in directions])
    assert as_tuples(node) == by_definition(list(range(tasks)), directions.numpy())


def test_tasks_without_a_direction_are_halved_by_their_order() -> None:
    assert as_tuples(Node.of(range(3), [[torch.zeros(2)]] * 3)) == ((0, 1, 2), (((0,), ()), ((1, 2), ())))


def test_the_nearest_task_is_found_without_trying_all() -> None:
    """A task whose direction is that of a far one is not tried: the tree holds them together."""
    directions = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(0))
    tree = Node.of(range(5), [list(task) for task in directions])
    gaps = [3.0, 1.0, 2.5, 4.0, 2.0]
    distances, choices, chosen = [0.0] * 5, [0] * 5, []
    for turn in range(400):
        task = tree.choose(distances, choices, math.log(2 * 400 * (turn + 1) * (turn + 2)))
        distances[task] += gaps[task]
        choices[task] += 1
        chosen.append(task)
    assert chosen.count(1) > 350 and set(chosen[-50:]) == {1}
    assert 4 not in chosen and any(node.tasks == (3, 4) for node in tree.children[0].children)


def third_task(lab: Lab, kind: str) -> tuple[TreeLora, Any]:
    """Return the beginning of a third task, after two whose means are random."""
    context, _ = build(lab.config(kind, {"name": "treelora", "weight": 0.5}), WORLD)
    assert isinstance(context.method, TreeLora)
    torch.manual_seed(1)
    for index in (0, 1):
        begun = begin_phase(context, index)
        context.method._mean = [torch.rand_like(layer.trainable()[0]) for layer in context.method.stack.layers.values()]
        end_phase(context, begun)
    begun = begin_phase(context, 1)
    return context.method, begun


def test_a_state_that_is_given_stays_as_it_is(lab: Lab) -> None:
    """It may be memory that all workers of a node read."""
    method, begun = third_task(lab, "bert")
    none = torch.zeros(2, 0, dtype=torch.long)
    batch = Batch(none, none, none, torch.tensor([0, 0]), torch.ones(2), torch.arange(2))
    output = Output(torch.tensor(3.0), torch.zeros(2, 2), torch.tensor([0, 0]), torch.arange(2))
    method.penalty(batch, output)
    values, tensors = method.state_dict()
    given = {name: tensor.clone() for name, tensor in tensors.items()}
    method.load_state_dict(values, given)
    begun.step = type(begun.step)(index=1)
    for layer in method.stack.layers.values():
        layer.trainable()[0].data += 1
    method.penalty(batch, output)
    assert all(torch.equal(given[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", ["bert", "t5", "llama"])
def test_the_penalty_draws_each_linear_to_the_chosen_task(lab: Lab, kind: str) -> None:
    """The gradient of `-weight (t / T) loss log S`, of which the value is zero."""
    method, begun = third_task(lab, kind)
    labels = torch.tensor([0, 0])
    none = torch.zeros(2, 0, dtype=torch.long)
    batch = Batch(none, none, none, labels, torch.ones(2), torch.arange(2))
    output = Output(torch.tensor(3.0), torch.zeros(2, 2), labels, torch.arange(2))
    steps = -(-begun.count("train") // begun.batch_size)
    for index in range(steps):
        begun.step = type(begun.step)(index=index)
        pull = method.penalty(batch, output)
    assert pull is not None and float(pull) == 0.0
    low = [layer.trainable()[0] for layer in method.stack.layers.values()]
    found = torch.autograd.grad(pull, low)
    chosen = [method._means[task][linear] for linear, task in enumerate(method._chosen)]
    aligned = sum(float((part * mean).sum()) for part, mean in zip(low, chosen, strict=True))
    strength = 0.5 * (steps - 1) / steps * 1.5
    for gradient, mean in zip(found, chosen, strict=True):
        torch.testing.assert_close(gradient, -strength * mean / abs(aligned), rtol=1e-4, atol=1e-6)
    assert all(sum(choices) == steps for choices in method._choices), "one choice for each linear and step"


def test_without_weight_it_is_a_lora_bit_for_bit(lab: Lab, complete: Complete, tmp_path: Path) -> None:
    stores, done = {"lora": complete("bert", "lora", "torch").storage}, {}
    for name, weight in {"free": 0.0, "drawn": 2.0}.items():
        stores[name] = Storage.at(tmp_path / name)
        run(lab.config("bert", {"name": "treelora", "weight": weight}), stores[name])
    for name, storage in stores.items():
        done[name] = trace(storage), matrix(storage)
    assert done["free"] == done["lora"]
    steps = len(done["drawn"][0]) // 2
    assert done["drawn"][0][:steps] == done["lora"][0][:steps], "the first task has no earlier ones"
    assert done["drawn"][0][steps:] != done["lora"][0][steps:]
