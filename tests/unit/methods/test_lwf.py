"""LwF: the divergence by hand, what the old model answers, and what distillation changes in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from phases import begin_phase
from tiny import ENGINES, KINDS, Lab, exported, matrix, run, trace
from torch import Tensor

from raycl.backbone.base import Output
from raycl.data.loader import Collate, eval_batches
from raycl.errors import ConfigError
from raycl.methods.base import activate_batch, trained_names
from raycl.methods.regularization.lwf import Lwf, LwfConfig, divergence
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))


def test_the_divergence_by_hand() -> None:
    old, new = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert divergence(old, new, 1.0).item() == pytest.approx(0.3681, abs=1e-4), "KL(new, old) were .5108"
    assert divergence(old, old + 3, 2.0).item() == pytest.approx(0), "equal but for a constant"
    assert divergence(2 * old, 2 * new, 2.0).item() == pytest.approx(0.3681, abs=1e-4)


def begun(lab: Lab, kind: str, **settings: Any) -> tuple[Lwf, TrainingContext, Batch]:
    """Return the method in the second task, and a batch of it."""
    context, _ = build(lab.config(kind, {"name": "lwf", **settings}), WORLD)
    method, codec = context.method, context.backbone.codec
    assert isinstance(method, Lwf)
    begin_phase(context, 0)
    assert not method._old, "there is no earlier task"
    move(context, ("red", "blue") if kind == "bert" else ())
    begin_phase(context, 1)
    context.backbone.train()
    labels = context.backbone.label_ids() if codec.needs_labels else None
    table = context.stream.table(context.stream.tasks[1], "train", codec)
    return method, context, next(iter(eval_batches(Collate([table], codec.pad_id, labels), 5)))


def move(context: TrainingContext, labels: tuple[str, ...] = ()) -> None:
    """Give what is trained other values."""
    draw = torch.Generator().manual_seed(len(labels))
    own = dict(context.backbone.named_parameters())
    with torch.no_grad():
        for name in trained_names(context.backbone):
            own[name].add_(0.3 * torch.randn(own[name].shape, generator=draw))


def outputs(method: Lwf, context: TrainingContext, batch: Batch) -> tuple[Output, Tensor]:
    """Return the output of the present model, and the penalty, as a training step computes them."""
    with activate_batch(method, batch):
        output = context.backbone(batch)
        penalty = method.penalty(batch, output)
        assert penalty is not None
        (output.loss_sum + penalty).backward()
    return output, penalty.detach()


@pytest.mark.parametrize(
    ("kind", "learner"),
    sampled([(kind, learner) for learner in ("lora", "finetune", "olora", "l2p") for kind in KINDS]),
)
def test_the_old_model_answers_as_before_the_task(lab: Lab, kind: str, learner: str) -> None:
    """The penalty is checked by a copy of the logits before anything moves; parameters and gradients are untouched."""
    pull = {"pull": 0.0} if learner == "l2p" else {}
    method, context, batch = begun(lab, kind, learner={"name": learner, **pull})
    with torch.no_grad(), activate_batch(method, batch):
        before = context.backbone(batch).logits
    _, nothing = outputs(method, context, batch)
    assert nothing.item() == pytest.approx(0, abs=1e-6), "the model is the old one yet"
    move(context)
    values = {name: value.clone() for name, value in context.backbone.named_parameters()}
    output, result = outputs(method, context, batch)
    old, new = before, output.logits.detach()
    if kind == "bert":
        assert method._known == ["blue", "red"] and old.shape[1] == 4
        old, new = old[:, :2], new[:, :2]
    expected = divergence(old, new, 2.0).mean()
    assert result.item() == pytest.approx(expected.item(), rel=1e-4) and expected > 1e-6
    assert all(torch.equal(value, values[name]) for name, value in context.backbone.named_parameters())


def test_examples_that_fill_a_batch_up_change_nothing(lab: Lab) -> None:
    method, context, batch = begun(lab, "bert")
    move(context)
    _, result = outputs(method, context, batch)
    codec, table = (
        context.backbone.codec,
        context.stream.table(context.stream.tasks[1], "train", context.backbone.codec),
    )
    labels = context.backbone.label_ids()
    filled = Collate([table], codec.pad_id, labels)(batch.rows.numpy(), 8)
    assert len(filled) == 8
    assert outputs(method, context, filled)[1].item() == pytest.approx(result.item(), rel=1e-5)
    empty = Collate([table], codec.pad_id, labels)(batch.rows.numpy()[:0], 4)
    assert outputs(method, context, empty)[1].item() == 0


def finished(lab: Lab, folder: Path, method: Any, **sections: Any) -> Storage:
    storage = Storage.at(folder)
    run(lab.config("bert", method, **sections), storage)
    return storage


def test_without_weight_it_is_the_learner_bit_for_bit(lab: Lab, tmp_path: Path) -> None:
    """Dropout included, of which the old model draws nothing."""
    learner = {"name": "lora", "lora_dropout": 0.2}
    lwf = {"name": "lwf", "learner": learner}
    plain, none, tiny = (
        finished(lab, tmp_path / str(number), method, train={"micro_batch_size": 2})
        for number, method in enumerate((learner, {**lwf, "weight": 0.0}, {**lwf, "weight": 1e-30}))
    )
    for result in (none, tiny):
        assert trace(result) == trace(plain) and matrix(result) == matrix(plain) and exported(result) == exported(plain)


def test_old_answers_change_less(lab: Lab, tmp_path: Path) -> None:
    """Weight 100: the first task's scores on the second task's texts stay nearer, and training differs."""
    stream, train = {"tasks": lab.tasks[:1]}, {"epochs": 2}
    old = scores(lab, run(lab.config("bert", "finetune", train=train, stream=stream), store(tmp_path)).context)
    changed = []
    for weight in (0.0, 100.0):
        config = lab.config("bert", {"name": "lwf", "learner": "finetune", "weight": weight}, train=train)
        new = scores(lab, run(config, store(tmp_path)).context)
        changed.append(float(divergence(old, new, 2.0).mean()))
    assert changed[1] < changed[0] / 3


def store(folder: Path) -> Storage:
    return Storage.at(folder / str(len(list(folder.iterdir()))))


@torch.no_grad()
def scores(lab: Lab, context: TrainingContext) -> Tensor:
    """Return the scores of the first task's labels on the second task's texts."""
    both, _ = build(lab.config("bert"), WORLD)
    codec = context.backbone.codec
    table = both.stream.table(both.stream.tasks[1], "train", codec)
    labels = dict.fromkeys(both.stream.tasks[1].labels or (), 0)
    context.backbone.eval()
    (batch,) = eval_batches(Collate([table], codec.pad_id, labels), 14)
    result, names = context.backbone.score_labels(batch)
    return result[:, [names.index(label) for label in ("blue", "red")]]


def test_what_it_cannot_work_with_is_refused(lab: Lab) -> None:
    for engine in ("zero3", "fsdp"):
        with pytest.raises(ConfigError, match=r"method 'lwf' computes outputs with earlier parameters, which engine"):
            check(lab.config("bert", "lwf", ENGINES[engine]))
    with pytest.raises(ConfigError, match=r"method\.learner is slm, which trains each task's adapters on its own"):
        build(lab.config("bert", {"name": "lwf", "learner": lab.slots()}), WORLD)


def test_the_first_phase_is_the_learners() -> None:
    lwf_config, other = LwfConfig(weight=2.0), LwfConfig(temperature=1.0)
    assert lwf_config.cache_key(0, ("a", "b")) == other.cache_key(0, ("a", "b"))
    assert lwf_config.cache_key(1, ("a", "b")) != other.cache_key(1, ("a", "b"))
