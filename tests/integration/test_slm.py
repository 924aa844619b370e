"""SLM end to end on tiny models: those of its properties that need a model."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from crash_copies import run_and_leave
from http_client import listening
from phases import begin_phase
from tiny import KINDS, Complete, Done, Lab, evaluated_by, exported, matrix, opened, run, tokenizer, trace

from raycl.adapters import AdapterStack
from raycl.backbone.roles import linear_names
from raycl.bank import Bank
from raycl.bank.states import get_router
from raycl.data.loader import Collate, eval_batches
from raycl.errors import BackboneError, ConfigError, RayclError
from raycl.generation.batch_answers import predict
from raycl.methods.base import activate, activate_batch
from raycl.methods.slm.slm import Slm
from raycl.operations.banks.maintenance import verify
from raycl.operations.banks.unlearning import evaluate, forget
from raycl.operations.report.phase_summaries import RouterSummary
from raycl.routing.slots import SlotRouter
from raycl.serve.offline.model import OfflineModel
from raycl.storage import Storage
from raycl.testing.tiny_models import tiny_model
from raycl.training.assembly import build
from raycl.training.workers.distributed import DistributedContext
from raycl.types import AdapterState, Batch, Mixture

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str, **settings: Any) -> tuple[Slm, Batch]:
    """Return the method at the beginning of its first task, and a batch of it."""
    context, _ = build(lab.config(kind, {"name": "slm", **settings}), WORLD)
    method, phase = context.method, context.phases[0]
    assert isinstance(method, Slm)
    table = context.stream.table(phase.tasks[0], "train", context.backbone.codec)
    begin_phase(context)
    labels = context.backbone.label_ids() if context.backbone.codec.needs_labels else None
    batch = next(iter(eval_batches(Collate([table], context.backbone.codec.pad_id, labels, texts=True), 4)))
    return method, batch


def states(method: Slm, batch: Batch) -> torch.Tensor:
    """Return what comes out before any label head."""
    backbone = method.backbone
    if backbone.codec.needs_labels:
        return backbone.pooled(batch)  # type: ignore[operator, no-any-return]
    return backbone(batch).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "value"), sampled([(kind, value) for kind in KINDS for value in ("jare", "adapter", "prefix")])
)
def test_new_slots_add_nothing(lab: Lab, kind: str, value: str) -> None:
    """B = 0, and the values of prefixes, so the output is the pretrained model's, bit for bit."""
    method, batch = started(lab, kind, value=value)
    with torch.no_grad():
        bare = states(method, batch)
        with activate_batch(method, batch):
            assert torch.equal(states(method, batch), bare)


