"""MoCL: weights of modules by cosines with keys, what is trained, the matching loss, and what is served."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from phases import bare, begin_phase, end_phase, routed
from service_client import FEW, bank_of, examples, serving
from tiny import ENGINES, KINDS, Complete, Lab, Taught, evaluated_by, matrix, opened, run, trace
from torch.nn.functional import cosine_similarity, normalize

from raycl.backbone.base import loss_count
from raycl.bank import Bank
from raycl.data.loader import Collate, eval_batches
from raycl.errors import BankError, ConfigError, RetrievalError
from raycl.generation.requests import Sampling
from raycl.methods.base import activate, activate_batch, trained_names
from raycl.methods.prompts.mocl import Mocl
from raycl.operations.banks.unlearning import evaluate, forget
from raycl.routing.routers import make_router, without
from raycl.routing.task_keys import TaskKeys
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import IGNORE, Batch, RouterState

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str, **settings: Any) -> tuple[Mocl, TrainingContext]:
    context, _ = build(lab.config(kind, {"name": "mocl", **settings}), WORLD)
    assert isinstance(context.method, Mocl)
    return context.method, context


def second_task(lab: Lab, kind: str, **settings: Any) -> tuple[Mocl, TrainingContext]:
    method, context = started(lab, kind, **settings)
    end_phase(context, begin_phase(context, 0))
    begin_phase(context, 1)
    return method, context


def batch_of(context: TrainingContext, task: int = 1) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[task], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    return next(iter(eval_batches(Collate([table], codec.pad_id, labels), 5)))


def test_weights_by_hand() -> None:
    keys = TaskKeys(2, "softmax", 8.0)
    with pytest.raises(RetrievalError, match="no task has been learned yet"):
        keys(torch.ones(1, 2))
    for number, key in enumerate(([3.0, 0.0], [1.0, 1.0])):
        keys.begin(f"task{number}", number)
        assert keys.key is not None and float(keys.key.min()) >= 0 and float(keys.key.max()) < 1
        keys.end_key(torch.tensor(key))
    cosines = keys(torch.tensor([[2.0, 0.0], [0.0, 5.0]]))
    torch.testing.assert_close(cosines, torch.tensor([[1.0, 0.5**0.5], [0.0, 0.5**0.5]]))
    torch.testing.assert_close(keys.weights(cosines), (8 * cosines).softmax(1))
    direct = TaskKeys(2, "cosine", 8.0)
    assert torch.equal(direct.weights(cosines), cosines)
    last = torch.tensor([0, 1])  # the tasks of the two texts are given
    assert torch.equal(keys.weights(cosines, last)[0], torch.tensor([1.0, 0.0])), "no key of a later task takes part"
    torch.testing.assert_close(keys.weights(cosines, last)[1], (8 * cosines[1]).softmax(0))
    torch.testing.assert_close(direct.weights(cosines, last), torch.tensor([[1.0, 0.0], [0.0, 0.5**0.5]]))


def test_the_router_reads_hidden_states_and_forgets_a_task() -> None:
    tensors = {"key/a": torch.tensor([1.0, 0.0]), "key/b": torch.tensor([0.0, 1.0])}
    state = RouterState("task_keys", {"dimensions": 2, "weights": "cosine", "scale": 8.0, "tasks": ["a", "b"]}, tensors)
    router = make_router(state, {"a": ("a",), "b": ("b",)})
    states = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [9.0, 9.0]]])
    embeddings = router.route_embeddings(states, torch.tensor([[1, 0, 0]]))
    assert embeddings.names == ("a", "b") and embeddings.weights.tolist() == [[1.0, 0.0]]
    left = make_router(without(state, "a"), {"b": ("b",)})
    assert left.route_embeddings(states, torch.tensor([[0, 1, 0]])).weights.tolist() == [[1.0]]
    with pytest.raises(BankError, match="router is 'task_keys', which reads prompts with the backbone"):
        router.route(["text"], None)
    with pytest.raises(RetrievalError, match="of 2 dimensions, this backbone's have 3: use the"):
        router.route_embeddings(torch.zeros(1, 1, 3), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("weights", "middle"), [("softmax", [1 / (1 + math.exp(-8)), 1 / (1 + math.exp(8)), 0]), ("cosine", [1, 0, 0])]
)
def test_the_router_of_given_tasks_by_hand(weights: str, middle: list[float]) -> None:
    """A text that equals the first key: the modules of its task and of those before it."""
    tensors = {"key/x": torch.tensor([1.0, 0.0]), "key/y": torch.tensor([0.0, 1.0]), "key/z": torch.tensor([1.0, 0.0])}
    settings = {"dimensions": 2, "weights": weights, "scale": 8.0, "tasks": ["x", "y", "z"]}
    state, owners = RouterState("task_keys_given", settings, tensors), {"z": ("z",), "y": ("y",), "x": ("x",)}
    router, mask = make_router(state, owners), torch.ones(3, 1)
    assert router.needs == {"hidden_states", "task_id"} and router.chooses
    states = torch.tensor([[[2.0, 0.0]]] * 3)
    embeddings = router.route_embeddings(states, mask, ["x", "y", "z"])
    assert embeddings.names == ("x", "y", "z")
    torch.testing.assert_close(embeddings.weights[:2], torch.tensor([[1.0, 0, 0], middle]))
    assert embeddings.weights[2].count_nonzero() == 3 - (weights == "cosine")
    with pytest.raises(BankError, match="router is 'task_keys_given', which needs the task of each text: name it"):
        router.route_embeddings(states, mask)
    with pytest.raises(BankError, match="no adapter was trained on w: expected x, y, z"):
        router.route_embeddings(states, mask, ["x", "w", "z"])
    left = make_router(without(state, "y"), {"x": ("x",), "z": ("z",)})
    embeddings = left.route_embeddings(states, mask, ["x", "z", "z"])
    last = [0.5, 0.5] if weights == "softmax" else [1.0, 1.0]
    assert embeddings.names == ("x", "z") and embeddings.weights.tolist() == [[1.0, 0.0], last, last]
    with pytest.raises(BankError, match="no adapter was trained on y: expected x, z"):
        left.route_embeddings(states, mask, ["y"] * 3)


@pytest.mark.parametrize("weights", ["softmax", "cosine"])
@pytest.mark.parametrize("kind", KINDS)
def test_at_test_the_task_id_leaves_modules_of_later_tasks_out(lab: Lab, kind: str, weights: str) -> None:
    method, context = second_task(lab, kind, weights=weights, task_id=True)
    assert method.config.needs_task and method.config.needs_texts
    batch = batch_of(context, 0)
    assert method.route(batch).weights.all(), "the task in training is composed with all earlier ones"
    learned = end_phase(context, bare(context.phases[1]))
    context.backbone.eval()
    first, second, unknown = (routed(method, learned, batch, task) for task in ("colour", "animal", "to come"))
    whole = method.keys(method._queries(batch))
    both = whole if weights == "cosine" else (8 * whole).softmax(1)
    alone = whole[:, :1] if weights == "cosine" else torch.ones(len(batch), 1)
    torch.testing.assert_close(second.weights, both)
    torch.testing.assert_close(first.weights, torch.cat([alone, torch.zeros(len(batch), 1)], dim=1))
    assert torch.equal(unknown.weights, second.weights), "a task to come is read as the newest"
    if kind == "bert":
        with torch.no_grad(), activate(method, first):
            scores, labels = context.backbone.score_labels(batch)
        possible = [label for label, score in zip(labels, scores[0].tolist(), strict=True) if score > -torch.inf]
        assert set(possible) == {"red", "blue"}, "labels of later tasks have no score"


@pytest.mark.parametrize("value", ["lora", "prefix", "prompt"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_newest_module_and_key_are_trained(lab: Lab, kind: str, value: str) -> None:
    """The key by the task loss too, through the weights; older modules and keys stay as they are."""
    settings = {} if value == "lora" else {"prompt_length": 3}
    method, context = second_task(lab, kind, value=value, **settings)
    names = trained_names(context.backbone)
    assert "task_keys.key" in names and all(part not in str(names) for part in ("model.embed", "query.base"))
    with torch.no_grad():
        for name, parameter in context.backbone.named_parameters():
            if name.endswith("lora_B") or name == "head.weight":
                parameter.normal_()
    old = {name: tensor.clone() for name, tensor in method.stack.states["colour"].tensors().items()}
    batch = batch_of(context)
    with activate_batch(method, batch):
        mixture = method.route(batch) if method.stack.plan is None else None
        context.backbone(batch).loss_sum.backward()
    assert mixture is None and method.keys.key is not None
    gradient = method.keys.key.grad
    assert gradient is not None and gradient.any(), "the task loss reaches the key"
    assert not method.keys.keys["colour"].requires_grad
    assert all(torch.equal(tensor, method.stack.states["colour"].tensors()[name]) for name, tensor in old.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_texts_weights_are_the_cosines_of_its_own_mean_state(lab: Lab, kind: str) -> None:
    """Weights are computed by hand, with padding beside the text; states are the bare model's, whatever was learned."""
    method, context = second_task(lab, kind)
    context.backbone.eval()
    batch = batch_of(context)
    result = method.route(batch)
    assert result.names == ("colour", "animal")
    keys = torch.stack([method.keys.keys["colour"], method.keys.key.detach()])  # type: ignore[union-attr]
    for row in range(len(batch)):
        length = int(batch.source_mask[row].sum())
        ids, mask = batch.source_ids[row : row + 1, :length], batch.source_mask[row : row + 1, :length]
        query = context.backbone.hidden_states(ids, mask)[0].mean(0)
        expected = (8 * normalize(query, dim=0) @ normalize(keys, dim=1).T).softmax(0)
        torch.testing.assert_close(result.weights[row].detach(), expected, atol=1e-5, rtol=1e-4)


