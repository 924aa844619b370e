"""Progressive Prompts: which prompts a text gets, in which order, what is trained, and what the task id picks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from phases import begin_phase, end_phase, routed
from service_client import FEW, bank_of, examples, serving
from tiny import KINDS, Lab, Taught, matrix, opened, run
from torch import Tensor

from raycl.adapters.soft_prompts import MixedPrompts, formed
from raycl.bank import Bank
from raycl.data.loader import Collate, eval_batches
from raycl.errors import BankError, ConfigError
from raycl.generation.requests import Sampling
from raycl.methods.base import activate, activate_batch, activate_trainable, trained_names
from raycl.methods.prompts.progprompt import ProgPrompt
from raycl.routing.routers import make_router
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, RouterState

WORLD = DistributedContext.alone(torch.device("cpu"))
LENGTH = 10


def started(lab: Lab, kind: str, **settings: Any) -> tuple[ProgPrompt, TrainingContext]:
    context, _ = build(lab.config(kind, {"name": "progprompt", **settings}), WORLD)
    assert isinstance(context.method, ProgPrompt)
    return context.method, context


def batch_of(context: TrainingContext, phase: int, split: Any = "train") -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.phases[phase].tasks[0], split, codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    return next(iter(eval_batches(Collate([table], codec.pad_id, labels, texts=True), 4)))


def read(method: ProgPrompt, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the prompt positions of the batch, and which of them are there."""
    prefix = method.backbone.prefix
    assert isinstance(prefix, MixedPrompts)
    with activate_batch(method, batch):
        result = prefix(len(batch), torch.device("cpu"))
    assert result is not None
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_the_input_grows_by_ten_per_task_with_the_newest_prompt_first(lab: Lab, kind: str) -> None:
    """Names of tasks are the other way round in the alphabet than in the stream of this test."""
    method, context = started(lab, kind)
    reversed_phases = tuple(reversed(context.phases))  # animal, colour: then the newest has the larger name
    for phases in (context.phases, reversed_phases):
        method, context = started(lab, kind)
        context.phases = phases
        first = begin_phase(context, 0)
        assert read(method, batch_of(context, 0))[0].shape[1] == LENGTH
        learned = end_phase(context, first)
        assert learned is not None
        old = learned.adapters[phases[0].name].prompt
        begin_phase(context, 1)
        positions, mask = read(method, batch_of(context, 1))
        new = dict(context.backbone.named_parameters())["prefix.trainable"][0]
        assert positions.shape[1] == 2 * LENGTH and mask.all() and old is not None
        torch.testing.assert_close(positions[0], torch.cat([new, old]))
        assert not torch.equal(new, old)


