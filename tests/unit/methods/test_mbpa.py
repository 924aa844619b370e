"""MbPA++: which examples are nearest, one adaptation by hand, and that nothing of it remains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase
from tiny import ENGINES, Complete, Lab, matrix, run, trace
from torch import Tensor

from raycl.backbone.base import loss_count
from raycl.data.loader import Collate, eval_batches
from raycl.data.tokens import TokenColumns
from raycl.errors import BankError, ConfigError
from raycl.methods.base import activate_batch
from raycl.methods.context import Step, TaskContext
from raycl.methods.replay.mbpa import ExampleMemory, KeyedRows, Mbpa, MbpaConfig
from raycl.methods.replay.stored_rows import numbers_of
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.adaptation import adapt, alone, answer_each
from raycl.training.records.named_bank import snapshot_at
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Task

WORLD = DistributedContext.alone(torch.device("cpu"))
KINDS = ("bert", "t5", "llama")


def taught(lab: Lab, kind: str = "bert", learner: str = "lora", **adapt: Any) -> tuple[Mbpa, TrainingContext]:
    """Return two tasks in the memory, and weights that are not those of the pretrained model."""
    settings = {"steps": 2, "neighbours": 3, "rate": 0.1, **adapt}
    method = {"name": "mbpa++", "learner": learner, "adapt": settings}
    context, _ = build(lab.config(kind, method), WORLD)
    draw = torch.Generator().manual_seed(0)
    for index in (0, 1):
        task = begin_phase(context, index)
        with torch.no_grad():
            for parameter in context.backbone.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
        end_phase(context, task)
    assert isinstance(context.method, Mbpa)
    context.backbone.eval()
    return context.method, context


def some_rows(context: TrainingContext, rows: int) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[0], "test", codec)
    return next(iter(eval_batches(Collate([table], codec.pad_id, texts=True), rows)))


def weights(context: TrainingContext) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in context.backbone.named_parameters()}


def logits(context: TrainingContext, batch: Batch) -> Tensor:
    """Return the logits of the one example, as it would be answered now."""
    with torch.no_grad(), activate_batch(context.method, batch):
        if context.backbone.head is not None:
            return context.backbone.score_labels(batch)[0]
        return context.backbone(batch).logits


# ---- the memory ----------------------------------------------------------------------------------------------------


def filled(keys: Tensor) -> ExampleMemory:
    """Return examples of two tasks, of 1 to 3 tokens."""
    memory, half = ExampleMemory(), len(keys) // 2
    ids = [torch.tensor([7] * (1 + n % 3), dtype=torch.int32).numpy() for n in range(len(keys))]
    labels = torch.zeros(len(keys), dtype=torch.int32).numpy()
    for name, part in (("one", slice(0, half)), ("two", slice(half, len(keys)))):
        columns = TokenColumns(ids[part], ids[part], labels[part])
        memory.entries[name] = KeyedRows.of(Task(name, None, "rouge_l"), columns, keys[part])
    return memory


def test_the_nearest_keys_by_euclidean_distance(lab: Lab) -> None:
    backbone = build(lab.config("t5", "lora"), WORLD)[0].backbone
    memory = filled(torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0], [0.0, 2.0]]))
    assert memory.nearest(torch.tensor([0.9, 0.0]), 3, backbone) == [2, 0, 3]
    assert sorted(memory.nearest(torch.zeros(2), 9, backbone)) == [0, 1, 2, 3], "no more than there are"
    again = ExampleMemory()
    again.take(memory.values(), memory.tensors())
    batch = again.batch([3, 1], backbone)
    assert batch.source_mask.tolist() == [[1, 0], [1, 1]] and numbers_of(batch)[1].tolist() == [3, 1]


@pytest.mark.parametrize("offset", [0.0, 100.0], ids=["spread", "far from zero"])
def test_neighbours_are_those_of_the_direct_distance(lab: Lab, offset: float) -> None:
    """They are so for close keys far from zero too, as BERT's are, where the expanded square is rounded."""
    backbone = build(lab.config("t5", "lora"), WORLD)[0].backbone
    draw = torch.Generator().manual_seed(1)
    keys, queries = (offset + torch.randn(n, 48, generator=draw) for n in (500, 20))
    memory = filled(keys)
    for query in queries:
        direct = (keys.double() - query.double()).square().sum(1).argsort()
        assert memory.nearest(query, 8, backbone) == direct[:8].tolist()


