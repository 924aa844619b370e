"""A row alone equals the row in a batch, in loss and in answer, for every kind of backbone."""

from __future__ import annotations

import pytest
import torch
from tiny import KINDS, TASKS, Lab

from raycl.backbone import Backbone
from raycl.backbone.base import loss_count
from raycl.data.loader import Collate
from raycl.generation.batch_answers import predict
from raycl.training.assembly import build
from raycl.training.workers.distributed import DistributedContext
from raycl.types import IGNORE, TENSORS, Batch


@pytest.fixture(scope="module", params=KINDS)
def parts(request: pytest.FixtureRequest, lab: Lab) -> tuple[Backbone, Collate]:
    """Return a backbone with trained-looking weights and what makes its batches."""
    built = build(lab.config(request.param, "finetune"), DistributedContext.alone(torch.device("cpu")))[0]
    backbone = built.backbone.eval()
    backbone.learn_labels([label for classes in TASKS.values() for label, _ in classes])
    torch.manual_seed(1)
    if backbone.head is not None:
        torch.nn.init.normal_(backbone.head.weight)
    tables = [built.stream.table(task, "train", backbone.codec) for task in built.stream.tasks]
    labels = backbone.label_ids() if backbone.codec.needs_labels else None
    return backbone, Collate(tables, backbone.codec.pad_id, labels)


def rows_of(batch: Batch, *rows: int) -> Batch:
    return Batch(**{name: getattr(batch, name)[list(rows)] for name in TENSORS})


def test_the_loss_of_a_batch_is_the_sum_of_its_rows_alone(parts: tuple[Backbone, Collate]) -> None:
    backbone, collate = parts
    chosen = torch.arange(collate.count).numpy()[::3]
    whole = collate(chosen, len(chosen) + 3)  # three fill-ups
    alone = [collate(chosen[index : index + 1], 1) for index in range(len(chosen))]
    assert len({batch.source_ids.shape[1] for batch in alone}) > 2, "rows of one length prove nothing"
    with torch.no_grad():
        losses = [backbone(batch).loss_sum for batch in alone]
        loss_sum = backbone(whole).loss_sum
        in_batch = [backbone(rows_of(whole, index)).loss_sum for index in range(len(chosen))]
    torch.testing.assert_close(loss_sum, torch.stack(losses).sum(), atol=1e-5, rtol=1e-6)
    for mine, lonely in zip(in_batch, losses, strict=True):
        torch.testing.assert_close(mine, lonely, atol=1e-6, rtol=1e-6)
    assert loss_count(whole) == sum(map(loss_count, alone))


def test_padded_positions_hold_anything(parts: tuple[Backbone, Collate]) -> None:
    backbone, collate = parts
    batch = collate(torch.arange(collate.count).numpy()[::3], 10)
    other = rows_of(batch, *range(len(batch)))
    other.source_ids[other.source_mask == 0] = 5
    with torch.no_grad():
        torch.testing.assert_close(backbone(other).loss_sum, backbone(batch).loss_sum, atol=1e-6, rtol=1e-6)
        assert predict(backbone, other, 3) == predict(backbone, batch, 3)


def test_answers_do_not_depend_on_neighbours(parts: tuple[Backbone, Collate]) -> None:
    backbone, collate = parts
    chosen = torch.arange(collate.count).numpy()[::4]
    together = predict(backbone, collate(chosen, len(chosen)), 4)
    assert together == [predict(backbone, collate(chosen[index : index + 1], 1), 4)[0] for index in range(len(chosen))]


def test_a_batch_of_fill_ups_costs_nothing_and_gives_no_gradient(parts: tuple[Backbone, Collate]) -> None:
    backbone, collate = parts
    batch = collate(torch.arange(0).numpy(), 2)
    backbone.zero_grad()
    output = backbone(batch)
    output.loss_sum.backward()
    assert loss_count(batch) == 0 and output.loss_sum.item() == 0.0
    assert all(not p.grad.any() for p in backbone.parameters() if p.grad is not None)
    assert batch.label_ids.tolist() == [IGNORE, IGNORE]


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_the_bare_models_own(lab: Lab, kind: str) -> None:
    """A row alone equals the row in a batch, without dropout and prefix, in the middle of training, which continues."""
    config = lab.config(kind, "finetune", backbone={"dropout": 0.5})
    backbone = build(config, DistributedContext.alone(torch.device("cpu")))[0].backbone.train()
    sources = [torch.tensor(ids) for ids in backbone.codec.encode_source(["the sea is cold very", "it purrs"])]
    ids = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=backbone.codec.pad_id)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(item) for item in sources], batch_first=True)
    bare = backbone.hidden_states(ids, mask)
    backbone.prefix = lambda rows, device: (torch.ones(rows, 1, bare.shape[2]), torch.ones(rows, 1).long())
    together = backbone.hidden_states(ids, mask)
    assert torch.equal(together, bare) and together.shape[:2] == ids.shape and not together.requires_grad
    for row, source in enumerate(sources):
        item = backbone.hidden_states(source[None], torch.ones_like(source)[None])[0]
        torch.testing.assert_close(together[row, : len(source)], item, atol=1e-5, rtol=1e-4)
    assert all(module.training for module in backbone.modules())
