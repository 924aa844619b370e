"""Out-of-distribution scores: near 1 for texts of no task, evenly spread for known ones, and none of removed tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn, get_args

import numpy as np
import pytest
import torch
from drawn_routers import drawn_router
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from raycl.errors import BankError, RetrievalError
from raycl.methods.slm.slm import newest_rows, quantiles
from raycl.routing import statistics
from raycl.routing.routers import SumRouter, without
from raycl.routing.score_summary import QUANTILES, texts_below
from raycl.routing.slot_keys import KeyConfig
from raycl.routing.slot_weights import RetrievalConfig
from raycl.routing.slots import Kind, SlotRouter
from raycl.routing.statistics import KEPT, Discriminant, OodCalibrator, Statistics, sample_rows
from raycl.routing.unknown_texts import UnknownRule
from raycl.types import Mixture, RouterState, UnknownPolicy

TASKS = ("one", "two", "three", "four")
KEYS = KeyConfig(groups=2, slots=3, rate=5e-3, epochs=2)


def texts_of(task: str, count: int, seed: int) -> Tensor:
    """Return queries around a centre of the task, in a covariance that all share."""
    centre = torch.randn(1, 16, generator=torch.Generator().manual_seed(100 + TASKS.index(task)))
    noise = torch.Generator().manual_seed(10 * seed + TASKS.index(task))
    return centre + 0.3 * torch.randn(count, 16, generator=noise)


def squared_distances(apart: Tensor, spread: Tensor) -> Tensor:
    """Return squared Mahalanobis distances of differences, by the covariance of `spread` and its ridge."""
    covariance = torch.cov(spread.T, correction=0)
    ridge = 0.01 * covariance.diagonal().mean() * torch.eye(16, dtype=torch.float64)
    return ((apart @ torch.linalg.inv(covariance + ridge)) * apart).sum(1)


def studied(*tasks: str, dev: int = 200) -> SlotRouter:
    router = SlotRouter("keys", 2, RetrievalConfig(top_k=2))
    for task in tasks:
        router.fit(task, texts_of(task, 200, seed=1), KEYS, seed=TASKS.index(task))
        router.hold_out(task, texts_of(task, dev, seed=2))
    return router


def restored(router: SlotRouter, forgotten: str = "") -> SlotRouter:
    state = RouterState(router.kind, router.settings(), router.tensors())
    return SlotRouter.restored(without(state, forgotten) if forgotten else state)


def test_texts_are_out_of_distribution_until_their_task_is_learned() -> None:
    router, fresh = studied("one", "two", "three"), texts_of("four", 200, seed=3)
    before = router.ood_score(fresh)
    assert before.shape == (200,) and before.dtype == torch.float32
    assert float(before.median()) == 1.0 and float(before.mean()) > 0.95
    router.fit("four", texts_of("four", 200, seed=1), KEYS, seed=3)
    router.hold_out("four", texts_of("four", 200, seed=2))
    assert 0.2 < float(router.ood_score(fresh).mean()) < 0.8, "its texts lie among the others'"


def test_known_texts_spread_evenly() -> None:
    """The largest gap to the uniform distribution (Kolmogorov and Smirnov) over 800 texts and 256 kept ones."""
    router = studied(*TASKS)
    shares = torch.cat([router.ood_score(texts_of(task, 200, seed=4)) for task in TASKS]).sort().values
    expected = (torch.arange(len(shares)) + 0.5) / len(shares)
    assert float((shares - expected).abs().max()) < 0.12
    assert float(shares.min()) >= 0 and float(shares.max()) <= 1


def test_a_share_counts_the_kept_texts_that_are_nearer() -> None:
    router = studied("one", "two")
    kept = torch.cat([router.samples["one"], router.samples["two"]])
    distances = router.discriminant.relative_distances(kept)
    queries = texts_of("one", 5, seed=5)
    counted = [int((distances < distance).sum()) for distance in router.discriminant.relative_distances(queries)]
    assert router.ood_score(queries).tolist() == pytest.approx([count / (2 * KEPT) for count in counted])
    assert float(router.ood_score(kept).min()) == 0, "nothing is nearer than the nearest"
    alone = torch.cat([router.ood_score(query[None]) for query in queries])
    assert torch.equal(alone, router.ood_score(queries)), "neighbours in a batch do not matter"


def test_distances_common_to_all_tasks_count_less() -> None:
    """The distance to the nearest task, less 0.9 of the one to the middle of all texts under their own covariance."""
    texts = {task: texts_of(task, 50 + 30 * number, seed=1) for number, task in enumerate(TASKS)}
    router = Discriminant({task: Statistics.of(queries) for task, queries in texts.items()})
    unit = torch.nn.functional.normalize(torch.cat(list(texts.values())).double(), dim=1)
    of_tasks = unit.split([len(queries) for queries in texts.values()])
    within = torch.cat([rows - rows.mean(0) for rows in of_tasks])
    queries = texts_of("one", 20, seed=10)
    rows = torch.nn.functional.normalize(queries.double(), dim=1)
    nearest = torch.stack([squared_distances(rows - task.mean(0), within) for task in of_tasks]).min(0).values
    background = squared_distances(rows - unit.mean(0), unit)
    expected = (nearest - 0.9 * background).float()
    torch.testing.assert_close(router.relative_distances(queries), expected, atol=1e-3, rtol=1e-4)
    alone = Discriminant({"one": Statistics.of(texts["one"])})
    own = squared_distances(rows - of_tasks[0].mean(0), of_tasks[0])
    assert alone.relative_distances(queries).argsort().tolist() == own.argsort().tolist(), "it is its own background"


def test_many_kept_texts_are_measured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    router, queries = studied("one", "two"), texts_of("two", 50, seed=6)
    whole = router.ood_score(queries)
    samples = [router.samples["two"], router.samples["one"]]
    monkeypatch.setattr(statistics, "ROWS", 7)
    calibrator = OodCalibrator(router.discriminant.relative_distances, samples)
    torch.testing.assert_close(calibrator.scores(router.discriminant.relative_distances(queries)), whole)


class Unread(dict[str, Tensor]):
    """A dict whose values must not be read one after another."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a loop over all tasks")

    def values(self) -> NoReturn:
        raise AssertionError("a loop over all tasks")

    items = values


