"""Tests, in memory, of what SAPT keeps: mean weights, old blocks and keys, replayed answers, all above the floor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from axes import sampled
from phases import begin_phase, end_phase, routed
from test_sapt import WORLD, loss, started
from tiny import KINDS, Lab
from torch import Tensor

from raycl.generation.batch_answers import predict
from raycl.methods.base import activate, trained_names
from raycl.methods.sapt.sapt import Sapt
from raycl.routing.attention import max_pooled
from raycl.training.assembly import build
from raycl.types import Batch, Mixture


def attend(method: Sapt, batch: Batch, loudness: float) -> None:
    """Let the batch's texts attend to the block in training: its score rises by about so much."""
    with torch.no_grad():
        pooled = max_pooled(method.backbone.embedded(batch.source_ids), batch.source_mask)
        query = method.attention.query(pooled).mean(0)
        assert method.attention.key is not None
        method.attention.key.add_(query * loudness * method.attention.tau / query.square().sum())


@pytest.mark.parametrize("split", ["dev", "test", "train"])
def test_mean_weights_are_over_the_configured_split(lab: Lab, split: str) -> None:
    """Those of dev (the released dev file is the test file), of test as in the paper; else of training."""
    stream = {"dev_fraction": 0.0 if split == "train" else 0.25, "train_rows": 14}
    arm = {"abar_split": "test" if split == "test" else "dev"}
    context, _ = build(lab.config("llama", {"name": "sapt", "arm": arm}, stream=stream), WORLD)
    method = context.method
    assert isinstance(method, Sapt)
    for phase in context.phases:
        rows = begin_phase(context, phase.index)
        end_phase(context, rows)
    means = {
        name: method.attention(method._pooled(rows.routed_ids(name))).exp().mean(0).detach()
        for name in ("train", "dev", "test")
        if rows.routed_ids(name)
    }
    assert len(means) == (2 if split == "train" else 3)
    kept = method.reflection.abar["animal"]
    torch.testing.assert_close(kept, means[split])
    assert all(not torch.allclose(kept, mean, atol=1e-6) for name, mean in means.items() if name != split)


def test_replayed_labels_are_allowed_at_any_adapter_weight(lab: Lab) -> None:
    """Below the pruning threshold only its own adapter has an old label: without it the loss would be infinite."""
    method, batch = started(lab, "bert", ablation="replay", arm={"fraction": 0.5})
    attend(method, batch, 30)
    joined = method.prepare_batch(batch)
    assert len(joined) > len(batch)
    weights = method.route(joined)
    assert (
        weights.names == ("colour", "animal")
        and weights.weights[:, 0].min() < method.config.attention.pruning_threshold / 2
    )
    assert loss(method, joined).isfinite()


@pytest.mark.parametrize("loudness", [30, 200], ids=["faint", "underflow"])
def test_a_given_task_is_answered_at_any_adapter_weight(lab: Lab, loudness: float) -> None:
    """With `eval.labels=task` an old task's labels are allowed, which only its own adapter has."""
    method, batch = started(lab, "bert")
    attend(method, batch, loudness)
    assert method.context is not None
    own = dict(method.backbone.named_parameters())
    method.context.parameters = {name: own[name].detach().clone() for name in trained_names(method.backbone)}
    learned = method.end_task(method.context)
    backbone = method.backbone.eval()
    with torch.no_grad():
        mixture = routed(method, learned, batch)
        assert mixture.names == ("animal",)
        with activate(method, mixture):
            assert set(predict(backbone, batch, 1)) <= {"cat", "dog"}
        backbone.allowed_labels = dict.fromkeys(("red", "blue"), ())
        with activate(method, routed(method, learned, batch)):
            assert set(predict(backbone, batch, 1)) <= {"red", "blue"}


@pytest.mark.parametrize(("kind", "value"), sampled([(kind, value) for kind in KINDS for value in ("lora", "prompt")]))
def test_the_default_pruning_threshold_changes_states_by_less_than_a_thousandth(
    lab: Lab, kind: str, value: str
) -> None:
    """The states that the model gives out hardly change, with two old blocks that weigh just too little."""
    method, batch = started(lab, kind, learned=2, value=value)
    attention = method.config.attention
    assert attention.pruning_threshold == 1e-3
    loudness, result = 0.0, list[Tensor]()
    while len(method.route(batch).names) > 1:
        attend(method, batch, 0.05)
        loudness += 0.05
    assert loudness < 15, "and not as good as silent"
    given: list[Tensor] = []
    method.backbone.model.register_forward_hook(
        lambda module, args, out: given.append(out["last_hidden_state" if kind == "bert" else "logits"])
    )
    with torch.no_grad():
        for pruning_threshold in (0.0, attention.pruning_threshold):
            config = attention.model_copy(update={"pruning_threshold": pruning_threshold})
            method.config = method.config.model_copy(update={"attention": config})
            loss(method, batch)
            result.append(given[-1].flatten(1))
    moved = (result[0] - result[1]).norm(dim=1) / result[0].norm(dim=1)
    assert 0 < float(moved.max()) < 1e-3


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_pruned_adapters_hardly_change_the_output(lab: Lab, kind: str) -> None:
    """Relatively by less than the floor, with a block that weighs just too little."""
    method, batch = started(lab, kind)
    attend(method, batch, 7)
    with torch.no_grad():
        pooled = max_pooled(method.backbone.embedded(batch.source_ids), batch.source_mask)
        pruning_threshold = 2.1 * float(method.attention(pooled).exp()[:, 0].max())
        collected = []
        for item in (0.0, pruning_threshold):
            attention = method.config.attention.model_copy(update={"pruning_threshold": item})
            method.config = method.config.model_copy(update={"attention": attention})
            collected.append((method.route(batch).names, float(loss(method, batch))))
    assert collected[0][0] == ("colour", "animal") and collected[1][0] == ("animal",)
    assert (
        1e-5 < pruning_threshold < 0.02
        and 0 < abs(collected[0][1] - collected[1][1]) < pruning_threshold * collected[0][1]
    )


@pytest.mark.parametrize("value", ["lora", "prompt"])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_step_changes_no_old_adapters_or_keys(lab: Lab, kind: str, value: str) -> None:
    """However large it is: the output of the old adapter alone stays, bit for bit; that of the new one does not."""
    method, batch = started(lab, kind, value=value)
    key = method.attention.keys["colour"].clone()

    def said(task: str) -> Tensor:
        with torch.no_grad(), method.stack.activate(Mixture.same({task: 1.0}, len(batch))):
            return method.backbone(batch).loss_sum  # type: ignore[no-any-return]

    before = {task: said(task) for task in ("colour", "animal")}
    trainable = [parameter for parameter in method.backbone.parameters() if parameter.requires_grad]
    loss(method, batch).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(trainable, lr=10.0).step()
    assert torch.equal(said("colour"), before["colour"]) and not torch.equal(said("animal"), before["animal"])
    assert torch.equal(method.attention.keys["colour"], key)


@pytest.mark.parametrize("settings", [{}, {"value": "prompt"}, {"head_rule": "logit"}], ids=["lora", "prompt", "logit"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_keys_and_adapters_does_not_matter(lab: Lab, kind: str, settings: dict[str, Any]) -> None:
    method, batch = started(lab, kind, learned=3, **settings)
    with torch.no_grad():
        first = loss(method, batch)
        names = method.route(batch).names
        method.attention.keys = dict(reversed(method.attention.keys.items()))
        method.attention._frozen = None
        assert method.route(batch).names != names and set(method.route(batch).names) == set(names)
        torch.testing.assert_close(loss(method, batch), first, atol=1e-4, rtol=1e-5)
