"""SAPT's attention (section 4.2): those of its properties that need no model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from raycl.errors import BankError, RetrievalError
from raycl.routing.attention import Attention, AttentionConfig, AttentionRouter, divergence, max_pooled, mixture_of
from raycl.routing.routers import make_router, without
from raycl.types import RouterState

WIDE = 8


def attention(tasks: int, trainable: bool = True, seed: int = 0, **settings: Any) -> Attention:
    """Return keys of so many tasks; the last one in training."""
    result = Attention(WIDE, AttentionConfig(width=3, **settings), seed)
    for number in range(tasks):
        result.begin(f"t{number}", seed + number)
        if number < tasks - 1 or not trainable:
            assert result.key is not None
            result.end({**result.tensors(), "key": result.key})
    return result


def texts(examples: int, seed: int = 1) -> Tensor:
    return torch.randn(examples, WIDE, generator=torch.Generator().manual_seed(seed))


def with_scores(scores: list[float]) -> Attention:
    """Return an attention that gives these scores to every text: the query is the norm's bias, the first unit
    vector."""
    result = attention(len(scores), trainable=False)
    with torch.no_grad():
        result.norm_weight.zero_()
        result.norm_bias.copy_(torch.eye(WIDE)[0])
    result.take(
        result.settings(),
        {**result.tensors(), **{f"key/t{n}": torch.eye(WIDE)[0] * z * result.tau for n, z in enumerate(scores)}},
    )
    return result


@pytest.mark.parametrize("proj_act", ["after_up", "between"])
def test_one_task_takes_all_and_gets_no_gradient(proj_act: str) -> None:
    """Softmax over one key is 1 whatever the text (SAPT, eq. 2)."""
    item = attention(1, proj_act=proj_act)
    alpha = item(texts(5)).exp()
    assert torch.equal(alpha, torch.ones(5, 1))
    (alpha * torch.randn(5, 1)).sum().backward()
    assert all(not parameter.grad.any() for parameter in item.parameters() if parameter.grad is not None)
    assert item.key is not None and item.key.grad is not None


def test_weights_and_divergence_by_hand() -> None:
    """SAPT, eqs. 2 and 5."""
    alpha = with_scores([0.0, math.log(3)])(texts(2)).exp()
    torch.testing.assert_close(alpha, torch.tensor([[0.25, 0.75]] * 2))
    known = divergence(torch.tensor([[1.0, 0.0]]), alpha[:1].log())
    assert known.item() == pytest.approx(math.log(4)) == pytest.approx(1.3863, abs=1e-4)
    padded = divergence(torch.tensor([[0.0, 0.25, 0.75]]), torch.tensor([[0.2, 0.3, 0.5]]).log())
    assert float(padded) == pytest.approx(0.25 * math.log(0.25 / 0.3) + 0.75 * math.log(0.75 / 0.5))


def test_the_direction_of_the_divergence() -> None:
    """None where both agree; finite where what was kept is 0, and there the reverse is not."""
    log_alpha = with_scores([0.3, -1.0, 2.0])(texts(1))
    assert float(divergence(log_alpha.exp(), log_alpha)) == pytest.approx(0.0, abs=1e-6)
    kept = torch.tensor([[1.0, 0.0]])
    alpha = torch.tensor([[0.25, 0.75]], requires_grad=True)
    ours = divergence(kept, alpha.log()).sum()
    ours.backward()
    assert math.isfinite(float(ours)) and alpha.grad is not None and bool(torch.isfinite(alpha.grad).all())
    assert float(divergence(alpha.detach(), kept.log()).sum()) == math.inf
    never = divergence(kept, torch.tensor([[0.0, -math.inf]], requires_grad=True))
    assert float(never) == 0.0, "0 log 0 is 0 even where alpha has vanished"


def test_weights_sum_to_one_and_an_unused_key_changes_none() -> None:
    scores = [0.4, -0.2, 1.0]
    old, more = with_scores(scores)(texts(4)).exp(), with_scores([*scores, -1e4])(texts(4)).exp()
    torch.testing.assert_close(old.sum(1), torch.ones(4))
    torch.testing.assert_close(more[:, :3], old)
    assert not more[:, 3].any()


def test_keys_in_another_order_give_the_same_weights_by_name() -> None:
    """Names go with keys, so (keys, blocks) together may be re-ordered."""
    first = attention(4, trainable=False)
    second = attention(4, trainable=False)
    second.keys = dict(reversed(first.keys.items()))
    mine, its = first(texts(6)).exp(), second(texts(6)).exp()
    assert second.names == first.names[::-1]
    torch.testing.assert_close(mine, its.flip(1))


@pytest.mark.parametrize("proj_act", ["after_up", "between"])
def test_pads_and_neighbours_do_not_count(proj_act: str) -> None:
    three = attention(3, proj_act=proj_act)
    rows = [torch.randn(length, WIDE, generator=torch.Generator().manual_seed(length)) for length in (2, 5, 3)]
    pad = torch.full((WIDE,), 9.0)
    joined = torch.stack([torch.cat([row, pad.expand(7 - len(row), -1)]) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (7 - len(row)) for row in rows])
    together = three(max_pooled(joined, mask)).exp()
    alone = torch.cat([three(max_pooled(row[None], torch.ones(1, len(row)))).exp() for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)
    assert torch.equal(max_pooled(joined, mask)[0], rows[0].amax(0)), "the maximum is exact"
    assert not torch.allclose(three(max_pooled(joined, mask, pads=True)).exp(), alone, atol=1e-3)
    assert not max_pooled(joined, mask * 0).any(), "a text without tokens is no text, and finite"


def test_silu_is_applied_where_configured() -> None:
    """It comes after both projections as in SAPT's code, or between them as in ATTEMPT, by the formula."""
    for proj_act in ("after_up", "between"):
        item = attention(2, proj_act=proj_act)
        x, silu = texts(3), torch.nn.functional.silu
        low = x @ item.down.T
        inner = silu(low @ item.up.T) if proj_act == "after_up" else silu(low) @ item.up.T
        query = torch.nn.functional.layer_norm(inner, (WIDE,))
        keys = torch.stack([item.keys["t0"], item.key])  # type: ignore[list-item]
        torch.testing.assert_close(item(x), (query @ keys.T / WIDE**0.5).log_softmax(-1))


