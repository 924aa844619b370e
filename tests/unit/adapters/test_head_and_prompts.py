"""Label heads and soft prompts as parts of adapters, mixed like their weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny import Lab
from torch import Tensor, nn

from raycl.adapters import AdapterStack
from raycl.adapters.head import MixedHead, Rule
from raycl.adapters.soft_prompts import MLP, MixedPrompts, PromptForm, PromptUse, used_alike
from raycl.adapters.state import combine
from raycl.backbone import Backbone, load_backbone, load_codec
from raycl.errors import AdapterError
from raycl.generation.batch_answers import predict
from raycl.methods.trained_adapters import end_training
from raycl.types import IGNORE, AdapterState, Batch, Mixture

WIDTH = 6


def stack_with_heads() -> tuple[AdapterStack, dict[str, AdapterState]]:
    """Return two adapters: labels x, y and labels y, z."""
    stack = AdapterStack(nn.Sequential(nn.Linear(WIDTH, WIDTH)), ["0"])
    draw = torch.Generator().manual_seed(0)
    states = {}
    for name, labels in (("one", ("x", "y")), ("two", ("y", "z"))):
        head = (torch.randn(2, WIDTH, generator=draw), torch.randn(2, generator=draw))
        states[name] = AdapterState({}, labels=labels, head_weight=head[0], head_bias=head[1])
        stack.load(name, states[name])
    return stack, states


def test_heads_are_mixed_as_probabilities() -> None:
    stack, states = stack_with_heads()
    head, pooled = MixedHead(stack, WIDTH), torch.randn(3, WIDTH)
    weights = torch.tensor([[0.7, 0.3], [1.0, 0.0], [0.0, 0.0]])
    with stack.activate(Mixture(("one", "two"), weights)):
        scores = head(pooled)
    own = {
        name: torch.softmax(pooled @ held.head_weight.T + held.head_bias, 1)  # type: ignore[union-attr]
        for name, held in states.items()
    }
    assert head.labels == ["x", "y", "z"]
    expected = torch.stack(
        [0.7 * own["one"][0, 0], 0.7 * own["one"][0, 1] + 0.3 * own["two"][0, 0], 0.3 * own["two"][0, 1]]
    )
    torch.testing.assert_close(scores[0].exp(), expected)
    torch.testing.assert_close(scores[1].exp(), torch.cat([own["one"][1], torch.zeros(1)]))
    assert bool((scores[2] == -torch.inf).all()), "no adapter is active, so no label is known"
    with stack.activate(None):
        assert bool((head(pooled) == -torch.inf).all())


@pytest.mark.parametrize(("rule", "first", "second"), [("logit", 0.7, 0.3), ("sum", 1.0, 1.0)])
def test_logits_are_summed_per_label_if_configured(rule: Rule, first: float, second: float) -> None:
    stack, states = stack_with_heads()
    head, pooled = MixedHead(stack, WIDTH, rule), torch.randn(1, WIDTH)
    with stack.activate(Mixture(("one", "two"), torch.tensor([[0.7, 0.3]]))):
        scores = head(pooled)
    item, two = ((pooled @ held.head_weight.T + held.head_bias)[0] for held in states.values())  # type: ignore[union-attr]
    expected = torch.stack([first * item[0], first * item[1] + second * two[0], second * two[1]])
    torch.testing.assert_close(scores[0], expected)
    made = combine({"one": 0.7, "two": 0.3}, states, rule)
    assert made.head_weight is not None and made.head_bias is not None
    torch.testing.assert_close((pooled @ made.head_weight.T + made.head_bias)[0], expected)


def test_labels_are_those_of_the_active_adapters_under_every_rule() -> None:
    stack, _ = stack_with_heads()
    pooled = torch.randn(2, WIDTH)
    for rule in ("probability", "logit", "sum"):
        head = MixedHead(stack, WIDTH, rule)
        head.grow(("x", "y", "z"))
        with stack.activate(Mixture(("one", "two"), torch.tensor([[1.0, 0.0], [0.5, 0.5]]))):
            both = head(pooled)
        with stack.activate(Mixture(("one",), torch.tensor([[1.0]]))):
            alone = head(pooled[:1])
        torch.testing.assert_close(both[:1], alone)
        assert (both == -torch.inf).tolist() == [[False, False, True], [False, False, False]]


def test_rows_in_training_learn_through_the_mixture() -> None:
    stack, _ = stack_with_heads()
    stack.begin_training({"new": 2, "more": 2}, 1.0, lambda low, outputs: nn.init.normal_(low))
    head = MixedHead(stack, WIDTH)
    head.begin_training(("z", "q"))
    assert head.weight.shape == (4, WIDTH)
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]], requires_grad=True)
    with stack.activate(Mixture(("one", "new", "more"), weights)):
        scores = head(torch.randn(2, WIDTH))
        target = torch.tensor([head.labels.index("q"), head.labels.index("z")])
        loss = nn.functional.cross_entropy(scores, target)
        loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(-scores[[0, 1], target].mean().item()), "the mixture is normalised already"
    assert head.weight.grad is not None and bool(head.weight.grad.abs().sum(1).gt(0)[:2].all())
    assert weights.grad is not None and bool(torch.isfinite(weights.grad).all()) and bool(weights.grad.any())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


def prompted(lab: Lab, kind: str, how: Any) -> tuple[Backbone, AdapterStack]:
    config = lab.config(kind).backbone
    codec = load_codec(config, 24, 4)
    backbone = load_backbone(config, codec, torch.device("cpu"), 0).eval()
    stack = AdapterStack(backbone.model, [])
    width = backbone.model.get_input_embeddings().weight.shape[1]
    for seed, name in enumerate(("a", "b")):
        stack.load(name, AdapterState(prompt=torch.randn(3, width, generator=torch.Generator().manual_seed(seed))))
    backbone.prefix = MixedPrompts(stack, width, partial(used_alike, how))
    backbone.learn_labels(["red", "blue"])
    return backbone, stack


def batch_of(texts: list[str], backbone: Backbone) -> Batch:
    ids = backbone.codec.encode_source(texts)
    longest = max(map(len, ids))
    source = torch.tensor([row + [backbone.codec.pad_id] * (longest - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    target = (
        torch.tensor([[5, 6]] * len(texts)) if not backbone.codec.needs_labels else torch.zeros(len(texts), 0).long()
    )
    label = torch.zeros(len(texts)).long() if backbone.codec.needs_labels else torch.full((len(texts),), IGNORE)
    return Batch(source, mask, target, label, torch.ones(len(texts)), torch.arange(len(texts)))


def at_answers(backbone: Backbone, batch: Batch) -> Tensor:
    """Return logits `[B, T, V]` at the answers' tokens, of which all rows have as many."""
    return backbone(batch).logits.unflatten(0, tuple(batch.target_ids.shape))  # type: ignore[no-any-return]


