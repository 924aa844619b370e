"""IncLoRA and O-LoRA: what the penalty does, and what the sum of adapters promises."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase
from safetensors.torch import load_file
from tiny import ENGINES, KINDS, Complete, Lab, exported, matrix, opened, run, trace

from raycl.adapters.state import combine
from raycl.backbone import load_backbone, load_codec
from raycl.bank import Bank
from raycl.data.loader import Collate, eval_batches
from raycl.methods.base import Method, activate_batch
from raycl.methods.lora.olora import OLora, abssum
from raycl.serve.snapshots.parts import backbone_of
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import AdapterState, Batch, Mixture

WORLD = DistributedContext.alone(torch.device("cpu"))
REPO = Path(__file__).resolve().parents[3]


def second_task(lab: Lab, kind: str, **settings: Any) -> tuple[OLora, TrainingContext, Batch]:
    """Return the beginning of task 2, with a first adapter of random numbers, and a batch of task 1."""
    parts, _ = build(lab.config(kind, {"name": "olora", **settings}), WORLD)
    method, codec = parts.method, parts.backbone.codec
    assert isinstance(method, OLora)
    first = begin_phase(parts)
    randomise(method)
    end_phase(parts, first)
    begin_phase(parts, 1)
    table = parts.stream.table(parts.stream.tasks[0], "test", codec)
    labels = parts.backbone.label_ids() if codec.needs_labels else None
    return method, parts, next(iter(eval_batches(Collate([table], codec.pad_id, labels), 4)))


def randomise(method: Method) -> None:
    torch.manual_seed(0)
    for name, parameter in method.backbone.named_parameters():
        if ".lora_B" in name or name.startswith("head."):
            torch.nn.init.normal_(parameter, std=0.1)


def finished(lab: Lab, folder: Path, method: Any, kind: str = "bert", **sections: Any) -> Storage:
    storage = Storage.at(folder)
    run(lab.config(kind, method, **sections), storage)
    return storage


def slots(storage: Storage) -> dict[str, AdapterState]:
    """Return adapters of the newest snapshot, the first task's first."""
    bank = Bank(storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None
    fetched = {entry.name: bank.fetch(entry, newest.layouts[entry.layout]) for entry in newest.adapters}
    return {name: fetched[name] for name in ("colour", "animal")}


# ---- the penalty ---------------------------------------------------------------------------------------------------


def test_the_overlap_counts_entries() -> None:
    item, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert float(abssum(item, other)) == 0
    assert float(abssum(item, item)) == float(abssum(item, -item)) == 1
    assert float(abssum(item.repeat(2, 1), item.repeat(2, 1))) == 4


def test_without_penalty_olora_is_inclora_bit_for_bit(lab: Lab, complete: Complete, tmp_path: Path) -> None:
    free = finished(lab, tmp_path / "olora", {"name": "olora", "lambda_1": 0, "lambda_2": 0})
    plain, bound = (complete("bert", method, "torch").storage for method in ("inclora", "olora"))
    assert trace(free) == trace(plain) and matrix(free) == matrix(plain) and exported(free) == exported(plain)
    steps = len(trace(bound)) // 2
    assert trace(bound)[:steps] == trace(plain)[:steps], "nothing is there yet to be at right angles to"
    assert trace(bound)[steps + 1 :] != trace(plain)[steps + 1 :]


def test_the_penalty_by_hand(lab: Lab) -> None:
    method, parts, _ = second_task(
        lab, "bert", lambda_1=9, lambda_1_by_task={"animal": 0.25}, lambda_2_by_task={"animal": 2.0}
    )
    old = method.stack.states["colour"].linears
    trainable = {path: (layer.lora_A, layer.lora_B) for path, layer in method.stack.layers.items()}
    assert len(trainable) == 4
    overlap = sum(
        float((old[path][0] @ a.detach().T).abs().sum()) for path, (a, _) in trainable.items() if a is not None
    )
    size = sum(float(part.detach().norm()) for pair in trainable.values() for part in pair if part is not None)
    penalty = method.penalty(None, None)  # type: ignore[arg-type]
    assert penalty is not None and overlap > 1
    assert float(penalty) == pytest.approx(0.25 * overlap + 2.0 * size, rel=1e-5)
    penalty.backward()  # type: ignore[no-untyped-call]
    moved = {name for name, p in parts.backbone.named_parameters() if p.grad is not None}
    assert moved == {n for n, _ in parts.backbone.named_parameters() if ".lora_" in n}
    path, (a, b) = next(iter(trainable.items()))
    assert a is not None and b is not None and a.grad is not None and b.grad is not None
    expected = 0.25 * (old[path][0] @ a.detach().T).sign().T @ old[path][0] + 2.0 * a.detach() / a.detach().norm()
    torch.testing.assert_close(a.grad, expected, atol=1e-6, rtol=1e-4)
    assert not b.grad.any(), "the norm of zeros has no direction"


def test_no_penalty_costs_nothing(lab: Lab) -> None:
    method, _, _ = second_task(lab, "bert", lambda_1=0)
    assert method.penalty(None, None) is None  # type: ignore[arg-type]


def test_the_penalty_turns_the_new_adapter_away(lab: Lab, tmp_path: Path) -> None:
    overlap = {}
    for weight in (0.0, 0.5):
        result = slots(finished(lab, tmp_path / str(weight), {"name": "olora", "lambda_1": weight}))
        (old, new) = (state.linears for state in result.values())
        overlap[weight] = sum(float(abssum(old[path][0], new[path][0])) for path in old)
    assert overlap[0.5] < 0.8 * overlap[0.0]


def test_the_penalty_counts_once_a_step(lab: Lab, tmp_path: Path) -> None:
    """Whatever the accumulation, and where the engine keeps parameters in parts."""
    settings = {"name": "olora", "lambda_2": 0.1}
    plain = trace(finished(lab, tmp_path / "plain", settings, train={"max_steps": 2}))
    for engine, micro in (("torch", 2), ("zero2", 1), ("zero3", None)):
        sections = {"engine": ENGINES[engine], "train": {"micro_batch_size": micro, "max_steps": 2}}
        other = trace(finished(lab, tmp_path / engine, settings, **sections))
        for mine, step in zip(other, plain, strict=True):
            assert mine == pytest.approx(step, abs=1e-4, rel=1e-3), engine


# ---- the sum -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_adds_nothing_and_a_zero_mixture_is_the_backbone(lab: Lab, kind: str) -> None:
    method, parts, batch = second_task(lab, kind)
    bare, _ = build(lab.config(kind, "inclora"), WORLD)

    def states(backbone: Any) -> torch.Tensor:
        return backbone.pooled(batch) if kind == "bert" else backbone(batch).logits  # type: ignore[no-any-return]

    with torch.no_grad():
        with activate_batch(method, batch):
            both = states(parts.backbone)
        with method.stack.activate(Mixture.same({"colour": 1.0}, 4)):
            assert torch.equal(both, states(parts.backbone)), "B starts at zero"
        with method.stack.activate(Mixture.same({"colour": 0.0, "animal": 0.0}, 4)):
            assert torch.equal(states(parts.backbone), states(bare.backbone))
    assert not torch.equal(both, states(bare.backbone))


@pytest.mark.parametrize("kind", KINDS)
def test_earlier_adapters_never_change(complete: Complete, kind: str) -> None:
    bank = Bank(complete(kind, "olora", "torch").storage.sub("bank"))
    first, second = bank.open(1), bank.open(2)
    assert [str(entry) for entry in first.adapters] == ["colour@1"]
    assert sorted(str(entry) for entry in second.adapters) == ["animal@1", "colour@1"]
    assert second.adapter("colour").tensors == first.adapter("colour").tensors
    assert [(entry.name, entry.tasks) for entry in second.adapters] == [(t, (t,)) for t in ("animal", "colour")]
    assert second.router.kind == "sum"


@pytest.mark.parametrize("name", ["inclora", "olora", "inflora", "gainlora", "sdlora"])
def test_gradients_stop_at_earlier_adapters(lab: Lab, name: str) -> None:
    """Lower layers get another gradient; outputs and the gradient of the layer on top are the same."""
    outputs, gradients = [], []
    for stop in (False, True):
        parts, _ = build(lab.config("llama", {"name": name, "stop_grad_old_blocks": stop}), WORLD)
        for index in range(2):
            begun = begin_phase(parts, index)
            randomise(parts.method)
            if index == 0:
                end_phase(parts, begun)
        table = parts.stream.table(parts.stream.tasks[0], "test", parts.backbone.codec)
        batch = next(iter(eval_batches(Collate([table], parts.backbone.codec.pad_id), 4)))
        with activate_batch(parts.method, batch):
            outputs.append(parts.backbone(batch).logits)
        outputs[-1].square().sum().backward()
        layers = parts.backbone.model.model.layers
        gradients.append([layer.self_attn.q_proj.lora_B.grad for layer in layers])
    assert torch.equal(*outputs)
    lower, upper = zip(*gradients, strict=True)
    assert not torch.allclose(*lower, rtol=1e-3) and torch.equal(*upper)


def test_the_first_task_is_plain_lora(complete: Complete) -> None:
    plain, result = (trace(complete("bert", name, "torch").storage) for name in ("lora", "inclora"))
    steps = len(plain) // 2
    for mine, other in zip(result[:steps], plain[:steps], strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def test_separate_adapters_equal_fresh_plain_loras(lab: Lab, tmp_path: Path) -> None:
    plain, result = (finished(lab, tmp_path / name, ("separate", name)) for name in ("lora", "olora"))
    for mine, other in zip(trace(result), trace(plain), strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    assert matrix(result) == matrix(plain)
    mine, other = slots(result), slots(plain)
    for name, state in mine.items():
        assert state.labels == other[name].labels
        for path, (a, b) in state.linears.items():
            torch.testing.assert_close(a, other[name].linears[path][0], atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(b, other[name].linears[path][1], atol=1e-4, rtol=1e-3)


# ---- the label head ------------------------------------------------------------------------------------------------


def test_the_parts_of_the_head_are_one_head_that_keeps_training(lab: Lab) -> None:
    """The same loss and the same gradient as one linear head with a row for each label seen so far."""
    method, parts, batch = second_task(lab, "bert")
    head = parts.backbone.head
    assert head is not None and head.labels == ["blue", "red", "cat", "dog"]
    old = method.stack.states["colour"]
    assert old.head_weight is not None and old.head_bias is not None
    whole = torch.nn.Linear(old.head_weight.shape[1], 4)
    with torch.no_grad(), activate_batch(method, batch):
        pooled = parts.backbone.pooled(batch)  # type: ignore[operator]
        whole.weight.copy_(torch.cat([old.head_weight, torch.zeros_like(old.head_weight)]))
        whole.bias.copy_(torch.cat([old.head_bias, torch.zeros(2)]))
    torch.nn.functional.cross_entropy(whole(pooled), batch.label_ids, reduction="sum").backward()
    with activate_batch(method, batch):
        output = parts.backbone(batch)
    torch.testing.assert_close(output.logits, whole(pooled))
    output.loss_sum.backward()
    torch.testing.assert_close(head.weight.grad, whole.weight.grad)
    torch.testing.assert_close(head.bias.grad, whole.bias.grad)


def test_head_rows_in_training(lab: Lab, complete: Complete, tmp_path: Path) -> None:
    shared = slots(complete("bert", "inclora", "torch").storage)
    own = slots(finished(lab, tmp_path / "own", {"name": "inclora", "head": "own"}))
    assert [state.labels for state in shared.values()] == [("blue", "red"), ("blue", "red", "cat", "dog")]
    assert [state.labels for state in own.values()] == [("blue", "red"), ("cat", "dog")]
    moved = shared["animal"].head_bias
    assert moved is not None and bool(moved[:2].any()), "the shared head keeps training"


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_answers_as_the_snapshot(lab: Lab, complete: Complete, tmp_path: Path, kind: str) -> None:
    """`jobs/bank.py export` without names takes all adapters of the sum, heads included."""
    bank = Bank(complete(kind, "olora", "torch").copy(tmp_path).sub("bank"))
    snapshot, folder = bank.newest(), tmp_path / "merged"
    assert snapshot is not None
    main = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]
    assert main(["export", bank.storage.uri, "--merged", "--to", str(folder)]) == 0
    config = backbone_of(snapshot).model_copy(update={"name": str(folder)})
    merged = load_backbone(config, load_codec(config, 24, 4), WORLD.device, 0).eval()
    served = opened(bank, snapshot)
    parts, _ = build(lab.config(kind, "olora"), WORLD)
    table = parts.stream.table(parts.stream.tasks[0], "test", parts.backbone.codec)
    batch = next(iter(eval_batches(Collate([table], parts.backbone.codec.pad_id), 4)))
    if kind == "bert":
        head = load_file(folder / "label_head.safetensors")
        assert Storage.at(str(folder)).read_json("labels.json") == ["blue", "red", "cat", "dog"]
        batch.label_ids.fill_(0)
        pooled = merged.pooled(batch) @ head["weight"].T + head["bias"]  # type: ignore[operator]
    else:
        pooled = merged(batch).logits
    with torch.no_grad(), served.model.activate(served.loaded.mixture(["x"] * 4), served.loaded.head_rule):
        torch.testing.assert_close(pooled, served.backbone(batch).logits, atol=1e-5, rtol=1e-4)


def test_heads_are_summed_only_under_the_logit_rule(lab: Lab) -> None:
    states = {
        name: AdapterState(
            {}, 1.0, None, labels, torch.full((len(labels), 2), value), torch.full((len(labels),), value)
        )
        for name, labels, value in (("one", ("a", "b"), 1.0), ("two", ("b", "c"), 2.0))
    }
    both = combine({"one": 1.0, "two": 0.5}, states, "logit")
    assert both.labels == ("a", "b", "c") and both.head_bias is not None and both.head_weight is not None
    assert both.head_bias.tolist() == [1.0, 2.0, 1.0] and both.head_weight[:, 1].tolist() == [1.0, 2.0, 1.0]
    halved = combine({"one": 0.5}, states, "logit")
    assert halved.head_bias is not None and halved.head_bias.tolist() == [0.5, 0.5]
