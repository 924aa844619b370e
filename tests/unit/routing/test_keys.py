"""Keys and weights of SLM (section 3.2): those of its properties that need neither model nor encoder."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raycl.errors import RetrievalError
from raycl.methods.slm.slm import SlmConfig
from raycl.routing import slot_keys
from raycl.routing.slot_keys import (
    KeyConfig,
    choose,
    cosines,
    key_accuracy,
    learn_keys,
    semi_orthogonal,
    split_groups,
)
from raycl.routing.slot_weights import RetrievalConfig, slot_weights
from raycl.routing.slots import SlotRouter


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("slots", "width"), [(4, 64), (64, 64), (200, 128)])
def test_keys_start_orthonormal_in_every_chunk(slots: int, width: int) -> None:
    """They are so beyond h rows too, where the released routine leaves memory as it found it."""
    keys = semi_orthogonal(slots, 3, width, seed=1)
    assert keys.shape == (slots, 3, width) and bool(torch.isfinite(keys).all())
    for group in keys.transpose(0, 1):
        for first in range(0, slots, width):
            chunk = group[first : first + width]
            torch.testing.assert_close(chunk @ chunk.T, torch.eye(len(chunk)), atol=1e-5, rtol=0)
    assert not torch.equal(keys[:, 0], keys[:, 1]), "every group has its own draw"


def test_one_step_of_the_papers_rule() -> None:
    """SLM, eq. 5: k . grad = 0, a step raises the cosine, keys that no text selects keep every bit."""
    query, config = drawn(1, 8), KeyConfig(groups=1, slots=4, mask=0.0, epochs=1, rate=0.05)
    before = semi_orthogonal(4, 1, 8, seed=3)
    after = learn_keys(query, config, top_k=2, seed=3)
    chosen = choose(cosines(split_groups(query, 1), before), 2, 0.0)[0, 0].tolist()
    moved = after - before
    for slot in range(4):
        if slot in chosen:
            assert abs(float((moved[slot] * before[slot]).sum())) < 1e-6
            pair = [float(cosines(split_groups(query, 1), keys)[0, 0, slot]) for keys in (before, after)]
            assert pair[1] > pair[0]
            key = before[slot].clone().requires_grad_()
            torch.nn.functional.cosine_similarity(query, key).sum().backward()
            torch.testing.assert_close(moved[slot], 0.05 * key.grad, atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(after[slot], before[slot])


@pytest.mark.parametrize("update", ["paper", "official"])
@pytest.mark.parametrize("start", ["orthogonal", "data"])
def test_every_rule_pulls_keys_to_the_texts(update: str, start: str) -> None:
    queries = drawn(1, 24, seed=5) + 0.2 * drawn(60, 24)
    config = KeyConfig(groups=3, slots=4, update=update, start=start, rate=5e-3, steps=80)  # type: ignore[arg-type]
    first = learn_keys(queries, KeyConfig(groups=3, slots=4, start=start, epochs=0), 2, seed=0)  # type: ignore[arg-type]
    keys = learn_keys(queries, config, 2, seed=0)
    near = [float(cosines(split_groups(queries, 3), held).topk(2).values.mean()) for held in (first, keys)]
    assert near[1] > near[0] and near[1] > 0.8
    assert torch.equal(keys, learn_keys(queries, config, 2, seed=0)), "the same seed gives the same keys"


def test_official_keys_are_those_of_the_published_loop() -> None:
    """AdamW on minus the mean of the chosen cosines, clipped, with the rate x0.1 after every second epoch."""
    queries = torch.randn(37, 12, generator=torch.Generator().manual_seed(1))
    config = KeyConfig(groups=3, slots=4, mask=0.2, update="official", rate=0.05, epochs=5, batch_size=8)
    split = split_groups(queries, 3)
    keys = torch.nn.Parameter(semi_orthogonal(4, 3, 4, seed=7))
    optimizer = torch.optim.AdamW([keys], lr=0.05, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    draw = torch.Generator().manual_seed(7)
    for _ in range(5):
        for rows in torch.split(torch.randperm(37, generator=draw), 8):
            similar = torch.nn.functional.cosine_similarity(split[rows][:, None], keys[None], dim=-1).transpose(1, 2)
            chosen = choose(similar.detach(), 2, 0.2, draw)
            optimizer.zero_grad()
            (-similar.gather(2, chosen).mean()).backward()
            torch.nn.utils.clip_grad_norm_([keys], 0.1)
            optimizer.step()
        schedule.step()
    result = learn_keys(queries, config, top_k=2, seed=7)
    assert torch.allclose(result, keys.detach(), atol=1e-4)
    by_steps = config.model_copy(update={"epochs": None, "steps": 25})
    assert not torch.allclose(learn_keys(queries, by_steps, top_k=2, seed=7), result, atol=1e-3), "its rate is constant"


def test_official_keys_without_a_hit_move_too() -> None:
    """AdamW's momentum and decay move them."""
    config = KeyConfig(groups=1, slots=4, mask=0.0, epochs=3, update="official")
    before, after = semi_orthogonal(4, 1, 8, seed=3), learn_keys(drawn(1, 8), config, 1, seed=3)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("update", ["paper", "official"])