@pytest.mark.parametrize("kind", KINDS)
def test_old_prompts_get_no_gradient(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    end_phase(context, begin_phase(context, 0))
    begin_phase(context, 1)
    if kind == "bert":
        torch.nn.init.normal_(context.backbone.head.weight)
    batch = batch_of(context, 1)
    with activate_batch(method, batch):
        context.backbone(batch).loss_sum.backward()
    head = ["head.bias", "head.weight"] if kind == "bert" else []
    assert sorted(trained_names(context.backbone)) == [*head, "prefix.trainable"]
    gradient = dict(context.backbone.named_parameters())["prefix.trainable"].grad
    assert gradient is not None and gradient.any(2).all(), "every position of the new prompt is trained"
    old = method.stack.states["colour"].prompt
    assert old is not None and not old.requires_grad and old.grad is None


def test_an_mlp_is_kept_as_what_it_gives(lab: Lab) -> None:
    method, context = started(lab, "t5", prompt_form="mlp")
    learned = end_phase(context, begin_phase(context, 0))
    assert learned is not None
    plain, again = started(lab, "t5")
    untrained = end_phase(again, begin_phase(again, 0))
    assert untrained is not None
    mine, other = learned.adapters["colour"].prompt, untrained.adapters["colour"].prompt
    assert mine is not None and other is not None and mine.shape == other.shape == (LENGTH, 32)
    assert not torch.allclose(mine, other), "P' is the prompt and what the MLP adds"
    assert torch.equal(formed({"trainable": other[None]})[0], other)
    assert method.backbone.prefix is not plain.backbone.prefix


@pytest.mark.parametrize("kind", KINDS)
def test_the_task_id_picks_the_prompts_and_the_head_of_its_task(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind)
    for index in range(2):
        learned = end_phase(context, begin_phase(context, index))
    both = [batch_of(context, index, "test") for index in range(2)]
    mixtures = [routed(method, learned, batch, name) for batch, name in zip(both, ("colour", "animal"), strict=True)]
    for number, (mixture, weights) in enumerate(zip(mixtures, ([1.0, 0.0], [1.0, 1.0]), strict=True)):
        assert mixture.weights.tolist() == [weights] * 4
        with activate(method, mixture):
            prefix = context.backbone.prefix(4, torch.device("cpu"))  # type: ignore[misc]
        assert prefix is not None and prefix[1].sum(1).tolist() == [LENGTH * (1 + number)] * 4
    if kind == "bert":
        assert mixtures[0].heads == ("colour",) * 4
        with activate(method, mixtures[1]):
            scores, labels = context.backbone.score_labels(both[1])
        possible = {label for label, score in zip(labels, scores[0].tolist(), strict=True) if score > -torch.inf}
        assert possible == {"cat", "dog"}, "the head of the text's own task answers"


def test_a_pass_for_parameters_alone_has_a_head(lab: Lab) -> None:
    """A pass for parameters alone has a head; engines make one before they restore an optimizer's state."""
    method, context = started(lab, "bert")
    begin_phase(context, 0)
    with activate_trainable(method, 1):
        context.backbone(batch_of(context, 0).first(1)).loss_sum.backward()
    assert all(p.grad is not None for p in context.backbone.parameters() if p.requires_grad)


def test_without_task_ids_every_text_gets_all_prompts(lab: Lab) -> None:
    method, context = started(lab, "bert", task_id=False)
    for index in range(2):
        learned = end_phase(context, begin_phase(context, index))
    batch = batch_of(context, 0, "test")
    mixture = routed(method, learned, batch)
    assert mixture.weights.all() and not method.config.needs_task and not method.config.needs_texts
    with activate(method, mixture):
        scores, labels = context.backbone.score_labels(batch)
    assert len(labels) == 4 and torch.isfinite(scores).all(), "the labels of all tasks compete"
    assert learned is not None and learned.router.kind == "sum"


def test_the_router_by_hand() -> None:
    state = RouterState("progressive", {"prompt_order": {"x": 4, "y": 1, "z": 2, "gone": 3}})
    router = make_router(state, {"x": ("x",), "y": ("y",), "z": ("z1", "z2")})
    assert router.needs == {"task_id"} and router.chooses
    result = router.route(["text"] * 3, ["z2", "y", "x"])
    assert result.names == ("y", "z", "x") and result.weights.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    with pytest.raises(BankError, match="router is 'progressive', which needs the task of each text"):
        router.route(["text"], None)


@pytest.mark.parametrize(("kind", "task_id"), sampled([(kind, given) for kind in KINDS for given in (True, False)]))
def test_snapshots_answer_as_the_run_did(lab: Lab, tmp_path: Path, kind: str, task_id: bool) -> None:
    """Trained at a rate at which prompts change answers, stopped by nothing, and read back from the bank."""
    storage = Storage.at(tmp_path)
    config = lab.config(kind, {"name": "progprompt", "task_id": task_id}, train={"epochs": 2, "learning_rate": 0.3})
    context = run(config, storage).context
    bank = Bank(storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None and newest.router.kind == ("progressive" if task_id else "sum")
    model, right, total = opened(bank, newest), 0, []
    assert model.loaded.prompt_positions() == 2 * LENGTH and model.loaded.prompt_positions({"colour"}) == LENGTH
    for task in context.stream.tasks:
        table = context.stream.table(task, "test", context.backbone.codec)
        batch = next(iter(eval_batches(Collate([table], context.backbone.codec.pad_id, texts=True), 6)))
        answers = model.predict(batch, batch.texts, batch.tasks, 4)
        expected = [text for (text,) in table.references(batch.rows.tolist())]
        right = sum(mine.strip() == its for mine, its in zip(answers, expected, strict=True))
        total.append(100 * right / len(batch))
    assert total == pytest.approx(matrix(storage)[-1])


def test_the_order_survives_a_checkpoint_and_a_forgotten_task(lab: Lab) -> None:
    method, context = started(lab, "t5")
    for index in range(2):
        end_phase(context, begin_phase(context, index))
    values, tensors = method.state_dict()
    assert values["places"] == {"colour": 1, "animal": 2}
    left, held = ProgPrompt.without_task(values, tensors, "colour", ["colour"], keep=False)
    fresh, again = started(lab, "t5")
    fresh.load_state_dict(left, held)
    assert list(fresh.stack.states) == ["animal"]
    begin_phase(again, 0)
    assert fresh._places == {"animal": 2, "colour": 3}, "a task that is learned again has the newest prompt"


@pytest.mark.parametrize("kind", KINDS)
def test_served_texts_need_their_task_and_get_the_answers_of_the_run(taught: Taught, tmp_path: Path, kind: str) -> None:
    done = taught(kind, "progprompt")
    bank = bank_of(done, tmp_path)
    model = opened(bank, bank.open(2))
    with pytest.raises(BankError, match="needs the task of each text: name it"):
        model.loaded.mixture(["a"], None)
    with model.model.activate(model.loaded.mixture(["a"], ["animal"]), model.loaded.head_rule, ("animal@1",)):
        assert model.backbone.prefix is not None
        served = model.backbone.prefix(1, torch.device("cpu"))
    learned = [model.loaded.source(name).prompt for name in ("animal", "colour")]
    assert served is not None and torch.equal(served[0][0], torch.cat(learned))  # type: ignore[arg-type]
    asked = examples(done, bank, rows=FEW)
    sampling = None if kind == "bert" else Sampling(12)
    with serving(bank, max_batch=5) as client:
        with client.paused():  # all in one batch: texts of both tasks beside each other
            replies = [client.ask(item.text, task=item.task, sampling=sampling) for item in asked]
        for item, reply in zip(asked, replies, strict=True):
            assert (reply.label if kind == "bert" else reply.text) == item.answer


def test_what_cannot_be_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"method 'progprompt' needs each text's task id"):
        lab.config("bert", "progprompt", stream={"unseen": [lab.unseen]})
    config = lab.config("bert", {"name": "replay", "learner": "progprompt"})
    with pytest.raises(
        ConfigError, match=r"method\.learner is progprompt, which trains each task's adapters on its own"
    ):
        build(config, WORLD)