def test_the_sum_of_prompts_is_weighted(lab: Lab) -> None:
    method, context = second_task(lab, "t5", value="prompt", prompt_length=3)
    batch = batch_of(context)
    weights = method.route(batch).weights
    with activate_batch(method, batch):
        prefix = context.backbone.prefix
        assert prefix is not None
        result = prefix(len(batch), torch.device("cpu"))
    old, new = method.stack.states["colour"].prompt, dict(context.backbone.named_parameters())["prefix.trainable"][0]
    assert result is not None and old is not None
    torch.testing.assert_close(result[0], weights[:, :1, None] * old + weights[:, 1:, None] * new)


@pytest.mark.parametrize("kind", KINDS)
def test_the_matching_loss_by_hand(lab: Lab, kind: str) -> None:
    method, context = second_task(lab, kind, pull=0.5)
    batch, total = batch_of(context), 0.0
    penalty = method.penalty(batch, None)  # type: ignore[arg-type]
    states = context.backbone.hidden_states(batch.source_ids, batch.source_mask)
    assert penalty is not None and method.keys.key is not None
    for row in range(len(batch)):
        query = states[row][batch.source_mask[row].bool()].mean(0)
        positions = 1 if kind == "bert" else int((batch.target_ids[row] != IGNORE).sum())
        total += (1 - float(cosine_similarity(query, method.keys.key.detach(), dim=0))) * positions
    assert float(penalty.detach()) == pytest.approx(0.5 * total / loss_count(batch), rel=1e-4)
    before = method.keys(method._queries(batch))[:, -1].mean()
    penalty.backward()  # type: ignore[no-untyped-call]
    assert method.keys.key.grad is not None
    method.keys.key.data -= 0.1 * method.keys.key.grad
    assert method.keys(method._queries(batch))[:, -1].mean() > before, "the key comes nearer to the task's texts"


