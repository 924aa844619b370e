"""SAPT end to end on tiny models: those of its properties that need a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from crash_copies import run_and_leave
from phases import begin_phase, end_phase
from tiny import KINDS, Complete, Lab, exported, matrix, opened, run, tokenizer, trace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from raycl.adapters import AdapterStack
from raycl.adapters.soft_prompts import MixedPrompts
from raycl.bank import Bank
from raycl.bank.states import get_router
from raycl.data.loader import Collate, eval_batches
from raycl.errors import ConfigError, RayclError
from raycl.generation.batch_answers import predict
from raycl.methods.base import activate_batch
from raycl.methods.sapt import sapt
from raycl.methods.sapt.sapt import Sapt
from raycl.operations.banks.maintenance import verify
from raycl.operations.banks.unlearning import evaluate, forget
from raycl.routing.attention import Attention, AttentionRouter, max_pooled
from raycl.routing.statistics import KINDS_OF_OUTLINES
from raycl.serve.snapshots.parts import router_of
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext
from raycl.types import AdapterState, Batch, Mixture, Objective

WORLD = DistributedContext.alone(torch.device("cpu"))


def tasks(lab: Lab, count: int) -> list[dict[str, Any]]:
    """Return so many tasks, over and over the two that the laboratory has."""
    return [{"name": f"task{number}", "path": lab.tasks[number % 2]["path"]} for number in range(count)]


def started(lab: Lab, kind: str, learned: int = 1, **settings: Any) -> tuple[Sapt, Batch]:
    """Return the method in its task number `learned` (from 0), every earlier block drawn at random; a batch of that
    task."""
    stream = {"tasks": tasks(lab, learned + 1)} if learned > 1 else {}
    context, _ = build(lab.config(kind, {"name": "sapt", **settings}, stream=stream), WORLD)
    method, codec = context.method, context.backbone.codec
    assert isinstance(method, Sapt)
    for number in range(learned + 1):
        phase = begin_phase(context, number)
        torch.manual_seed(number)
        with torch.no_grad():
            for layer in method.stack.layers.values():
                assert layer.lora_B is not None
                layer.lora_B.normal_(std=0.1)
        if number < learned:
            end_phase(context, phase)
    table = context.stream.table(context.phases[learned].tasks[0], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    return method, next(iter(eval_batches(Collate([table], codec.pad_id, labels, texts=True), 4)))


def loss(method: Sapt, batch: Batch) -> Tensor:
    with activate_batch(method, batch):
        return method.backbone(batch).loss_sum  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_the_first_task_is_plain_lora(lab: Lab, complete: Complete, kind: str) -> None:
    """Alpha = 1, scale 32 / r: the same loss and gradient norm in every step, and no KL."""
    mine, plain = (trace(complete(kind, method, "torch").storage) for method in ("sapt", "lora"))
    for step, other in zip(mine[:4], plain[:4], strict=True):
        assert step == pytest.approx(other, rel=1e-5)
    assert mine[0][2] == plain[0][2] and mine[4][2] != pytest.approx(plain[4][2], rel=1e-3)


def test_the_first_task_does_not_train_attention(lab: Lab) -> None:
    """Key and projection get zero gradient."""
    method, batch = started(lab, "llama", learned=0)
    loss(method, batch).backward()  # type: ignore[no-untyped-call]
    assert method.penalty(batch, None) is None  # type: ignore[arg-type]
    own = dict(method.attention.named_parameters())
    assert len(own) == 5 and not any(p.grad is not None and p.grad.any() for p in own.values())
    blocks = [p for name, p in method.backbone.named_parameters() if ".lora_B" in name]
    assert blocks and all(p.grad is not None and p.grad.any() for p in blocks)


@pytest.mark.parametrize(("kind", "stands"), sampled([(kind, stands) for kind in KINDS for stands in (True, False)]))
def test_statistics_come_from_the_first_task(lab: Lab, kind: str, stands: bool) -> None:
    """The statistics are taken from the first task's texts, once."""
    settings = {"standardize": stands}
    method, _ = started(lab, kind, learned=0, attention=settings)
    first = method.attention.center
    assert (first is not None) == stands == ("center" in method.attention.tensors())
    later, _ = started(lab, kind, learned=1, attention=settings)
    assert (later.attention.center is first) if first is None else torch.equal(later.attention.center, first)


