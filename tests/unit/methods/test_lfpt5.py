"""LFPT5: where the prompt stands, what is added to the loss, what is written and kept, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from phases import begin_phase, end_phase
from service_client import FEW, bank_of, examples, serving
from tiny import KINDS, WRITERS, Lab, Taught
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from raycl.backbone import Backbone
from raycl.data.loader import Collate, eval_batches
from raycl.data.tokens import HeldRows
from raycl.errors import ConfigError
from raycl.generation.requests import Sampling
from raycl.methods.base import activate_batch, trained_names
from raycl.methods.prompts.lfpt5 import Lfpt5
from raycl.methods.pseudo_samples.self_generated import (
    RepetitionPenalty,
    SampleFormat,
    Sampler,
    batch_of_pairs,
    mean_losses,
)
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext
from raycl.types import IGNORE, TENSORS, Batch

WORLD = DistributedContext.alone(torch.device("cpu"))
TEXTS = KINDS[1:]
"""Kinds of backbones that write texts."""


def started(lab: Lab, kind: str = "t5", **settings: Any) -> TrainingContext:
    context, _ = build(lab.config(kind, {**WRITERS["lfpt5-real"], "share": 0.3, **settings}), WORLD)
    context.backbone.eval()  # without dropout
    return context


def method_of(context: TrainingContext) -> Lfpt5:
    assert isinstance(context.method, Lfpt5)
    return context.method


def rows_of(context: TrainingContext, rows: int = 5) -> Batch:
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[0], "train", codec)
    return next(iter(eval_batches(Collate([table], codec.pad_id), rows)))


def second_phase(context: TrainingContext, change: float = 0.3) -> Batch:
    """Return a batch of the second task, whose prompt differs from the one before: two rows of each, and a fill-up."""
    first = begin_phase(context)
    end_phase(context, first)
    begin_phase(context, 1)
    method_of(context).prompts.trainable.data += change  # type: ignore[union-attr]
    own, codec = context.stream.tasks[1], context.backbone.codec
    count = len(context.stream.rows(own, "train"))
    tables = [context.stream.table(own, "train", codec), *method_of(context)._added]
    sources, targets = [], []
    for table, row in ((tables[0], 0), (tables[1], 0), (tables[0], 3), (tables[1], 1)):
        columns = table.columns([row])
        sources.append(columns.source_ids[0].tolist())
        targets.append(columns.target_ids[0].tolist())
    batch = batch_with([*sources, [codec.pad_id]], [*targets, []], codec.pad_id)
    batch.rows = torch.tensor([0, count, 3, count + 1, -1])
    batch.weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    return batch


def batch_with(sources: list[list[int]], targets: list[list[int]], pad_id: int) -> Batch:
    def padded(rows: list[list[int]], fill: int) -> Tensor:
        width = max(map(len, rows))
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    count = len(sources)
    return Batch(
        padded(sources, pad_id),
        padded([[1] * len(row) for row in sources], 0),
        padded(targets, IGNORE),
        torch.full((count,), IGNORE),
        torch.ones(count),
        torch.arange(count),
    )


def loss_of(context: TrainingContext, batch: Batch) -> tuple[Any, Tensor | None]:
    with activate_batch(context.method, batch):
        output = context.backbone(batch)
        return output, context.method.penalty(batch, output)


# ---- where the prompt stands -----------------------------------------------------------------------------------------


def by_hand(backbone: Backbone, prompt_PD: Tensor, source: list[int], target: list[int]) -> Tensor:
    """Return logits `[T, V]` of the answer's tokens: text, prompt, answer."""
    words = backbone.model.get_input_embeddings()
    if backbone.capabilities.separate_encoder:
        read = torch.cat([words(torch.tensor([source])), prompt_PD[None]], 1)
        logit: Tensor = backbone.model(inputs_embeds=read, labels=torch.tensor([target])).logits[0]
        return logit
    parts = [words(torch.tensor([source])), prompt_PD[None], words(torch.tensor([target]))]
    logits = backbone.model(inputs_embeds=torch.cat(parts, 1)).logits[0]
    return logits[-len(target) - 1 : -1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", TEXTS)
def test_the_prompt_stands_between_text_and_answer_whatever_the_padding(lab: Lab, kind: str) -> None:
    context = started(lab, kind)
    begin_phase(context)
    assert trained_names(context.backbone) == ["suffix.trainable"]
    prompt, batch = method_of(context).prompts.trainable, rows_of(context)
    assert prompt is not None and prompt.shape == (1, 3, 32) and len(set(batch.source_mask.sum(1).tolist())) > 1
    with activate_batch(context.method, batch):
        guesses = context.backbone.guesses(batch)
    for row in range(len(batch)):
        source = batch.source_ids[row][batch.source_mask[row].bool()].tolist()
        target = batch.target_ids[row][batch.target_ids[row] != IGNORE].tolist()
        mine = guesses.rows == row
        assert guesses.labels[mine].tolist() == target
        expected = by_hand(context.backbone, prompt[0], source, target)
        torch.testing.assert_close(guesses.logits[mine], expected, atol=1e-4, rtol=1e-4)


def test_prompts_may_stand_on_both_sides(lab: Lab) -> None:
    backbone = started(lab).backbone
    backbone.prefix = lambda rows, device: (torch.full((rows, 1, 32), 7.0), torch.ones(rows, 1).long())
    backbone.suffix = None
    del backbone._modules["suffix"]
    backbone.suffix = lambda rows, device: (torch.full((rows, 2, 32), 9.0), torch.ones(rows, 2).long())
    inputs, first = backbone.prefixed(torch.tensor([[3, 4], [5, 0]]), torch.tensor([[1, 1], [1, 0]]))
    assert first == 1 and inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert (inputs["inputs_embeds"][1, 2:4] == 9).all() and (inputs["inputs_embeds"][:, 0] == 7).all()


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TEXTS)
def test_the_loss_of_writing_counts_each_example_by_its_answer_tokens(lab: Lab, kind: str) -> None:
    context = started(lab, kind, lm_weight=0.25, kd_weight=0.0)
    method, batch = method_of(context), second_phase(context)
    _, penalty = loss_of(context, batch)
    tables = [context.stream.table(task, "train", context.backbone.codec) for task in context.stream.tasks]
    own, kept = tables[1], method._added[0]
    assert isinstance(method.prompts.trainable, Tensor) and penalty is not None
    total = count = 0.0
    for table, row, number in ((own, 0, 0), (kept, 0, 1), (own, 3, 2), (kept, 1, 3)):
        text, label = table.texts([row])[0], table.references([row])[0][0]  # type: ignore[union-attr]
        source, target = method.form.pair(table.task.name, text, label)
        logits = by_hand(context.backbone, method.prompts.trainable[0], source, target)
        tokens = int((batch.target_ids[number] != IGNORE).sum())
        total += float(cross_entropy(logits.detach(), torch.tensor(target))) * tokens
        count += tokens
    assert float(penalty) == pytest.approx(0.25 * total / count, rel=1e-4)


