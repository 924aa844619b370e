"""SAPT's generator by itself: a prompt instead of a LoRA, what it leaves unchanged, and its failures."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_copies import run_and_leave
from fork_server import ForkServer
from tiny import Lab, Stop, exported, matrix, run, trace

from raycl.bank import Bank
from raycl.errors import ConfigError
from raycl.methods.context import TaskContext
from raycl.methods.pseudo_samples import generator
from raycl.methods.pseudo_samples.generator import Generator, GeneratorConfig
from raycl.methods.pseudo_samples.samples import PseudoSamples, Volume, take_real
from raycl.methods.sapt.sapt import Sapt
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.setup.checks import check
from raycl.training.setup.run_config import load_config
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))
LORA = {"steps": 5, "rate": 0.02, "max_tokens": 8}
PROMPT = {"value": "prompt", "prompt_length": 3, "epochs": 5, "max_tokens": 8}
SAPTS: tuple[dict[str, Any], ...] = ({}, {"value": "prompt", "prompt_length": 2})


def generated(generator: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"name": "sapt", "arm": {"source": "generated", "fraction": 0.3}, "generator": generator, **settings}


def begun(lab: Lab, kind: str, settings: dict[str, Any]) -> tuple[Sapt, TaskContext]:
    """Return a method that has learned nothing yet, and the rows of its first phase."""
    context, _ = build(lab.config(kind, {"name": "sapt", **settings}), WORLD)
    assert isinstance(context.method, Sapt)
    return context.method, TaskContext(context.phases[0], 4, context.stream, context.backbone.codec)


def pseudo(storage: Storage, task: str) -> PseudoSamples:
    bank = Bank(storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None
    return PseudoSamples.of(bank.get(newest.adapter(task).extras["pseudo"], "pseudo samples"))


def test_a_run_with_a_prompt_generator_resumes_where_it_stopped(lab: Lab, tmp_path: Path) -> None:
    """The generator has a backbone of its own: the run's is encoder-only."""
    writer = {"name": str(lab.model_folder("llama")), "dtype": "float32"}
    config = lab.config("bert", generated({**PROMPT, "backbone": writer}))
    whole, again = Storage.at(tmp_path / "whole"), Storage.at(tmp_path / "again")
    run_and_leave(config, whole, {6: tmp_path / "again"})
    kept = pseudo(whole, "colour")
    assert len(kept) == 4 and not kept.fallback_samples, "30 % of 14 rows, all of them written"
    run(config, again)
    assert trace(again) == trace(whole) and exported(again) == exported(whole) and matrix(again) == matrix(whole)
    assert pseudo(again, "animal") == pseudo(whole, "animal")
    assert "fallback_samples" not in whole.read_json("results.json")["phase_summaries"][-1]["attention"]


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_a_prompt_is_trained(lab: Lab, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Its loss on the task's texts falls; what is trained is the prompt and [Gen], by Adafactor."""
    method, rows = begun(lab, kind, {})
    config = GeneratorConfig(value="prompt", prompt_length=8, epochs=100, max_tokens=8)
    generator = Generator(config, method.backbone, method.stack, 0)
    losses, trained, plain, train = list[float](), list[Any](), Generator._loss, Generator._train

    def told(self: Generator, labels: Any, start: Any) -> Any:
        result = plain(self, labels, start)
        losses.append(result.item() / int((labels != -100).sum()))
        return result

    def watched(self: Generator, texts: Any, start: Any, parameters: Any, seed: int) -> None:
        before = start.detach().clone()
        train(self, texts, start, parameters, seed)
        trained.extend((parameters, bool((start != before).any(1).all())))

    monkeypatch.setattr(Generator, "_loss", told)
    monkeypatch.setattr(Generator, "_train", watched)
    assert len(generator.write(rows, Volume(0.5))) == 7
    assert [tuple(parameter.shape) for parameter in trained[0]] == [(9, 32)] and trained[1]
    assert len(losses) == 100, "14 rows fit in one batch of 16: an epoch is a step"
    assert losses[0] - losses[-1] > 0.05


def test_a_prompt_that_is_encoded_once_gives_the_same_loss_and_gradient(lab: Lab) -> None:
    method, _ = begun(lab, "t5", {})
    generator = Generator(GeneratorConfig(**PROMPT), method.backbone, method.stack, 0)
    labels = torch.tensor([[7, 8, 1, -100], [9, 10, 11, 1]])
    start = generator._start()
    once = generator._loss(labels, start)
    rows = method.backbone.model(inputs_embeds=start.expand(2, -1, -1), labels=labels).logits
    each = torch.nn.functional.cross_entropy(rows.flatten(0, 1), labels.flatten(), reduction="sum")
    assert once.item() == pytest.approx(each.item(), rel=1e-5)
    assert torch.allclose(torch.autograd.grad(once, start)[0], torch.autograd.grad(each, start)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "generator", "settings"),
    [("t5", LORA, SAPTS[0]), ("llama", LORA, SAPTS[1]), ("llama", PROMPT, SAPTS[0]), ("t5", PROMPT, SAPTS[1])],
)
def test_generation_does_not_change_the_backbone(
    lab: Lab, kind: str, generator: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Modules, values to the last bit, what is trained, training or not; the same with generators that break."""
    method, rows = begun(lab, kind, settings)
    backbone = method.backbone
    backbone.train()
    next(backbone.model.parameters()).requires_grad_(False)

    def state() -> Any:
        values = {name: (p.data_ptr(), p.requires_grad, p.grad) for name, p in backbone.named_parameters()}
        modules = [(name, id(module), module.training) for name, module in backbone.named_modules()]
        return values, modules, id(backbone.prefix), method.stack.trainable, method.stack.plan

    before = state()
    bits = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    Generator(GeneratorConfig(**generator), backbone, method.stack, 0).write(rows, Volume(0.3))
    assert state() == before
    assert all(torch.equal(tensor, bits[name]) for name, tensor in backbone.state_dict().items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generator, "_sample", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Generator(GeneratorConfig(**generator), backbone, method.stack, 0).write(rows, Volume(0.3))
    assert state() == before


def test_too_few_generated_samples_are_kept(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = iter(["fire is warm", "the sea"] + [""] * 1000)
    monkeypatch.setattr("raycl.backbone.codec.HFCodec.decode", lambda self, ids: [next(said) for _ in ids])
    method, rows = begun(lab, "t5", {})
    with caplog.at_level(logging.WARNING, logger="raycl"):
        result = Generator(GeneratorConfig(**LORA), method.backbone, method.stack, 0).write(rows, Volume(0.3))
    assert (
        result.sources == rows.prompts(rows.phase.tasks[0], ["fire is warm", "the sea"]) and not result.fallback_samples
    )
    assert "generator of task 'colour' wrote 2 of 4 texts in 16 tries: only these are kept" in caplog.text
    assert "(method.generator.steps) or more gently (method.generator.rate)" in caplog.text


@pytest.mark.parametrize("how", ["writes nothing", "diverges"])
def test_a_failed_generator_falls_back_to_stored_inputs(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    def diverge(self: Generator, texts: Any, start: Any, *rest: Any) -> None:
        start.data.fill_(float("nan"))

    monkeypatch.setattr(generator.Generator, "_train", diverge if how == "diverges" else lambda *given: None)
    if how == "writes nothing":
        monkeypatch.setattr("raycl.backbone.codec.HFCodec.decode", lambda self, ids: [""] * len(ids))
    config, storage = lab.config("llama", generated(PROMPT)), Storage.at(tmp_path)
    with caplog.at_level(logging.WARNING, logger="raycl"), pytest.raises(Stop):
        run(config, storage, 6)
    done = run(config, storage)
    method = done.context.method
    assert isinstance(method, Sapt)
    said = "generator of task 'colour' wrote 0 of 4 texts in 16 tries: stored training inputs stand for the task"
    assert (
        said in caplog.text and "(method.generator.epochs) or more gently (method.generator.prompt_rate)" in caplog.text
    )
    kept = method.reflection.samples["colour"]
    rows = TaskContext(done.context.phases[0], 4, done.context.stream, done.context.backbone.codec)
    assert len(kept) == kept.fallback_samples == 4 and all(
        ids in take_real(rows, Volume(1.0), 0).sources for ids in kept.sources
    )
    assert pseudo(storage, "colour") == kept, "told beside the samples"
    told = storage.read_json("results.json")["phase_summaries"][-1]["attention"]
    assert told["fallback_samples"] == told["pseudo"] == {"colour": 4, "animal": 4}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"value": "prompt", "steps": 300},
            r"method.generator.steps is of method.generator.value=lora, and value is prompt",
        ),
        ({"value": "prompt", "rate": 0.1}, r"which has prompt_length, epochs, prompt_rate: leave it out, or choose"),
        (
            {"prompt_length": 20},
            r"method.generator.prompt_length is of method.generator.value=prompt, and value is lora",
        ),
        ({"epochs": 3}, r"which has r, lora_alpha, lora_dropout, target_modules, .*steps, rate: leave it out"),
        ({"value": "adapter"}, r"config key 'method.generator.value' is 'adapter'"),
        ({"value": "prompt", "prompt_length": 0}, r"config key 'method.generator.prompt_length' is 0"),
    ],
)
def test_bad_settings_are_errors(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, ["method=sapt", *(f"method.generator.{name}={value}" for name, value in settings.items())])


def test_positions_are_counted_before_anything_starts(lab: Lab) -> None:
    """128 of the tiny decoder, of the run or named; T5's are relative."""
    fits = {"value": "prompt", "prompt_length": 119, "max_tokens": 8}
    check(lab.config("llama", generated(fits)))
    long = {**fits, "prompt_length": 120}
    said = (
        r"reads 121 positions and writes up to method.generator.max_tokens=8, which is more than the 128 positions of"
    )
    with pytest.raises(
        ConfigError, match=f"{said} its backbone: lower method.generator.prompt_length, method.generator.max"
    ):
        check(lab.config("llama", generated(long)))
    named = {"backbone": {"name": str(lab.model_folder("llama"))}}
    with pytest.raises(ConfigError, match=said):
        check(lab.config("bert", generated({**long, **named})))
    with pytest.raises(ConfigError, match=r"reads 1 positions and writes up to method.generator.max_tokens=512"):
        check(lab.config("llama", generated({})))
    check(lab.config("t5", generated({"value": "prompt"})))


def test_two_workers_keep_the_samples_of_the_first(lab: Lab, fork_server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(lab.tree("t5", generated({**LORA, "steps": 1}))))
    fork_server.pair("two_generators:main", tmp_path, tmp_path / "rendezvous", tmp_path, seconds=200)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second == {task: pseudo(Storage.at(tmp_path / "run"), task).sources for task in first}
    assert len(first["colour"]) == 4
