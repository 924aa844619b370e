"""SAPT's pseudo-samples from each source, and its ablations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from crash_copies import run_and_leave
from test_sapt import started
from tiny import Lab, exported, matrix, run, trace
from transformers import AutoTokenizer

from raycl.bank import Bank
from raycl.bank.states import get_router
from raycl.errors import BackboneError, ConfigError, DataError
from raycl.methods.base import trained_names
from raycl.methods.context import TaskContext
from raycl.methods.pseudo_samples.generator import Generator, GeneratorConfig
from raycl.methods.pseudo_samples.samples import Volume
from raycl.methods.sapt.reflection import ReflectionConfig
from raycl.methods.sapt.sapt import Sapt
from raycl.operations.banks.unlearning import evaluate
from raycl.routing.attention import hard_weights
from raycl.routing.routers import make_router
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))
WRITER = {"steps": 10, "rate": 0.02, "max_tokens": 8}
ABLATIONS = ("arm", "replay", "alignment", "shared_attention")


def sapt(**settings: Any) -> dict[str, Any]:
    return {"name": "sapt", **settings}


def whole_and_continued(config: Any, folder: Path, after: int) -> tuple[TrainingContext, Storage, Storage]:
    """Return the context and the folder of a run, and the same run as it was left after some steps and continued."""
    whole, again = Storage.at(folder / "whole"), Storage.at(folder / "again")
    context = run_and_leave(config, whole, {after: folder / "again"}).context
    run(config, again)
    return context, whole, again


def pseudo(storage: Storage, task: str) -> dict[str, Any]:
    bank = Bank(storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None
    return bank.get(newest.adapter(task).extras["pseudo"], "pseudo samples")


def generated(lab: Lab, kind: str, **settings: Any) -> dict[str, Any]:
    """Return a generator of the run's own backbone, or a small decoder where that cannot write."""
    generator: dict[str, Any] = {**WRITER}
    if kind == "bert":
        generator["backbone"] = {"name": str(lab.model_folder("llama")), "dtype": "float32"}
    return sapt(arm={"source": "generated", "fraction": 0.3}, generator=generator, **settings)