TEXTS = ["the sea is cold", "it purrs", "a dog barks much very"]


@pytest.mark.parametrize("how", ["sum", "concat"])
@pytest.mark.parametrize("kind", ["bert", "t5", "llama"])
def test_prompts_are_mixed_per_example(lab: Lab, kind: str, how: str) -> None:
    """A row in a batch equals the row alone; a row without weights is the bare backbone's."""
    backbone, stack = prompted(lab, kind, how)
    weights = torch.tensor([[0.6, 0.4], [0.0, 0.0], [0.0, 1.0]])

    def states(texts: list[str], weights: Tensor | None) -> Tensor:
        with torch.no_grad(), stack.activate(None if weights is None else Mixture(("a", "b"), weights)):
            batch = batch_of(texts, backbone)
            return backbone.pooled(batch) if kind == "bert" else at_answers(backbone, batch)  # type: ignore[operator]

    together, bare = states(TEXTS, weights), states(TEXTS, None)
    for row in range(3):
        alone = states(TEXTS[row : row + 1], weights[row : row + 1])[0]
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(together[1], bare[1], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(together[0], bare[0], atol=1e-3)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_generation_reads_the_prompt_once_for_every_sequence(lab: Lab, kind: str) -> None:
    backbone, stack = prompted(lab, kind, "sum")
    weights = torch.tensor([[2.0, 0.5], [0.0, 3.0], [0.0, 0.0]])
    with stack.activate(Mixture(("a", "b"), weights)):
        together = predict(backbone, batch_of(TEXTS, backbone), 4)
    alone = []
    for row in range(3):
        with stack.activate(Mixture(("a", "b"), weights[row : row + 1])):
            alone += predict(backbone, batch_of(TEXTS[row : row + 1], backbone), 4)
    assert together == alone


@pytest.mark.parametrize("kind", ["mlp", "gate"])
def test_prompts_in_training_have_the_form_of_the_paper(lab: Lab, kind: Any) -> None:
    """SLM, eq. 10 and 11, by torch's own layers: what the model reads, and what is kept of it."""
    backbone, stack = prompted(lab, "bert", "concat")
    prefix = backbone.prefix
    assert isinstance(prefix, MixedPrompts)
    stack.begin_training({"new": 0, "more": 0}, 1.0, lambda low, outputs: None)
    start = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(7))
    prefix.begin_training(start, PromptForm(kind, 11))
    held = {name: value.detach() for name, value in prefix.named_parameters()}
    if kind == "gate":
        assert held["gate"].tolist() == [0.0, 0.0]
        prefix.gate.data.copy_(torch.tensor([0.5, -2.0]))  # type: ignore[union-attr]
        wanted = start * torch.tensor([0.5, -2.0])[:, None, None]
    else:
        network = nn.Sequential(nn.Linear(32, 11), nn.Tanh(), nn.Linear(11, 32))
        names = dict(zip(("0.weight", "0.bias", "2.weight", "2.bias"), MLP, strict=True))
        network.load_state_dict({theirs: held[ours] for theirs, ours in names.items()})
        wanted = network(start).detach() + start
        assert all(0 < float(held[name].abs().max()) <= 32**-0.5 for name in MLP[:2])
        assert all(0 < float(held[name].abs().max()) <= 11**-0.5 for name in MLP[2:])
    with stack.activate(Mixture(("new", "more"), torch.ones(1, 2))):
        result = prefix(1, torch.device("cpu"))
        assert result is not None
        result[0].square().sum().backward()
    torch.testing.assert_close(result[0][0], wanted.flip(0).flatten(0, 1), atol=1e-5, rtol=1e-5)  # "more" < "new"
    assert all(value.grad is not None and value.grad.any() for value in prefix.parameters())
    states = end_training(backbone, stack, {f"prefix.{n}": item.detach() for n, item in prefix.named_parameters()})
    torch.testing.assert_close(torch.stack([state.prompt for state in states.values()]), wanted)  # type: ignore[arg-type]
    assert not list(prefix.parameters())