def test_labels_of_all_heads_compete_under_either_weights(lab: Lab) -> None:
    for weights in ("softmax", "cosine"):
        method, context = second_task(lab, "bert", weights=weights)
        batch = batch_of(context)
        with torch.no_grad(), activate_batch(method, batch):
            scores, labels = context.backbone.score_labels(batch)
        assert len(labels) == 4 and torch.isfinite(scores).all()


def test_the_matching_loss_counts_once_a_step(lab: Lab, tmp_path: Path) -> None:
    """It does in each task alike."""

    def steps(engine: str, micro: int | None) -> list[Any]:
        storage, stream = Storage.at(tmp_path / engine), {"tasks": lab.tasks[:1]}
        run(lab.config("t5", "mocl", ENGINES[engine], train={"micro_batch_size": micro}, stream=stream), storage)
        return trace(storage)

    whole = steps("zero0", None)
    for engine, micro in (("torch", 1), ("zero2", 2)):
        for mine, other in zip(steps(engine, micro), whole, strict=True):
            assert mine == pytest.approx(other, abs=1e-4, rel=1e-3), engine


@pytest.mark.parametrize(
    ("kind", "method"), sampled([(kind, method) for kind in KINDS for method in ("mocl", "mocl-task-id")])
)
def test_served_texts_get_the_weights_and_answers_of_the_run(
    taught: Taught, tmp_path: Path, kind: str, method: str
) -> None:
    done, is_given = taught(kind, method), method != "mocl"
    bank = bank_of(done, tmp_path)
    asked, codec, expected = examples(done, bank, rows=FEW), done.context.backbone.codec, {}
    router = evaluated_by(done)
    for task in done.context.stream.tasks:
        table = done.context.stream.table(task, "test", codec)
        for batch in eval_batches(Collate([table], codec.pad_id, texts=True), 1):
            expected[batch.texts[0]] = router.mixture(batch, task.name).weights[0].tolist()
    sampling = None if kind == "bert" else Sampling(12)
    with serving(bank, max_batch=5) as client:
        with client.paused():  # all in one batch: texts of both tasks beside each other
            replies = [client.ask(item.text, task=item.task if is_given else None, sampling=sampling) for item in asked]
            without_task = client.ask("fire is", sampling=sampling)
        for item, reply in zip(asked, replies, strict=True):
            assert (reply.label if kind == "bert" else reply.text) == item.answer
            values = [reply.metadata.weights.get(name, 0.0) for name in ("colour", "animal")]
            assert values == pytest.approx(expected[item.text], abs=1e-4)
            assert not is_given or item.task == "animal" or values == [1.0, 0.0]
        assert (
            not is_given
            or "router is 'task_keys_given', which needs the task of each text: name it" in without_task.error
        )


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_snapshot_scores_as_the_run_did_where_tasks_are_given(complete: Complete, tmp_path: Path, kind: str) -> None:
    """A snapshot scores as the run did, and a task that is forgotten takes its key with it."""
    done = complete(kind, "mocl-task-id", "torch")
    bank = Bank(done.copy(tmp_path).sub("bank"))
    newest = bank.newest()
    assert newest is not None and newest.router.kind == "task_keys_given"
    scores = {name: score.value for name, score in evaluate(bank, newest).items()}
    assert scores == pytest.approx(dict(zip(("colour", "animal"), matrix(done.storage)[-1], strict=True)))
    result = forget(bank, newest, "colour", scores=False)
    left = opened(bank, bank.open(result.new))
    mask = torch.ones(1, 2, dtype=torch.long)
    states = torch.zeros(1, 2, int(left.model.backbone.model.config.hidden_size))
    mixture = left.loaded.router.route_embeddings(states, mask, ["animal"])
    assert mixture.names == ("animal",)
    with pytest.raises(BankError, match="no adapter was trained on colour: expected animal"):
        left.loaded.router.route_embeddings(states, mask, ["colour"])


def test_unseen_tasks_have_no_task_id(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"method 'mocl' needs each text's task id"):
        lab.config("bert", {"name": "mocl", "task_id": True}, stream={"unseen": [lab.unseen]})


def test_a_task_alone_has_neither_key_nor_matching_loss(lab: Lab, tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    context = run(lab.config("bert", ("separate", "mocl")), storage).context
    assert isinstance(context.method, Mocl) and context.method.penalty(batch_of(context, 0), None) is None  # type: ignore[arg-type]
    newest = Bank(storage.sub("bank")).newest()
    assert newest is not None and newest.router.kind == "task"
