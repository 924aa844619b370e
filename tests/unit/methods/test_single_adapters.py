"""One soft prompt, and one set of bottleneck adapters: what is trained, what it computes, what is kept and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from phases import begin_phase
from service_client import FEW, bank_of, examples, serving
from tiny import KINDS, Lab, Taught, opened
from torch import Tensor

from raycl.adapters.soft_prompts import MixedPrompts
from raycl.data.loader import Collate, eval_batches
from raycl.generation.requests import Sampling
from raycl.methods.base import activate_batch, trained_names
from raycl.methods.single_adapter import SingleAdapter
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str, method: str, **settings: Any) -> tuple[SingleAdapter, TrainingContext]:
    context, _ = build(lab.config(kind, {"name": method, **settings}), WORLD)
    assert isinstance(context.method, SingleAdapter)
    begin_phase(context)
    return context.method, context


def batch_of(context: TrainingContext) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[0], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    return next(iter(eval_batches(Collate([table], codec.pad_id, labels), 6)))


def test_a_prompt_and_the_head_are_trained_and_nothing_else(lab: Lab) -> None:
    _, context = started(lab, "bert", "prompt", prompt_length=7)
    assert trained_names(context.backbone) == ["head.weight", "head.bias", "prefix.trainable"]
    prompt = dict(context.backbone.named_parameters())["prefix.trainable"].detach()
    words = context.backbone.model.get_input_embeddings().weight
    assert prompt.shape == (1, 7, 32)
    assert all((row == words).all(1).any() for row in prompt[0]), "it begins as embeddings of tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_stands_in_front_of_every_text(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind, "prompt", prompt_length=3)
    batch, prefix = batch_of(context), context.backbone.prefix
    assert isinstance(prefix, MixedPrompts) and prefix.trainable is not None
    with activate_batch(method, batch):
        result = prefix(len(batch), torch.device("cpu"))
    assert result is not None
    torch.testing.assert_close(result[0], prefix.trainable.expand(len(batch), -1, -1))
    assert result[1].shape == (len(batch), 3) and result[1].all()


@pytest.mark.parametrize(("kind", "linears"), [("bert", 4), ("t5", 10), ("llama", 4)])
def test_bottlenecks_stand_beside_both_output_projections(lab: Lab, kind: str, linears: int) -> None:
    """Two layers of attention and feed-forward block; T5 has them twice, and attention to the encoder besides."""
    method, context = started(lab, kind, "adapter", reduction=8)
    assert len(method.stack.layers) == linears
    head = ["head.bias", "head.weight"] if kind == "bert" else []
    assert sorted(n for n in trained_names(context.backbone) if ".lora_" not in n) == head
    for layer in method.stack.layers.values():
        assert layer.lora_A is not None and len(layer.lora_A) == 32 // 8
    tiniest, _ = started(lab, kind, "adapter", reduction=1000)
    assert all(layer.lora_A is not None and len(layer.lora_A) == 1 for layer in tiniest.stack.layers.values())


def test_a_bottleneck_by_hand(lab: Lab) -> None:
    """`W x + B relu(A x)`, whatever LoRA's scale would be; at first the backbone's own output."""
    method, context = started(lab, "bert", "adapter")
    path, layer = next(iter(method.stack.layers.items()))
    x = torch.randn(6, 5, layer.inputs)
    with method.stack.activate(method.route(batch_of(context))):
        assert torch.equal(layer(x), layer.base(x))
        assert layer.lora_A is not None and layer.lora_B is not None
        torch.nn.init.normal_(layer.lora_B)
        low: Tensor = layer.lora_A.detach()
        expected = layer.base(x) + (x @ low.T).relu() @ layer.lora_B.T
        torch.testing.assert_close(layer(x), expected)
    assert path.endswith("dense")


@pytest.mark.parametrize(
    ("kind", "method"), sampled([(kind, method) for kind in KINDS for method in ("prompt", "adapter")])
)
def test_served_answers_are_those_of_the_run(taught: Taught, tmp_path: Path, kind: str, method: str) -> None:
    done = taught(kind, method)
    bank = bank_of(done, tmp_path)
    asked = examples(done, bank, rows=FEW)
    sampling = None if kind == "bert" else Sampling(12)
    with serving(bank, max_batch=5) as client:
        replies = [client.ask(item.text, sampling=sampling) for item in asked]
        for item, reply in zip(asked, replies, strict=True):
            assert (reply.label if kind == "bert" else reply.text) == item.answer


def test_the_snapshot_holds_one_adapter_of_all_tasks(taught: Taught, tmp_path: Path) -> None:
    for method in ("prompt", "adapter"):
        bank = bank_of(taught("llama", method), tmp_path / method)
        (entry,) = bank.open(2).adapters
        assert entry.name == method and set(entry.tasks) == {"colour", "animal"}
        assert opened(bank, bank.open(2)).loaded.prompt_positions() == (10 if method == "prompt" else 0)