@pytest.mark.parametrize("kind", TEXTS)
def test_the_divergence_is_of_pseudo_samples_from_the_previous_prompt(lab: Lab, kind: str) -> None:
    context = started(lab, kind, lm_weight=0.0, kd_weight=2.0)
    method, batch = method_of(context), second_phase(context)
    _, penalty = loss_of(context, batch)
    prompt = method.prompts.trainable
    assert prompt is not None and method.previous is not None and penalty is not None
    torch.testing.assert_close(method.previous + 0.3, prompt[0])
    total = 0.0
    for row in (1, 3):
        source = batch.source_ids[row][batch.source_mask[row].bool()].tolist()
        target = batch.target_ids[row][batch.target_ids[row] != IGNORE].tolist()
        now, before = (
            by_hand(context.backbone, item, source, target).log_softmax(-1) for item in (prompt[0], method.previous)
        )
        total += float(kl_div(now, before, log_target=True, reduction="sum"))
    assert float(penalty) == pytest.approx(2.0 * total / int((batch.target_ids != IGNORE).sum()), rel=1e-3)
    assert total > 1e-4
    penalty.backward()  # type: ignore[no-untyped-call]
    assert prompt.grad is not None and bool(prompt.grad.any())
    prompt.data -= 0.3
    assert float(loss_of(context, batch)[1].detach()) == pytest.approx(0.0, abs=1e-6)  # type: ignore[union-attr]
    alone = Batch(**{name: getattr(batch, name)[[0, 2, 4]] for name in TENSORS})
    assert float(loss_of(context, alone)[1]) == 0, "rows of the present task do not count"  # type: ignore[arg-type]