@pytest.mark.parametrize("tasks", [3, 1400])
@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("kind", ["keys", "discriminant"])
def test_no_request_loops_over_tasks(kind: Kind, per_group: bool, tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    router, texts = drawn_router(kind, tasks)
    router.per_group, queries = per_group, texts[:3]
    router.hold_out("t1", texts[1:2])
    expected = router.route_scored(queries)
    router._keys, router._statistics = Unread(router._keys), Unread(router._statistics)
    router.samples = Unread(router.samples)
    monkeypatch.setattr(router, "tasks", Unread(dict.fromkeys(router.tasks, torch.zeros(1))))
    again = router.route_scored(queries)
    assert again.names == expected.names and torch.equal(again.weights, expected.weights)
    assert torch.equal(again.ood_scores, expected.ood_scores)


def test_a_text_is_compared_with_each_task_once() -> None:
    """The score goes by the nearest tasks of those products that choose the task."""
    draw = torch.Generator().manual_seed(0)
    router = SlotRouter("discriminant", 2, RetrievalConfig(top_k=1))
    for number in range(200):
        queries = torch.randn(4, 16, generator=draw)
        router.add(f"t{number}", queries.view(4, 2, 8), Statistics.of(queries))
        router.hold_out(f"t{number}", queries[:1])
    router.route_scored(queries)
    with FlopCounterMode(display=False) as counted:
        router.route_scored(queries[:1])
    cosines = 2 * 16 * 800
    assert counted.get_total_flops() - cosines < 1.5 * 2 * 16 * 200


def test_texts_are_compared_with_as_many_of_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    router, queries = studied(*TASKS), texts_of("two", 50, seed=6)
    whole = router.ood_score(queries)
    monkeypatch.setattr(statistics, "COMPARED", 4 * 16)
    smaller = OodCalibrator(router.discriminant.relative_distances, list(router.samples.values()))
    shares = smaller.scores(router.discriminant.relative_distances(queries))
    assert torch.equal((shares * 64).round(), shares * 64), "16 of each"
    assert 0 < float((shares - whole).abs().max()) < 0.2


@pytest.mark.parametrize(("rate", "place"), [(0.05, 18), (0.1, 17), (0.5, 9)])
def test_the_threshold_keeps_false_alarms_below_their_share(rate: float, place: int) -> None:
    """Beside 19 known texts a new one is as likely to take each of 20 places."""
    known = torch.arange(19.0)[torch.randperm(19, generator=torch.Generator().manual_seed(0))][:, None]
    calibrator = OodCalibrator(lambda queries: queries[:, 0], [known])
    assert calibrator.threshold(rate) == place
    with pytest.raises(
        RetrievalError, match=r"0\.04 takes 24 kept dev texts, and there are 19: use false_alarms=0\.05"
    ):
        calibrator.threshold(0.04)
    assert calibrator.threshold(0.05) == 18


def test_texts_of_the_tasks_are_unknown_as_often_as_stated() -> None:
    router = studied(*TASKS, dev=60)
    limit = router.calibrated().threshold(0.05)
    known = torch.cat([texts_of(task, 200, seed=4) for task in TASKS])
    mixture = router.route_scored(known)
    assert mixture.ood_distances is not None
    assert 0.01 < float((mixture.ood_distances > limit).float().mean()) < 0.09


def mixture_of(*distances: float) -> Mixture:
    weights = torch.full((len(distances), 2), 0.5)
    whole = Mixture(("a", "b"), weights)
    return replace(whole, ood_distances=torch.tensor(distances), unpruned=whole, by_text=whole)


def test_the_rule_for_unknown_texts() -> None:
    rules = [UnknownRule(policy, 1.0) for policy in get_args(UnknownPolicy)]
    nearest, bare, refuse = (rule.applied(mixture_of(0.5, 1.5)) for rule in rules)
    for mixture in (nearest, bare, refuse):
        assert mixture.unknown is not None and mixture.unknown.tolist() == [False, True]
    assert nearest.weights.tolist() == refuse.weights.tolist() == [[0.5, 0.5]] * 2 and nearest.bare == [False, False]
    assert bare.bare == [False, True]
    for part in (bare, bare.unpruned, bare.by_text):
        assert part is not None and part.weights.tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert [rule.refuses(refuse) for rule in rules] == [[], [], [1]]
    unable = UnknownRule("bare", None).applied(mixture_of(9.0))
    assert unable.unknown is None and not unable.bare[0] and not UnknownRule("refuse", 1.0).refuses(unable)


def test_a_router_without_statistics_has_no_rule_but_nearest() -> None:
    router = SumRouter({"a": ("a",)})
    assert UnknownRule.of(router, "nearest", 0.05, "snapshot 3") == UnknownRule("nearest", None)
    expected = "unknown=bare cannot be used with snapshot 3: its router keeps no statistics of the tasks' texts"
    with pytest.raises(BankError, match=expected):
        UnknownRule.of(router, "bare", 0.05, "snapshot 3")


def test_a_sample_is_small_and_depends_on_nothing_but_the_task() -> None:
    texts = texts_of("one", 500, seed=2)
    sample = texts[sample_rows(len(texts))]
    assert sample.shape == (KEPT, 16) and sample.unique(dim=0).shape == sample.shape
    assert len({tuple(row) for row in sample.tolist()} & {tuple(row) for row in texts.tolist()}) == KEPT
    torch.manual_seed(5)
    assert torch.equal(sample, texts[sample_rows(len(texts))]), "whatever was drawn before"
    assert sample_rows(3).sort().values.tolist() == [0, 1, 2], "few texts are all kept"
    sample.zero_()
    assert float(texts.abs().min()) > 0, "not a view of the dev texts"


def test_stored_statistics_score_the_same_and_a_removed_task_leaves_none() -> None:
    router, queries = studied("one", "two", "three"), texts_of("two", 40, seed=7)
    assert torch.equal(restored(router).ood_score(queries), router.ood_score(queries))
    smaller = restored(router, forgotten="two")
    assert not [name for name in smaller.tensors() if "two" in name] and "sample/one" in smaller.tensors()
    assert torch.equal(smaller.ood_score(queries), studied("one", "three").ood_score(queries))
    assert float(smaller.ood_score(queries).mean()) > 0.9 > 0.7 > float(router.ood_score(queries).mean())
    backward = studied("three", "two", "one").ood_score(queries)
    torch.testing.assert_close(backward, router.ood_score(queries), atol=0.011, rtol=0)  # two texts' rounding


def test_distances_are_measured_anew_when_a_task_comes() -> None:
    """The shared covariance changes with every task: what was sorted before would no longer be true."""
    grown, queries = studied("one", "two"), texts_of("two", 30, seed=8)
    grown.ood_score(queries)
    grown.fit("three", texts_of("three", 200, seed=1), KEYS, seed=2)
    between = OodCalibrator(grown.discriminant.relative_distances, list(grown.samples.values()))
    distances = grown.discriminant.relative_distances(queries)
    assert torch.equal(grown.ood_score(queries), between.scores(distances)) and len(grown.samples) == 2
    grown.hold_out("three", texts_of("three", 200, seed=2))
    assert torch.equal(grown.ood_score(queries), studied("one", "two", "three").ood_score(queries))


def test_routers_without_dev_texts_have_no_score() -> None:
    queries = texts_of("one", 2, seed=9)
    old = restored(studied("one", "two"))
    tensors = {name: value for name, value in old.tensors().items() if not name.startswith("sample/")}
    old = SlotRouter.restored(RouterState(old.kind, old.settings(), tensors))
    assert torch.equal(old.route(queries).weights, studied("one", "two").route(queries).weights)
    for router in (old, studied("one", dev=0), studied()):
        with pytest.raises(RetrievalError, match="keeps no dev texts to compare with"):
            router.ood_score(queries)
    assert "sample/one" not in studied("one", dev=0).tensors()
    with pytest.raises(RetrievalError, match="not finite"):
        studied("one").ood_score(torch.full((1, 16), torch.nan))


def test_novelty_is_the_area_under_the_roc_curve_before_the_task_was_learned() -> None:
    from sklearn.metrics import roc_auc_score

    router = studied("one", "two", "three")
    before = Discriminant({task: Statistics.of(texts_of(task, 200, seed=1)) for task in ("one", "two")})
    known = torch.cat([texts_of(task, 200, seed=2)[sample_rows(200)] for task in ("one", "two")])
    result = torch.cat([before.relative_distances(known), before.relative_distances(texts_of("three", 200, seed=2))])
    expected = 100 * roc_auc_score([0] * len(known) + [1] * 200, result.numpy())
    (scores,) = router.outside_scores().values()
    assert 100 * float(scores.mean()) == pytest.approx(expected, abs=1e-3) and expected > 90
    assert studied("one").outside_scores() == {} == studied("one", "two", dev=0).outside_scores()


def test_quantiles_are_those_of_dev_texts_now_and_before_their_task_was_learned() -> None:
    router = studied("one", "two", "three")
    found = quantiles(router, router.outside_scores())
    assert found["kept"] == 3 * KEPT and list(found["learned"]) == ["one", "two", "three"]
    for task, levels in found["learned"].items():
        scores = router.ood_score(texts_of(task, 200, seed=2)).numpy()
        assert levels == pytest.approx(np.quantile(scores, QUANTILES), abs=1e-3)
    before = studied("one", "two").ood_score(texts_of("three", 200, seed=2)).numpy()
    assert found["outside"] == {"three": pytest.approx(np.quantile(before, QUANTILES), abs=1e-3)}
    assert found["outside"]["three"][2] > found["learned"]["three"][2]
    none = studied("one", "two", dev=0)
    assert quantiles(none, none.outside_scores()) == {}


@pytest.mark.parametrize(("kept", "rate"), [(192, 0.05), (20, 0.1), (19, 0.05)])
def test_scores_from_the_threshold_on_are_those_of_unknown_texts(kept: int, rate: float) -> None:
    """A page draws the threshold among scores; the rule compares distances."""
    calibrator = OodCalibrator(lambda distances: distances, [torch.arange(kept).double()])
    below = texts_below(kept, rate)
    assert below is not None
    new = torch.linspace(-1, kept + 1, 997, dtype=torch.float64)
    assert torch.equal(calibrator.scores(new) >= below / kept, new > calibrator.threshold(rate))
    assert texts_below(18, 0.05) is None


def test_rows_of_all_phases_make_the_matrix_of_slots() -> None:
    rows = [row for count in (1, 2, 3) for row in newest_rows(studied(*TASKS[:count]))]
    assert [len(row) for row in rows] == [3] * 3 + [6] * 3 + [9] * 3
    matrix = torch.tensor([[rows[max(i, j)][min(i, j)] for j in range(9)] for i in range(9)])
    keys = torch.cat(list(studied(*TASKS[:3]).keys().values()))
    cosines = torch.stack([torch.cosine_similarity(key, keys, dim=-1).mean(-1) for key in keys])
    torch.testing.assert_close(matrix, cosines, atol=1e-3, rtol=0)