def test_the_centrifugal_term_is_that_of_the_published_code(update: str) -> None:
    """Mean over groups and pairs of cosines of new and earlier keys (SLM's released retriever), by autograd."""
    queries, earlier = drawn(8, 12, seed=2), drawn(5, 3, 4, seed=9)
    config = KeyConfig(groups=3, slots=4, mask=0.0, update=update, rate=0.05, epochs=1, batch_size=8, centrifugal=0.7)  # type: ignore[arg-type]
    keys = torch.nn.Parameter(semi_orthogonal(4, 3, 4, seed=7))
    similar = torch.nn.functional.cosine_similarity(split_groups(queries, 3)[:, None], keys[None], dim=-1)
    chosen = choose(similar.transpose(1, 2).detach(), 2, 0.0)
    new, old = (torch.nn.functional.normalize(held.transpose(0, 1)[None], dim=-1) for held in (keys, earlier))
    away = torch.einsum("bgxc,bgyc->bgxy", new, old).mean()
    loss = -similar.transpose(1, 2).gather(2, chosen).mean() + 0.7 * away
    if update == "paper":
        (loss * chosen.numel()).backward()
        wanted = keys.detach() - 0.05 * keys.grad
    else:
        optimizer = torch.optim.AdamW([keys], lr=0.05, weight_decay=0.01)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([keys], 0.1)
        optimizer.step()
        wanted = keys.detach()
    assert torch.allclose(learn_keys(queries, config, 2, 7, earlier), wanted, atol=1e-5)
    without = config.model_copy(update={"centrifugal": 0.0})
    assert torch.equal(learn_keys(queries, config, 2, 7), learn_keys(queries, without, 2, 7, earlier))
    assert not torch.allclose(learn_keys(queries, without, 2, 7, earlier), wanted, atol=1e-3)


def test_keys_of_a_second_task_keep_away_from_the_first_ones() -> None:
    """The router fits keys of a second task away from those of earlier tasks, which stay as they are."""
    first = drawn(1, 24, seed=5) + drawn(60, 24, seed=1)
    second = drawn(1, 24, seed=5) + drawn(60, 24, seed=2)
    collected = {}
    for weight in (0.0, 0.5):
        config = KeyConfig(groups=3, slots=4, update="official", rate=5e-2, steps=60, centrifugal=weight)
        router = SlotRouter("keys", 3, RetrievalConfig(top_k=2))
        router.fit("one", first, config, 0)
        router.fit("two", second, config, 1)
        keys = router.keys()
        item, two = (torch.nn.functional.normalize(keys[task], dim=-1) for task in ("one", "two"))
        collected[weight] = keys["one"], float(torch.einsum("xgh,ygh->xyg", item, two).mean())
    assert torch.equal(collected[0.0][0], collected[0.5][0]) and collected[0.5][1] < collected[0.0][1] - 0.1
    chosen = SlmConfig(keys=KeyConfig(centrifugal=0.5))
    assert SlmConfig().independent_tasks and not chosen.independent_tasks
    keys = [[config.cache_key(index, ["a", "b"]) for config in (SlmConfig(), chosen)] for index in (0, 1)]
    assert keys[0][0] == keys[0][1] and keys[1][0] != keys[1][1], "the first task has no earlier keys"


@pytest.mark.parametrize("mask", [0.0, 0.99, 0.999999])
def test_the_mask_keeps_k_slots_without_bias(mask: float) -> None:
    """SLM, eq. 7."""
    similar = drawn(5, 3, 4)
    chosen = choose(similar, 2, mask, torch.Generator().manual_seed(0))
    assert chosen.shape == (5, 3, 2) and all(len(set(pair)) == 2 for group in chosen.tolist() for pair in group)
    if not mask:
        assert torch.equal(chosen, similar.topk(2).indices)
    keys = learn_keys(drawn(9, 12), KeyConfig(groups=3, slots=2, mask=mask, rate=1e-2, steps=400), 2, seed=0)
    assert float(keys.abs().max()) < 10