def test_the_memory_holds_rows_of_all_tasks_with_the_encoders_keys(lab: Lab) -> None:
    method, context = taught(lab)
    assert {task: len(rows) for task, rows in method.memory.entries.items()} == {"colour": 14, "animal": 14}
    table = context.stream.table(context.stream.tasks[1], "train", context.backbone.codec)
    text = table.texts([5])[0]
    nearest = method.memory.nearest(method.encoder.embed([text])[0], 1, context.backbone)
    (result,) = method.memory.batch(nearest, context.backbone).source_ids.tolist()
    assert result == table.columns([5]).source_ids[0].tolist(), "a text is nearest to itself"


# ---- adaptation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "momentum"), [*((kind, 0.0) for kind in KINDS), ("bert", 0.9), ("t5", 0.5)])
def test_three_steps_by_hand(lab: Lab, kind: str, momentum: float) -> None:
    """Gradients of the whole objective by autograd, the squared distance included."""
    method, context = taught(lab, kind, steps=3, rate=0.2, momentum=momentum, weight=0.3)
    example, adaptation = alone(some_rows(context, 3), 1), method.local_adaptation
    assert adaptation is not None
    own = {n: p for n, p in context.backbone.named_parameters() if n in adaptation.parameters() and p.numel()}
    base = {name: p.detach().clone() for name, p in own.items()}
    adapt(method, adaptation, example, own, base)
    copied = {name: p.detach().clone() for name, p in own.items()}
    neighbours = adaptation.neighbours(example)
    assert neighbours is not None and len(neighbours) == 3
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(base[name])
    directions = {name: torch.zeros_like(p) for name, p in own.items()}
    for _ in range(3):
        context.backbone.zero_grad()
        with activate_batch(method, neighbours):
            loss = context.backbone(neighbours).loss_sum / loss_count(neighbours)
            (loss + 0.3 * sum((p - base[name]).square().sum() for name, p in own.items())).backward()
        with torch.no_grad():
            for name, p in own.items():
                assert p.grad is not None
                directions[name] = momentum * directions[name] + p.grad
                p -= 0.2 * directions[name]
    assert all(torch.allclose(copied[name], p, atol=1e-6) for name, p in own.items())
    assert any(not torch.allclose(copied[name], base[name], atol=1e-4) for name in own)


@pytest.mark.parametrize(
    ("kind", "learner"), [("bert", "lora"), ("bert", "finetune"), ("t5", "lora"), ("llama", "lora")]
)
def test_a_rows_answer_does_not_depend_on_its_batch_and_nothing_remains(lab: Lab, kind: str, learner: str) -> None:
    method, context = taught(lab, kind, learner)
    assert method.local_adaptation is not None
    before, seen = weights(context), list[Tensor]()

    def answer(batch: Batch) -> list[str]:
        assert any(not torch.equal(p, before[n]) for n, p in context.backbone.named_parameters()), "it is adapted"
        seen.append(logits(context, batch))
        return ["answer"]

    batch = some_rows(context, 4)
    padded = batch.rows.clone()
    padded[3] = -1
    together = answer_each(method, method.local_adaptation, batch, answer)
    assert together == ["answer"] * 4
    for row in (2, 0):
        answer_each(method, method.local_adaptation, alone(batch, row), answer)
    assert torch.equal(seen[4], seen[2]) and torch.equal(seen[5], seen[0])
    batch.rows = padded
    assert answer_each(method, method.local_adaptation, batch, answer) == ["answer"] * 3 + [""], "fill-ups cost nothing"
    now = weights(context)
    assert all(torch.equal(now[name], value) for name, value in before.items())
    assert all(p.grad is None for p in context.backbone.parameters())


def test_an_error_leaves_the_trained_weights(lab: Lab) -> None:
    method, context = taught(lab)
    before = weights(context)

    def fail(batch: Batch) -> list[str]:
        raise RuntimeError("no answer")

    assert method.local_adaptation is not None
    with pytest.raises(RuntimeError, match="no answer"):
        answer_each(method, method.local_adaptation, some_rows(context, 2), fail)
    assert all(torch.equal(value, before[name]) for name, value in weights(context).items())


def finished(lab: Lab, folder: Path, method: Any, **sections: Any) -> Storage:
    storage = Storage.at(folder)
    run(lab.config("bert", method, **sections), storage)
    return storage