def test_shared_statistics_are_estimated_from_a_random_subset(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be sorted by label: its first rows are not like the rest."""
    looked: list[int] = []
    pooled = Sapt._pooled

    def watched(self: Sapt, sources: Sequence[Sequence[int]]) -> Tensor:
        looked.append(len(sources))
        return pooled(self, sources)

    monkeypatch.setattr(Sapt, "_pooled", watched)
    context, _ = build(lab.config("llama", "sapt"), WORLD)
    method = context.method
    assert isinstance(method, Sapt)
    monkeypatch.setattr(sapt, "SAMPLED", 5)
    begin_phase(context, 0)
    assert method.context is not None and looked == [5]
    blind = Attention(method.attention.dimensions, method.config.attention, 0)
    blind.look_at(pooled(method, method.context.routed_ids("train")[:5]))
    assert method.attention.center is not None and blind.center is not None
    assert not torch.equal(method.attention.center, blind.center)


def test_outputs_are_mixed_and_never_matrices() -> None:
    """The sum of the blocks' outputs (SAPT, eq. 3); the product of mixed matrices is something else."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"l": torch.nn.Linear(6, 5)})
    stack = AdapterStack(model, ["l"])
    blocks = {name: (torch.randn(2, 6), torch.randn(5, 2)) for name in ("a", "b")}
    for name, pair in blocks.items():
        stack.load(name, AdapterState({"l": pair}, 4.0))
    x, alpha = torch.randn(3, 4, 6), torch.tensor([[0.3, 0.7], [0.9, 0.1], [0.5, 0.5]], requires_grad=True)
    with stack.activate(Mixture(("a", "b"), alpha)):
        result = model["l"](x) - stack.layers["l"].base(x)
    pairs = list(blocks.values())
    right = sum(4.0 * alpha[:, n, None, None] * (x @ low.T @ high.T) for n, (low, high) in enumerate(pairs))
    mixed_low = torch.einsum("bn,nrd->brd", alpha, torch.stack([low for low, _ in pairs]))
    mixed_high = torch.einsum("bn,nor->bor", alpha, torch.stack([high for _, high in pairs]))
    wrong = 4.0 * torch.einsum("btd,brd,bor->bto", x, mixed_low, mixed_high)
    torch.testing.assert_close(result, right, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(result, wrong, atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_from_the_source_alone(lab: Lab, kind: str) -> None:
    """Neither label tokens nor padding nor neighbours change them; trained as evaluated."""
    method, batch = started(lab, kind)
    trained = method.route(batch).weights
    assert trained.requires_grad and trained.shape == (4, 2)
    other = Batch(*(tensor.clone() for tensor in batch.tensors()))
    other.target_ids.random_(0, 5)
    other.label_ids.zero_()
    pad = torch.full((4, 6), method.backbone.codec.pad_id)
    other.source_ids = torch.cat([other.source_ids, pad], dim=1)
    other.source_mask = torch.cat([other.source_mask, pad * 0], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(method.route(other).weights, trained, atol=1e-6, rtol=1e-6)
        for row in range(4):
            item = Batch(*(tensor[row : row + 1] for tensor in batch.tensors()))
            torch.testing.assert_close(method.route(item).weights[0], trained[row], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_generation_attends_once_per_prompt(lab: Lab, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """One set of weights for all decoding steps, and a longer answer asks for no more."""
    method, batch = started(lab, kind)
    seen: list[int] = []
    method.attention.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    method.backbone.eval()
    with activate_batch(method, batch):
        predict(method.backbone, batch, 8)
    assert seen == [4]


@pytest.mark.parametrize("kind", KINDS)
def test_earlier_adapters_never_change(complete: Complete, kind: str) -> None:
    """Blocks, keys and outlines of texts bit for bit; the projection continues."""
    bank = Bank(complete(kind, "sapt", "torch").storage.sub("bank"))
    first, second = bank.open(1), bank.open(2)
    assert [entry.name for entry in second.adapters] == ["animal", "colour"]
    assert second.adapter("colour").tensors == first.adapter("colour").tensors
    item, two = (get_router(bank, snapshot) for snapshot in (first, second))
    assert (item.kind, two.kind) == ("attention", "attention")
    assert set(two.tensors) - set(item.tensors) == {f"{kind}/animal" for kind in ("key", *KINDS_OF_OUTLINES)}
    for kind in ("key", *KINDS_OF_OUTLINES):
        assert torch.equal(item.tensors[f"{kind}/colour"], two.tensors[f"{kind}/colour"]), kind
    for name in ("down", "up", "norm_weight", "norm_bias"):
        assert not torch.equal(item.tensors[name], two.tensors[name]), name


def test_without_reflection_the_projection_follows_the_task_alone(lab: Lab) -> None:
    """In SAPT's eq. 6 lambda = 0 takes the KL's gradient away and nothing else."""
    collected = {}
    for weight in (0.0, 1.0, 2.0):
        method, batch = started(lab, "llama", arm={"weight": weight})
        term = method.penalty(batch, None)  # type: ignore[arg-type]
        assert (term is None) is (weight == 0)
        total = loss(method, batch)
        (total if term is None else total + term * 10).backward()  # type: ignore[no-untyped-call]
        assert method.attention.down.grad is not None
        collected[weight] = method.attention.down.grad
    torch.testing.assert_close(
        collected[2.0] - collected[0.0], 2 * (collected[1.0] - collected[0.0]), atol=1e-5, rtol=1e-3
    )
    assert not torch.equal(collected[1.0], collected[0.0])


@pytest.mark.parametrize(("kind", "micro"), sampled([(kind, micro) for kind in ("bert", "t5") for micro in (2, 1)]))
def test_accumulation_changes_nothing_in_any_task(lab: Lab, tmp_path: Path, kind: str, micro: int) -> None:
    """The first task and the third, which reflects on up to two, are unchanged; the released scale changes them."""
    collected = {}
    stream = {"tasks": tasks(lab, 3), "train_rows": 9, "test_rows": 1}
    for name, rows, scaled in (("joined", None, False), ("parts", micro, False), ("scaled", micro, True)):
        method = {"name": "sapt", "arm": {"weight": 2.0, "kl_scale_with_accum": scaled}}
        storage = Storage.at(tmp_path / name)
        run(lab.config(kind, method, stream=stream, train={"micro_batch_size": rows, "max_steps": 2}), storage)
        collected[name] = trace(storage)
    assert {step[0] for step in collected["joined"]} == set(range(3))
    for mine, other in zip(collected["parts"], collected["joined"], strict=True):
        assert mine == pytest.approx(other, abs=2e-4, rel=2e-4)
    assert collected["scaled"][-1][3] != pytest.approx(collected["joined"][-1][3], rel=1e-2)


def test_old_adapters_get_no_gradient_when_detached(lab: Lab) -> None:
    """Lower layers see another gradient, the value is the same; the layer above is not concerned."""
    values, gradients = [], []
    for stop in (False, True):
        method, batch = started(lab, "llama", stop_grad_old_blocks=stop, arm={"weight": 0.0})
        total = loss(method, batch)
        total.backward()  # type: ignore[no-untyped-call]
        values.append(total.detach())
        layers = method.backbone.model.model.layers
        gradients.append([layer.self_attn.q_proj.lora_B.grad for layer in layers])
    assert torch.equal(values[0], values[1])
    lower, upper = zip(*gradients, strict=True)
    assert not torch.allclose(lower[0], lower[1], rtol=1e-3) and torch.equal(upper[0], upper[1])


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_keep_their_length_and_the_first_is_prompt_tuning(lab: Lab, kind: str) -> None:
    """SAPT-Prompt (appendix C): 10 positions, started from words of the vocabulary."""
    method, batch = started(lab, kind, learned=0, value="prompt")
    prefix = method.backbone.prefix
    assert isinstance(prefix, MixedPrompts) and prefix.trainable is not None and prefix.trainable.shape == (1, 10, 32)
    with activate_batch(method, batch):
        result = prefix(4, torch.device("cpu"))
        assert result is not None and torch.equal(result[0], prefix.trainable.expand(4, -1, -1))
    words = method.backbone.model.get_input_embeddings().weight
    assert all(any(torch.equal(row, word) for word in words) for row in prefix.trainable[0]), (
        "drawn from the vocabulary"
    )
    method, batch = started(lab, kind, learned=3, value="prompt", attention={"pruning_threshold": 0.0})
    prefix = method.backbone.prefix
    assert isinstance(prefix, MixedPrompts) and prefix.trainable is not None
    mixture = method.route(batch)
    with activate_batch(method, batch):
        result = prefix(4, torch.device("cpu"))
    old = [method.stack.states[name].prompt for name in mixture.names[:-1]]
    assert result is not None and len(old) == 3
    decoded = torch.stack([*(item for item in old if item is not None), prefix.trainable[0]])
    torch.testing.assert_close(result[0], torch.einsum("bn,npd->bpd", mixture.weights, decoded))


SETTINGS: dict[str, dict[str, Any]] = {
    "prompt": {"value": "prompt", "prompt_length": 3},
    "between": {"attention": {"proj_act": "between", "tau": 2.0, "pruning_threshold": 0.3}},
    "logit": {"head_rule": "logit", "stop_grad_old_blocks": True, "lora_dropout": 0.1, "arm": {"abar_split": "test"}},
}


@pytest.mark.parametrize(
    ("kind", "name"), sampled([(kind, name) for kind in KINDS for name in SETTINGS], keep=[("bert", "logit")])
)
def test_a_snapshot_answers_as_the_evaluated_model(lab: Lab, tmp_path: Path, kind: str, name: str) -> None:
    """Serving opens it by the router's name; the method is not asked."""
    storage = Storage.at(tmp_path)
    done = run(lab.config(kind, {"name": "sapt", **SETTINGS[name]}), storage)
    bank = Bank(storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None and newest.router.kind == "attention" and newest.encoder is None
    evaluated = evaluate(bank, newest)
    assert [evaluated[task].value for task in ("colour", "animal")] == matrix(storage)[-1]
    told = storage.read_json("results.json")["phase_summaries"][-1]["attention"]
    assert told["keys"] == ["colour", "animal"] and told["train"]["colour"] == [1.0]
    for weights in (told["train"]["animal"], told["test"]["colour"], told["test"]["animal"]):
        assert len(weights) == 2 and sum(weights) == pytest.approx(1.0, abs=1e-3)
    router, stream = router_of(bank, newest), done.context.stream
    assert isinstance(router, AttentionRouter)
    for task in stream.tasks:
        table = stream.table(task, "test", codec := done.context.backbone.codec)
        batch = next(iter(eval_batches(Collate([table], codec.pad_id), len(table))))
        pooled = max_pooled(done.context.backbone.embedded(batch.source_ids), batch.source_mask)
        mean = router.attention(pooled).exp().mean(0).tolist()
        assert told["test"][task.name] == pytest.approx(mean, abs=1e-4)


def test_pseudo_samples_lie_beside_the_adapter_and_go_with_it(complete: Complete, tmp_path: Path) -> None:
    bank = Bank(complete("bert", "sapt", "torch").copy(tmp_path).sub("bank"))
    newest = bank.newest()
    assert newest is not None
    for entry in newest.adapters:
        kept = bank.get(entry.extras["pseudo"], "pseudo samples")
        assert kept["source_lengths"].tolist() == [len(kept["source_ids"])], "2 % of 14 rows is one, inputs only"
        assert set(kept) == {"source_ids", "source_lengths"}
    result = forget(bank, newest, "colour")
    left = bank.open(result.new)
    assert result.removed == ["colour"] and [entry.name for entry in left.adapters] == ["animal"]
    assert "key/colour" not in get_router(bank, left).tensors
    assert result.after["animal"].value >= result.before["animal"].value, "one task less to be confused with"
    assert verify(bank).problems == [] and verify(bank).leftovers == []


@pytest.mark.parametrize("value", ["lora", "prompt"])
def test_with_the_task_id_only_its_adapter_is_active(lab: Lab, tmp_path: Path, value: str) -> None:
    """`separate`, the reference of forward transfer: the same block without attention, so nothing is forgotten."""
    storage = Storage.at(tmp_path)
    run(lab.config("t5", ("separate", {"name": "sapt", "value": value})), storage)
    assert matrix(storage)[0][0] == matrix(storage)[1][0]
    newest = Bank(storage.sub("bank")).newest()
    assert newest is not None and newest.router.kind == "task"
    assert {entry.name for entry in newest.adapters} == {"colour", "animal"}


def test_prompts_resume_where_they_stopped(lab: Lab, tmp_path: Path) -> None:
    config = lab.config("t5", {"name": "sapt", "value": "prompt", "arm": {"fraction": 0.5, "batch": 3}})
    whole, left = Storage.at(tmp_path / "whole"), {after: tmp_path / f"after{after}" for after in (5, 7)}
    run_and_leave(config, whole, left)
    for folder in left.values():
        parts = Storage.at(folder)
        run(config, parts)
        assert trace(parts) == trace(whole) and exported(parts) == exported(whole) and matrix(parts) == matrix(whole)


def test_grouped_queries_have_values_of_their_own_width(lab: Lab, tmp_path: Path) -> None:
    """Fewer key and value heads than query heads: the released code takes outputs to be as wide as inputs."""
    words, folder = tokenizer("llama"), tmp_path / "grouped"
    words.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), num_key_value_heads=1, **sizes, **special)).save_pretrained(
        folder
    )
    storage = Storage.at(tmp_path / "run")
    run(lab.config("llama", "sapt", backbone={"name": str(folder)}), storage)
    newest = Bank(storage.sub("bank")).newest()
    assert newest is not None
    shapes = set(next(iter(newest.layouts.values())).values())
    assert shapes == {(32, 32), (32, 8)}


def test_texts_alone_are_refused(complete: Complete) -> None:
    bank = Bank(complete("bert", "sapt", "torch").storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None
    with pytest.raises(RayclError, match="'attention', which reads prompts with the backbone"):
        opened(bank, newest).loaded.mixture(["fire is"])


def test_bad_settings_are_refused_before_training(lab: Lab) -> None:
    with pytest.raises(RayclError, match="target 'nowhere' matches no linear layer"):
        check(lab.config("bert", {"name": "sapt", "target_modules": ["nowhere"]}))


@pytest.mark.parametrize(
    ("objective", "settings", "said"),
    [
        ("clm", {}, "sapt reads prompts, which stream.objective=clm of task 'colour' does not have"),
        (
            "mlm",
            {"ablation": "replay"},
            "replay trains on answers, which stream.objective=mlm of task 'colour' does not",
        ),
    ],
)
def test_texts_without_prompts_or_answers_are_refused(
    lab: Lab, objective: Objective, settings: dict[str, Any], said: str
) -> None:
    context, _ = build(lab.config("bert", {"name": "sapt", **settings}), WORLD)
    with pytest.raises(ConfigError, match=said):
        context.method.check([replace(context.phases[0].tasks[0], objective=objective)])
