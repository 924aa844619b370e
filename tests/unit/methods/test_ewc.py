"""EWC: gradients on single rows, Fisher information, the penalty by hand, and what it holds in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phases import begin_phase, end_phase
from tiny import ENGINES, KINDS, TRAIN_ROWS, Complete, Lab, exported, matrix, run, trace
from torch import Tensor

from raycl.backbone.base import Output
from raycl.errors import ConfigError
from raycl.methods.regularization.ewc import Ewc, EwcConfig, merged
from raycl.methods.trained_adapters import in_present_rows
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))
NOTHING: Any = None


def begun(lab: Lab, kind: str = "bert", **settings: Any) -> tuple[Ewc, TrainingContext, Any]:
    """Return the method in the first task."""
    context, _ = build(lab.config(kind, {"name": "ewc", **settings}), WORLD)
    assert isinstance(context.method, Ewc)
    return context.method, context, begin_phase(context, 0)


def penalty_of(method: Ewc) -> Tensor:
    batch: Batch = NOTHING
    output: Output = NOTHING
    penalty = method.penalty(batch, output)
    assert penalty is not None
    return penalty


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_rows_add_up_to_those_of_their_batch(lab: Lab, kind: str) -> None:
    """Each row's is of its mean loss, so it counts by the row's loss positions."""
    _, context, task = begun(lab, kind)
    rows = [(context.stream.tasks[0], np.arange(5))]
    table = context.stream.table(context.stream.tasks[0], "train", context.backbone.codec)
    counts = [max(1, len(table.columns([row]).target_ids[0])) for row in range(5)]
    total: dict[str, Tensor] = {}
    for row, gradients in task.row_gradients(rows):
        for name, gradient in gradients.items():
            total[name] = total.get(name, torch.zeros(())) + counts[row] / sum(counts) * gradient
    for name, gradient in task.gradients(rows).items():
        assert torch.allclose(total[name], gradient, atol=1e-6), name


def test_gradients_of_rows_are_those_without_dropout(lab: Lab) -> None:
    _, context, task = begun(lab, learner={"name": "lora", "lora_dropout": 0.5})
    with torch.no_grad():
        weight = dict(context.backbone.named_parameters())["head.weight"]
        weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    item, two = ([result for _, result in task.row_gradients([(context.stream.tasks[0], np.arange(2))])] for _ in "ab")
    for first, second in zip(item, two, strict=True):
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert any(bool(value.any()) for name, value in item[0].items() if ".lora_B" in name)


def test_gradients_of_outputs_are_those_of_the_true_label(lab: Lab) -> None:
    """A label's bias is its own logit's only term."""
    _, context, task = begun(lab)
    rows = [(context.stream.tasks[0], np.arange(3))]
    lists = [gradients["head.bias"].tolist() for _, gradients in task.row_gradients(rows, of="outputs")]
    assert context.backbone.head is not None and context.backbone.head.labels == ["blue", "red"]
    assert lists == [[0, 1], [1, 0], [0, 1]], "red, blue, red"


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_outputs_of_a_text_are_the_logits_of_its_tokens(lab: Lab, kind: str) -> None:
    _, context, task = begun(lab, kind, learner="finetune")
    backbone, rows = context.backbone, np.array([1])
    ((_, gradients),) = task.row_gradients([(context.stream.tasks[0], rows)], of="outputs")
    probabilities = {name: p for name, p in backbone.named_parameters() if name in gradients}
    data = task._collate([(context.stream.tasks[0], rows)])(np.array([0]), 1)
    logits_MV = backbone(data).logits
    tokens = data.target_ids[0].tolist()
    summed = torch.stack([logits_MV[index, token] for index, token in enumerate(tokens)]).sum()
    expected = torch.autograd.grad(summed, list(probabilities.values()), allow_unused=True)
    for name, gradient in zip(probabilities, expected, strict=True):
        assert gradient is None or torch.allclose(gradients[name], gradient, atol=1e-5), name


def test_fisher_information_squares_the_gradient_of_each_row(lab: Lab) -> None:
    """A new head says 1/2 for both labels: every row's gradient is +-1/2, and that of the balanced batch 0."""
    method, context, task = begun(lab, rows=None)
    end_phase(context, task)
    assert method._fisher["head.bias"].tolist() == pytest.approx([0.25, 0.25])


def test_fisher_information_of_tasks_is_merged() -> None:
    item, two, three = (torch.tensor([value]) for value in (6.0, 2.0, 1.0))
    first = merged(item, torch.zeros(1), 0)
    second = merged(two, first, 1)
    assert (first.item(), second.item(), merged(three, second, 2).item()) == (6, 4, 3)