def test_the_optimizer_goes_on_as_if_nothing_had_been_answered(lab: Lab, tmp_path: Path) -> None:
    """Dev rows are answered after each epoch: weights and the optimizer's state are as without adaptation."""
    method = {"name": "mbpa++", "adapt": {"steps": 2, "rate": 0.5}}
    sections = {
        "stream": {"tasks": lab.tasks[:1], "dev_fraction": 0.3},
        "eval": {"select": "best_dev"},
        "train": {"epochs": 2},
    }
    adapts = trace(finished(lab, tmp_path / "adapts", method, **sections))
    plain = trace(finished(lab, tmp_path / "plain", {**method, "adapt": {"steps": 0}}, **sections))
    assert adapts == plain and len(plain) > 4


def test_without_steps_it_is_the_trained_model_alone(lab: Lab, complete: Complete, tmp_path: Path) -> None:
    method = {"name": "mbpa++", "every": 0, "adapt": {"steps": 0}}
    result, plain = finished(lab, tmp_path, method), complete("bert", "lora", "torch").storage
    assert trace(result) == trace(plain) and matrix(result) == matrix(plain)


def test_the_evaluation_of_a_run_adapts(lab: Lab, tmp_path: Path) -> None:
    """Large steps towards each text's neighbours change answers, here to those of the task forgotten last."""
    train = {"epochs": 4, "learning_rate": 0.03}
    method = {"name": "mbpa++", "every": 0, "adapt": {"steps": 10, "neighbours": 4, "rate": 0.5}}
    adapts = matrix(finished(lab, tmp_path / "adapts", method, train=train))
    plain = matrix(finished(lab, tmp_path / "plain", {**method, "adapt": {"steps": 0}}, train=train))
    assert adapts[1][0] > plain[1][0], "the memory brings the first task back"


# ---- replay --------------------------------------------------------------------------------------------------------


def test_earlier_examples_join_every_second_step(lab: Lab) -> None:
    context, _ = build(lab.config("bert", {"name": "mbpa++", "every": 2}), WORLD)
    method = context.method
    assert isinstance(method, Mbpa)

    def joined(task: TaskContext, index: int) -> list[int]:
        task.step = Step(index, 7 + index, 1)
        batch = some_rows(context, 4)
        return numbers_of(method.prepare_batch(batch))[1].tolist()

    first = begin_phase(context, 0)
    assert [joined(first, index) for index in range(2)] == [[], []], "no earlier task"
    second = begin_phase(context, 1)
    result = [joined(second, index) for index in range(4)]
    assert result[0] == result[2] == [] and len(result[1]) == len(result[3]) == 4 and result[1] != result[3]
    assert set(result[1] + result[3]) <= set(range(14)), "of the first task alone"


# ---- what it cannot do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"engine": ENGINES["zero3"]},
            r"'mbpa\+\+' adapts weights to each text .* and engine.zero_stage=3 shares them",
        ),
        ({"engine": ENGINES["fsdp"]}, r"'mbpa\+\+' adapts weights to each text .* and engine=fsdp shares them out"),
        ({"stream": {"objective": "mlm"}}, r"method 'mbpa\+\+' learns answers, but stream.objective is mlm"),
        ({"bank": {"dir": "elsewhere"}}, r"bank.dir is '.*elsewhere', but method 'mbpa\+\+' publishes nothing"),
    ],
)
def test_runs_that_cannot_be_are_refused(lab: Lab, sections: dict[str, Any], words: str) -> None:
    kind = "masked" if "stream" in sections else "bert"
    with pytest.raises(ConfigError, match=words):
        check(lab.config(kind, "mbpa++", **sections))


def test_a_learner_that_freezes_what_it_learned_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"method\.learner is olora, which freezes each task's adapters"):
        build(lab.config("bert", {"name": "mbpa++", "learner": "olora"}), WORLD)


def test_serving_and_snapshots_are_refused_in_one_sentence(lab: Lab, tmp_path: Path) -> None:
    storage = finished(lab, tmp_path, {"name": "mbpa++", "adapt": {"steps": 0}}, stream={"tasks": lab.tasks[:1]})
    assert storage.list("bank") == ["not_served.json"] and not storage.exists("learned")
    with pytest.raises(BankError, match=r"has no snapshot: method 'mbpa\+\+' adapts its weights to each text before"):
        snapshot_at(f"{storage.root}/bank")


def test_the_first_phase_does_not_depend_on_the_interval() -> None:
    mbpa_config, other = MbpaConfig(every=3), MbpaConfig(every=0)
    assert mbpa_config.cache_key(0, ("a", "b")) == other.cache_key(0, ("a", "b")) != {}
    assert mbpa_config.cache_key(1, ("a", "b")) != other.cache_key(1, ("a", "b"))
    assert mbpa_config.keeps_data and not mbpa_config.rereads_rows