def test_softmax_weighs_by_shares_of_all_slots() -> None:
    """The authors' similarity_type=softmax: cosines of a group over 0.1, normalised over its slots, then as cosines."""
    similar, config = drawn(5, 3, 6).clamp(-1, 1), RetrievalConfig(top_k=2, similarity="softmax")
    chances = torch.softmax(similar / 0.1, dim=2)
    wanted = torch.zeros(5, 6)
    for row in range(5):
        for group in range(3):
            for slot in similar[row, group].topk(2).indices.tolist():
                wanted[row, slot] += chances[row, group, slot]
    weights = slot_weights(similar, config)
    assert torch.allclose(weights, wanted / wanted.sum(1, keepdim=True), atol=1e-6)
    mean = slot_weights(similar, RetrievalConfig(top_k=6, rule="group_mean", similarity="softmax"))
    assert torch.allclose(mean, chances.mean(1), atol=1e-6)
    mine = torch.tensor([[True, True, False, False, False, False]]).expand(5, 6)
    assert (slot_weights(similar, config, mine)[:, 2:] == 0).all(), "shares are of the candidates alone"


UNION, MEAN = RetrievalConfig(top_k=1), RetrievalConfig(top_k=1, rule="group_mean")


@pytest.mark.parametrize(
    ("groups", "top_k", "rule", "expected"),
    [
        ([[1, 0, 0.6], [0, 1, 0.6]], 1, "group_union", [0.5, 0.5, 0]),
        ([[1, 0, 0.6], [0, 1, 0.6]], 1, "group_mean", [0, 0, 1]),
        ([[1, 0, 0.7071], [1, 0, 0.7071]], 2, "group_union", [0.5858, 0, 0.4142]),
        ([[1, 0, 0.7071], [1, 0, 0.7071]], 2, "group_mean", [0.5858, 0, 0.4142]),
        ([[0.9, 0.1, 0.3], [0.8, 0.2, 0.1]], 1, "vote", [1, 0, 0]),
        ([[-0.2, -0.5, -0.9]], 2, "group_union", [0.5, 0.5, 0]),
        ([[0.4, -0.5, -0.9]], 2, "group_union", [1, 0, 0]),
    ],
)
def test_weights_by_hand(groups: list[list[float]], top_k: int, rule: str, expected: list[float]) -> None:
    """Choice by group or by the mean over groups, clamping and the even fallback."""
    weights = slot_weights(torch.tensor([groups]).float(), RetrievalConfig(top_k=top_k, rule=rule))  # type: ignore[arg-type]
    torch.testing.assert_close(weights[0], torch.tensor(expected).float(), atol=1e-4, rtol=0)


def test_negative_weights_only_if_configured() -> None:
    raw = slot_weights(torch.tensor([[[0.4, -0.1]]]), RetrievalConfig(top_k=2, clamp=False))
    torch.testing.assert_close(raw, torch.tensor([[0.4, -0.1]]) / 0.3)


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 8),
    st.sampled_from(["group_union", "group_mean", "vote"]), st.integers(0, 99),
)  # fmt: skip
def test_weights_sum_to_one_and_rows_are_independent(
    batch: int, groups: int, slots: int, top_k: int, rule: str, seed: int
) -> None:
    """K is capped at the candidates; a batch equals its rows; permuting slots permutes weights."""
    similar = torch.rand(batch, groups, slots, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    config = RetrievalConfig(top_k=top_k, rule=rule)  # type: ignore[arg-type]
    weights = slot_weights(similar, config)
    torch.testing.assert_close(weights.sum(1), torch.ones(batch))
    assert bool((weights >= 0).all()) and int((weights > 0).sum(1).max()) <= groups * min(top_k, slots)
    torch.testing.assert_close(
        torch.cat([slot_weights(similar[row : row + 1], config) for row in range(batch)]), weights
    )
    if rule != "vote":  # ties have no order
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(slot_weights(similar[:, :, order], config), weights[:, order])


def test_selection_per_batch_differs_from_per_text() -> None:
    """With batch scope, as released, two texts of different tasks get one mixture."""
    similar = torch.tensor([[[0.9, 0.1, 0.0]], [[0.0, 0.1, 0.8]]])
    together = slot_weights(similar, RetrievalConfig(top_k=1, scope="batch"))
    assert torch.equal(together[0], together[1])
    apart = slot_weights(similar, RetrievalConfig(top_k=1))
    assert apart.tolist() == [[1, 0, 0], [0, 0, 1]]


def test_candidates_cap_k_and_others_get_nothing() -> None:
    similar = torch.rand(2, 3, 5)
    mine = torch.tensor([[False, True, False, False, False], [False, False, False, True, True]])
    weights = slot_weights(similar, RetrievalConfig(top_k=4), mine)
    assert weights[0].tolist() == [0, 1, 0, 0, 0]
    assert bool((weights[1][:3] == 0).all()) and float(weights[1].sum()) == pytest.approx(1)


def test_a_value_for_every_group() -> None:
    similar = torch.tensor([[[0.6, 0.2], [0.1, 0.2]]])
    weights = slot_weights(similar, RetrievalConfig(top_k=1), per_group=True)
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.0, 0.0, 0.25]]))


