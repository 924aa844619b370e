"""SDFT: the divergences by hand, whose answers are judged by whom, and how the teacher follows."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phases import begin_phase, end_phase
from tiny import ENGINES, Lab, run, trace
from torch import Tensor

from raycl.data.loader import Collate, eval_batches, padded
from raycl.errors import ConfigError
from raycl.generation import dynamic_cache
from raycl.generation.requests import Sampling
from raycl.generation.sampling import pick
from raycl.methods.base import activate_batch, trained_names
from raycl.methods.context import Step
from raycl.methods.sdft import Sdft, SdftConfig, distances
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.data import PhaseData
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext
from raycl.types import IGNORE, Batch

WORLD = DistributedContext.alone(torch.device("cpu"))
EXAMPLE = " Output : {answer} very much"


def test_the_divergences_by_hand() -> None:
    model, teacher = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), torch.tensor([[0.9, 0.1], [0.9, 0.1]]).log()
    assert distances(model + 3, teacher, 0.0).tolist() == pytest.approx([0.3681, 0], abs=1e-4), "KL(teacher, model)"
    assert distances(model, teacher - 1, 1.0).tolist() == pytest.approx([0.5108, 0], abs=1e-4), "KL(model, teacher)"
    mixture = torch.tensor([0.25 * 0.9 + 0.75 * 0.5, 0.25 * 0.1 + 0.75 * 0.5]).log()
    parts = [float((p.exp() * (p - mixture)).sum()) for p in (teacher[0], model[0])]
    expected = 0.25 * parts[0] + 0.75 * parts[1]
    assert distances(model, teacher, 0.25).tolist() == pytest.approx([expected, 0], abs=1e-6)


def begun(lab: Lab, learner: Any = "finetune", **settings: Any) -> tuple[Sdft, TrainingContext, PhaseData, Batch]:
    """Return the method in the first task with weights that are no longer the teacher's, and a batch of it."""
    settings = {"name": "sdft", "learner": learner, "example": EXAMPLE, **settings}
    context, _ = build(lab.config("llama", settings), WORLD)
    method, codec = context.method, context.backbone.codec
    assert isinstance(method, Sdft)
    data = begin_phase(context, 0)
    context.backbone.train()
    move(context, 0)
    table = context.stream.table(context.stream.tasks[0], "train", codec)
    return method, context, data, next(iter(eval_batches(Collate([table], codec.pad_id), 5)))


def move(context: TrainingContext, seed: int) -> None:
    """Give what is trained other values."""
    draw = torch.Generator().manual_seed(seed)
    own = dict(context.backbone.named_parameters())
    with torch.no_grad():
        for name in trained_names(context.backbone):
            own[name].add_(0.3 * torch.randn(own[name].shape, generator=draw))


def values(context: TrainingContext) -> dict[str, Tensor]:
    own = dict(context.backbone.named_parameters())
    return {name: own[name].detach().clone() for name in trained_names(context.backbone)}