@pytest.mark.parametrize("kind", ["plain", "mlp", "gate"])
def test_a_task_that_is_learned_again_begins_with_its_prompts_in_every_form(lab: Lab, kind: Any) -> None:
    backbone, stack = prompted(lab, "bert", "sum")
    prefix, before = backbone.prefix, AdapterState(prompt=torch.randn(3, 32))
    assert isinstance(prefix, MixedPrompts)
    stack.begin_training({"new": 0}, 1.0, lambda low, outputs: None)
    prefix.begin_training(torch.ones(1, 3, 32), PromptForm(kind, 4))
    prefix.fill({"new": before})
    with stack.activate(Mixture(("new",), torch.ones(1, 1))):
        result = prefix(1, torch.device("cpu"))
    assert result is not None and before.prompt is not None and torch.equal(result[0][0], before.prompt)


@pytest.mark.parametrize("kind", ["bert", "t5", "llama"])
def test_prompts_of_different_lengths_are_summed_where_they_end(lab: Lab, kind: str) -> None:
    """Shorter ones are zero in front; positions in front of all of them are masked, and do not change an output."""
    backbone, stack = prompted(lab, kind, "sum")
    long = torch.randn(5, 32, generator=torch.Generator().manual_seed(9))
    stack.load("long", AdapterState(prompt=long))
    prefix, short = backbone.prefix, stack.states["a"].prompt
    assert prefix is not None and short is not None
    weights = torch.tensor([[0.6, 0.4], [1.0, 0.0], [0.0, 0.0]])
    with stack.activate(Mixture(("a", "long"), weights)):
        result = prefix(3, torch.device("cpu"))
    assert result is not None and result[1].tolist() == [[1] * 5, [0, 0, 1, 1, 1], [0] * 5]
    torch.testing.assert_close(result[0][0], 0.4 * long + 0.6 * torch.cat([torch.zeros(2, 32), short]))
    torch.testing.assert_close(result[0][1], torch.cat([torch.zeros(2, 32), short]))
    with stack.activate(Mixture(("a", "long"), weights[1:2])):
        alone = prefix(1, torch.device("cpu"))
    assert alone is not None and torch.equal(alone[0][0], short)

    def read(texts: list[str], weights: Tensor) -> Tensor:
        with torch.no_grad(), stack.activate(Mixture(("a", "long"), weights)):
            batch = batch_of(texts, backbone)
            return backbone.pooled(batch) if kind == "bert" else at_answers(backbone, batch)  # type: ignore[operator]

    together = read(TEXTS, weights)
    for row in range(len(TEXTS)):
        mine = read(TEXTS[row : row + 1], weights[row : row + 1])[0]
        torch.testing.assert_close(together[row], mine, atol=1e-5, rtol=1e-4)