def test_far_tasks_change_nothing_under_clamping() -> None:
    queries, keys = drawn(3, 2, 4).abs(), drawn(4, 2, 4, seed=1).abs()
    far = torch.cat([keys, -queries])
    config = RetrievalConfig(top_k=2)
    both = slot_weights(cosines(queries, far), config)
    torch.testing.assert_close(both[:, :4], slot_weights(cosines(queries, keys), config))


def test_scale_of_queries_and_keys_does_not_matter() -> None:
    queries, keys = drawn(3, 2, 4), drawn(5, 2, 4, seed=1)
    torch.testing.assert_close(cosines(7 * queries, keys * torch.rand(5, 1, 1)), cosines(queries, keys))


@pytest.mark.parametrize(("right", "counts"), [(6, False), (7, True)])
def test_key_accuracy_wants_more_than_half(right: int, counts: bool) -> None:
    """SLM, eq. 13 with g = 6 and K = 2."""
    similar = torch.zeros(1, 6, 4)  # slots 0 and 1 are the task's own
    for entry in range(12):
        similar[0, entry // 2, entry % 2 if entry < right else 2 + entry % 2] = 1.0
    assert bool(key_accuracy(similar, torch.tensor([True, True, False, False]), 2)[0]) is counts


@pytest.mark.parametrize(
    ("queries", "config", "top_k", "said"),
    [
        (drawn(4, 10), KeyConfig(groups=3), 1, "3 groups do not divide the encoder's 10 dimensions: use one of 1, 2"),
        (drawn(4, 12), KeyConfig(groups=3, slots=2), 3, "retrieval.top_k=3 is more than keys.slots=2"),
        (drawn(4, 12), KeyConfig(groups=3, slots_by_task={"one": 1}), 2, "is more than keys.slots_by_task.one=1"),
        (drawn(0, 12), KeyConfig(groups=3), 1, "a task without texts"),
        (drawn(4, 12) / 0, KeyConfig(groups=3), 1, "not finite"),
        (drawn(3, 12), KeyConfig(groups=3, start="data"), 1, "3 texts cannot start 4 slots"),
    ],
)
def test_impossible_settings_are_errors(queries: Tensor, config: KeyConfig, top_k: int, said: str) -> None:
    with pytest.raises(RetrievalError, match=said):
        learn_keys(queries, config, top_k, seed=0)


def test_progress_and_the_time_left_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("raycl"), "propagate", True)
    caplog.set_level(logging.INFO, "raycl")
    monkeypatch.setattr(slot_keys, "EVERY_S", 0.0)
    learn_keys(torch.randn(4, 6), KeyConfig(groups=2, slots=2, steps=3), 1, seed=0)
    said = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(",")[0].strip() for line in said] == [f"keys: {done} of 3 updates" for done in (1, 2)]


def test_updates_are_a_bar(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="raycl.progress"):
        learn_keys(torch.randn(20, 8), KeyConfig(slots=3, groups=2, steps=10), top_k=1, seed=0)
    bars = [record.bar for record in caplog.records if hasattr(record, "bar")]
    assert [(bar.done, bar.total) for bar in bars] == [(number, 10) for number in range(11)]


def test_a_tasks_own_weights_are_the_mean_over_its_kept_texts_else_those_of_the_mean_one() -> None:
    router = SlotRouter("keys", 2, RetrievalConfig(top_k=1))
    for seed, task in enumerate(("one", "two")):
        router.fit(task, drawn(20, 8, seed=seed), KeyConfig(slots=3, groups=2, steps=10), seed)
    router.hold_out("one", texts := drawn(6, 8, seed=5))
    expected = router.route(texts, ["one"] * 6).weights.mean(0)
    assert router.own_weights("one") == pytest.approx({f"one.{slot}": float(expected[slot]) for slot in range(3)})
    assert set(router.own_weights("two")) == {"two.0", "two.1", "two.2"}
    assert sum(router.own_weights("two").values()) == pytest.approx(1)
