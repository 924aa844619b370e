"""EPI: which statistics are taken of which texts, who is chosen, and what is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from http_client import listening
from phases import begin_phase, end_phase, routed
from service_client import FEW, bank_of, examples, serving
from tiny import KINDS, Lab, Taught, matrix, run

from raycl.bank import Bank
from raycl.data.loader import Collate, eval_batches
from raycl.errors import ConfigError
from raycl.generation.requests import Sampling
from raycl.methods.base import trained_names
from raycl.methods.prompts.epi import Epi
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Task

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str = "bert", train: dict[str, Any] | None = None, **settings: Any) -> TrainingContext:
    context, _ = build(lab.config(kind, {"name": "epi", **settings}, train=train or {}), WORLD)
    return context


def method_of(context: TrainingContext) -> Epi:
    assert isinstance(context.method, Epi)
    return context.method


def rows_of(context: TrainingContext, task: int, rows: int = 14) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[task], "train", codec)
    return next(iter(eval_batches(Collate([table], codec.pad_id), rows)))


@pytest.mark.parametrize("value", ["prefix", "prompt", "lora"])
def test_a_tasks_own_adapter_and_label_rows_are_trained(lab: Lab, value: str) -> None:
    context = started(lab, value=value, **({"r": 3} if value == "lora" else {"prompt_length": 5}))
    begin_phase(context)
    trained = {name: tuple(p.shape) for name, p in context.backbone.named_parameters() if p.requires_grad}
    low = {"prefix": "lora_A", "prompt": "prefix.trainable", "lora": "lora_A"}[value]
    expected = {"prefix": {(5, 32)}, "prompt": {(1, 5, 32)}, "lora": {(3, 32)}}[value]
    assert {shape for name, shape in trained.items() if name.endswith(low)} == expected
    assert all("lora_" in name or name.startswith(("prefix.", "head.")) for name in trained)
    assert trained["head.weight"] == (2, 32)
    where = {"prefix": "output.dense", "lora": "self.", "prompt": ""}[value]
    assert all(where in name for name in trained if "lora_" in name)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_of_the_frozen_models_mean_states_of_all_training_texts(lab: Lab, kind: str) -> None:
    """Whatever is trained, and however few steps that takes."""
    context = started(lab, kind, train={"max_steps": 1})
    method, phase = method_of(context), begin_phase(context)
    for name, parameter in context.backbone.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=3.0)
    end_phase(context, phase)
    batch = rows_of(context, 0)
    states = context.backbone.hidden_states(batch.source_ids, batch.source_mask)
    queries = torch.stack([own[mask.bool()].mean(0) for own, mask in zip(states, batch.source_mask, strict=True)])
    table = context.stream.table(context.stream.tasks[0], "train", context.backbone.codec)
    labels = torch.from_numpy(table.labels(batch.rows.tolist()))
    by_class = [queries[labels == number] for number in range(2)]
    torch.testing.assert_close(method.gaussians.means["colour"], torch.stack([own.mean(0) for own in by_class]))
    covariance = torch.stack([torch.cov(own.T) for own in by_class]).mean(0)
    torch.testing.assert_close(method.gaussians.covariances["colour"], covariance, atol=1e-5, rtol=1e-4)


def test_each_text_gets_the_adapter_of_the_nearest_class(lab: Lab) -> None:
    context = started(lab)
    method = method_of(context)
    for index in range(2):
        begun = begin_phase(context, index)
        own = method.route(rows_of(context, index))
        assert own.names == (["colour", "animal"][index],) and (own.weights == 1).all(), "in training its own"
        learned = end_phase(context, begun)
    batch = rows_of(context, 1)
    result = routed(method, learned, batch)
    assert result.names == ("colour", "animal") and result.weights.sum(1).tolist() == [1.0] * len(batch)
    assert result.weights[:, 1].mean() > 0.7, "training texts of the second task"
    assert trained_names(context.backbone) == []
    summary = method.summary({"animal": result.weights.mean(0)})
    assert summary["chosen"]["adapters"] == ["colour", "animal"] and sum(summary["chosen"]["test"]["animal"]) == 1


def test_dev_texts_that_are_kept_tell_unknown_texts_in_every_answer(lab: Lab, tmp_path: Path) -> None:
    config = lab.config("llama", "epi", stream={"dev_fraction": 0.25})
    done = run(config, Storage.at(tmp_path)).storage
    asked = ["fire is warm", "blue sky cat much : Output a a a a"]
    with listening(Bank(done.sub("bank"))) as wire:
        routed = [item["raycl"]["ood_score"] for item in wire.post("/v1/route", {"input": asked}).json()["data"]]
        chats = [{"messages": [{"role": "user", "content": text}], "max_tokens": 2} for text in asked]
        answers = [wire.post("/v1/chat/completions", chat).json()["raycl"]["ood_score"] for chat in chats]
        prompts = [{"prompt": text, "max_tokens": 2, "raycl": {"template": True}} for text in asked]
        completions = [wire.post("/v1/completions", prompt).json()["raycl"]["ood_score"] for prompt in prompts]
    assert routed == answers == completions and len(set(routed)) == 2 and 0 <= min(routed) < max(routed) <= 1


def test_tasks_without_labels_are_refused(lab: Lab) -> None:
    method = method_of(started(lab, "t5"))
    with pytest.raises(
        ConfigError, match="'epi' chooses a task by its classes, and task 'sum' has no closed label set"
    ):
        method.check([Task("sum", None, "rouge_l")])


@pytest.mark.parametrize(
    ("kind", "decoding"), sampled([("bert", "dynamic"), ("t5", "dynamic"), ("llama", "dynamic"), ("llama", "static")])
)
def test_served_texts_get_the_adapter_and_the_answers_of_the_run(
    taught: Taught, tmp_path: Path, kind: str, decoding: str
) -> None:
    done = taught(kind, "epi")
    assert all(score is not None for score in matrix(done.storage)[-1])
    bank = bank_of(done, tmp_path)
    asked = examples(done, bank, rows=FEW)
    sampling = None if kind == "bert" else Sampling(12)
    with serving(bank, max_batch=5, decoding=decoding) as client:
        with client.paused():
            replies = [client.ask(item.text, sampling=sampling) for item in asked]
        chosen = [max(reply.metadata.weights, key=lambda name: reply.metadata.weights[name]) for reply in replies]
        assert set(chosen) == {"colour", "animal"}
        for item, reply in zip(asked, replies, strict=True):
            assert (reply.label if kind == "bert" else reply.text) == item.answer