@pytest.mark.parametrize(("kind", "settings"), [("llama", {}), ("t5", {"value": "prompt", "prompt_length": 2})])
def test_a_run_with_a_generator_resumes_where_it_stopped(
    lab: Lab, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    context, whole, again = whole_and_continued(lab.config(kind, generated(lab, kind, **settings)), tmp_path, 6)
    kept = pseudo(whole, "colour")
    assert len(kept["source_lengths"]) == 4 and int(kept["source_lengths"].min()) >= 2, "30 % of 14 rows, with template"
    assert "fallback_samples" not in kept, "the generator wrote them"
    method = context.method
    assert isinstance(method, Sapt) and not method.stack.trainable and trained_names(method.backbone)
    names = [name for name, _ in method.backbone.named_parameters() if ".lora_" in name]
    assert names == [], "the generator is forgotten when it has written"
    assert trace(again) == trace(whole) and exported(again) == exported(whole) and matrix(again) == matrix(whole)
    assert torch.equal(pseudo(again, "animal")["source_ids"], pseudo(whole, "animal")["source_ids"])


@pytest.mark.parametrize(("kind", "falls"), [("t5", 2.0), ("llama", 0.25)])
def test_a_generator_is_trained(lab: Lab, monkeypatch: pytest.MonkeyPatch, kind: str, falls: float) -> None:
    """The one released with SAPT trains nothing. Its loss on the task's texts falls, [Gen] and LoRA move."""
    context, _ = build(lab.config(kind, sapt(target_modules=["attention", "ffn"])), WORLD)
    method, losses = context.method, list[float]()
    assert isinstance(method, Sapt)
    rows = TaskContext(context.phases[0], 4, context.stream, context.backbone.codec)
    generator = Generator(
        GeneratorConfig(steps=40, rate=0.01, max_tokens=8, lora_dropout=0.0), context.backbone, method.stack, 0
    )
    plain = Generator._loss

    def told(self: Generator, labels: Any, token: Any) -> Any:
        result = plain(self, labels, token)
        losses.append(result.item() / int((labels != -100).sum()))
        return result

    monkeypatch.setattr(Generator, "_loss", told)
    assert len(generator.write(rows, Volume(0.5))) == 7
    assert losses[0] - losses[-1] > falls


def test_a_backbone_without_generation_is_refused_before_training(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="needs a backbone that generates texts, and this one is encoder-only: name a small"
    ):
        check(lab.config("bert", sapt(arm={"source": "generated"})))
    generator = {"backbone": {"name": str(lab.model_folder("bert"))}}
    with pytest.raises(ConfigError, match="is encoder-only and cannot generate texts: expected an encoder-decoder"):
        check(lab.config("bert", sapt(arm={"source": "generated"}, generator=generator)))
    check(lab.config("bert", generated(lab, "bert")))
    endless = shutil.copytree(lab.model_folder("llama"), tmp_path / "endless")
    words = AutoTokenizer.from_pretrained(endless)
    words.eos_token = None
    words.save_pretrained(endless)
    with pytest.raises(
        BackboneError, match="decoder backbone has no end-of-sequence token, so answers never end: name one"
    ):
        check(lab.config("bert", sapt(arm={"source": "generated"}, generator={"backbone": {"name": str(endless)}})))


def test_no_generator_is_trained_without_use_of_its_samples(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a generator's backbone needed where adapters are trained alone."""
    monkeypatch.delattr(Generator, "write")
    _, whole, again = whole_and_continued(lab.config("t5", generated(lab, "t5", ablation="arm")), tmp_path, 6)
    assert pseudo(whole, "colour")["source_lengths"].tolist() == []
    assert trace(again) == trace(whole) and matrix(again) == matrix(whole)
    check(lab.config("bert", ("separate", sapt(arm={"source": "generated"}))))


def test_inputs_from_files(lab: Lab, tmp_path: Path) -> None:
    for task, text in (("colour", "fire is warm"), ("animal", "it purrs a")):
        (tmp_path / f"{task}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    config = lab.config("llama", sapt(arm={"source": "file", "files": str(tmp_path)}))
    storage = Storage.at(tmp_path / "run")
    done = run(config, storage)
    ids = pseudo(storage, "colour")["source_ids"]
    words = done.context.backbone.codec.tokenizer.convert_ids_to_tokens(ids.tolist())
    assert words == ["<s>", "fire", "is", "warm", "Output", ":"], "with the task's template"
    (tmp_path / "animal.jsonl").unlink()
    with pytest.raises(DataError, match=r"animal.jsonl' with pseudo-samples is missing"):
        check(config)  # before anything is learned, though it is the second task's
    (tmp_path / "animal.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(DataError, match=r"is not UTF-8 .*; save it as UTF-8"):
        check(config)
    alone = ("separate", sapt(arm={"source": "file", "files": str(tmp_path)}))
    check(lab.config("llama", alone))


def test_a_folder_of_files_is_found_from_wherever_workers_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert ReflectionConfig(source="file", files="mine").files == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("kind", "ablation"), sampled([(kind, ablation) for kind in ("bert", "t5") for ablation in ABLATIONS])
)
def test_every_ablation_completes_and_resumes(lab: Lab, tmp_path: Path, kind: str, ablation: str) -> None:
    settings = sapt(ablation=ablation, arm={"fraction": 0.5}, selector={"steps": 20})
    _, whole, again = whole_and_continued(lab.config(kind, settings), tmp_path, 6)
    bank = Bank(whole.sub("bank"))
    newest = bank.newest()
    assert newest is not None and len(newest.adapters) == 2
    evaluated = evaluate(bank, newest)
    assert [evaluated[task].value for task in ("colour", "animal")] == matrix(whole)[-1]
    state = get_router(bank, newest)
    assert state.kind == "attention" and bool(state.settings["hard"]) is (ablation == "shared_attention")
    assert trace(again) == trace(whole) and exported(again) == exported(whole) and matrix(again) == matrix(whole)


@pytest.mark.parametrize("ablation", ["none", *ABLATIONS])
def test_each_ablation_disables_its_component(lab: Lab, ablation: str) -> None:
    """Each ablation acts in the third of three tasks, and after it."""
    settings = {"arm": {"fraction": 0.5, "weight": 1.0}, "selector": {"steps": 20}}
    method, batch = started(lab, "t5", learned=2, ablation=ablation, **settings)
    term = method.penalty(batch, None)  # type: ignore[arg-type]
    assert (term is not None and term.item() > 0) if ablation == "none" else term is None
    assert (len(method.prepare_batch(batch)) > len(batch)) is (ablation == "replay")
    trained = method.route(batch)
    assert trained.names == (("task2",) if ablation == "shared_attention" else ("task0", "task1", "task2"))
    assert trained.weights.requires_grad is (ablation != "shared_attention")
    assert (method.selector is not None) is (ablation in ("alignment", "shared_attention"))
    if method.selector is not None:
        mine, other = method.attention.keys, method.selector.keys
        assert mine.keys() == other.keys() and not any(torch.equal(mine[task], other[task]) for task in mine)
        state, ids = method._router(), batch.source_ids
        tested = make_router(state, {}).route_embeddings(method.backbone.embedded(ids), batch.source_mask)
        chosen = method.selector(method._pooled([row.tolist() for row in ids])).exp()
        told = torch.zeros(4, len(other))
        told[:, [list(other).index(name) for name in tested.names]] = tested.weights
        assert torch.equal(told, hard_weights(chosen) if ablation == "shared_attention" else chosen)


def test_without_shared_attention_adapters_equal_single_task_ones(lab: Lab, tmp_path: Path) -> None:
    """-SA trains every adapter as the reference does; only the mixture at test differs."""
    alone, reference = Storage.at(tmp_path / "alone"), Storage.at(tmp_path / "reference")
    run(lab.config("t5", sapt(ablation="shared_attention", selector={"steps": 5})), alone)
    run(lab.config("t5", ("separate", "sapt")), reference)
    assert trace(alone) == trace(reference) and exported(alone) == exported(reference)


def test_a_selector_finds_the_tasks_of_its_pseudo_inputs(lab: Lab, tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    run(lab.config("bert", sapt(ablation="shared_attention", arm={"fraction": 1.0})), storage)
    told = storage.read_json("results.json")["phase_summaries"][-1]["attention"]
    assert told["test"]["colour"][0] > 0.9 and told["test"]["animal"][1] > 0.9
    assert told["train"] == {"colour": [1.0], "animal": [0.0, 1.0]}


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_replayed_rows_are_each_trained_on_once_an_epoch(lab: Lab, tmp_path: Path, kind: str) -> None:
    config = lab.config(kind, sapt(ablation="replay", arm={"fraction": 0.5}), train={"epochs": 2})
    context, _ = build(config, WORLD)
    method = context.method
    assert isinstance(method, Sapt)
    seen: list[tuple[int, Any]] = []
    join = Sapt.prepare_batch

    def watched(self: Sapt, batch: Any) -> Any:
        text = join(self, batch)
        new = text.source_ids[len(batch) :], text.source_mask[len(batch) :], text.label_ids[len(batch) :]
        seen.extend(
            (
                self.context.step.index // -(-self._replay.rows // self.context.batch_size),
                (ids[mask > 0].tolist(), int(label)),
            )
            for ids, mask, label in zip(*new, strict=True)
        )
        assert bool(text.weight[len(batch) :].all()) and text.target_ids.shape[0] == len(text)
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sapt, "prepare_batch", watched)
        done = run(config, Storage.at(tmp_path))
    method = done.context.method
    assert isinstance(method, Sapt)
    kept = method.reflection.samples["colour"]
    rows = method.backbone.label_ids() if kind == "bert" else {}
    labels = [rows["blue"], rows["red"]] if kind == "bert" else []
    expected = sorted((s, labels[row] if labels else -100) for s, row in zip(kept.sources, kept.labels, strict=True))
    for epoch in range(2):
        assert sorted(pair for when, pair in seen if when == epoch) == expected


def test_replay_is_the_same_for_any_accumulation(lab: Lab, tmp_path: Path) -> None:
    collected = []
    for micro in (None, 1):
        storage = Storage.at(tmp_path / str(micro))
        settings = sapt(ablation="replay", arm={"fraction": 1.0})
        run(lab.config("bert", settings, train={"micro_batch_size": micro}), storage)
        collected.append(trace(storage))
    for mine, other in zip(*collected, strict=True):
        assert mine == pytest.approx(other, abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_generated_inputs_are_replayed_with_the_models_own_answers(lab: Lab, tmp_path: Path, kind: str) -> None:
    """The paper's +Replay, whose pseudo-samples are generated; the run resumes where it stopped."""
    config = lab.config(kind, generated(lab, kind, ablation="replay"))
    context, whole, again = whole_and_continued(config, tmp_path, 6)
    method = context.method
    assert isinstance(method, Sapt)
    for task, labels in (("colour", ("blue", "red")), ("animal", ("cat", "dog"))):
        kept = method.reflection.samples[task]
        assert len(kept) == 4 and all(label in (0, 1) for label in kept.labels)
        said = context.backbone.codec.encode_target([labels[label] for label in kept.labels])
        assert kept.targets == said
    assert trace(again) == trace(whole) and exported(again) == exported(whole) and matrix(again) == matrix(whole)