def test_the_temperature_divides_the_scores() -> None:
    plain, hot = attention(3), attention(3, tau=4 * WIDE**0.5)
    torch.testing.assert_close(hot(texts(4)), (plain(texts(4)) / 4).log_softmax(-1))


def test_old_keys_have_no_gradient_and_the_new_one_does() -> None:
    three = attention(3)
    before = {task: key.clone() for task, key in three.keys.items()}
    three(texts(4))[:, 0].sum().backward()
    assert three.key is not None and three.key.grad is not None and three.key.grad.any()
    assert all(not key.requires_grad and torch.equal(key, before[task]) for task, key in three.keys.items())
    assert {name for name, _ in three.named_parameters()} == {"down", "up", "norm_weight", "norm_bias", "key"}


def test_weights_below_the_pruning_threshold_are_dropped_per_text() -> None:
    alpha = torch.tensor([[0.5, 0.4999, 0.0001], [0.9, 0.0002, 0.0998], [0.9999, 0.0, 0.0001]])
    sparse = mixture_of(("a", "b", "c"), alpha, pruning_threshold=1e-3)
    assert torch.equal(sparse.weights, torch.tensor([[0.5, 0.4999, 0.0], [0.9, 0.0, 0.0998], [0.9999, 0.0, 0.0]]))
    mixture = mixture_of(("a", "b", "c"), alpha[2:], pruning_threshold=1e-3)
    assert mixture.names == ("a",), "an adapter without weight is not evaluated"
    trainable = mixture_of(("a", "b", "c"), alpha[2:], pruning_threshold=1e-3, always="c")
    assert trainable.names == ("a", "c") and torch.equal(trainable.weights, alpha[2:, [0, 2]]), (
        "the adapter in training is active"
    )
    assert torch.equal(mixture_of(("a", "b", "c"), alpha, pruning_threshold=0.0).weights, alpha)