def test_the_length_of_a_sum_stays_and_prompts_that_cannot_be_mixed_are_refused(lab: Lab) -> None:
    backbone, stack = prompted(lab, "bert", "sum")
    prefix = backbone.prefix
    assert prefix is not None
    with stack.activate(Mixture(("a", "b"), torch.ones(2, 2))):
        result = prefix(2, torch.device("cpu"))
    assert result is not None and result[0].shape == (2, 3, 32)
    stack.load("wide", AdapterState(prompt=torch.ones(3, 31)))
    with (
        pytest.raises(AdapterError, match="width 31, the model's is 32"),
        stack.activate(Mixture(("a", "wide"), torch.ones(1, 2))),
    ):
        prefix(1, torch.device("cpu"))


def test_concatenated_prompts_have_an_order_of_their_own(lab: Lab) -> None:
    """It is the order of their names: which adapter a batch names first depends on the other texts in it."""
    backbone, stack = prompted(lab, "bert", "concat")
    prefix, collected = backbone.prefix, []
    assert isinstance(prefix, MixedPrompts)
    for names in ("ab", "ba"):
        with stack.activate(Mixture(tuple(names), torch.ones(1, 2))):
            collected.append(prefix(1, torch.device("cpu")))
    assert collected[0] is not None and collected[1] is not None and torch.equal(collected[0][0], collected[1][0])
    assert torch.equal(collected[0][0][0, :3], stack.states["a"].prompt)  # type: ignore[arg-type]
    order = {"a": "z", "b": "y"}
    prefix = MixedPrompts(stack, prefix.width, lambda name: PromptUse(True, (0, order[name])))
    with stack.activate(Mixture(("a", "b"), torch.ones(1, 2))):
        renamed = prefix(1, torch.device("cpu"))
    assert renamed is not None and torch.equal(renamed[0][0, :3], stack.states["b"].prompt)  # type: ignore[arg-type]


def test_concatenated_prompts_stand_behind_the_sum_of_the_others(lab: Lab) -> None:
    """A prompt that an example does not have is padded on the left, and costs nothing where no example has it."""
    backbone, stack = prompted(lab, "bert", "sum")
    for seed, (name, length) in enumerate((("c", 2), ("d", 1))):
        prompt = torch.randn(length, 32, generator=torch.Generator().manual_seed(10 + seed))
        stack.load(name, AdapterState(prompt=prompt))
    prefix = backbone.prefix
    assert isinstance(prefix, MixedPrompts)
    prefix = MixedPrompts(stack, prefix.width, lambda name: PromptUse(name in "cd", (0, name)))
    own = {name: stack.states[name].prompt for name in "abcd"}
    weights = torch.tensor([[0.5, 0.5, 0.7, 1.0], [0.0, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 0.0], [0.0] * 4])
    with stack.activate(Mixture(tuple("abcd"), weights)):
        result = prefix(4, torch.device("cpu"))
    assert result is not None
    expected = [
        torch.cat([0.5 * own["a"] + 0.5 * own["b"], own["c"], own["d"]]),  # type: ignore[operator, list-item]
        own["d"],
        2.0 * own["a"],  # type: ignore[operator]
        torch.zeros(0, 32),
    ]
    assert result[1].tolist() == [[0] * (6 - len(row)) + [1] * len(row) for row in expected]  # type: ignore[arg-type]
    for prompts, mask, row in zip(*result, expected, strict=True):
        torch.testing.assert_close(prompts[mask.bool()], row)
        assert not prompts[~mask.bool()].any()
    with stack.activate(Mixture(("c", "d"), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))):
        short = prefix(2, torch.device("cpu"))
    assert short is not None and short[0].shape == (2, 2, 32)
