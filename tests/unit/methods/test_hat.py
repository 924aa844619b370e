"""HAT in the layers of a transformer: gates of each task, weights that stay, and the model that is exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase, routed
from tiny import KINDS, Complete, Lab, Taught, matrix
from torch import Tensor

from raycl.data.loader import Collate, eval_batches
from raycl.methods.base import activate, activate_batch, trained_names
from raycl.methods.masks.hat import Hat
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Mixture

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str = "bert", **sections: Any) -> tuple[Hat, TrainingContext]:
    context, _ = build(lab.config(kind, "hat", **sections), WORLD)
    assert isinstance(context.method, Hat)
    return context.method, context


def batch_of(context: TrainingContext, task: int = 0, rows: int = 4) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[task], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    return next(iter(eval_batches(Collate([table], codec.pad_id, labels, texts=True), rows)))


def set_mask(method: Hat, mask: Tensor) -> None:
    """e of the task in training, for a binary mask `[U]`."""
    with torch.no_grad():
        method.masks.embedding.copy_(mask * 12 - 6)


def states(context: TrainingContext, batch: Batch) -> Tensor:
    with torch.no_grad():
        return context.backbone.text_states(batch)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_factors_on_heads_inner_units_and_outputs(lab: Lab, kind: str) -> None:
    """The masked model is the model whose projections have scaled rows and columns: what is exported."""
    method, context = started(lab, kind)
    phase = begin_phase(context)
    context.backbone.eval()
    batch = batch_of(context)
    with activate(method, None):
        bare = states(context, batch)
    torch.manual_seed(1)
    set_mask(method, (torch.rand(len(method.masks.embedding)) < 0.7).float())
    with activate_batch(method, batch):
        trained = states(context, batch)
    assert not torch.allclose(trained, bare, atol=1e-3)
    learned = end_phase(context, phase)
    assert learned is not None and not learned.adapters
    with activate(method, routed(method, learned, batch, "colour")):
        torch.testing.assert_close(states(context, batch), trained, atol=1e-5, rtol=1e-4)
    own = dict(context.backbone.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            if context.backbone.exported_name(name) in learned.model and not name.startswith("head."):
                parameter.copy_(learned.model[context.backbone.exported_name(name)])
    with activate(method, None):
        torch.testing.assert_close(states(context, batch), trained, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["hat", "hat-adapter"])
def test_gradients_survive_recomputation(lab: Lab, name: str) -> None:
    collected = []
    for again in (False, True):
        context, _ = build(lab.config("llama", name, backbone={"gradient_checkpointing": again}), WORLD)
        begin_phase(context)
        context.backbone.train()
        own = {key: p for key, p in context.backbone.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for key, parameter in own.items():
                if key.endswith("lora_B"):
                    parameter.fill_(0.1)
        batch = batch_of(context)
        with activate_batch(context.method, batch):
            context.backbone(batch).loss_sum.backward()
        collected.append({key: p.grad for key, p in own.items() if p.grad is not None})
    assert collected[0].keys() == collected[1].keys() and bool(collected[0]["unit_masks.embedding"].any())
    for key, gradient in collected[0].items():
        torch.testing.assert_close(collected[1][key], gradient)


def test_the_bare_backbone_computes_what_it_did(lab: Lab) -> None:
    method, context = started(lab)
    plain, _ = build(lab.config("bert", "finetune"), WORLD)
    begin_phase(context)
    batch = batch_of(context)
    context.backbone.eval()
    plain.backbone.eval()
    with activate(method, None):
        assert torch.equal(states(context, batch), states(plain, batch))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_weights_in_use_are_zero(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    phase = begin_phase(context)
    own = dict(context.backbone.named_parameters())
    ones = {name: torch.ones_like(own[name]) for name in trained_names(context.backbone)}
    method.penalty(None, None)  # type: ignore[arg-type]
    first = method.transform_gradients(ones)
    embedding = "unit_masks.embedding"
    assert all(torch.equal(first[name], ones[name]) for name in ones if name != embedding)
    torch.manual_seed(2)
    mask = (torch.rand(len(method.masks.embedding)) < 0.5).float()
    set_mask(method, mask)
    end_phase(context, phase)
    begin_phase(context, 1)
    ones = {name: torch.ones_like(dict(context.backbone.named_parameters())[name]) for name in ones}
    method.penalty(None, None)  # type: ignore[arg-type]
    after = method.transform_gradients(ones)
    readers = {path for path, side in method.units if side == "input"}
    for path in readers:
        inputs = method.units[path, "input"].spread(mask[method.masks.places[path, "input"]])
        outputs = mask[method.masks.places[path, "output"]]
        expected = 1 - torch.minimum(outputs[:, None], inputs[None])
        torch.testing.assert_close(after[f"model.{path}.weight"], expected)
        for writer in method.units[path, "input"].writers:
            torch.testing.assert_close(after[f"model.{writer}.weight"][:, 0], 1 - inputs)
    rest = [n for n in after if n.startswith("model.") and n.removeprefix("model.") not in method.sides]
    assert rest and not any(bool(after[name].any()) for name in rest), "embeddings and norms are every task's"
    heads = [name for name in after if name.startswith("head.")]
    assert all(torch.equal(after[name], ones[name]) for name in heads)


def test_masked_weights_do_not_move_by_one_bit_and_the_first_task_keeps_its_score(taught: Taught) -> None:
    """A whole run with AdamW, whose masks are binary."""
    done = taught("bert", "hat")
    method = done.context.method
    assert isinstance(method, Hat)
    model = [done.storage.read(f"learned/{name}/model.safetensors") for name in done.storage.list("learned")]
    from safetensors.torch import load

    first, last = map(load, model)
    mask = method.masks.masks["colour"]
    now = method.masks.masks["animal"]
    assert float(((mask == 0) | (mask == 1)).float().mean()) > 0.9
    own = dict(done.context.backbone.model.named_parameters())
    held = 0
    for (path, side), units in method.units.items():
        where = method.masks.places[path, side]
        if side == "output":
            continue
        used = units.spread((mask[where] == 1).float()).bool()
        for writer in units.writers:
            assert torch.equal(first[f"{writer}.weight"][used], own[f"{writer}.weight"][used])
            held += int(used.sum())
        outputs = mask[method.masks.places[path, "output"]] == 1
        assert torch.equal(first[f"{path}.weight"][outputs][:, used], own[f"{path}.weight"][outputs][:, used].detach())
    assert held and not torch.equal(mask, now)
    embeddings = [name for name in first if "embeddings" in name or "LayerNorm" in name]
    assert all(torch.equal(first[name], last[name]) for name in embeddings if name in own)
    moved = [name for name in last if name in own and not torch.equal(first[name], last[name])]
    assert moved
    scores = matrix(done.storage)
    assert scores[1][0] == scores[0][0]


def test_examples_of_several_tasks_have_their_own_masks(lab: Lab) -> None:
    method, context = started(lab, "llama")
    torch.manual_seed(3)
    for index in range(2):
        begun = begin_phase(context, index)
        set_mask(method, (torch.rand(len(method.masks.embedding)) < 0.6).float())
        end_phase(context, begun)
    context.backbone.eval()
    batch = batch_of(context, rows=3)
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    with activate(method, Mixture(("colour", "animal"), weights)):
        together = states(context, batch)
    for row, name in enumerate(("colour", "animal", "colour")):
        with activate(method, Mixture.same({name: 1.0}, 3)):
            torch.testing.assert_close(together[row], states(context, batch)[row], atol=1e-5, rtol=1e-4)


def test_nothing_is_published(complete: Complete) -> None:
    done = complete("bert", "hat", "torch")
    assert not done.storage.exists("bank") or not done.storage.sub("bank").list("snapshots")
    assert [name.partition("-")[2] for name in done.storage.list("learned")] == ["colour", "animal"]
