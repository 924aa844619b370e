"""L2P: which prompts a text gets, what pulls the keys, and what both depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from phases import begin_phase
from service_client import FEW, bank_of, examples, serving
from tiny import ENGINES, KINDS, Lab, Taught, evaluated_by, opened, run, trace
from torch.nn.functional import cosine_similarity

from raycl.backbone.base import loss_count, mean_pooled
from raycl.bank import Bank
from raycl.data.loader import Collate, eval_batches
from raycl.errors import BankError, ConfigError
from raycl.generation.requests import Sampling
from raycl.methods.base import activate_batch, trained_names
from raycl.methods.prompts.l2p import L2p
from raycl.routing.pools import PromptPool, PromptPoolRouter
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import IGNORE, Batch

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str = "bert", **settings: Any) -> tuple[L2p, TrainingContext]:
    context, _ = build(lab.config(kind, {"name": "l2p", **settings}), WORLD)
    assert isinstance(context.method, L2p)
    begin_phase(context)
    return context.method, context


def batch_of(context: TrainingContext, rows: int = 6) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[0], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    return next(iter(eval_batches(Collate([table], codec.pad_id, labels), rows)))


# ---- the pool ------------------------------------------------------------------------------------------------------


def test_the_nearest_keys_are_selected_by_cosine() -> None:
    pool = PromptPool(["a", "b", "c", "d"], 2, 2, 0)
    pool.keys.data = torch.tensor([[9.0, 0.0], [0.1, 0.1], [0.0, 3.0], [-1.0, 0.0]])
    assert pool.selected(torch.tensor([[1.0, 0.2], [-1.0, 5.0]])).tolist() == [[1, 1, 0, 0], [0, 1, 1, 0]]
    everything = PromptPool(["a", "b", "c"], 2, 3, 0)
    assert everything.selected(torch.randn(5, 2)).all(), "a pool of top_k prompts gives all of them to every text"


def test_queries_are_means_over_real_tokens() -> None:
    states = torch.arange(12.0).view(2, 3, 2)
    pooled = mean_pooled(states, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    assert pooled.tolist() == [[1.0, 2.0], [0.0, 0.0]]


def test_texts_alone_are_not_routed() -> None:
    with pytest.raises(BankError, match="router is 'prompt_pool', which reads prompts with the backbone"):
        PromptPoolRouter(PromptPool(["a"], 2, 1, 0)).route(["x"], None)


# ---- the method ----------------------------------------------------------------------------------------------------


def test_prompts_keys_and_head_are_trained_and_nothing_else(lab: Lab) -> None:
    method, context = started(lab)
    assert trained_names(context.backbone) == ["head.weight", "head.bias", "prefix.trainable", "prompt_pool.keys"]
    assert dict(context.backbone.named_parameters())["prefix.trainable"].shape == (10, 5, 32)
    assert method.pool.keys.shape == (10, 32) and method.pool.top_k == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_texts_prompts_do_not_depend_on_its_batch(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    context.backbone.train()
    batch = batch_of(context)
    together = method.route(batch)
    assert (together.weights.sum(1) == 3).all() and len({tuple(row) for row in together.weights.tolist()}) > 1
    for row in range(len(batch)):
        length = int(batch.source_mask[row].sum())
        fields = {name: getattr(batch, name)[row : row + 1] for name in ("target_ids", "label_ids", "weight", "rows")}
        ids, mask = batch.source_ids[row : row + 1, :length], batch.source_mask[row : row + 1, :length]
        alone = method.route(Batch(ids, mask, **fields))
        assert torch.equal(alone.weights[0], together.weights[row])


@pytest.mark.parametrize("kind", KINDS)
def test_the_pull_by_hand_and_the_selected_keys_move(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind, pull=0.25)
    batch = batch_of(context)
    penalty = method.penalty(batch, None)  # type: ignore[arg-type]
    states = context.backbone.hidden_states(batch.source_ids, batch.source_mask)
    chosen, total = method.route(batch).weights.bool(), 0.0
    for row in range(len(batch)):
        query = states[row][batch.source_mask[row].bool()].mean(0)
        cosines = cosine_similarity(query[None], method.pool.keys.detach()[chosen[row]])
        positions = 1 if kind == "bert" else int((batch.target_ids[row] != IGNORE).sum())
        total += float(cosines.mean()) * positions
    assert penalty is not None
    assert float(penalty.detach()) == pytest.approx(-0.25 * total / loss_count(batch), rel=1e-4)
    penalty.backward()  # type: ignore[no-untyped-call]
    assert method.pool.keys.grad is not None
    assert torch.equal(method.pool.keys.grad.any(1), chosen.any(0))


@pytest.mark.parametrize("kind", KINDS)
def test_only_selected_prompts_are_trained_by_the_loss(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    if context.backbone.head is not None:
        torch.nn.init.normal_(context.backbone.head.weight)  # type: ignore[arg-type]
    batch = batch_of(context, rows=2)
    with activate_batch(method, batch):
        context.backbone(batch).loss_sum.backward()
    gradient = dict(context.backbone.named_parameters())["prefix.trainable"].grad
    assert gradient is not None
    assert torch.equal(gradient.flatten(1).any(1), method.route(batch).weights.bool().any(0))


def test_no_pull_costs_nothing(lab: Lab) -> None:
    method, context = started(lab, pull=0)
    assert method.penalty(batch_of(context), None) is None  # type: ignore[arg-type]


def test_pools_that_cannot_be_are_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="top_k is 4 and pool_size 2: a text cannot get more prompts than there are"):
        lab.config("bert", {"name": "l2p", "pool_size": 2, "top_k": 4})


@pytest.mark.parametrize(
    ("kind", "engine", "micro"),
    sampled([(kind, engine, micro) for kind in ("bert", "t5") for engine, micro in (("torch", 1), ("zero2", 2))]),
)
def test_the_pull_counts_once_a_step(lab: Lab, tmp_path: Path, kind: str, engine: str, micro: int) -> None:
    """Whatever the accumulation: each example's pull counts by its loss positions, in each task alike."""
    collected = []
    for name, sections in (("whole", {}), ("parts", {"engine": ENGINES[engine], "train": {"micro_batch_size": micro}})):
        storage = Storage.at(tmp_path / name)
        run(lab.config(kind, "l2p", stream={"tasks": lab.tasks[:1]}, **sections), storage)
        collected.append(trace(storage))
    for mine, other in zip(*collected, strict=True):
        assert mine == pytest.approx(other, abs=1e-4, rel=1e-3)


