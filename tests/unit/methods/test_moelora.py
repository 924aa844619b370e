"""MoELoRA: what the router reads, that it and every expert learn on every task, and what one expert is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from phases import begin_phase, end_phase
from service_client import FEW, bank_of, examples, serving
from tiny import ENGINES, KINDS, Complete, Lab, Taught, evaluated_by, matrix, run, trace

from raycl.data.loader import Collate, eval_batches
from raycl.errors import BankError, ConfigError, RetrievalError
from raycl.generation.requests import Sampling
from raycl.methods.base import activate_batch, trained_names
from raycl.methods.lora.moelora import MoeLora
from raycl.routing.pools import ExpertGate, ExpertRouter
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str = "bert", **settings: Any) -> tuple[MoeLora, TrainingContext]:
    context, _ = build(lab.config(kind, {"name": "moelora", "experts": 3, "r": 2, **settings}), WORLD)
    assert isinstance(context.method, MoeLora)
    begin_phase(context)
    return context.method, context


def batch_of(context: TrainingContext, rows: int = 6) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[0], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    return next(iter(eval_batches(Collate([table], codec.pad_id, labels), rows)))


# ---- the router ----------------------------------------------------------------------------------------------------


def test_weights_are_the_softmax_of_a_linear_layer_over_the_mean_of_real_tokens() -> None:
    gate = ExpertGate(["a", "b"], 2, 0)
    gate.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert gate(torch.tensor([[3.0, 3.0]])).tolist() == [[0.5, 0.5]]
    states = torch.tensor([[[2.0, 0.0], [0.0, 2 - 2 * 1.0986122], [50.0, -50.0]]])
    mixture = ExpertRouter(gate, ["head"]).route_embeddings(states, torch.tensor([[1, 1, 0]]))
    assert mixture.names == ("a", "b", "head")
    torch.testing.assert_close(mixture.weights, torch.tensor([[0.75, 0.25, 1.0]]))


def test_what_the_router_cannot_read_is_refused() -> None:
    router = ExpertRouter(ExpertGate(["a"], 2, 0))
    with pytest.raises(BankError, match="router is 'experts', which reads prompts with the backbone"):
        router.route(["x"], None)
    with pytest.raises(RetrievalError, match="of 2 dimensions, this backbone's have 3: use the"):
        router.route_embeddings(torch.zeros(1, 4, 3), torch.ones(1, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_texts_experts_do_not_depend_on_its_batch(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    context.backbone.train()
    batch = batch_of(context)
    together = method.route(batch).weights.detach()
    assert len({tuple(row) for row in together.tolist()}) > 1
    for row in range(len(batch)):
        length = int(batch.source_mask[row].sum())
        fields = {name: getattr(batch, name)[row : row + 1] for name in ("target_ids", "label_ids", "weight", "rows")}
        ids, mask = batch.source_ids[row : row + 1, :length], batch.source_mask[row : row + 1, :length]
        alone = method.route(Batch(ids, mask, **fields)).weights.detach()
        torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=1e-5)


# ---- tasks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_router_and_every_expert_learn_on_every_task(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    for index in range(2):
        begun = begin_phase(context, index)
        names = [name for name in trained_names(context.backbone) if ".lora_" not in name]
        assert names == [*(["head.weight", "head.bias"] if kind == "bert" else []), "expert_gate.weight"]
        torch.manual_seed(index)
        for name, parameter in context.backbone.named_parameters():
            parameter.grad = None
            if ".lora_B" in name or name == "head.weight":
                torch.nn.init.normal_(parameter, std=0.1)
        batch = batch_of(context)
        with activate_batch(method, batch):
            context.backbone(batch).loss_sum.backward()
        gradient = method.gate.weight.grad
        assert gradient is not None and bool(gradient.any(1).all()), "each expert's row of the router"
        for layer in method.stack.layers.values():
            assert layer.lora_B is not None and layer.lora_B.grad is not None
            per_expert = layer.lora_B.grad.unflatten(1, (3, 2)).abs().sum((0, 2))
            assert bool((per_expert > 0).all())
        learned = end_phase(context, begun)
        assert learned is not None and [name for name in learned.adapters if name != "head"] == list(method.gate.names)


def test_one_expert_is_plain_lora(lab: Lab, complete: Complete, tmp_path: Path) -> None:
    plain = complete("bert", "lora", "torch").storage
    for experts, same in ((1, True), (2, False)):
        storage = Storage.at(tmp_path / str(experts))
        run(lab.config("bert", {"name": "moelora", "experts": experts}), storage)
        assert ((trace(storage), matrix(storage)) == (trace(plain), matrix(plain))) is same


@pytest.mark.parametrize("engine", ["zero3", "fsdp"])
def test_the_router_learns_under_engines_that_share_weights_out(lab: Lab, tmp_path: Path, engine: str) -> None:
    sections = {"stream": {"tasks": lab.tasks[:1]}, "train": {"max_steps": 2}}
    config = lab.config("bert", {"name": "moelora", "experts": 3}, ENGINES[engine], **sections)
    done = run(config, Storage.at(tmp_path)).context
    assert isinstance(done.method, MoeLora)
    first = ExpertGate(done.method.gate.names, done.method.gate.dimensions, 0)
    assert done.method.gate.weight.shape == first.weight.shape
    assert not torch.equal(done.method.gate.weight, first.weight)


def test_objectives_that_cannot_be_are_refused(lab: Lab) -> None:
    method, context = started(lab)
    with pytest.raises(ConfigError, match=r"'moelora' reads prompts, which stream\.objective=clm of task 'colour'"):
        method.check([replace(context.phases[0].tasks[0], objective="clm")])


# ---- serving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "decoding"), sampled([("bert", "dynamic"), ("llama", "dynamic"), ("llama", "static")])
)
def test_served_texts_get_the_mixture_of_the_run_and_its_answers(
    taught: Taught, tmp_path: Path, kind: str, decoding: str
) -> None:
    """They get it while others are decoded too, whose adapters are no part of what the router reads."""
    done = taught(kind, "moelora")
    asked, codec = examples(done, bank_of(done, tmp_path), rows=FEW), done.context.backbone.codec
    router, expected = evaluated_by(done), {}
    for task in done.context.stream.tasks:
        table = done.context.stream.table(task, "test", codec)
        for batch in eval_batches(Collate([table], codec.pad_id), 1):
            row = router.mixture(batch)
            weights = dict(zip(row.names, row.weights[0].tolist(), strict=True))
            expected[table.texts(batch.rows.tolist())[0]] = weights
    sampling = None if kind == "bert" else Sampling(12)
    with serving(bank_of(done, tmp_path / "served"), max_batch=5, decoding=decoding) as client:
        with client.paused():
            replies = [client.ask(item.text, sampling=sampling) for item in asked]
        for item, reply in zip(asked, replies, strict=True):
            result = {name: weight for name, weight in reply.metadata.weights.items() if name != "head"}
            assert result == pytest.approx(expected[item.text], abs=1e-4)
            assert (reply.label if kind == "bert" else reply.text) == item.answer