@pytest.mark.parametrize("tasks", [2, 20, 100])
def test_dropped_weights_sum_to_less_than_the_pruning_threshold(tasks: int) -> None:
    scores = torch.randn(200, tasks, generator=torch.Generator().manual_seed(0)) * 4
    alpha = scores.softmax(1)
    for pruning_threshold in (1e-3, 1e-1):
        sparse = mixture_of(tuple(map(str, range(tasks))), alpha, pruning_threshold)
        kept = torch.zeros(200, tasks)
        kept[:, [int(name) for name in sparse.names]] = sparse.weights
        assert float((alpha - kept).sum(1).max()) < pruning_threshold
        blocks = torch.nn.functional.normalize(torch.randn(tasks, 16), dim=1)
        change = ((alpha - kept) @ blocks).norm(dim=1)
        assert float(change.max()) < pruning_threshold, "no output moves by more than that share of a block's"


def test_hard_attention_selects_the_largest_weight() -> None:
    alpha = torch.tensor([[0.4, 0.6], [0.7, 0.3]])
    assert torch.equal(mixture_of(("a", "b"), alpha, 1e-3, hard=True).weights, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


def state(source: Attention, **settings: Any) -> RouterState:
    return RouterState("attention", {**source.settings(), **settings}, source.tensors())


def test_a_snapshot_gives_the_same_weights() -> None:
    source = attention(3, trainable=False)
    router = make_router(state(source), {})
    assert isinstance(router, AttentionRouter) and router.needs == {"embeddings"}
    embedded, mask = texts(8).view(2, 4, WIDE), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    embeddings = router.route_embeddings(embedded, mask)
    assert embeddings.names == ("t0", "t1", "t2") and not embeddings.weights.requires_grad
    assert torch.equal(embeddings.weights, source(max_pooled(embedded, mask)).exp().detach())
    hard = make_router(state(source, hard=True), {})
    assert isinstance(hard, AttentionRouter)
    assert hard.route_embeddings(embedded, mask).weights.sum(1).tolist() == [1.0, 1.0]
    assert set(hard.route_embeddings(embedded, mask).weights.unique().tolist()) <= {0.0, 1.0}


def test_standardized_queries_do_not_see_what_all_texts_share() -> None:
    plain, standard = attention(2, trainable=False), attention(2, trainable=False, standardize=True)
    near, shift = texts(6), 50 * torch.ones(WIDE)
    standard.look_at(near + shift)
    assert torch.equal(attention(2, trainable=False, standardize=True)(near), plain(near)), "nothing was looked at yet"
    shifted = standard(near + shift)
    assert standard.center is not None and standard.spread is not None
    torch.testing.assert_close(shifted, plain((near - near.mean(0)) / standard.spread + 1), atol=1e-4, rtol=1e-4)
    standard.look_at(near)
    assert torch.equal(standard(near + shift), shifted), "the first texts count"

    embedded, mask = (near + shift).view(2, 3, WIDE), torch.ones(2, 3, dtype=torch.long)
    router = make_router(state(standard), {})
    assert isinstance(router, AttentionRouter)
    torch.testing.assert_close(
        router.route_embeddings(embedded, mask).weights, standard(max_pooled(embedded, mask)).exp().detach()
    )


def test_the_standardized_texts_remain_distinguishable() -> None:
    """Held to their key by a few of them, those never seen attend to it too, beside a task that is found far off."""
    wide = 64
    drawn = torch.randn(400, wide, generator=torch.Generator().manual_seed(2))
    first, second = drawn[:200], drawn[200:] + 4 * (torch.arange(wide) % 4 == 0)
    both = Attention(wide, AttentionConfig(width=32, standardize=True), 0)
    both.begin("first", 0)
    both.look_at(first)
    assert both.key is not None
    both.end({**both.tensors(), "key": both.key})
    both.begin("second", 1)
    adam = torch.optim.Adam(both.parameters(), lr=1e-2)
    for _ in range(60):
        adam.zero_grad()
        (-both(first[:30])[:, 0].mean() - both(second[:30])[:, 1].mean()).backward()
        adam.step()
    assert both(first[30:])[:, 0].exp().mean() > 0.9
    assert both(second[30:])[:, 1].exp().mean() > 0.9


def test_a_task_taken_out_leaves_the_others_weights_among_themselves() -> None:
    source = attention(3, trainable=False)
    left = make_router(without(state(source), "t1"), {})
    assert isinstance(left, AttentionRouter)
    embedded, mask = texts(6).view(2, 3, WIDE), torch.ones(2, 3)
    whole = source(max_pooled(embedded, mask)).exp().detach()[:, [0, 2]]
    embeddings = left.route_embeddings(embedded, mask)
    assert embeddings.names == ("t0", "t2")
    torch.testing.assert_close(embeddings.weights, whole / whole.sum(1, keepdim=True))


def test_names_with_dots_are_names() -> None:
    """Names with dots are not slots: forgetting one task keeps the key of the other."""
    attention = Attention(WIDE, AttentionConfig(width=3), 0)
    for name in ("shop", "shop.v2"):
        attention.begin(name, 0)
        assert attention.key is not None
        attention.end({**attention.tensors(), "key": attention.key})
    for gone, left in (("shop", "shop.v2"), ("shop.v2", "shop")):
        router = make_router(without(state(attention), gone), {})
        assert isinstance(router, AttentionRouter) and router.attention.names == (left,)


def test_dimensions_that_hardly_any_text_varies_do_not_drown_the_others() -> None:
    """Most dimensions of few short texts under one instruction are the same in all; they count as the others do."""
    first = texts(4)
    first[:, :6] = 0.5
    result = attention(1, trainable=False, standardize=True)
    result.look_at(first)
    assert result.spread is not None and result.spread.min() > 0.1
    result = attention(1, trainable=False, standardize=True)
    result.look_at(torch.ones(3, WIDE))
    assert result.spread is not None and torch.equal(result.spread, torch.ones(WIDE))


def test_scores_are_mixed_without_a_pruning_threshold() -> None:
    """The least of a block lifts its labels from impossible to 0, so no block may be left out."""
    assert AttentionConfig().settled(encoder=True, scores=True).pruning_threshold == 0.0
    assert (
        AttentionConfig().settled(encoder=True, scores=False).pruning_threshold == AttentionConfig().pruning_threshold
    )
    assert (
        AttentionConfig().settled(encoder=False, scores=True).pruning_threshold == AttentionConfig().pruning_threshold
    )


def test_impossible_routing_is_an_error() -> None:
    router = AttentionRouter(attention(2, trainable=False))
    with pytest.raises(BankError, match="'attention', which reads prompts with the backbone"):
        router.route(["a text"], None)
    with pytest.raises(RetrievalError, match="of 8 dimensions, this backbone's have 4: use the"):
        router.route_embeddings(torch.zeros(1, 2, 4), torch.ones(1, 2))
    with pytest.raises(RetrievalError, match="no task has been learned yet"):
        attention(0)(texts(1))


def test_the_same_seed_draws_the_same_and_keys_lie_within_one() -> None:
    first, second = attention(3), attention(3)
    assert torch.equal(first.down, second.down) and torch.equal(first.key, second.key)  # type: ignore[arg-type]
    assert not torch.equal(first.keys["t0"], first.keys["t1"]) and float(first.keys["t0"].abs().max()) <= 1
    assert float(first.down.abs().max()) <= WIDE**-0.5 and float(first.up.abs().max()) <= 3**-0.5