# ---- serving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "decoding"), sampled([("bert", "dynamic"), ("t5", "dynamic"), ("llama", "dynamic"), ("llama", "static")])
)
def test_served_texts_get_the_prompts_of_the_run_and_its_answers(
    taught: Taught, tmp_path: Path, kind: str, decoding: str
) -> None:
    done = taught(kind, "l2p")
    bank = bank_of(done, tmp_path)
    asked = examples(done, bank, rows=FEW)
    router, codec, expected = evaluated_by(done), done.context.backbone.codec, {}
    for task in done.context.stream.tasks:
        table = done.context.stream.table(task, "test", codec)
        for batch in eval_batches(Collate([table], codec.pad_id), 1):
            row = router.mixture(batch)
            names = {name for name, weight in zip(row.names, row.weights[0].tolist(), strict=True) if weight}
            expected[table.texts(batch.rows.tolist())[0]] = names
    assert len(set(map(frozenset, expected.values()))) > 1
    sampling = None if kind == "bert" else Sampling(12)
    with serving(bank, max_batch=5, decoding=decoding) as client:
        with client.paused():
            replies = [client.ask(item.text, sampling=sampling) for item in asked]
        for item, reply in zip(asked, replies, strict=True):
            result = {name for name, weight in reply.metadata.weights.items() if weight}
            assert result - {"head"} == expected[item.text]
            assert (reply.label if kind == "bert" else reply.text) == item.answer


def test_positions_of_prompts_are_counted(taught: Taught, lab: Lab, tmp_path: Path) -> None:
    """From the snapshot's adapters and router alone, whatever its backbone and however long they were trained."""
    bank = bank_of(taught("llama", "l2p"), tmp_path)
    loaded = opened(bank, bank.open(2)).loaded
    assert loaded.prompt_positions() == 15 and loaded.prompt_positions({"prompt000", "prompt004"}) == 10
    soft, storage = {"name": "sapt", "value": "prompt", "prompt_length": 3}, Storage.at(tmp_path / "other")
    run(lab.config("llama", soft, train={"max_steps": 1}), storage)
    other = Bank(storage.sub("bank"))
    assert opened(other, other.open(2)).loaded.prompt_positions() == 3, "prompts that are added up"


def test_the_snapshot_holds_pool_keys_and_head(taught: Taught) -> None:
    newest = Bank(taught("bert", "l2p").storage.sub("bank")).newest()
    assert newest is not None and newest.router.kind == "prompt_pool"
    names = ["head", *(f"prompt{number:03d}" for number in range(10))]
    assert sorted(entry.name for entry in newest.adapters) == names
    assert all(set(entry.tasks) == {"colour", "animal"} for entry in newest.adapters)