def logprobs(model: Any, source: list[int], answer: list[int]) -> Tensor:
    """Return `[T, V]` of an answer's tokens, in a row of their own."""
    logits: Tensor = model(torch.tensor([source + answer])).logits[0, len(source) - 1 : -1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("divergence", [0.0, 1.0])
@pytest.mark.parametrize("skip", [0, 1])
def test_gradients_are_those_of_the_divergence_from_the_averaged_model_with_the_example(
    lab: Lab, divergence: float, skip: int
) -> None:
    """Two plain models, one of which has the averages for weights and reads the example, judge the same answers."""
    method, context, data, batch = begun(lab, divergence=divergence, skip=skip, ema=0.25)
    method.teacher.follow(0.25)
    teacher, codec = copy.deepcopy(context.backbone.model), context.backbone.codec
    named = {name.removeprefix("model."): value for name, value in method.teacher.values.items()}
    assert not teacher.load_state_dict(named, strict=False).unexpected_keys
    drawn = method.prepare_batch(batch)
    rows, table = batch.rows.tolist(), data.tables("train")[0]
    examples = [EXAMPLE.replace("{answer}", names[0]) for names in table.references(rows)]
    texts = [text + example for text, example in zip(table.texts(rows), examples, strict=True)]
    context.backbone.eval()
    total = torch.zeros(())
    prompt = data.stream.prompt(table.task, codec)
    for place, source in enumerate(codec.encode_source(list(map(prompt.around, texts)))):
        answer = [token for token in drawn.target_ids[place].tolist() if token != IGNORE]
        own = batch.source_ids[place][batch.source_mask[place] > 0].tolist()
        now, then = logprobs(context.backbone.model, own, answer), logprobs(teacher, source, answer).detach()
        each = (then.exp() * (then - now)).sum(1) if divergence == 0 else (now.exp() * (now - then)).sum(1)
        total = total + each[skip:].sum() / max(1, len(answer) - skip) / len(rows)
    parameters = {name: p for name, p in context.backbone.named_parameters() if p.requires_grad}
    by_hand = torch.autograd.grad(total, list(parameters.values()))
    context.backbone.train()
    with activate_batch(method, drawn):
        loss = method.objective(drawn, context.backbone(drawn)) / method.objective.count(drawn)
    assert loss.item() == pytest.approx(total.item(), rel=1e-4) and loss > 0.01
    for name, hand, found in zip(
        parameters, by_hand, torch.autograd.grad(loss, list(parameters.values())), strict=True
    ):
        torch.testing.assert_close(found, hand, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("learner", ["lora", "finetune"])
def test_the_teacher_follows_once_a_step_and_starts_each_task_as_the_model(lab: Lab, learner: str) -> None:
    method, context, data, batch = begun(lab, learner, ema=0.1)
    average = {name: value.clone() for name, value in method.teacher.values.items()}
    for step in range(3):
        data.step = Step(step, seed=step, micro_batches=2)
        for _ in range(2):
            method.prepare_batch(batch)
        if step:
            average = {name: 0.9 * value + 0.1 * values(context)[name] for name, value in average.items()}
        assert average.keys() == values(context).keys()
        for name, value in average.items():
            torch.testing.assert_close(method.teacher.values[name], value)
        move(context, step + 1)
    state, tensors = method.state_dict()
    restored = begun(lab, learner, ema=0.1)[0]
    restored.load_state_dict(state, tensors)
    for name, value in method.teacher.values.items():
        assert torch.equal(restored.teacher.values[name], value)
    end_phase(context, data)
    assert not method.teacher.values
    begin_phase(context, 1)
    assert all(torch.equal(method.teacher.values[name], value) for name, value in values(context).items())


def test_the_model_answers_its_own_prompt_by_draws_of_the_row_and_step_alone(lab: Lab) -> None:
    """What rows say is the answer is nothing that the model reads or is trained on."""
    method, context, data, batch = begun(lab, "lora")
    data.step = Step(0, seed=7)
    drawn = method.prepare_batch(batch).target_ids
    others = replace(batch, target_ids=batch.target_ids.clone().fill_(IGNORE))
    assert torch.equal(method.prepare_batch(others).target_ids, drawn)
    for place in (1, 3):
        alone = replace(batch, **{name: getattr(batch, name)[place : place + 1] for name in _fields()})
        tokens = method.prepare_batch(alone).target_ids[0]
        assert torch.equal(tokens, drawn[place][: len(tokens)])
        source = batch.source_ids[place][batch.source_mask[place] > 0].tolist()
        mixture = method.route(alone)
        assert method.stack is not None
        with method.stack.activate(mixture), torch.no_grad():
            logits = dynamic_cache.begin(context.backbone, [source]).logits
        draw = torch.Generator().manual_seed(7 + int(batch.rows[place]))
        assert pick(logits, [Sampling(4, temperature=1.0)], [draw]) == [int(tokens[0])]
    data.step = Step(0, seed=8)
    assert not torch.equal(method.prepare_batch(batch).target_ids, drawn)
    filled = replace(batch, rows=torch.full_like(batch.rows, -1), weight=torch.zeros_like(batch.weight))
    assert bool((method.prepare_batch(filled).target_ids == IGNORE).all()) and context.backbone.training


def _fields() -> tuple[str, ...]:
    return ("source_ids", "source_mask", "target_ids", "label_ids", "weight", "rows")


def test_there_is_a_warning_for_a_model_that_does_not_write_the_answer_that_it_reads(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said of one that has learned to repeat the example; the share is resumed, and in the results."""
    method, context, data, _ = begun(lab)
    told = "method 'sdft': the model wrote the answer that it read as an example for 0 of "
    (table,) = data.tables("train")
    assert told in caplog.text and method.summary({})["examples_repeated"] == {table.task.name: 0.0}
    rows = range(len(table))
    plain = Collate([table], context.backbone.codec.pad_id)(np.arange(len(rows)), len(rows))
    sources = method._with_examples(table, rows)
    batch = replace(plain, source_ids=padded(sources, 0, 1), source_mask=padded([[1] * len(s) for s in sources], 0, 1))
    optimizer = torch.optim.Adam(context.backbone.parameters(), 3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        with activate_batch(method, batch):
            context.backbone(batch).loss_sum.backward()
        optimizer.step()
    caplog.clear()
    begin_phase(context, 0)
    assert "sdft" not in caplog.text and method.summary({})["examples_repeated"] == {table.task.name: 1.0}
    restored = begun(lab)[0]
    restored.load_state_dict(*method.state_dict())
    assert restored.summary({}) == method.summary({})
    data.phase = replace(data.phase, tasks=(replace(table.task, labels=None),))
    method.begin_task(data.phase, data)
    assert method.summary({})["examples_repeated"] == {}, "good answers without labels are other words"


def test_it_becomes_like_its_teacher(lab: Lab, tmp_path: Path) -> None:
    """A teacher that stands still is found more and more; the first steps see what a fresh model makes of examples."""
    settings = {"name": "sdft", "learner": "finetune", "ema": 0.0, "example": EXAMPLE}
    tasks = {"tasks": lab.tasks[:1]}
    run(lab.config("llama", settings, stream=tasks, train={"epochs": 8}), Storage.at(tmp_path))
    losses = [step[2] for step in trace(Storage.at(tmp_path))]
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8])


@pytest.mark.parametrize(
    ("kind", "settings", "sections", "why"),
    [
        (
            "bert",
            {},
            {},
            r"reads an example in its prompt, which encoder-only and .* this backbone \(encoder\) are not",
        ),
        ("t5", {}, {}, r"this backbone \(encoder-decoder\) are not trained to follow: expected a decoder-only"),
        *(
            ("llama", {}, {"engine": ENGINES[engine]}, "'sdft' computes outputs with earlier parameters, which engine")
            for engine in ("zero3", "fsdp")
        ),
        ("llama", {"learner": "sapt"}, {}, r"method\.learner is sapt, which trains each task's adapters on its own"),
    ],
)
def test_what_cannot_work_is_refused(
    lab: Lab, kind: str, settings: dict[str, Any], sections: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        config = lab.config(kind, {"name": "sdft", **settings}, **sections)
        check(config)
        build(config, WORLD)


def test_prompts_with_examples_must_fit_and_examples_have_a_place_for_the_answer(lab: Lab) -> None:
    context, _ = build(lab.config("llama", {"name": "sdft", "max_tokens": 120}), WORLD)
    with pytest.raises(ConfigError, match=r"of an answer, which is more than the 128 positions of the backbone: lower"):
        begin_phase(context)
    with pytest.raises(ConfigError, match=r"has {answer} 0 times: expected once"):
        lab.config("llama", {"name": "sdft", "example": "an answer"})


def test_its_costs_are_planned() -> None:
    assert SdftConfig().extra_passes(2, 10) == 0.5 and SdftConfig().values_kept(1) == 1