@pytest.mark.parametrize("kind", KINDS)
def test_one_slot_is_a_plain_lora(lab: Lab, kind: str) -> None:
    """K = 1, g = 1, m = 1: weight 1 for any text, scale 1."""
    method, batch = started(lab, kind, keys={"groups": 1, "slots": 1}, retrieval={"top_k": 1})
    assert torch.equal(method.route(batch).weights, torch.ones(4, 1))
    torch.manual_seed(0)
    for layer in method.stack.layers.values():
        assert layer.lora_B is not None
        torch.nn.init.normal_(layer.lora_B, std=0.05)
    pairs = {path: (layer.lora_A, layer.lora_B) for path, layer in method.stack.layers.items()}
    with torch.no_grad():
        with activate_batch(method, batch):
            result = states(method, batch)
        for path, (low, high) in pairs.items():
            base = method.stack.layers[path].base
            base.weight += high @ low  # type: ignore[operator]
        torch.testing.assert_close(result, states(method, batch), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_earlier_slots_never_change(complete: Complete, kind: str) -> None:
    """Slots and keys of task 1 after task 2, the last optimizer step included, bit for bit."""
    bank = Bank(complete(kind, "slm", "torch").storage.sub("bank"))
    first, second = bank.open(1), bank.open(2)
    for entry in first.adapters:
        assert second.adapter(entry.name).tensors == entry.tensors
    keys = [bank.get(snapshot.router.tensors, "router") for snapshot in (first, second) if snapshot.router.tensors]
    assert len(keys) == 2 and len(keys[1]) > len(keys[0])
    assert all(torch.equal(keys[0][name], keys[1][name]) for name in keys[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_are_independent(lab: Lab, kind: str) -> None:
    """A batch of texts of both tasks equals each of them alone."""
    method, batch = started(lab, kind)
    routed = method.route(batch).weights
    for row in range(4):
        alone = method.router.route(method.encoder.embed(batch.texts[row : row + 1]), [batch.tasks[row]]).weights
        torch.testing.assert_close(alone[0], routed[row])


def test_with_the_task_id_only_the_tasks_slots_are_used(lab: Lab, tmp_path: Path) -> None:
    """SLM-TI, and `separate` with SLM as the learner: the same thing by two names."""
    task_given, separate = Storage.at(tmp_path / "task-id-given"), Storage.at(tmp_path / "separate")
    run(lab.config("bert", {"name": "slm", "retrieval": {"task_id": True}}), task_given)
    run(lab.config("bert", ("separate", {"name": "slm"})), separate)
    assert matrix(task_given)[-1] == matrix(separate)[-1]
    assert matrix(task_given)[0][0] == matrix(task_given)[1][0], "nothing can be forgotten when the task id is given"
    assert {RouterSummary.of(storage.read_json("results.json")).used for storage in (task_given, separate)} == {"task"}


RELEASED: dict[str, dict[str, Any]] = {"all": {"train_scope": "all"}, "label_count": {"head_rule": "label_count"}}
LEFT = (3, 6)


@pytest.fixture(scope="module")
def released(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Key of `RELEASED` -> a folder with `whole`, a run with that setting, and what it left at the steps of `LEFT`."""

    @functools.cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        config = lab.config("bert", {"name": "slm", **RELEASED[name]})
        run_and_leave(config, Storage.at(folder / "whole"), {after: folder / str(after) for after in LEFT})
        return folder

    return made


@pytest.mark.parametrize(
    "settings",
    [
        {"router": "discriminant"},
        {"train_scope": "seen"},
        "all",
        "label_count",
        {"value_layout": "per_group"},
        {"head_rule": "logit", "retrieval": {"rule": "group_mean"}},
        {"keys": {"update": "official", "start": "data"}, "retrieval": {"rule": "vote", "scope": "batch"}},
        {"target_modules": ["attention.query", "ffn"]},
    ],
    ids=["discriminant", "seen", "all", "label_count", "per_group", "logit", "official", "target_modules"],
)
def test_every_setting_learns_and_its_snapshot_is_whole(
    lab: Lab, released: Callable[[str], Path], tmp_path: Path, settings: dict[str, Any] | str
) -> None:
    if isinstance(settings, str):
        storage, settings = Storage.at(released(settings) / "whole"), RELEASED[settings]
    else:
        storage = Storage.at(tmp_path)
        run(lab.config("bert", {"name": "slm", **settings}), storage)
    bank = Bank(storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None
    assert len(newest.adapters) == (32 if settings.get("value_layout") == "per_group" else 8)
    result = storage.read_json("results.json")
    routing = RouterSummary.of(result)
    assert set(result["phase_summaries"][-1]["own_shares"]) == {"keys", "discriminant", "eq13"}
    assert routing.tasks == result["phases"] and routing.novelty == {}, "a run without dev texts"
    assert routing.owners == [task for task in routing.tasks for _ in range(4)]
    for i, row in enumerate(routing.cosines):
        assert row[i] == pytest.approx(1, abs=1e-3) and len(row) == 8
    if settings.get("retrieval", {}).get("scope") != "batch":
        evaluated = evaluate(bank, newest)
        assert [evaluated[task].value for task in ("colour", "animal")] == matrix(storage)[-1]


@pytest.mark.parametrize("name", RELEASED)
def test_runs_with_the_released_settings_resume(
    lab: Lab, released: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Left in each task."""
    config, folder = lab.config("bert", {"name": "slm", **RELEASED[name]}), released(name)
    whole = Storage.at(folder / "whole")
    for after in LEFT:
        parts = Storage.at(shutil.copytree(folder / str(after), tmp_path / str(after)))
        run(config, parts)
        assert trace(parts) == trace(whole) and exported(parts) == exported(whole) and matrix(parts) == matrix(whole)


def test_slots_of_future_tasks_take_weight_and_add_nothing(lab: Lab, tmp_path: Path) -> None:
    """With `all`, as released, the first task's texts lose weight to the second's slots; with `seen` they do not."""
    shares = {}
    for scope in ("all", "seen"):
        context, _ = build(lab.config("bert", {"name": "slm", "train_scope": scope, "keys": {"steps": 0}}), WORLD)
        method = context.method
        assert isinstance(method, Slm)
        begin_phase(context)
        table = context.stream.table(context.phases[0].tasks[0], "train", context.backbone.codec)
        batch = next(iter(eval_batches(Collate([table], 0, context.backbone.label_ids(), texts=True), 4)))
        mixture = method.route(batch)
        assert set(mixture.names) == {f"colour.{number}" for number in range(4)}
        shares[scope] = float(mixture.weights.sum(1).mean())
    assert shares["seen"] == pytest.approx(1.0) and shares["all"] < 0.99


def test_one_head_for_each_number_of_labels(lab: Lab, released: Callable[[str], Path]) -> None:
    """As released, the first task with so many labels trains a head, frozen for later ones; all slots share it."""
    bank = Bank.at(released("label_count") / "whole/bank")
    newest = bank.newest()
    assert newest is not None
    rows = {entry.name: bank.fetch(entry, newest.layouts[entry.layout]) for entry in newest.adapters}
    first = rows["colour.0"].head_weight
    assert first is not None and first.abs().sum() > 0
    assert all(torch.equal(first, state.head_weight) for state in rows.values() if state.head_weight is not None)
    assert set(rows["animal.0"].labels) == {"cat", "dog"} and set(rows["colour.0"].labels) == {"red", "blue"}
    served = opened(bank, newest)
    context, _ = build(lab.config("bert", {"name": "slm"}), WORLD)
    table = context.stream.table(context.phases[1].tasks[0], "test", context.backbone.codec)
    batch = next(iter(eval_batches(Collate([table], context.backbone.codec.pad_id, texts=True), 4)))
    with pytest.raises(RayclError, match="label heads go by the task of each text"):
        served.predict(batch, batch.texts, None, 1)
    assert set(served.predict(batch, batch.texts, batch.tasks, 1)) <= {"cat", "dog"}


@pytest.mark.parametrize("method", ["joint", "separate"])
def test_references_over_a_head_for_each_number_of_labels(lab: Lab, tmp_path: Path, method: str) -> None:
    """The head of each text's task answers, in training, in evaluation, and from the snapshot that is left."""
    learner = {"name": "slm", "head_rule": "label_count", "keys": {"steps": 40}}
    storage = Storage.at(tmp_path)
    context = run(lab.config("bert", (method, learner)), storage).context
    bank = Bank(storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None
    served = opened(bank, newest)
    for task in context.stream.tasks:
        files = [f"predictions/{folder}/{task.name}.jsonl" for folder in storage.list("predictions")]
        last = [file for file in files if storage.exists(file)][-1]
        measured = [json.loads(line)["answer"] for line in storage.read(last).decode().splitlines()]
        table = context.stream.table(task, "test", context.backbone.codec)
        answers: dict[int, str] = {}
        for batch in eval_batches(Collate([table], context.backbone.codec.pad_id, texts=True), 4):
            answers |= dict(zip(batch.rows.tolist(), served.predict(batch, batch.texts, batch.tasks, 1), strict=True))
        assert [answers[row] for row in range(len(table))] == measured


def test_a_head_that_the_task_picks_answers_no_unseen_tasks(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"method 'slm' needs each text's task id"):
        lab.config("bert", {"name": "slm", "head_rule": "label_count"}, stream={"unseen": [lab.unseen]})


def test_stored_dev_texts_detect_out_of_distribution_texts(lab: Lab, tmp_path: Path) -> None:
    """The snapshot has the texts and the phase's summary the scores, also after a crash in the second task."""
    config = lab.config("bert", {"name": "slm"}, stream={"dev_fraction": 0.25})
    whole, stopped = Storage.at(tmp_path / "whole"), Storage.at(tmp_path / "stopped")
    run_and_leave(config, whole, {(steps := 5): tmp_path / "stopped"})
    assert steps == len(trace(whole)) - 1
    run(config, stopped)
    routers = []
    for storage in (whole, stopped):
        bank = Bank(storage.sub("bank"))
        newest = bank.newest()
        assert newest is not None
        routers.append(SlotRouter.restored(get_router(bank, newest)))
    first, second = (router.tensors() for router in routers)
    assert {"sample/colour", "sample/animal"} < first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    routings = [RouterSummary.of(storage.read_json("results.json")) for storage in (whole, stopped)]
    assert routings[0] == routings[1] and list(routings[0].novelty) == ["animal"]
    assert 0.1 < float(routers[0].ood_score(first["sample/colour"]).mean()) < 0.9
    asked = ["fire is warm", "the annual report of the company lists its subsidiaries in Norway"]
    with listening(Bank(whole.sub("bank"))) as wire:
        ood_scores = [item["raycl"]["ood_score"] for item in wire.post("/v1/route", {"input": asked}).json()["data"]]
        answered = [item["raycl"]["ood_score"] for item in wire.post("/v1/classify", {"input": asked}).json()["data"]]
        pinned = wire.post("/v1/classify", {"input": asked, "model": "colour"}).json()["data"][0]["raycl"]
    assert ood_scores[0] < ood_scores[1] == 1.0 and answered == ood_scores
    assert pinned["ood_score"] is None, "no router has read it"


@pytest.mark.parametrize("kind", KINDS)
def test_forgetting_a_task_removes_its_keys(complete: Complete, tmp_path: Path, kind: str) -> None:
    done = complete(kind, "slm", "torch")
    bank = Bank(done.copy(tmp_path).sub("bank"))
    snapshot = bank.newest()
    assert snapshot is not None
    result = forget(bank, snapshot, "colour")
    assert sorted(result.removed) == [f"colour.{number}" for number in range(4)]
    new = bank.open(result.new)
    assert new.router.tensors is not None
    assert not [name for name in bank.get(new.router.tensors, "router") if "colour" in name]
    assert result.after["animal"].value >= result.before["animal"].value, "one task less to be confused with"


@pytest.mark.parametrize(
    ("kind", "mixing"), sampled([(kind, mixing) for kind in KINDS for mixing in ("concat", "sum")])
)
def test_slots_can_hold_prompts(lab: Lab, tmp_path: Path, kind: str, mixing: str) -> None:
    """The ablation DTKR+Prompt: same keys, no weight is touched; retrieved prompts stand one after another."""
    storage = Storage.at(tmp_path)
    settings = {"name": "slm", "value": "prompt", "prompt_length": 3, "retrieval": {"rule": "vote"}}
    config = lab.config(kind, {**settings, "prompt_mixing": mixing})
    done = Done(config, storage, run(config, storage).trainer.context)
    context = done.context
    table = context.stream.table(context.stream.tasks[0], "test", context.backbone.codec)
    batch = next(iter(eval_batches(Collate([table], context.backbone.codec.pad_id, texts=True), 4)))
    with activate(context.method, evaluated_by(done).mixture(batch)):
        inputs, positions = context.backbone.prefixed(batch.source_ids, batch.source_mask)
    assert positions == (6 if mixing == "concat" else 3), "two slots of three positions"
    assert inputs["attention_mask"][:, :positions].bool().all()
    bank = Bank(storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None and len(newest.adapters) == 8
    prompts = [bank.fetch(entry, newest.layouts[entry.layout]).prompt for entry in newest.adapters]
    assert all(prompt is not None and prompt.shape == (3, 32) for prompt in prompts)
    assert all(entry.rank == 0 for entry in newest.adapters)
    evaluated = evaluate(bank, newest)
    assert [evaluated[task].value for task in ("colour", "animal")] == matrix(storage)[-1]
    assert newest.router.settings.get("prompt_mixing", "sum") == mixing
    texts = table.texts(range(len(table)))
    with OfflineModel.open(bank, newest) as model:
        served = [answer.text for answer in model.predict(texts)]
    (last,) = (name for name in storage.files("predictions") if name.endswith("colour.jsonl") and "/001" in name)
    assert served == [json.loads(line)["answer"] for line in storage.read_text(last).splitlines()]


VARIANTS = (("slm-adapter", "relu", 8), ("slm-prefix", "softmax", 3))


@pytest.mark.parametrize(
    ("kind", "variant", "activation", "size"), sampled([(kind, *variant) for kind in KINDS for variant in VARIANTS])
)
def test_slots_can_hold_bottlenecks_and_prefixes(
    complete: Complete, kind: str, variant: str, activation: str, size: int
) -> None:
    """The ablation DTKR+Adapter: same keys, blocks that no weight can hold."""
    storage = complete(kind, variant, "torch").storage
    bank = Bank(storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None and len(newest.adapters) == 8
    blocks = [bank.fetch(entry, newest.layouts[entry.layout]) for entry in newest.adapters]
    assert all((block.activation, block.rank) == (activation, size) for block in blocks)
    assert any(bool(high.any()) for block in blocks for _, high in block.linears.values())
    evaluated = evaluate(bank, newest)
    assert [evaluated[task].value for task in ("colour", "animal")] == matrix(storage)[-1]


def test_memory_of_the_papers_slots() -> None:
    """SLM, table 15 (3.6M, 33M): m = 4 with r = 12 on twelve 768 x 768 linears, with r = 8 on thirty-two of 4096."""
    for rank, layers, width, expected in ((12, 12, 768, 3_538_944), (8, 32, 4096, 33_554_432)):
        adapter_state = AdapterState(
            {str(n): (torch.empty(rank, width), torch.empty(width, rank)) for n in range(layers)}
        )
        assert 4 * sum(tensor.nbytes for tensor in adapter_state.tensors().values()) == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"keys": {"groups": 5}, "encoder": {"name": "minilm"}},
            "5 groups do not divide the encoder's 384 dimensions: use one of 1, 2, 3, 4, 6",
        ),
        ({"keys": {"slots": 2}, "retrieval": {"top_k": 3}}, "retrieval.top_k=3 is more than keys.slots=2"),
        ({"value_layout": "per_group", "retrieval": {"rule": "vote"}}, "needs method.retrieval.rule=group_union"),
        ({"encoder": {"name": "/nowhere/encoder"}}, "'/nowhere/encoder' does not exist"),
    ],
)
def test_bad_settings_are_refused_before_training(lab: Lab, settings: dict[str, Any], said: str) -> None:
    from raycl.training.setup.checks import check

    with pytest.raises(RayclError, match=said):
        check(lab.config("bert", {"name": "slm", **settings}))


def test_generation_calls_the_encoder_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per request, and a cached decode equals recomputation."""
    method, batch = started(lab, "llama")
    asked: list[int] = []
    computed = method.encoder._computed
    monkeypatch.setattr(method.encoder, "_known", {})
    monkeypatch.setattr(method.encoder, "_computed", lambda texts: asked.append(len(texts)) or computed(texts))  # type: ignore[func-returns-value]
    torch.manual_seed(0)
    for layer in method.stack.layers.values():
        assert layer.lora_B is not None
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    method.backbone.eval()
    with activate_batch(method, batch):
        predict(method.backbone, batch, 8)
    assert asked == [len(set(batch.texts))]
    llama = tiny_model("llama", len(tokenizer("llama"))).eval()
    stack = AdapterStack(llama, linear_names(llama, ["attention.out"]))
    torch.manual_seed(0)
    pairs = {
        path: (torch.randn(2, layer.inputs), torch.randn(layer.outputs, 2)) for path, layer in stack.layers.items()
    }
    stack.load("a", AdapterState(pairs, 0.5))
    ids = torch.tensor([[4, 5, 6, 7]])
    with torch.no_grad(), stack.activate(Mixture(("a",), torch.ones(1, 1))):
        cached, plain = (
            llama.generate(ids, max_new_tokens=6, do_sample=False, use_cache=use, pad_token_id=0)
            for use in (True, False)
        )
    assert torch.equal(cached, plain)


def test_a_missing_encoder_is_an_error() -> None:
    from raycl.routing.sentence_encoder import EncoderConfig, SentenceEncoder

    with pytest.raises(BackboneError, match="does not exist"):
        SentenceEncoder(EncoderConfig(name="./nowhere"))


def test_a_damaged_router_is_named(complete: Complete, tmp_path: Path) -> None:
    bank = Bank(complete("bert", "slm", "torch").copy(tmp_path).sub("bank"))
    assert verify(bank).problems == []
    snapshot = bank.newest()
    assert snapshot is not None and snapshot.router.tensors is not None
    file = Path(bank.storage.path(snapshot.router.tensors.file))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert any(f"the router of snapshot {snapshot.number} are damaged" in problem for problem in verify(bank).problems)