def test_means_are_of_each_example() -> None:
    logits = torch.zeros(4, 2)
    losses = mean_losses(logits, torch.tensor([0, 1, IGNORE, 1]), torch.tensor([0, 0, 1, 2]), 4)
    assert losses.tolist() == pytest.approx([0.6931, 0.0, 0.6931, 0.0], abs=1e-4)


# ---- what is written -------------------------------------------------------------------------------------------------


def test_samples_are_parted_at_the_one_separator(lab: Lab) -> None:
    form = SampleFormat(started(lab).backbone.codec, 8)
    source, target = form.pair("colour", "fire is warm very much the sky is cold", "red")
    assert source == form.start("colour") and len(target) == 8 and target[-1] == form.codec.eos_id
    mark = form.separator
    assert form.parted(target[:-1]) == (form.codec.decode([target[: -2 - len(mark)]])[0], "red")
    assert form.parted([*target[:3], *mark, *target[3:-1]]) is None, "two separators"
    assert form.parted(target[:3]) is None and form.parted([*mark, *target[-2:-1]]) is None


@pytest.mark.parametrize("kind", TEXTS)
def test_what_the_prompt_writes_is_trained_on_and_kept(lab: Lab, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample whose answer is no label of its task is left out; a resumed run has what was written."""

    def drawn(sampler: Sampler, task: str, rows: int) -> list[list[int]]:
        good, bad = (sampler.form.pair(task, "fire is warm", answer)[1][:-1] for answer in ("red", "cat"))
        return [bad, good, good][:rows]

    settings = {"source": "generated", "share": 0.2}  # 2 of 14 rows
    context = started(lab, kind, **settings)
    method = method_of(context)
    end_phase(context, begin_phase(context))
    monkeypatch.setattr(Sampler, "_drawn", drawn)
    begun = begin_phase(context, 1)
    (added,) = begun.added
    assert method.counts == {"colour": 2} and isinstance(added, HeldRows) and len(added) == 2
    codec = context.backbone.codec
    assert added.columns([0]).source_ids[0].tolist() == begun.prompts(context.stream.tasks[0], ["fire is warm"])[0]
    assert codec.decode([added.columns([0]).target_ids[0].tolist()]) == ["red"]
    own = len(context.stream.rows(context.stream.tasks[1], "train"))
    assert method._pair(own + 1) == method.form.pair("colour", "fire is warm", "red") and method._pair(-1) is None
    assert method.summary({}) == {"replay": {"pseudo": {"colour": 2}}}

    other = started(lab, kind, **settings)
    monkeypatch.undo()
    other.method.load_state_dict(*method.state_dict())
    resumed = begin_phase(other, 1, resumed=True)
    assert method_of(other)._pair(own) == method._pair(own) and len(resumed.added[0]) == 2
    assert torch.equal(method_of(other).previous, method.previous)  # type: ignore[arg-type]


def test_a_model_that_learned_to_write_writes_samples(lab: Lab) -> None:
    """It writes through generation itself, with the default penalty."""
    context = started(lab, "llama", source="generated")
    method, backbone = method_of(context), context.backbone
    form, task = SampleFormat(backbone.codec, 20), context.stream.tasks[0]
    rows = [("fire is warm very", "red"), ("the sea is cold", "blue")]
    learned = batch_of_pairs([form.pair(task.name, *row) for row in rows], backbone.codec.pad_id)
    weights = list(backbone.parameters())
    for parameter in weights:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    for _ in range(120):
        with method._activated(len(learned)):
            guesses = backbone.guesses(learned)
        optimizer.zero_grad()
        cross_entropy(guesses.logits.float(), guesses.labels, ignore_index=IGNORE).backward()
        optimizer.step()
    sampler = Sampler(backbone, form, 2, 2.5, method._activated, 24)
    written = sampler.samples(task, 6, seed=0)
    assert len(written) == 6 and set(rows) <= set(written)


def test_samples_are_drawn_until_there_are_enough(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ten can be used; draws end with the last one that is wanted, or at `draws`."""
    context = started(lab, "llama", source="generated")
    method, task = method_of(context), context.stream.tasks[0]
    form, batches = SampleFormat(context.backbone.codec, 20), list[int]()

    def drawn(sampler: Sampler, name: str, rows: int) -> list[list[int]]:
        first = sum(batches)
        batches.append(rows)
        answers = ("red" if number % 10 == 9 else "cat" for number in range(first, first + rows))
        return [form.pair(name, "fire is warm", answer)[1][:-1] for answer in answers]

    monkeypatch.setattr(Sampler, "_drawn", drawn)
    for draws, wanted, result, spent in ((1000, 3, 3, 48), (25, 3, 2, 25), (1, 3, 0, 3)):
        batches.clear()
        sampler = Sampler(context.backbone, form, 2, 2.5, method._activated, draws)
        assert len(sampler.samples(task, wanted, seed=0)) == result and sum(batches) == spent


def test_the_penalty_leaves_the_separator_out() -> None:
    before, scores = torch.tensor([[5, 3, 3]]), torch.tensor([[1.0, -1.0, 2.0, 4.0, 1.0, 3.0]])
    result = RepetitionPenalty(2.0, [3, 3, 4])(before, scores.clone())
    assert result.tolist() == [[1.0, -1.0, 2.0, 4.0, 1.0, 1.5]]
    alone = RepetitionPenalty(2.0, [3])(before, scores.clone())
    assert alone.tolist() == [[1.0, -1.0, 2.0, 2.0, 1.0, 1.5]], "one token is not due twice"


def test_each_task_alone_has_no_pseudo_samples(lab: Lab) -> None:
    context, _ = build(lab.config("t5", ("separate", WRITERS["lfpt5-real"])), WORLD)
    end_phase(context, begin_phase(context))
    assert begin_phase(context, 1).added == [] and method_of(context).previous is None


# ---- serving and refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "decoding"), sampled([("t5", "dynamic"), ("llama", "dynamic"), ("llama", "static")]))
def test_served_answers_are_those_of_the_run(taught: Taught, tmp_path: Path, kind: str, decoding: str) -> None:
    done = taught(kind, "lfpt5-real")
    bank = bank_of(done, tmp_path)
    asked = examples(done, bank, rows=FEW)
    with serving(bank, max_batch=5, decoding=decoding) as client:
        with client.paused():
            replies = [client.ask(item.text, sampling=Sampling(12)) for item in asked]
        assert [reply.text for reply in replies] == [item.answer for item in asked]
        assert client.loaded().prompt_positions() == 3 and client.loaded().prompts_follow
    assert any(item.answer for item in asked)


@pytest.mark.parametrize(
    ("kind", "settings", "sections", "why"),
    [
        (
            "bert",
            {},
            {},
            "'lfpt5' writes its own pseudo-samples, and an encoder-only backbone writes no texts: expected",
        ),
        (
            "llama",
            {"max_tokens": 500},
            {},
            r"writes up to method\.max_tokens=500, which is more than the 128 positions",
        ),
        ("t5", {"separator": " "}, {}, "has no tokens for method.separator=' ', which stands between input and"),
        ("t5", {"source": "generated"}, {"engine": "fsdp"}, "'lfpt5' generates pseudo-samples.*engine=fsdp"),
        ("llama", {}, {"train": {"packing": True}}, "'lfpt5' learns soft prompts, which stand beside every text"),
    ],
)
def test_what_cannot_work_is_refused(
    lab: Lab, kind: str, settings: dict[str, Any], sections: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        check(lab.config(kind, {**WRITERS["lfpt5-real"], **settings}, **sections))