def test_the_penalty_by_hand(lab: Lab) -> None:
    method, context, task = begun(lab, weight=10.0)
    assert method.penalty(NOTHING, NOTHING) is None, "nothing is held in the first task"
    end_phase(context, task)
    begin_phase(context, 1)
    assert penalty_of(method).item() == 0, "at the parameters of the last task"
    name = "head.bias"
    method._fisher = {n: torch.zeros_like(f) for n, f in method._fisher.items()}
    method._fisher[name] = torch.tensor([0.5, 2.0, 0.0, 0.0])
    parameter = dict(context.backbone.named_parameters())[name]
    with torch.no_grad():
        parameter += torch.tensor([2.0, -1.0, 5.0, 0.0])
    assert penalty_of(method).item() == pytest.approx(10 / 2 * (0.5 * 4 + 2 * 1))
    (gradient,) = torch.autograd.grad(penalty_of(method), [parameter])
    assert gradient.tolist() == pytest.approx([10 * 0.5 * 2, -10 * 2 * 1, 0, 0])


def test_rows_of_labels_are_found_by_their_names(lab: Lab) -> None:
    _, context, _ = begun(lab)
    context.backbone.learn_labels(["new"])
    assert context.backbone.head is not None and context.backbone.head.labels == ["blue", "red", "new"]
    kept = {"head.bias": torch.tensor([1.0, 2.0])}
    assert in_present_rows(kept, ["red", "blue"], context.backbone)["head.bias"].tolist() == [2, 1, 0]
    columns = {"head.bias": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    result = in_present_rows(columns, ["blue", "red"], context.backbone, axis=1)["head.bias"]
    assert result.tolist() == [[1, 2, 0], [3, 4, 0]]


def finished(lab: Lab, folder: Path, method: Any, **sections: Any) -> tuple[Storage, TrainingContext]:
    storage = Storage.at(folder)
    return storage, run(lab.config("bert", method, **sections), storage).context


def test_without_weight_it_is_the_learner_bit_for_bit(lab: Lab, complete: Complete, tmp_path: Path) -> None:
    plain, result = (
        complete("bert", "lora", "torch").storage,
        finished(lab, tmp_path, {"name": "ewc", "weight": 0.0})[0],
    )
    assert trace(result) == trace(plain) and matrix(result) == matrix(plain) and exported(result) == exported(plain)


@pytest.mark.parametrize("learner", ["finetune", "l2p"])
def test_what_matters_to_the_first_task_moves_less(lab: Lab, tmp_path: Path, learner: str) -> None:
    """The first task is the learner's own; the second stays nearer to it, weighed by the first task's F."""
    moved, method = [], {"name": "ewc", "learner": learner}
    first = finished(lab, tmp_path / "first", method, stream={"tasks": lab.tasks[:1]})[1]
    assert isinstance(first.method, Ewc) and first.method._tasks == 1
    for weight in (0.0, 10000.0):
        _, both = finished(lab, tmp_path / f"both{weight}", {**method, "weight": weight})
        held = (first.method._fisher, first.method._old)
        fisher, old = (in_present_rows(kept, first.method._labels, both.backbone) for kept in held)
        now = {name: value.detach() for name, value in both.backbone.named_parameters()}
        moved.append(sum(float((fisher[name] * (now[name] - old[name]) ** 2).sum()) for name in fisher))
    assert moved[1] < moved[0] / 2


def test_as_many_rows_as_are_asked_for(lab: Lab) -> None:
    method, _, task = begun(lab, rows=3)
    asked: list[int] = []
    kept = task.row_gradients
    task.row_gradients = lambda rows: asked.extend(len(chosen) for _, chosen in rows) or kept(rows)
    method._measured(task)
    assert asked == [3] and TRAIN_ROWS > 3


@pytest.mark.parametrize("name", ["ewc", "ogd"])
def test_adapters_of_their_own_tasks_are_refused(lab: Lab, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"learner is inclora, which freezes the adapters .* method '{name}' has"):
        build(lab.config("bert", {"name": name, "learner": "inclora"}), WORLD)


def test_engines_that_shard_parameters_and_other_schedules_are_refused(lab: Lab) -> None:
    for engine in ("zero3", "fsdp"):
        with pytest.raises(ConfigError, match=r"method 'ewc' computes gradients of its own, which engine"):
            check(lab.config("bert", "ewc", ENGINES[engine]))
    with pytest.raises(ConfigError, match=r"'ewc' needs what is kept of earlier tasks, and under stream.schedule=join"):
        lab.config("bert", ("joint", "ewc"))


def test_the_first_phase_depends_on_the_rows_alone() -> None:
    ewc_config, other = EwcConfig(weight=1.0), EwcConfig(weight=2.0, merge="sum")
    assert ewc_config.cache_key(0, ("a", "b")) == other.cache_key(0, ("a", "b"))
    assert ewc_config.cache_key(1, ("a", "b")) != other.cache_key(1, ("a", "b"))
    assert ewc_config.cache_key(0, ("a", "b")) != EwcConfig(weight=1.0, rows=3).cache_key(0, ("a", "b"))
